"""Bounded label values: the names that have a series of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection

MOST = 100
OTHER = "(other)"


class LabelSlots:
    """Gives each of the first `most` names its own label value, and all further ones `OTHER`.

    A name keeps its place after it has gone, so that its series stay readable, until another one needs the place.
    """

    def __init__(self, evicted: Callable[[str], object], most: int = MOST) -> None:
        """`evicted` gets the name that has lost its place; its series must go."""
        self._evicted = evicted
        self._most = most
        self._slots: dict[str, None] = {}
        self._present: Collection[str] = ()
        self._is_full = False  # of names that are in use

    def retain(self, present: Collection[str]) -> None:
        """Only these names are in use now."""
        self._present = frozenset(present)
        self._is_full = False

    def __getitem__(self, name: str) -> str:
        """Return the label value of a name."""
        if name in self._slots:
            return name
        if self._is_full:
            return OTHER
        if len(self._slots) >= self._most:
            gone = next((one for one in self._slots if one not in self._present), None)
            if gone is None:
                self._is_full = True
                return OTHER
            del self._slots[gone]
            self._evicted(gone)
        self._slots[name] = None
        return name
