"""The files a person writes for the local cloud: cloud.yaml, and a spot market to play.

Every wrong key or value is reported with its path, all of them at once, as an InvalidRequestError.
"""

from __future__ import annotations

import difflib
import json
from functools import lru_cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from policies.model import CapacityType
from provisioners.durations import seconds_of
from provisioners.files import write_text
from provisioners.local.spot_market import Key, Limit, LocalMarket, MarketStep
from provisioners.local.store import CLOUD, LocalStore
from provisioners.port.errors import InvalidRequestError

DEFAULT_CLOUD_YAML = """\
# The local cloud: instances are processes of this machine. The zones, prices and capacities are make-believe,
# what runs in them is real. Edit freely: launches read this file again.

cold_start_s: 0.5            # from an accepted launch to `setup`
stop_grace_s: 3              # from SIGTERM to SIGKILL when an instance is terminated
preemption_notice_s: 0       # warning before the market takes a spot instance; 0: none
network: 10.213.0.0/16       # replicas that need the same port each get a subnet of this

regions:                     # capacity: how many instances fit at once; null: any number
  us:
    us-a: {spot_usd_hour: 0.30, on_demand_usd_hour: 1.00, spot_capacity: 8, on_demand_capacity: null}
    us-b: {spot_usd_hour: 0.33, on_demand_usd_hour: 1.00, spot_capacity: 8, on_demand_capacity: null}
  eu:
    eu-a: {spot_usd_hour: 0.36, on_demand_usd_hour: 1.10, spot_capacity: 8, on_demand_capacity: null}
    eu-b: {spot_usd_hour: 0.38, on_demand_usd_hour: 1.10, spot_capacity: 8, on_demand_capacity: null}
  asia:
    asia-a: {spot_usd_hour: 0.40, on_demand_usd_hour: 1.20, spot_capacity: 8, on_demand_capacity: null}
    asia-b: {spot_usd_hour: 0.42, on_demand_usd_hour: 1.20, spot_capacity: 8, on_demand_capacity: null}
"""


def _seconds(value: Any) -> Any:
    """Numbers are seconds; "250ms", "10s", "5m", "2h", "1d" are what they say."""
    if isinstance(value, str):
        found = seconds_of(value)
        if found is None:
            raise ValueError("a duration is a number of seconds, or one with a unit: 250ms, 10s, 5m, 2h, 1d")
        return found
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
UsdHour = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ZoneConfig(_Strict):
    spot_usd_hour: UsdHour
    on_demand_usd_hour: UsdHour
    spot_capacity: Count | None = 8
    on_demand_capacity: Count | None = None

    def price_usd_hour(self, capacity_type: CapacityType) -> float:
        return self.spot_usd_hour if capacity_type is CapacityType.SPOT else self.on_demand_usd_hour

    def capacity(self, capacity_type: CapacityType) -> int | None:
        return self.spot_capacity if capacity_type is CapacityType.SPOT else self.on_demand_capacity


class CloudConfig(_Strict):
    cold_start_s: Seconds = 0.5
    stop_grace_s: Seconds = 3.0
    preemption_notice_s: Seconds = 0.0
    network: IPv4Network = IPv4Network("10.213.0.0/16")
    regions: dict[str, dict[str, ZoneConfig]]

    @model_validator(mode="after")
    def _zone_names_are_unique(self) -> CloudConfig:
        names = [name for zones in self.regions.values() for name in zones]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"zone names must differ over all regions: {', '.join(twice)}")
        return self

    def zones(self) -> list[tuple[str, str, ZoneConfig]]:
        """(region, zone, its configuration), in the order of the file."""
        return [
            (region, name, zone) for region, zones in self.regions.items() for name, zone in zones.items()
        ]

    def zone(self, name: str) -> tuple[str, ZoneConfig] | None:
        """(region, configuration) of a zone, or None if there is none of that name."""
        return next(((region, zone) for region, known, zone in self.zones() if known == name), None)


class TimelineStep(_Strict):
    """From `at` on, `zone` ("*": every zone) has this much room. Other values stay as they were."""

    at: Seconds
    zone: str
    spot: Count | None = None
    on_demand: Count | None = None
    notice: Seconds | None = None


class MarketConfig(_Strict):
    """Either a `timeline` or a `trace` (a folder, relative to the file)."""

    timeline: list[TimelineStep] | None = None
    trace: str | None = None
    speed: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _one_of_two(self) -> MarketConfig:
        if (self.timeline is None) == (self.trace is None):
            raise ValueError("give either `timeline` or `trace`")
        return self


class TraceMetadata(BaseModel):
    gap_seconds: Annotated[float, Field(gt=0)]


