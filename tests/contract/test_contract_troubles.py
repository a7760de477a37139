"""The contract when a cloud is not at its best, over every cloud of `conftest`."""

from provisioners.contract.troubles import *  # noqa: F403
