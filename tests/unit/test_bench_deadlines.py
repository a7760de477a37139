"""A short form of benchmarks.deadlines: urgent requests are in time at 1.3 times the load, and cost next to no throughput."""

from __future__ import annotations

from benchmarks.deadlines import Cell, Row
from policies.routing.deadlines import Late


def row(late: Late | None) -> Row:
    return Cell("mixed", 1.3, late, 1, 1.0, (1.0,), 4, 0.4).run()


def test_urgent_requests_are_in_time_at_1_3_times_the_load() -> None:
    without, queued = row(None), row(Late.QUEUE)
    assert without.in_time < 0.9, "it would be no test otherwise"
    assert queued.in_time >= 0.98
    assert queued.tokens_per_s >= 0.97 * without.tokens_per_s
    assert queued.refused == 0
