"""How many random schedules each cloud is put through: SKYSERVE_SCHEDULES, or few enough for every run of the tests."""

import os

import pytest

_SCHEDULES = int(os.environ.get("SKYSERVE_SCHEDULES", "40"))
_AT_ONCE = 10

by_decades = pytest.mark.parametrize(
    "seeds",
    [range(first, min(first + _AT_ONCE, _SCHEDULES)) for first in range(0, _SCHEDULES, _AT_ONCE)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
