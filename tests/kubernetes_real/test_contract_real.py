"""The contract of a cloud, on a real API server."""

from provisioners.contract.suite import *  # noqa: F403
from provisioners.contract.troubles import *  # noqa: F403
