"""Preemptions that no client notices. The long version: benchmarks/chaos/updates.py."""

import pytest

from benchmarks.chaos.harness import Stack
from benchmarks.chaos.traffic import tally
from benchmarks.chaos.updates import preempt_two, spec

pytestmark = pytest.mark.long


def test_preemptions_with_and_without_notice_fail_no_request_and_cut_no_stream() -> None:
    with Stack() as stack:
        stack.up(spec(3, "v1", stream_s=2.0))
        finding = preempt_two(stack, rate=20, stream_s=2.0, notice_s=2.0)
    assert len(finding.unary) >= 40
    assert tally(finding.unary) == {}
    assert tally(finding.streams) == {}
