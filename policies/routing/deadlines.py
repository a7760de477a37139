"""Whether the deadline of a request can be kept, and what follows from it. Pure.

A request may say by when it needs its first byte, and how long each further token may take. The load balancer sends it to the
cheapest target that keeps both; while it waits it goes before requests of its own API key that have no deadline, the earliest
deadline first (Liu, Layland 1973). One that cannot be kept any longer takes nothing from those that can: it goes after all others
of its key, or is refused.

    rank       when                                                        order within a rank
    RETURNING  it was sent before, and lost its target                     as they came
    URGENT     its deadline may be kept                                    earliest deadline first
    USUAL      it has no deadline                                          as they came, later by what they are put off
    LATE       its deadline is over, or no target is expected to keep it   as they came

Ranks are within one key. Between keys, what a key may use is fixed by its weight (see `lb.core.queue`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final

RETURNING: Final = 0
URGENT: Final = 1
USUAL: Final = 2
LATE: Final = 3

#: Puts the place of an urgent request before, and that of a late one after all others where places are instants.
APART_S: Final = 1e9


class Late(str, Enum):
    """What becomes of a request whose deadline cannot be kept."""

    QUEUE = "queue"  # it goes last
    SHED = "shed"  # it is refused, as long as no engine has had it


class Fate(Enum):
    """What to do with a request now."""

    IN_TURN = "in_turn"
    FIRST = "first"  # of its key
    LAST = "last"  # of its key
    REFUSED = "refused"


def rank_of(due_at: float, now: float, expected_late: bool, returning: bool) -> int:
    """Return the rank of a request that is due at `due_at` (0: it has no deadline)."""
    if returning:
        return RETURNING
    if not due_at:
        return USUAL
    return LATE if expected_late or now >= due_at else URGENT


def fate_of(rank: int, late: Late, started: bool) -> Fate:
    """Return what to do with a request of that rank; `started`: an engine may have worked on it."""
    if rank == LATE:
        return Fate.REFUSED if late is Late.SHED and not started else Fate.LAST
    return Fate.FIRST if rank in (RETURNING, URGENT) else Fate.IN_TURN


def keeps(first_s: float, token_s: float, left_s: float, tpot_s: float) -> bool:
    """Return whether a first byte after `first_s` and then a token each `token_s` keep what is left of a deadline.

    `tpot_s` 0: any pace does. `token_s` 0: the pace is not known, and taken for good.
    """
    return first_s <= left_s and (not tpot_s or token_s <= tpot_s)
