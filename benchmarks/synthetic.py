"""Make-believe spot markets: traces drawn from a seed, to simulate on where no recording is at hand.

Fitted to no recording, they have the three habits that published ones share (SkyServe, EuroSys '25, and its
traces):

- the hazard of losing capacity falls with age: a zone that has just come back, or just lost some, soon loses
  again, and one that was calm for a day stays calm for another;
- shortages are heavy-tailed: most last minutes, some a day;
- zones of one region fall together, those of different regions hardly ever.

Both the calm before a loss and the shortage after it have a hazard of shape / (scale + age) per hour, which
makes their lengths Lomax-distributed, and a floor under it, so that nothing lasts for ever. Draws are
`random()` of one generator: the only method whose numbers Python promises to keep.

    python -m benchmarks.synthetic FOLDER       # writes the traces that come with the package
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import orjson

from skyserve_cli.sim.trace import TICK_S, Steps, Trace, ZoneTrace, region_of

_WARM_UP_H = 72.0  # what came before the trace begins: it does not begin with every zone new


@dataclass(frozen=True, slots=True)
class Lull:
    """How long a state lasts: it ends at a rate of shape / (scale_h + age in hours) per hour, `floor` at least."""

    shape: float
    scale_h: float
    floor: float

    def hazard(self, age_h: float) -> float:
        return max(self.shape / (self.scale_h + age_h), self.floor)


@dataclass(frozen=True, slots=True)
class MarketParameters:
    """A market's habits. Parts are between 0 and 1."""

    zones: tuple[str, ...]  # regions are in their names
    capacity: int = 8  # of a zone that lacks nothing
    calm: Lull = Lull(shape=1.0, scale_h=0.7, floor=0.02)
    shortage: Lull = Lull(shape=1.3, scale_h=1.0, floor=0.04)
    partial: float = (
        0.4  # the part of losses that leaves something, and of returns that do not bring back all
    )
    same_region: float = 0.25  # the chance that a loss takes another zone of its region along,
    other_region: float = 0.01  # and one of another region,
    together_s: float = 600.0  # within this long
    unlike: float = (
        0.5  # how much zones differ: their rates are up to e^unlike times the market's, or that less
    )
    daily: float = 0.0  # by this part losses are likelier at noon and rarer at midnight
    gap_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.zones or len(set(self.zones)) < len(self.zones):
            raise ValueError("a market has zones, and each of them once")
        if self.capacity < 1 or self.gap_s <= 0:
            raise ValueError("capacity is at least 1, and gap_s above 0")
        if not all(
            0 <= part <= 1 for part in (self.partial, self.same_region, self.other_region, self.daily)
        ):
            raise ValueError("partial, same_region, other_region and daily are between 0 and 1")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a shipped trace is made."""

    market: MarketParameters
    seed: int
    days: float


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "synthetic-volatile": Recipe(
            MarketParameters(
                zones=("north-1a", "north-1b", "south-1a"),
                shortage=Lull(shape=1.1, scale_h=1.0, floor=0.04),
                same_region=0.35,
                daily=0.3,
            ),
            seed=1,
            days=14,
        ),
        "synthetic-wide": Recipe(
            MarketParameters(
                zones=tuple(f"{region}-1{zone}" for region in ("east", "north", "west") for zone in "abc"),
                calm=Lull(shape=0.75, scale_h=0.6, floor=0.01),
                partial=0.2,
            ),
            seed=2,
            days=14,
        ),
    }
)


def generate(
    market: MarketParameters, seed: int, days: float, name: str = "synthetic", tick_s: float = TICK_S
) -> Trace:
    """Return a trace of `days`. Same market, same seed: same trace."""
    gap_h = market.gap_s / 3600
    points = list(zip(*_points(market, random.Random(seed), math.floor(days * 24 / gap_h)), strict=True))
    n_ticks = math.floor(len(points[0]) * market.gap_s / tick_s)
    return Trace(
        name=name,
        zones=tuple(
            ZoneTrace(zone, region_of(zone), _laid(counts, market.gap_s, tick_s, n_ticks))
            for zone, counts in zip(market.zones, points, strict=True)
        ),
        n_ticks=n_ticks,
        tick_s=tick_s,
        gap_s=market.gap_s,
        reading="counts of instances",
    )


def write(trace: Trace, folder: Path) -> None:
    """Write a trace that `generate` made the way `trace.load` reads it, into a folder that is made if need be.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    n_points = math.ceil(trace.length_s / trace.gap_s)
    ticks = [math.ceil(point * trace.gap_s / trace.tick_s) for point in range(n_points)]
    gap: float = int(trace.gap_s) if trace.gap_s.is_integer() else trace.gap_s
    for zone in trace.zones:
        content = {
            "metadata": {"gap_seconds": gap, "region": zone.region},
            "data": [zone.capacity.at(tick) for tick in ticks],
        }
        (folder / f"{zone.name}.json").write_bytes(orjson.dumps(content) + b"\n")


