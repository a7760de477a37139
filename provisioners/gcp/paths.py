"""Which networks machines of Google Cloud go to, and the paths by which those are named. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

_SUBNETWORK = re.compile(r"projects/([a-z0-9.:-]+)/regions/([a-z0-9-]+)/subnetworks/([a-z0-9-]+)")
_NETWORK = re.compile(r"(?:projects/([a-z0-9.:-]+)/)?(?:global/networks/)?([a-z][a-z0-9-]*)")


class Network(NamedTuple):
    """A network by its project and name."""

    project: str
    name: str

    def path_from(self, project: str) -> str:
        """Return the path by which a request in that project names it."""
        path = f"global/networks/{self.name}"
        return path if self.project == project else f"projects/{self.project}/{path}"


class Subnetwork(NamedTuple):
    project: str
    region: str
    name: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/regions/{self.region}/subnetworks/{self.name}"


def subnetwork_of(path: str) -> Subnetwork:
    """Of `projects/P/regions/R/subnetworks/N`. Raises ValueError."""
    found = _SUBNETWORK.fullmatch(path)
    if found is None:
        raise ValueError(f"{path!r} is not like projects/PROJECT/regions/REGION/subnetworks/NAME")
    return Subnetwork(*found.groups())


def network_of(path: str, project: str) -> Network:
    """Of `projects/P/global/networks/N`, or of a name in `project`. Raises ValueError."""
    found = _NETWORK.fullmatch(path)
    if found is None or (found[1] is not None and "/global/networks/" not in path):
        raise ValueError(f"{path!r} is not like NAME or projects/PROJECT/global/networks/NAME")
    return Network(found[1] or project, found[2])


def network_of_url(url: str) -> Network:
    """Of the URL by which Compute Engine names a network."""
    found = re.search(r"projects/([^/]+)/global/networks/([^/]+)$", url)
    if found is None:
        raise ValueError(f"{url!r} is no network")
    return Network(found[1], found[2])


@dataclass(frozen=True, slots=True)
class NetworkSetup:
    """What the user has set about networks.

    `network` exists and is used as it is, and so are `subnets` (paths by region), which may be those of another project
    (Shared VPC). Without either each owner gets a network of their own. Without `manage_firewall` no rule is made or
    changed.
    """

    network: str | None = None
    subnets: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    manage_firewall: bool = True
    use_private_ip: bool = False

    @property
    def makes_networks(self) -> bool:
        return self.network is None and not self.subnets

    def projects(self, own: str) -> tuple[str, ...]:
        """Return where there may be rules of ours: our own project, and those of the networks that are used."""
        found = {subnetwork_of(path).project for path in self.subnets.values()}
        if self.network is not None:
            found.add(network_of(self.network, own).project)
        return (own, *sorted(found - {own}))
