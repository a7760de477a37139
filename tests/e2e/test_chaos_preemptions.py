"""Preemptions that no client notices. The long version: benchmarks/chaos/updates.py."""

import pytest

from benchmarks.chaos.harness import Stack
from benchmarks.chaos.traffic import tally
from benchmarks.chaos.updates import preempt_two, spec, warn_one

pytestmark = pytest.mark.long


def test_preemptions_with_and_without_notice_fail_no_request_and_cut_no_stream() -> None:
    with Stack() as stack:
        stack.up(spec(3, "v1", stream_s=2.0))
        finding = preempt_two(stack, rate=20, stream_s=2.0, notice_s=2.0)
    assert len(finding.unary) >= 40
    assert tally(finding.unary) == {}
    assert tally(finding.streams) == {}


def test_a_replica_with_a_notice_serves_until_shortly_before_its_end_while_its_replacement_starts() -> None:
    with Stack() as stack:
        stack.up(spec(2, "v1", stream_s=1.0, notice_drain_s=5.0))
        warned = warn_one(stack, rate=20, stream_s=1.0, notice_s=40.0)
    assert warned.served_after > warned.served_before
    assert 0.0 < warned.drained_s_before <= 5.0
    assert len(warned.finding.unary) >= 100
    assert tally(warned.finding.unary) == {}
    assert tally(warned.finding.streams) == {}
