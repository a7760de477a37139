"""The queue model that judges autoscalers: what it draws from a recording, what it bridges, and whom it finds late."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from skyserve_cli.sim.arrivals import Arrivals, constant
from skyserve_cli.sim.slo_queue import STEP_S, SloQueue, bridged, drawn


def recording(counts: list[float], bin_s: float = 600.0) -> Arrivals:
    at_s = tuple(index * bin_s for index in range(len(counts) + 1))
    return Arrivals("r", at_s, tuple(accumulate(counts, initial=0.0)))


def per_bin(arrivals: Arrivals) -> list[float]:
    return [after - before for before, after in pairwise(arrivals.counts)]


# --- requests -----------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_requests_and_another_seed_others() -> None:
    assert drawn(constant(16.0), 7200.0, 3) == drawn(constant(16.0), 7200.0, 3)
    assert drawn(constant(16.0), 7200.0, 3) != drawn(constant(16.0), 7200.0, 4)


def test_counts_have_the_recorded_mean_and_twice_the_variance_of_a_poisson_process() -> None:
    counts = drawn(constant(16.0), 4 * 86400.0, 0)
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(16.0 * STEP_S, rel=0.01)
    assert variance / mean == pytest.approx(2.0, rel=0.05)


def test_between_the_middles_of_two_bins_the_rate_is_a_straight_line() -> None:
    counts = drawn(recording([60_000.0, 120_000.0]), 1200.0, 0)
    middle = sum(counts[29:31]) / (2 * STEP_S)  # at 600 s, the edge
    assert middle == pytest.approx(150.0, rel=0.1)
    assert counts[0] / STEP_S == pytest.approx(100.0, rel=0.15)


# --- holes --------------------------------------------------------------------------------------------------


def test_a_hole_between_busy_bins_is_bridged_and_counted() -> None:
    found, bins = bridged(recording([600.0, 600.0, 0.0, 3.0, 900.0, 600.0]))
    assert bins == 2
    assert per_bin(found) == pytest.approx([600.0, 600.0, 700.0, 800.0, 900.0, 600.0])


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0.0, 600.0, 600.0], id="at the beginning"),
        pytest.param([600.0, 600.0, 0.0], id="at the end"),
        pytest.param([600.0, 40.0, 0.0, 40.0, 600.0], id="a night that comes slowly"),
        pytest.param([600.0, *[0.0] * 37, 600.0], id="longer than six hours"),
    ],
)
def test_other_silence_is_demand_of_zero(counts: list[float]) -> None:
    told = recording(counts)
    assert bridged(told) == (told, 0)


# --- who is late --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "in_time"),
    [(0.5, 1.0), (1.0, 1.0), (1.125, 0.5), (1.25, 0.0)],
)
def test_up_to_its_capacity_a_fleet_is_in_time_and_beyond_it_ever_less(load: float, in_time: float) -> None:
    arrived = load * 2.0 * 4 * STEP_S
    assert SloQueue(2.0).step(arrived, 4) == pytest.approx(arrived * in_time)


def test_what_a_fleet_cannot_serve_waits_and_makes_the_next_requests_late() -> None:
    queue = SloQueue(2.0)
    queue.step(320.0, 4)  # 200 can be served
    assert queue.waiting == pytest.approx(120.0)
    assert queue.step(40.0, 4) < 40.0


def test_without_a_replica_all_are_late_and_wait() -> None:
    queue = SloQueue(2.0)
    assert (queue.step(50.0, 0), queue.waiting) == (0.0, 50.0)
