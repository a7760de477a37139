"""The limits of a service's size at an instant, by the schedule of its file. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim

from skyserve_cli.spec.model import ScheduledSize, ServiceSpec

_MINUTE_S = 60.0
_STEP = timedelta(minutes=1)


class SizeLimits(NamedTuple):
    """The size from now on, until `until`."""

    least: int
    most: int
    until: float


def limits_at(spec: ServiceSpec, now: float) -> SizeLimits:
    """Return the limits at `now`. Of entries that overlap the later one in the file counts, key by key."""
    least, most, until = spec.scaling.min_replicas, spec.scaling.max_replicas, math.inf
    for entry in spec.schedule:
        is_active, changes_at = _state(entry, int(now // _MINUTE_S))
        until = min(until, changes_at)
        if is_active:
            least = least if entry.min_replicas is None else entry.min_replicas
            most = most if entry.max_replicas is None else entry.max_replicas
    return SizeLimits(least, max(least, most), until)


@lru_cache(maxsize=1024)
def _state(entry: ScheduledSize, minute: int) -> tuple[bool, float]:
    """Return whether the entry is active in a minute (counted since 1970), and when that changes."""
    at = datetime.fromtimestamp(minute * _MINUTE_S, UTC).astimezone(ZoneInfo(entry.timezone))
    began = next(CronSim(entry.cron, at + _STEP, reverse=True)).timestamp()
    begins = next(CronSim(entry.cron, at)).timestamp()
    ends = began + entry.duration_s
    is_active = ends > minute * _MINUTE_S
    return is_active, min(begins, ends) if is_active else begins
