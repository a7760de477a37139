"""`benchmarks.plateaus`: constants are changed for a while only, and differences are of pairs."""

from __future__ import annotations

import pytest

from benchmarks.frontier_stats import Family, Outcome, Sample
from benchmarks.market_runs import RISK_HEDGE
from benchmarks.plateaus import AVAILABILITIES, CONSTANTS, OF_WORK, Constant, changed, difference
from policies.placement import risk_budget
from skyserve_cli.sim.settings import Job


def family(paid: float) -> Family:
    """Twenty hours of both targets, of which the second half costs more; never short."""
    samples = (Sample(10.0, paid, 0.0), Sample(10.0, 2.0 * paid, 0.0))
    return tuple(Outcome(Job(RISK_HEDGE, availability_target=a), samples, 0.0) for a in AVAILABILITIES)


def test_every_constant_is_changed_in_both_directions_within_a_factor_of_two() -> None:
    every = (*CONSTANTS, *OF_WORK)
    assert len({constant.name for constant in every}) == len(every)
    for constant in every:
        low, high = constant.values[0], constant.values[-1]
        assert constant.value / 2 <= low < constant.value < high <= constant.value * 2
        assert {type(one) for one in constant.values} == {type(getattr(constant.module, constant.name))}


def test_a_constant_has_its_value_again_also_after_an_error() -> None:
    constant, before, within = Constant(risk_budget, "STEER_S", (1.0, 2.0)), risk_budget.STEER_S, []

    def fails() -> None:
        with changed(constant, 1.0):
            within.append(risk_budget.STEER_S)
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    assert (within, risk_budget.STEER_S) == ([1.0], before)


def test_a_difference_is_of_the_same_blocks() -> None:
    """The blocks differ in what they cost, and both families alike: so does no resample."""
    before, after = [family(4.0), family(2.0)], [family(4.4), family(2.2)]
    mean, sure = difference(before, before, 0.995, 50)
    assert (mean, *sure) == (0.0, 0.0, 0.0)
    mean, sure = difference(before, after, 0.995, 200)
    assert mean == pytest.approx(0.1 * (0.6 + 0.3) / 2)
    assert 0.0 < sure.low < mean < sure.high
