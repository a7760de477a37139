"""The contract, over every cloud of `conftest`."""

from provisioners.contract.suite import *  # noqa: F403
