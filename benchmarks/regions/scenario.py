"""What a run is made of: regions with replicas, round trips between them, clients, and what goes wrong when.

A scenario is a value, and a YAML file of the same keys: `benchmarks/regions/scenarios/uneven.yaml` is an example,
docs/benchmarks.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# Round trips in milliseconds: medians between cloud regions in Virginia, Frankfurt and Tokyo, rounded.
RTT_MS = {("us", "eu"): 90.0, ("us", "asia"): 150.0, ("eu", "asia"): 220.0}
# USD per hour of one L4 on demand (AWS g6.xlarge, 2026 list prices, rounded to the ratio between the regions).
USD_PER_HOUR = {"us": 0.70, "eu": 0.84, "asia": 1.02}
# USD per GB that leaves a region for another one of the same cloud.
EGRESS_USD_PER_GB = {"us": 0.02, "eu": 0.02, "asia": 0.09}


class ScenarioError(ValueError):
    """A scenario file is wrong; the message names the key."""


@dataclass(frozen=True, slots=True)
class Region:
    """`replicas` engines and an agent."""

    name: str
    replicas: int
    usd_per_hour: float = 1.0
    egress_usd_per_gb: float = 0.02


@dataclass(frozen=True, slots=True)
class Death:
    """The agent of `region` is gone from `at_s` until `until_s`. Its clients find another one after `clients_find_s`; its
    replicas are adopted by the nearest agent after `adopted_after_s`, or never (None)."""

    region: str
    at_s: float
    until_s: float
    adopted_after_s: float | None = 5.0
    clients_find_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes from `source` to `target` between two instants (one direction)."""

    source: str
    target: str
    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class RttChange:
    """From `at_s` on the round trip between two regions takes `rtt_ms`."""

    one: str
    other: str
    at_s: float
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class Clients:
    """Where requests come from. `kind` is the name of a workload (see `benchmarks.regions.workloads`), `options` its own."""

    kind: str = "day"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world. `stay` maps a region to the regions that may serve its clients (residency); none: all may."""

    name: str
    regions: tuple[Region, ...]
    rtt_ms: Mapping[tuple[str, str], float]
    clients: Clients
    profile: str = "l4-8b"
    report_s: float = 0.1  # between two reports of an agent to its peers
    stay: Mapping[str, frozenset[str]] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()
    cuts: tuple[Cut, ...] = ()
    rtt_changes: tuple[RttChange, ...] = ()
    closed_loop: bool = False
    count_from_s: float = 0.0  # arrivals before that fill the caches (open loop)

    @property
    def region_names(self) -> tuple[str, ...]:
        return tuple(region.name for region in self.regions)

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)


def three(replicas: Mapping[str, int] | int = 4) -> tuple[Region, ...]:
    """Return the three regions of the reference scenarios. `replicas` is per region."""
    return tuple(
        Region(
            name,
            replicas if isinstance(replicas, int) else replicas[name],
            USD_PER_HOUR[name],
            EGRESS_USD_PER_GB[name],
        )
        for name in ("us", "eu", "asia")
    )


_KEYS = {
    "name", "regions", "rtt_ms", "clients", "profile", "report_s", "stay", "deaths", "cuts", "rtt_changes",
    "closed_loop", "count_from_s",
}  # fmt: skip


def load(path: Path) -> Scenario:
    """Reads a scenario file. Raises ScenarioError, which names the key, and OSError."""
    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: not YAML: {error}") from None
    if not isinstance(given, dict):
        raise ScenarioError(f"{path}: a mapping is expected")
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        raise ScenarioError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    try:
        regions = tuple(Region(name, **dict(about)) for name, about in given["regions"].items())
        names = {region.name for region in regions}
        rtt = {}
        for pair, value in given["rtt_ms"].items():
            one, _, other = str(pair).partition("-")
            if {one, other} - names:
                raise ScenarioError(
                    f"{path}: rtt_ms.{pair}: write it as REGION-REGION, of {', '.join(names)}"
                )
            rtt[one, other] = float(value)
        scenario = Scenario(
            name=given.get("name", path.stem),
            regions=regions,
            rtt_ms=rtt,
            clients=Clients(given["clients"].pop("kind"), given["clients"]),
            profile=given.get("profile", "l4-8b"),
            report_s=float(given.get("report_s", 0.1)),
            stay={name: frozenset(those) for name, those in given.get("stay", {}).items()},
            deaths=tuple(Death(**one) for one in given.get("deaths", ())),
            cuts=tuple(Cut(**one) for one in given.get("cuts", ())),
            rtt_changes=tuple(RttChange(**one) for one in given.get("rtt_changes", ())),
            closed_loop=bool(given.get("closed_loop", False)),
            count_from_s=float(given.get("count_from_s", 0.0)),
        )
    except KeyError as error:
        raise ScenarioError(f"{path}: the key {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    missing = [
        f"{one}-{other}"
        for index, one in enumerate(scenario.region_names)
        for other in scenario.region_names[index + 1 :]
        if (one, other) not in rtt and (other, one) not in rtt
    ]
    if missing:
        raise ScenarioError(f"{path}: rtt_ms.{missing[0]} is missing")
    return scenario
