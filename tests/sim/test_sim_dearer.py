"""RiskHedge in random markets: no week is dearer than plain on demand by more than what was put by and advanced.

`SKYSERVE_MARKETS=500 pytest tests/sim/test_sim_dearer.py` runs as many; `python -m benchmarks.dearer` prints them.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.dearer import measured
from policies.placement.risk_budget import LOAN_EVERY_H, LOAN_H, SAVED_H

FIRST = 8
MARKETS = int(os.environ.get("SKYSERVE_MARKETS", "0"))
#: Its replicas are lost every few minutes. The dearest of five hundred: 104.8 %, had more spot been requested than was put by for.
DEAREST = 322
DAYS = 7.1


@pytest.mark.parametrize("seed", range(FIRST, FIRST + MARKETS) if MARKETS else [DEAREST])
def test_no_week_is_dearer_than_on_demand_but_for_what_was_put_by(seed: int) -> None:
    found = measured(seed, DAYS)
    assert found.dearest_week <= 1.0 + (2.0 * LOAN_H + SAVED_H) / LOAN_EVERY_H
