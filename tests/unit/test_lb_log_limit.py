"""Lines of a log that strangers can cause: one of each kind now and then, with a count of the others."""

from __future__ import annotations

from lb.core.log_limit import LogLimit


def test_one_line_of_a_kind_is_logged_and_the_next_one_counts_those_left_out() -> None:
    limit = LogLimit(10.0)
    assert [limit.left_out("a", now) for now in (0.0, 0.0, 5.0, 9.9)] == [0, None, None, None]
    assert [limit.left_out("a", now) for now in (10.0, 10.1)] == [3, None]
    assert limit.left_out("a", 25.0) == 1
    assert limit.left_out("a", 40.0) == 0


def test_kinds_do_not_silence_each_other() -> None:
    limit = LogLimit(10.0)
    assert [limit.left_out(kind, 0.0) for kind in "abab"] == [0, 0, None, None]
    assert limit.left_out("b", 10.0) == 1
