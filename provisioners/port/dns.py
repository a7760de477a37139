"""The port for DNS records of services. `provisioners.aws.dns` implements it on Route 53."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class Endpoint(NamedTuple):
    """A load balancer that a name means: its IPv4 address, and how its health is checked from outside.

    `scheme` is http or https of its data port `port`; empty: its health is not checked. `token` is that of its machine.
    """

    address: str
    token: str = ""
    port: int = 0
    scheme: str = ""


class Publisher(Protocol):
    """Writes the records of one name in a hosted zone."""

    def publish(
        self, zone: str, name: str, owner: str, mark: str, endpoints: Mapping[str, Sequence[Endpoint]]
    ) -> None:
        """Replace the records of `name` in `zone`: `endpoints` by region, none to delete the name.

        `mark` identifies the service of an `owner`: records with another mark are never changed. Raises ProvisionError; the records
        may have been replaced without their health checks then.
        """
        ...