# --- the market ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Zone:
    """A zone while it is drawn. Times are hours."""

    region: str
    calm_rate: float  # times the market's
    shortage_rate: float
    capacity: int
    since_h: float  # of the last loss, or of the last return from nothing
    lost_at_h: float  # the beginning of the shortage
    dragged_at_h: list[float] = field(default_factory=list)  # when others will have taken it along


def _points(market: MarketParameters, rng: random.Random, n_points: int) -> Iterator[tuple[int, ...]]:
    """Yield the capacities of all zones, point by point."""
    gap_h = market.gap_s / 3600
    warm_up = math.ceil(_WARM_UP_H / gap_h)
    zones = [_new_zone(name, market, rng) for name in market.zones]
    for point in range(-warm_up, n_points):
        for zone in zones:
            _step(zone, zones, market, rng, point * gap_h)
        if point >= 0:
            yield tuple(zone.capacity for zone in zones)


def _new_zone(name: str, market: MarketParameters, rng: random.Random) -> _Zone:
    return _Zone(
        region=region_of(name),
        calm_rate=math.exp(market.unlike * (2 * rng.random() - 1)),
        shortage_rate=math.exp(market.unlike * (2 * rng.random() - 1)),
        capacity=market.capacity,
        since_h=-_WARM_UP_H,
        lost_at_h=-_WARM_UP_H,
    )


def _step(
    zone: _Zone, zones: Sequence[_Zone], market: MarketParameters, rng: random.Random, now_h: float
) -> None:
    """What one gap of time does to a zone. It gains or loses, not both."""
    dragged = any(at_h <= now_h for at_h in zone.dragged_at_h)
    zone.dragged_at_h = [at_h for at_h in zone.dragged_at_h if at_h > now_h]
    if zone.capacity > 0:
        time_of_day = 1 - market.daily * math.cos(2 * math.pi * now_h / 24)
        hazard = zone.calm_rate * time_of_day * market.calm.hazard(now_h - zone.since_h)
        by_itself = _happens(hazard, market, rng)
        if by_itself or dragged:
            _preempt(zone, market, rng, now_h)
            if by_itself:  # a zone that fails with another takes none with it: no avalanches
                _drag(zone, zones, market, rng, now_h)
            return
    if zone.capacity < market.capacity:
        hazard = zone.shortage_rate * market.shortage.hazard(now_h - zone.lost_at_h)
        if _happens(hazard, market, rng):
            _gain(zone, market, rng, now_h)


def _happens(hazard_per_h: float, market: MarketParameters, rng: random.Random) -> bool:
    return rng.random() < 1 - math.exp(-hazard_per_h * market.gap_s / 3600)


def _preempt(zone: _Zone, market: MarketParameters, rng: random.Random, now_h: float) -> None:
    some_stay = rng.random() < market.partial
    zone.capacity = int(rng.random() * zone.capacity) if some_stay else 0
    zone.since_h = zone.lost_at_h = now_h


def _gain(zone: _Zone, market: MarketParameters, rng: random.Random, now_h: float) -> None:
    if zone.capacity == 0:
        zone.since_h = now_h
    some_lack = rng.random() < market.partial
    missing = market.capacity - zone.capacity
    zone.capacity += 1 + int(rng.random() * missing) if some_lack else missing


def _drag(
    fallen: _Zone, zones: Sequence[_Zone], market: MarketParameters, rng: random.Random, now_h: float
) -> None:
    for zone in zones:
        chance = market.same_region if zone.region == fallen.region else market.other_region
        if zone is not fallen and rng.random() < chance:
            zone.dragged_at_h.append(now_h + rng.random() * market.together_s / 3600)


def _laid(counts: Sequence[int], gap_s: float, tick_s: float, n_ticks: int) -> Steps[int]:
    ticks = ((math.ceil(point * gap_s / tick_s), count) for point, count in enumerate(counts))
    return Steps.of((tick, count) for tick, count in ticks if tick < n_ticks)


def main(arguments: Sequence[str]) -> int:
    """Write every shipped trace into a folder of its name, in the folder that is named."""
    if len(arguments) != 1:
        print("usage: python -m benchmarks.synthetic FOLDER", file=sys.stderr)
        return 2
    for name, recipe in RECIPES.items():
        write(generate(recipe.market, recipe.seed, recipe.days, name), Path(arguments[0]) / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
