"""How much trouble each cloud is put through: SKYSERVE_SCHEDULES random schedules, or few enough for every run of the
tests: of crashes (`test_*_crashes`) and of refusals (`test_refusal_schedules`). With 200 or more of them, a controller that
cleans up crashes at each of its calls, else at every third, and what takes long (`only_long`) runs, too; the longest properties have
all their examples, else a third (`examples`). `.github/workflows/engines.yml` runs the load balancer's and the unit tests so each night."""

import os

import pytest

_SCHEDULES = int(os.environ.get("SKYSERVE_SCHEDULES", "6"))
_AT_ONCE = 10
is_long = _SCHEDULES >= 200
CALL_STEP = 1 if is_long else 3

_AT_FIRST = 2

only_long = pytest.mark.skipif(not is_long, reason="SKYSERVE_SCHEDULES=200 plays it")

by_decades = pytest.mark.parametrize(
    "seeds",
    [range(first, min(first + _AT_ONCE, _SCHEDULES)) for first in range(0, _SCHEDULES, _AT_ONCE)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)


def examples(count: int) -> int:
    """Return how many of so many examples, or requests, are tried."""
    return count if is_long else count // 3


def seeds(count: int) -> pytest.MarkDecorator:
    """Return a parameter `seed` that takes `count` values, of which `./test.sh` plays the first ones."""
    values = [pytest.param(one, marks=pytest.mark.long if one >= _AT_FIRST else ()) for one in range(count)]
    return pytest.mark.parametrize("seed", values)
