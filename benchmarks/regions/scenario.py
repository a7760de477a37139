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

from skyserve_cli.engine.profiles import PROFILES

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
    """`replicas` engines of the scenario's profile, `engines` of others by the names of their profiles, and `agents`."""

    name: str
    replicas: int = 0
    usd_per_hour: float = 1.0
    egress_usd_per_gb: float = 0.02
    engines: Mapping[str, int] = field(default_factory=dict)
    agents: int = 1

    def profiles(self, default: str) -> tuple[str, ...]:
        """Return the profile of each engine."""
        others = (name for name, count in self.engines.items() for _ in range(count))
        return (*(default for _ in range(self.replicas)), *others)

    @property
    def size(self) -> int:
        """The number of its engines."""
        return self.replicas + sum(self.engines.values())


@dataclass(frozen=True, slots=True)
class Death:
    """The agents of `region` are gone from `at_s` until `until_s`. Their clients find another one after `clients_find_s`; their
    replicas are adopted by the nearest agents after `adopted_after_s`, or never (None)."""

    region: str
    at_s: float
    until_s: float
    adopted_after_s: float | None = 5.0
    clients_find_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Pause:
    """The agents of `region` stop from `at_s` until `until_s`, and find then what has come meanwhile. Their clients wait.

    The nearest agents adopt their replicas after `adopted_after_s`, or never (None), and give them back 1 s after the end.
    """

    region: str
    at_s: float
    until_s: float
    adopted_after_s: float | None = 5.0


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
    """One world. `stay` maps a region to the regions that may serve its clients (residency); none: all may.

    A message between regions takes up to `jitter` (a share) less or more than half a round trip. `usd_per_second` is as in a
    service file; None: money does not count.
    """

    name: str
    regions: tuple[Region, ...]
    rtt_ms: Mapping[tuple[str, str], float]
    clients: Clients
    profile: str = "l4-8b"
    report_s: float = 0.1  # between two reports of an agent to its peers
    stay: Mapping[str, frozenset[str]] = field(default_factory=dict)
    deaths: tuple[Death, ...] = ()
    pauses: tuple[Pause, ...] = ()
    cuts: tuple[Cut, ...] = ()
    jitter: float = 0.0
    usd_per_second: float | None = None
    rtt_changes: tuple[RttChange, ...] = ()
    closed_loop: bool = False
    count_from_s: float = 0.0  # arrivals before that fill the caches (open loop)
    ends_at_s: float | None = (
        None  # nothing arrives later, so that conversations under way have no further turns
    )
    spread: bool = False  # requests over the agents of their region, instead of sessions

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
    "closed_loop", "count_from_s", "ends_at_s", "pauses", "jitter", "usd_per_second", "spread",
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
        scenario = _scenario(given, path)
        check(scenario)
    except KeyError as error:
        raise ScenarioError(f"{path}: the key {error} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ScenarioError(f"{path}: {error}") from None
    return scenario


def _scenario(given: dict[str, Any], path: Path) -> Scenario:
    regions = tuple(Region(name, **dict(about)) for name, about in given["regions"].items())
    return Scenario(
        name=given.get("name", path.stem),
        regions=regions,
        rtt_ms=_round_trips(given["rtt_ms"], {region.name for region in regions}),
        clients=Clients(given["clients"].pop("kind"), given["clients"]),
        profile=given.get("profile", "l4-8b"),
        report_s=float(given.get("report_s", 0.1)),
        stay={name: frozenset(those) for name, those in given.get("stay", {}).items()},
        deaths=tuple(Death(**one) for one in given.get("deaths", ())),
        pauses=tuple(Pause(**one) for one in given.get("pauses", ())),
        cuts=tuple(Cut(**one) for one in given.get("cuts", ())),
        jitter=float(given.get("jitter", 0.0)),
        usd_per_second=given.get("usd_per_second"),
        rtt_changes=tuple(RttChange(**one) for one in given.get("rtt_changes", ())),
        closed_loop=bool(given.get("closed_loop", False)),
        count_from_s=float(given.get("count_from_s", 0.0)),
        ends_at_s=given.get("ends_at_s"),
        spread=bool(given.get("spread", False)),
    )


def _round_trips(given: Mapping[str, float], names: set[str]) -> dict[tuple[str, str], float]:
    rtt_ms = {}
    for pair, value in given.items():
        one, _, other = str(pair).partition("-")
        if {one, other} - names:
            raise ValueError(f"rtt_ms.{pair}: write it as REGION-REGION, of {', '.join(sorted(names))}")
        rtt_ms[one, other] = float(value)
    return rtt_ms


def check(scenario: Scenario) -> None:
    """Check that a run of the scenario can end. Raises ScenarioError, which names the key."""
    names, sizes = scenario.region_names, {region.name: region.size for region in scenario.regions}
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            if not {(one, other), (other, one)} & scenario.rtt_ms.keys():
                raise ScenarioError(f"rtt_ms.{one}-{other} is missing")
    for region in scenario.regions:
        if region.agents < 1:
            raise ScenarioError(f"regions.{region.name}.agents: at least 1 is expected")
        for profile in region.profiles(scenario.profile):
            if profile not in PROFILES:
                raise ScenarioError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    if not any(sizes.values()):
        raise ScenarioError("regions: none has replicas")
    for name, zone in scenario.stay.items():
        if not {name, *zone} <= set(names):
            raise ScenarioError(f"stay.{name}: no such region")
        if not any(sizes[one] for one in zone):
            raise ScenarioError(f"stay.{name}: none of these regions has replicas")
    if not 0.0 <= scenario.jitter < 1.0:
        raise ScenarioError("jitter: a share from 0 to 1 is expected")
    named = [("deaths", one.region) for one in scenario.deaths] + [
        ("pauses", one.region) for one in scenario.pauses
    ]
    for what, name in named:
        if name not in names:
            raise ScenarioError(f"{what}: no such region: {name}")
