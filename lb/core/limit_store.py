"""The numbers behind the limits of API keys: where they are kept, and who shares them. Pure.

`lb.core.quota` decides; a `LimitStore` holds what it decides on. Several agents of one host that serve one port, and
an agent and its successor, must count as one, so their store is a file (`lb.agent.limits_file`). An agent that is alone
keeps the numbers in memory.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

FULL: Final = math.inf  # the level of a bucket that has never been used, of any size

# Where a row has the instant for which its levels hold, and the levels of its buckets, less reservations; below zero is a debt.
FILLED_AT: Final = 0
REQUESTS, TOKENS, INPUT, OUTPUT = 1, 2, 3, 4
LEVELS_SIZE: Final = 5
# A day, and its requests, input and output tokens; a month, and its input and output tokens and US dollars. Reservations are not in these.
DAY: Final = 5
CALENDAR_SIZE: Final = 8
CALENDAR: Final = slice(DAY, DAY + CALENDAR_SIZE)
ROW_SIZE: Final = 14
NUMBER_BYTES: Final = 8

# Of each process: its requests under way, and the tokens that it has taken from the levels for those that are not settled, with what they cost.
IN_FLIGHT: Final = 0
RESERVED_IN: Final = 1
RESERVED_OUT: Final = 2
RESERVED_USD: Final = 3
CELL_SIZE: Final = 4


class Columns(NamedTuple):
    """Where the cells of a row are: one of each process (`slot`), `distance` apart. How many there are is at `slots_at`, -1: only the own one."""

    slot: int = 0
    distance: int = CELL_SIZE
    slots_at: int = -1


class LimitRow(NamedTuple):
    """Where the numbers of one quota are.

    `numbers[at + REQUESTS]` and so on are shared, and are read and written between `lock` and `unlock` only; `numbers[own + IN_FLIGHT]`
    and so on are written by this process alone.
    """

    numbers: Any  # memoryview[float], which mypyc does not know here
    at: int
    own: int
    columns: Columns


def sum_of_cells(numbers: memoryview[float], own: int, columns: Columns, which: int) -> float:
    """Return IN_FLIGHT or another number of a cell, of all processes."""
    slot, distance, slots_at = columns
    slots = 1 if slots_at < 0 else int(numbers[slots_at])
    first = own - slot * distance + which
    return numbers[first] if slots == 1 else sum(numbers[first : first + slots * distance : distance])


_ALONE: Final = Columns()


class LimitStore(Protocol):
    """Rows by the name of their quota."""

    def row(self, name: str) -> LimitRow:
        """Return the row of this name; a new one has full buckets, and nothing used.

        Two calls return the same numbers for as long as those of one are in use.
        """
        ...

    def lock(self, now: float) -> int:
        """No other process changes numbers until `unlock`. Takes microseconds; does not nest.

        Returns a stamp: as long as it stays the same, only the one user of a row has changed the row.
        """
        ...

    def unlock(self) -> None: ...

    def reap(self, now: float) -> bool:
        """Forget the requests of processes that died, and return their reserved tokens to the buckets.

        Returns whether there were any. Must be called without the lock; cheap enough for each refused request.
        """
        ...


class MemoryLimits:
    """A `LimitStore` that shares with no other process. Numbers are kept for as long as a quota or a request uses them."""

    def __init__(self) -> None:
        self._numbers: WeakValueDictionary[str, memoryview[float]] = WeakValueDictionary()
        self._stamp = 0

    def row(self, name: str) -> LimitRow:
        numbers = self._numbers.get(name)
        if numbers is None:
            numbers = memoryview(bytearray(NUMBER_BYTES * (ROW_SIZE + CELL_SIZE))).cast("d")
            numbers[REQUESTS] = numbers[TOKENS] = numbers[INPUT] = numbers[OUTPUT] = FULL
            self._numbers[name] = numbers
        return LimitRow(numbers, 0, ROW_SIZE, _ALONE)

    def lock(self, now: float) -> int:
        """No other process has these numbers, but several quotas may have one row."""
        self._stamp += 1
        return self._stamp

    def unlock(self) -> None:
        """As `lock`."""

    def reap(self, now: float) -> bool:
        return False
