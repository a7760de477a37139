"""How many threads move the chunks of streams."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

AUTO = 0  # workers: one per core
MOST_WORKERS = 16
_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # of a container: that of its own group


def mover_threads(workers: int, cores: int) -> int:
    """Return how many threads move chunks beside the event loop; 0: it moves them itself, which costs least where nothing runs beside it.

    `workers` is what the user wants, AUTO or 1 to MOST_WORKERS.
    """
    wanted = workers or min(cores, MOST_WORKERS)
    return 0 if wanted == 1 else wanted


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
