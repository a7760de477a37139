"""The port for DNS records of services. `provisioners.aws.dns` implements it on Route 53."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Publisher(Protocol):
    """Writes the records of one name in a hosted zone."""

    def publish(self, zone: str, name: str, mark: str, addresses: Mapping[str, Sequence[str]]) -> None:
        """Replace the records of `name` in `zone`: `addresses` by region, none to delete the name.

        `mark` identifies the owner: records of another owner are never changed. Raises ProvisionError.
        """
        ...
