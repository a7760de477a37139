"""The targets that may serve a request, as a sequence that changes without being built again.

A load balancer with a thousand targets cannot afford to list them for each request. Its owner keeps one
`TargetList` up to date instead: a target that is full leaves it, one that has room joins it again, and a request
that must not use a few of them gets a `Without`. Each of these costs a binary search. The order is always that in
which the targets joined the table, so a decision depends on the list and not on how it came to be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from policies.routing.base import TargetView


class TargetList(list[TargetView]):
    """The views of targets, by rank (their place in the table). Policies only read it.

    `fleet` are all targets of the table, whether they are listed here or not; the owner replaces it by another list
    when a target joins or leaves the table.
    """

    __slots__ = ("_by_id", "_ranks", "fleet", "get")

    def __init__(
        self, ranked: Iterable[tuple[int, TargetView]] = (), fleet: Sequence[TargetView] = ()
    ) -> None:
        rows = sorted(ranked, key=_rank)
        super().__init__(view for _, view in rows)
        self._ranks = [rank for rank, _ in rows]
        self._by_id = {view.id: view for view in self}
        self.fleet = fleet
        self.get: Callable[[str], TargetView | None] = self._by_id.get

    def add(self, rank: int, view: TargetView) -> bool:
        """List a target. Returns False if it is listed already."""
        at = bisect_left(self._ranks, rank)
        if at < len(self._ranks) and self._ranks[at] == rank:
            return False
        self._ranks.insert(at, rank)
        self.insert(at, view)
        self._by_id[view.id] = view
        return True

    def drop(self, rank: int) -> bool:
        """Remove a target from the list. Returns False if it is not listed."""
        at = self.position(rank)
        if at is None:
            return False
        del self._ranks[at]
        del self._by_id[self.pop(at).id]
        return True

    def position(self, rank: int) -> int | None:
        at = bisect_left(self._ranks, rank)
        return at if at < len(self._ranks) and self._ranks[at] == rank else None

    def without(self, ranks: Iterable[int]) -> Sequence[TargetView]:
        """Return the list without the targets of these ranks; unknown ones are fine."""
        gone: list[int] = []
        for rank in ranks:
            at = self.position(rank)
            if at is not None:
                insort(gone, at)
        return Without(self, gone) if gone else self


class Without(Sequence[TargetView]):
    """A target list without a few positions (in ascending order). It is valid as long as the list does not change."""

    __slots__ = ("_base", "_gone", "fleet")

    def __init__(self, base: TargetList, gone: Sequence[int]) -> None:
        self._base = base
        self._gone = gone
        self.fleet = base.fleet

    def get(self, target_id: str) -> TargetView | None:
        view = self._base.get(target_id)
        return None if any(self._base[at] is view for at in self._gone) else view

    def __len__(self) -> int:
        return len(self._base) - len(self._gone)

    @overload
    def __getitem__(self, index: int) -> TargetView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TargetView]: ...

    def __getitem__(self, index: int | slice) -> TargetView | Sequence[TargetView]:
        if isinstance(index, slice):
            return list(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self)
        for gone in self._gone:
            at += at >= gone
        return self._base[at]


def finder(targets: Sequence[TargetView]) -> Callable[[str], TargetView | None]:
    """Return a function that finds a target of the sequence by its id."""
    if isinstance(targets, (TargetList, Without)):
        return targets.get
    return {target.id: target for target in targets}.get


def fleet(targets: Sequence[TargetView]) -> Sequence[TargetView]:
    """Return all targets of the table that the sequence is from, as far as it is known."""
    return (isinstance(targets, (TargetList, Without)) and targets.fleet) or targets


def _rank(row: tuple[int, TargetView]) -> int:
    return row[0]