class TraceZone(BaseModel):
    """How many instances a zone had room for, every `gap_seconds`. Other keys are other people's."""

    metadata: TraceMetadata
    data: Annotated[list[Count], Field(min_length=1)]


def load_cloud(store: LocalStore) -> CloudConfig:
    """Return the local cloud's configuration; the default one is written on first use."""
    if not store.config_path.exists():
        store.create()
        write_text(store.config_path, DEFAULT_CLOUD_YAML)
    stat = store.config_path.stat()
    return _load_cloud(store.config_path, (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=8)
def _load_cloud(path: Path, _signature: tuple[int, int, int]) -> CloudConfig:
    """Parsed once per edit: every tick requests offers."""
    return _parse(CloudConfig, _read_yaml(path), str(path))


def read_market(path: Path, cloud: CloudConfig, now: float, speed: float | None = None) -> LocalMarket:
    """Return the market in a YAML file or a folder with a spot trace, beginning `now`. `speed` overrides the file's."""
    if path.is_dir():
        return _trace_market(path, cloud, now, speed or 1.0)
    config = _parse(MarketConfig, _read_yaml(path), str(path))
    if config.trace is not None:
        return _trace_market(path.parent / config.trace, cloud, now, speed or config.speed)
    schedule = _timeline(config.timeline or [], cloud, str(path))
    return LocalMarket(started_at=now, speed=speed or config.speed, schedule=schedule, source=str(path))


def _timeline(
    steps: list[TimelineStep], cloud: CloudConfig, source: str
) -> dict[Key, tuple[MarketStep, ...]]:
    names = [name for _, name, _ in cloud.zones()]
    schedule: dict[Key, list[MarketStep]] = {}
    for number, step in enumerate(steps):
        if step.zone != "*" and step.zone not in names:
            hint = did_you_mean(step.zone, names)
            raise InvalidRequestError(
                f"{source}: timeline.{number}.zone: there is no zone {step.zone!r}{hint}", cloud=CLOUD
            )
        capacities = {CapacityType.SPOT: step.spot, CapacityType.ON_DEMAND: step.on_demand}
        for capacity_type, capacity in capacities.items():
            if capacity is not None:
                for name in names if step.zone == "*" else [step.zone]:
                    entry = MarketStep(step.at, Limit(capacity, step.notice))
                    schedule.setdefault((name, capacity_type), []).append(entry)
    return {key: tuple(sorted(entries, key=lambda entry: entry.at_s)) for key, entries in schedule.items()}


def _trace_market(folder: Path, cloud: CloudConfig, now: float, speed: float) -> LocalMarket:
    """Return a spot trace, one JSON file per zone.

    Files named after zones go to those; else the first file goes to the first zone and so on. A zone the trace leaves out
    has no spot capacity: a replay is the whole world.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    if not files:
        raise InvalidRequestError(f"{folder}: no trace: a folder with one JSON file per zone", cloud=CLOUD)
    names = [name for _, name, _ in cloud.zones()]
    by_name = set(files) <= set(names)
    file_of = files if by_name else dict(zip(names, files.values(), strict=False))
    schedule: dict[Key, tuple[MarketStep, ...]] = {}
    for name in names:
        steps = _trace_steps(file_of[name]) if name in file_of else (MarketStep(0.0, Limit(0)),)
        schedule[name, CapacityType.SPOT] = steps
    return LocalMarket(started_at=now, speed=speed, schedule=schedule, source=str(folder))


def _trace_steps(path: Path) -> tuple[MarketStep, ...]:
    """Return only the ticks at which the capacity changes."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path}: {error}", cloud=CLOUD) from error
    trace = _parse(TraceZone, raw, str(path))
    return tuple(
        MarketStep(tick * trace.metadata.gap_seconds, Limit(capacity))
        for tick, capacity in enumerate(trace.data)
        if tick == 0 or capacity != trace.data[tick - 1]
    )


def did_you_mean(word: str, known: list[str]) -> str:
    """ "; did you mean …?", or what there is."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", cloud=CLOUD) from error
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path}: not YAML: {error}", cloud=CLOUD) from error


_Model = TypeVar("_Model", bound=BaseModel)
_NESTED: dict[type[BaseModel], type[BaseModel]] = {CloudConfig: ZoneConfig, MarketConfig: TimelineStep}


def _parse(model: type[_Model], raw: Any, source: str) -> _Model:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(model, detail) for detail in error.errors()]
        raise InvalidRequestError("\n".join(f"{source}: {line}" for line in lines), cloud=CLOUD) from error


def _explain(model: type[BaseModel], detail: Any) -> str:
    path = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        owner = model if len(detail["loc"]) == 1 else _NESTED[model]
        return f"{path}: unknown key{did_you_mean(str(detail['loc'][-1]), list(owner.model_fields))}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {message} (got {detail['input']!r})" if path else message
