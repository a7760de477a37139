"""Spot traces: how many instances could be launched in each zone, over time.

On disk a trace is a folder with one JSON file per zone,

    us-east-1a.json   {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, 0, ...]}

`data[i]` holds from `i * gap_seconds` on. The file's stem up to the first "_" is the zone, so that
"us-central1-b_a100.json" is us-central1-b. The metadata may name the `region`, `spot_usd_hour` and
`on_demand_usd_hour`; `prices`, beside `data` and as long, are spot prices in USD per hour point by point.
Other keys are other people's.

A set that knows only 0 and 1 was recorded with a probe of one instance: its 1 says "there was at least one".
How much that is has to be chosen, and `Trace.reading` says what was. In memory a trace is laid on the
simulator's grid of ticks and compressed to the ticks at which something changes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import orjson

TICK_S = 30.0
UNLIMITED = 1_000_000  # more than anyone requests, and still a number to compare and add

MAX_FILES = 200
MAX_FILE_BYTES = 32 << 20
MAX_POINTS = 2_000_000
MAX_AMOUNT = 1e6  # of seconds and of dollars

_REGION_OF = (
    re.compile(r"(.+)-[a-z]"),  # us-central1-b
    re.compile(r"(.+\d)[a-z]"),  # us-east-1a
)

_T = TypeVar("_T", bound=float)


class TraceError(ValueError):
    """A recording cannot be used; the text is a sentence that begins with its path."""


@dataclass(frozen=True, slots=True)
class Steps(Generic[_T]):
    """A step function: from `ticks[i]` on it is `values[i]`. `ticks` rise from 0, and neighbours differ."""

    ticks: tuple[int, ...]
    values: tuple[_T, ...]

    @classmethod
    def constant(cls, value: _T) -> Steps[_T]:
        return cls((0,), (value,))

    @classmethod
    def of(cls, points: Iterator[tuple[int, _T]]) -> Steps[_T]:
        """From (tick, value) in order of time; of several at one tick the last counts, what changes nothing is left out."""
        ticks: list[int] = []
        values: list[_T] = []
        for tick, value in points:
            if ticks and ticks[-1] == tick:
                ticks.pop()
                values.pop()
            if not values or values[-1] != value:
                ticks.append(tick)
                values.append(value)
        return cls(tuple(ticks), tuple(values))

    def at(self, tick: int) -> _T:
        """Return the value at a tick (not below 0); after the last step it stays."""
        return self.values[bisect_right(self.ticks, tick) - 1]

    def next_change(self, tick: int) -> int | None:
        """Return the first tick after `tick` at which the value changes, if it ever does."""
        index = bisect_right(self.ticks, tick)
        return self.ticks[index] if index < len(self.ticks) else None

    def cut(self, start: int, length: int) -> Steps[_T]:
        """Return the ticks from `start` on, `length` of them, counted from 0 again."""
        first, last = (bisect_right(self.ticks, tick) for tick in (start, start + length - 1))
        ticks = (0, *(tick - start for tick in self.ticks[first:last]))
        return Steps(ticks, self.values[first - 1 : last])


@dataclass(frozen=True, slots=True)
class ZoneTrace:
    """One zone. `capacity` counts instances that can run there at once, those that do included."""

    name: str
    region: str
    capacity: Steps[int]
    spot_usd_hour: Steps[float] | None = None  # None: the recording does not say
    on_demand_usd_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What several zones had to offer during the same `n_ticks` ticks of `tick_s` seconds."""

    name: str
    zones: tuple[ZoneTrace, ...]
    n_ticks: int
    tick_s: float
    gap_s: float  # between two points of the recording; the longest where zones differ
    reading: str  # how its numbers were taken, for people

    @property
    def length_s(self) -> float:
        return self.n_ticks * self.tick_s

    @property
    def is_priced(self) -> bool:
        """Whether all its zones have spot prices in USD."""
        return all(zone.spot_usd_hour is not None for zone in self.zones)

    def zone(self, name: str) -> ZoneTrace:
        """Return the zone of that name; KeyError if there is none."""
        for zone in self.zones:
            if zone.name == name:
                return zone
        raise KeyError(name)

    def capacity(self, zone: str, tick: int) -> int:
        """Return what there was room for in a zone at a tick. A hot loop calls `Steps.at` of the zone it holds."""
        return self.zone(zone).capacity.at(tick)

    def changes(self) -> tuple[int, ...]:
        """Return every tick but 0 at which some zone's capacity changes, in order."""
        return tuple(sorted({tick for zone in self.zones for tick in zone.capacity.ticks if tick > 0}))

    def window(self, start_s: float, length_s: float) -> Trace:
        """Return a part of the trace, its time counted from 0 again; ValueError where it sticks out."""
        start, length = round(start_s / self.tick_s), round(length_s / self.tick_s)
        if start < 0 or length < 1 or start + length > self.n_ticks:
            raise ValueError(
                f"{self.name} has {self.length_s / 3600:g} h, and no window of {length_s / 3600:g} h"
                f" from {start_s / 3600:g} h on"
            )
        return self.cut(start, length, f"{self.name}@{start_s / 3600:g}h+{length_s / 3600:g}h")

    def windows(self, length_s: float) -> tuple[Trace, ...]:
        """Return all whole windows of a length, one after the other; a rest at the end is left out.

        ValueError where not one fits.
        """
        length = max(1, round(length_s / self.tick_s))
        count = max(1, self.n_ticks // length)
        return tuple(
            self.window(number * length * self.tick_s, length * self.tick_s) for number in range(count)
        )

    def cut(self, start: int, length: int, name: str) -> Trace:
        """`length` ticks from the tick `start` on, under a new name."""
        zones = tuple(
            replace(
                zone,
                capacity=zone.capacity.cut(start, length),
                spot_usd_hour=zone.spot_usd_hour and zone.spot_usd_hour.cut(start, length),
            )
            for zone in self.zones
        )
        return replace(self, name=name, zones=zones, n_ticks=length)


# --- where traces are ---------------------------------------------------------------------------------------


def shipped() -> tuple[str, ...]:
    """Return the names of the traces that come with the package. All of them are synthetic."""
    return tuple(sorted(entry.name for entry in _shipped_folder().iterdir() if entry.is_dir()))


def find(source: str) -> Traversable:
    """Return the folder a user means: one of that path, else the shipped trace of that name. Raises TraceError."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if source in shipped():
        return _shipped_folder() / source
    raise TraceError(
        f"{source}: neither a folder nor a trace that comes with the package: {', '.join(shipped())}"
    )


def named(name: str, *, tick_s: float = TICK_S) -> Trace:
    """Return a shipped trace. Raises TraceError."""
    if name not in shipped():
        raise TraceError(
            f"{name}: no trace of that name comes with the package; there are {', '.join(shipped())}"
        )
    return load(_shipped_folder() / name, tick_s=tick_s)


def _shipped_folder() -> Traversable:
    return files("skyserve_cli.sim") / "traces"


# --- reading ------------------------------------------------------------------------------------------------


def load(
    folder: Traversable,
    *,
    capacity_per_zone: int | Literal["unlimited"] | None = None,
    tick_s: float = TICK_S,
) -> Trace:
    """Read a folder of zones and lay it on a grid: at tick i a zone has what was recorded in the point floor(i * tick_s / gap).

    Zones of different gaps or lengths are cut to the span they share.

    `capacity_per_zone` is what an available zone has room for: a number is what a probe's 1 stands for, and a cap on
    counts; "unlimited" makes every non-zero count any number; None takes counts as they are and a probe's 1 for any
    number. Raises TraceError.
    """
    if isinstance(capacity_per_zone, int) and capacity_per_zone < 1:
        raise TraceError(f"{folder}: capacity_per_zone is {capacity_per_zone}, and must be at least 1")
    recordings = [_read_zone(path) for path in _zone_files(folder)]
    by_name: dict[str, _Recording] = {}
    for recording in recordings:
        if (other := by_name.setdefault(recording.zone, recording)) is not recording:
            raise TraceError(f"{recording.path}: the zone {recording.zone} is also in {other.path}")
    n_ticks = math.floor(min(len(recording.data) * recording.gap_s for recording in recordings) / tick_s)
    if n_ticks < 1:
        raise TraceError(f"{folder}: shorter than one tick of {tick_s:g} s")
    is_probe = all(max(recording.data) <= 1 for recording in recordings)
    available, reading = _reading(is_probe, capacity_per_zone)
    return Trace(
        name=folder.name or str(folder),
        zones=tuple(_on_grid(recording, available, n_ticks, tick_s) for recording in recordings),
        n_ticks=n_ticks,
        tick_s=tick_s,
        gap_s=max(recording.gap_s for recording in recordings),
        reading=reading,
    )


def region_of(zone: str) -> str:
    """Return the region in a zone's name, as AWS ("us-east-1a") and GCP ("us-central1-b") write it; else the name itself."""
    for pattern in _REGION_OF:
        if match := pattern.fullmatch(zone):
            return match[1]
    return zone


@dataclass(frozen=True, slots=True)
class _Recording:
    """A zone's file, checked and otherwise as it is."""

    path: str
    zone: str
    region: str
    gap_s: float
    data: Sequence[int]
    prices: Sequence[float] | None
    on_demand_usd_hour: float | None


@dataclass(frozen=True, slots=True)
class _Available:
    """What a recorded count stands for."""

    at_least: int = 0  # when there is anything at all
    at_most: int = UNLIMITED

    def of(self, count: int) -> int:
        return min(max(count, self.at_least), self.at_most) if count else 0


def _reading(is_probe: bool, capacity_per_zone: int | Literal["unlimited"] | None) -> tuple[_Available, str]:
    what = "a probe of one instance" if is_probe else "counts of instances"
    if capacity_per_zone == "unlimited" or (capacity_per_zone is None and is_probe):
        return _Available(at_least=UNLIMITED), f"{what}, read as any number"
    if capacity_per_zone is None:
        return _Available(), what
    if is_probe:
        return _Available(at_least=capacity_per_zone), f"{what}, read as {capacity_per_zone} per zone"
    return _Available(at_most=capacity_per_zone), f"{what}, at most {capacity_per_zone} per zone"


def _zone_files(folder: Traversable) -> list[Traversable]:
    try:
        found = [
            entry
            for entry in folder.iterdir()
            if entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file()
        ]
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror}") from error
    if not found:
        raise TraceError(f"{folder}: no trace: a trace is a folder with one JSON file per zone")
    if len(found) > MAX_FILES:
        raise TraceError(f"{folder}: {len(found)} zones, and at most {MAX_FILES} are read")
    return sorted(found, key=lambda entry: entry.name)


