"""Which day and month it is for limits per day and month: those of UTC. Pure."""

from __future__ import annotations

from typing import NamedTuple

from lb.config.usage import DAY_S, first_day, month_of


class Calendar(NamedTuple):
    """A day and a month, counted from 1970-01, and the instants of the agent's clock at which they end."""

    day: int
    month: int
    day_ends_at: float
    month_ends_at: float


def calendar_of(unix_s: float, now: float) -> Calendar:
    """Return the calendar at the instant `now` of the agent's clock, which is `unix_s` in Unix time."""
    day = int(unix_s // DAY_S)
    month = month_of(day)
    begin = now - unix_s  # of 1970, by the agent's clock
    return Calendar(day, month, begin + (day + 1) * DAY_S, begin + first_day(month + 1) * DAY_S)
