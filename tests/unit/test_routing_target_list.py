"""A list of targets that is kept up to date is the list that would be built from nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.base import TargetView
from policies.routing.target_list import TargetList, Without, finder, fleet

RANKS = st.integers(0, 30)


@given(
    first=st.sets(RANKS), changes=st.lists(st.tuples(st.booleans(), RANKS)), gone=st.lists(RANKS, unique=True)
)
def test_any_changes_leave_what_is_listed_in_order(
    first: set[int], changes: list[tuple[bool, int]], gone: list[int]
) -> None:
    views = {rank: TargetView(f"t{rank}") for rank in range(31)}
    listed = TargetList(((rank, views[rank]) for rank in first), list(views.values()))
    expected = set(first)
    for joins, rank in changes:
        if joins:
            assert listed.add(rank, views[rank]) == (rank not in expected)
            expected.add(rank)
        else:
            assert listed.drop(rank) == (rank in expected)
            expected.discard(rank)
    assert list(listed) == [views[rank] for rank in sorted(expected)]
    assert [rank for rank in views if listed.get(f"t{rank}")] == sorted(expected)

    rest = listed.without(gone)
    left = [views[rank] for rank in sorted(expected - set(gone))]
    assert list(rest) == [rest[at] for at in range(len(rest))] == left
    assert [rest[at - len(left)] for at in range(len(left))] == left
    assert rest[1:] == left[1:]
    assert len(fleet(rest)) == 31
    found = finder(rest)
    assert [view for view in views.values() if found(view.id)] == left


def test_beyond_its_end_there_is_nothing() -> None:
    rest = TargetList((rank, TargetView(f"t{rank}")) for rank in range(3)).without([1])
    assert isinstance(rest, Without)
    for index in (2, -3):
        with pytest.raises(IndexError):
            rest[index]


def test_of_any_other_sequence_all_is_found_by_id() -> None:
    targets = [TargetView("a"), TargetView("b")]
    assert finder(targets)("b") is targets[1]
    assert finder(targets)("c") is None
    assert fleet(targets) is targets