def _read_zone(file: Traversable) -> _Recording:
    path = str(file)
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise TraceError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        raw = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}: not JSON: {error}") from error
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(metadata, dict):
        raise TraceError(
            f'{path}: not a zone of a trace, which is {{"metadata": {{"gap_seconds": …}}, "data": […]}}'
        )
    zone = file.name.removesuffix(".json").split("_")[0]
    region = metadata.get("region", region_of(zone))
    if not isinstance(region, str) or not region or not zone:
        raise TraceError(f"{path}: the names of a zone and of its region are texts, and not empty")
    gap_s = _amount(path, "metadata.gap_seconds", metadata.get("gap_seconds"))
    if gap_s == 0:
        raise TraceError(f"{path}: metadata.gap_seconds is 0, and must be more")
    data = _counts(path, raw.get("data"))
    return _Recording(
        path,
        zone,
        region,
        gap_s,
        data,
        _prices(path, raw, len(data)),
        _optional(path, metadata, "on_demand_usd_hour"),
    )


def _counts(path: str, raw: object) -> list[int]:
    if not isinstance(raw, list) or not raw:
        raise TraceError(f"{path}: data is not a list of counts")
    if len(raw) > MAX_POINTS:
        raise TraceError(f"{path}: data has {len(raw)} points, and at most {MAX_POINTS} are read")
    for index, count in enumerate(raw):
        if type(count) is not int or not 0 <= count <= UNLIMITED:  # True is an int, too
            raise TraceError(
                f"{path}: data[{index}] is {_shown(count)}, and must be a whole number from 0 to {UNLIMITED}"
            )
    return raw


