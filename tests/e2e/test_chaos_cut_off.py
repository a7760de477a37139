"""A controller that is cut off or gets no CPU harms no one. The long version: benchmarks/chaos/cut_off.py."""

import pytest

from benchmarks.chaos.cut_off import run

pytestmark = pytest.mark.long


def test_a_controller_that_is_cut_off_terminates_nothing_and_recovers() -> None:
    assert run(cut_s=20.0, stopped_s=10.0, threshold_s=8.0).broken == []
