"""RiskHedge in random markets: no week is dearer than plain on demand by more than what was put by and advanced.

`SKYSERVE_MARKETS=500 pytest tests/sim/test_sim_dearer.py` runs as many; `python -m benchmarks.dearer` prints them.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.dearer import measured
from policies.placement.risk_budget import LOAN_EVERY_H, LOAN_H, SAVED_H

FIRST = 8  # of a size that moves, at 99.9 % in five zones: the dearest of the first ten
MARKETS = int(os.environ.get("SKYSERVE_MARKETS", "1"))
DAYS = 7.1


@pytest.mark.parametrize("seed", range(FIRST, FIRST + MARKETS))
def test_no_week_is_dearer_than_on_demand_but_for_what_was_put_by(seed: int) -> None:
    found = measured(seed, DAYS)
    assert found.dearest_week <= 1.0 + (2.0 * LOAN_H + SAVED_H) / LOAN_EVERY_H
