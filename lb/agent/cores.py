"""How many cores an agent has."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # of a container: that of its own group


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        cores = min(cores, quota_of(_CGROUP.read_text()))
    return max(1, cores)


def quota_of(line: str) -> int:
    """Return the cores of a `cpu.max` of cgroups, rounded up. Raises ValueError if there is no quota."""
    quota, period = line.split()
    return math.ceil(int(quota) / int(period))
