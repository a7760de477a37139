"""The spot market of the local cloud: a pure function of (market, zone, capacity type, now).

There is no market process. `market.json` says what the market does; a launch reads it, and so
does every spot host, a few times per second, to see whether it is still among the instances its zone has room
for (newest launched, first preempted).

Three voices, the later ones louder: the zone's capacity in cloud.yaml (calm; this module then says nothing), a
schedule (a scripted timeline or a spot trace, compressed in time by `speed`), and overrides by hand. Standard
library only: hosts import it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from policies.model import CapacityType
from provisioners.files import read_json, write_json

Key = tuple[str, CapacityType]  # zone, capacity type


class Limit(NamedTuple):
    """Room for `capacity` instances (None: any number), and the notice those without room get (None: the cloud's default)."""

    capacity: int | None
    notice_s: float | None = None


class MarketStep(NamedTuple):
    """From `at_s` seconds of market time on, `limit` holds."""

    at_s: float
    limit: Limit


@dataclass(frozen=True, slots=True)
class LocalMarket:
    """`schedule` per zone and capacity type, its steps sorted by time.

    The market's time zero is `started_at` (UNIX seconds) and runs `speed` times as fast as ours. After its last step a
    schedule stays as it is.
    """

    started_at: float = 0.0
    speed: float = 1.0
    schedule: Mapping[Key, tuple[MarketStep, ...]] = field(default_factory=dict)
    overrides: Mapping[Key, int] = field(default_factory=dict)
    source: str = ""  # where the schedule came from, for people

    def limit(self, zone: str, capacity_type: CapacityType, now: float) -> Limit | None:
        """Return the market's capacity of the zone at `now`, or None if it leaves it as cloud.yaml has it."""
        key = (zone, capacity_type)
        if key in self.overrides:
            return Limit(self.overrides[key])
        steps = self.schedule.get(key, ())
        index = bisect_right(steps, (now - self.started_at) * self.speed, key=lambda step: step.at_s)
        return steps[index - 1].limit if index else None


def load_market(path: Path) -> LocalMarket:
    """Return the market in `path`; no file is a calm market."""
    raw = read_json(path)
    return LocalMarket() if raw is None else _decode(raw)


def save_market(path: Path, market: LocalMarket) -> None:
    write_json(path, _encode(market))


class MarketReader:
    """Reads the market again when its file has changed; costs one stat otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._market = LocalMarket()

    def read(self) -> LocalMarket:
        seen = self._signature()
        if seen != self._seen:
            self._market, self._seen = load_market(self._path), seen
        return self._market

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _encode(market: LocalMarket) -> dict[str, Any]:
    return {
        "started_at": market.started_at,
        "speed": market.speed,
        "source": market.source,
        "schedule": [
            {"zone": zone, "capacity_type": kind, "steps": [[step.at_s, *step.limit] for step in steps]}
            for (zone, kind), steps in market.schedule.items()
        ],
        "overrides": [
            {"zone": zone, "capacity_type": kind, "capacity": capacity}
            for (zone, kind), capacity in market.overrides.items()
        ],
    }


def _decode(raw: Mapping[str, Any]) -> LocalMarket:
    return LocalMarket(
        started_at=raw["started_at"],
        speed=raw["speed"],
        source=raw["source"],
        schedule={
            (entry["zone"], CapacityType(entry["capacity_type"])): tuple(
                MarketStep(at_s, Limit(capacity, notice_s)) for at_s, capacity, notice_s in entry["steps"]
            )
            for entry in raw["schedule"]
        },
        overrides={
            (entry["zone"], CapacityType(entry["capacity_type"])): entry["capacity"]
            for entry in raw["overrides"]
        },
    )