def _prices(path: str, raw: dict[str, Any], points: int) -> list[float] | None:
    """Spot prices: point by point, or one for all points."""
    prices = raw.get("prices")
    if prices is None:
        constant = _optional(path, raw["metadata"], "spot_usd_hour")
        return None if constant is None else [constant]
    if not isinstance(prices, list) or len(prices) != points:
        raise TraceError(f"{path}: prices is not a list as long as data")
    return [_amount(path, f"prices[{index}]", price) for index, price in enumerate(prices)]


def _optional(path: str, metadata: dict[str, Any], key: str) -> float | None:
    return None if metadata.get(key) is None else _amount(path, f"metadata.{key}", metadata[key])


def _amount(path: str, key: str, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= MAX_AMOUNT:
        raise TraceError(f"{path}: {key} is {_shown(raw)}, and must be a number from 0 to {MAX_AMOUNT:g}")
    return float(raw)


def _shown(raw: object) -> str:
    """Return a wrong value, short enough for a sentence."""
    text = orjson.dumps(raw).decode()
    return text if len(text) <= 40 else f"{text[:39]}…"


def _on_grid(recording: _Recording, available: _Available, n_ticks: int, tick_s: float) -> ZoneTrace:
    def laid(points: Sequence[_T]) -> Steps[_T]:
        # The point p is in force from the first tick i with i * tick_s >= p * gap_s: floor(i * tick_s / gap_s) >= p.
        changes = (p for p in range(len(points)) if p == 0 or points[p] != points[p - 1])
        ticks = ((math.ceil(p * recording.gap_s / tick_s), points[p]) for p in changes)
        return Steps.of((tick, value) for tick, value in ticks if tick < n_ticks)

    return ZoneTrace(
        name=recording.zone,
        region=recording.region,
        capacity=laid([available.of(count) for count in recording.data]),
        spot_usd_hour=None if recording.prices is None else laid(recording.prices),
        on_demand_usd_hour=recording.on_demand_usd_hour,
    )
