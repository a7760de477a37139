"""Clouds from other packages: what a plug-in provides, and how installed ones are found.

A package offers a cloud as an entry point of the group `skyserve.clouds` whose name is the cloud's and whose value is a
`CloudPlugin`. It is imported when the cloud is first used, so one that is broken shows where it is used, and nowhere else.

The interface is `CloudPlugin`, `Setup`, `provisioners.port.vm`, `provisioners.port.errors`, `provisioners.port.firewall`,
`provisioners.name_tags` and `provisioners.offers.catalog.model`. It has a version, `API_VERSION`; a plug-in for another one is refused.
docs/plugins.md describes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from policies.model import CapacityType
from provisioners.offers.catalog.model import Catalog, Listing
from provisioners.port.base import Requirements
from provisioners.port.vm import Machines
from provisioners.registry import PROVISIONERS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

API_VERSION = 2
GROUP = "skyserve.clouds"

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


class PluginError(Exception):
    """A plug-in cannot be used; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a plug-in makes its machines with.

    `section` is the cloud's part of config.yaml, in the plug-in's own model. `catalog` has the plug-in's listings, of the regions
    that the section names. `now` gives UNIX seconds, `sleep` waits: the contract suite moves both.
    """

    section: Any
    catalog: Catalog
    now: Callable[[], float]
    sleep: Callable[[float], None]


def _no_listings() -> Iterable[Listing]:
    return ()


@dataclass(frozen=True, slots=True)
class CloudPlugin:
    """A cloud.

    `machines` makes the cloud's `Machines`; it calls nothing yet. `listings` are what the cloud has and what it costs, from the
    plug-in's own package: they are read to plan, so nothing is called there either. `section` is a subclass of
    `skyserve_cli.config.RentedConfig`, None for that one itself. `first_user` is who can log in on an image of a cloud that runs
    no user data (docs/plugins.md); None: the cloud runs it. `markets` are those that the cloud has. `small` are machine types for load balancers with USD per hour, the usual one
    first; without any there are no load balancers on this cloud. `route53_region` names the AWS region that is nearest.
    """

    name: str
    machines: Callable[[Setup], Machines]
    listings: Callable[[], Iterable[Listing]] = _no_listings
    section: type[Any] | None = None
    first_user: str | None = None
    markets: frozenset[CapacityType] = frozenset(CapacityType)
    small: Mapping[str, float] = field(default_factory=dict)
    route53_region: Callable[[str], str | None] = lambda region: None
    api_version: int = API_VERSION


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Return the plug-ins by name, without importing any. Names of our own clouds cannot be taken."""
    from importlib.metadata import entry_points  # only where a cloud is none of ours: it is slow

    found = sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value))
    return {one.name: one for one in found if one.name not in PROVISIONERS}


@cache
def plugin(name: str) -> CloudPlugin:
    """Return the installed plug-in of that name. Raises PluginError for anything that is wrong with it."""
    entry = installed().get(name)
    if entry is None:
        raise PluginError(f"no plug-in for the cloud {name!r} is installed")
    origin = f" (of {entry.dist.name} {entry.dist.version})" if entry.dist is not None else ""
    try:
        found = entry.load()
    except Exception as error:
        raise PluginError(
            f"the plug-in {name!r}{origin} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    try:
        return checked(name, found)
    except PluginError as error:
        raise PluginError(f"the plug-in {name!r}{origin} cannot be used: {error}") from error


def checked(name: str, found: object) -> CloudPlugin:
    """Raise PluginError if it is no plug-in, for another interface, or for another name."""
    if not isinstance(found, CloudPlugin):
        raise PluginError(f"its entry point is no CloudPlugin but {type(found).__name__}")
    if found.api_version != API_VERSION:
        raise PluginError(
            f"it is for version {found.api_version} of the interface, and this is {API_VERSION}"
        )
    if found.name != name or not _NAME.fullmatch(name):
        raise PluginError(f"it calls itself {found.name!r}")
    return found


def listings_of(found: CloudPlugin) -> tuple[Listing, ...]:
    """Raise PluginError."""
    try:
        listings = tuple(found.listings())
    except Exception as error:
        raise PluginError(
            f"the plug-in {found.name!r} cannot list what it has: {type(error).__name__}: {error}"
        ) from error
    for each in listings:
        if not isinstance(each, Listing) or each.shape.cloud != found.name:
            raise PluginError(f"the plug-in {found.name!r} lists {each!r}, which is no listing of its own")
    return listings


def in_its_markets(found: CloudPlugin, need: Requirements) -> Requirements:
    """Return the need without candidates of a market that the cloud does not have."""
    kept = [
        one
        for one in need.candidates
        if (CapacityType.SPOT if one.use_spot else CapacityType.ON_DEMAND) in found.markets
    ]
    return replace(need, candidates=tuple(kept))
