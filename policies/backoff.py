"""Exponential back-off: how long to wait after failures in a row. Jitter is the caller's. Pure."""

from __future__ import annotations

_DOUBLINGS = 60  # more would only make large numbers


def delay_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after the latest of `failures` (from 1).

    `first_s`, doubled by every further failure, at most `longest_s`.
    """
    return float(min(longest_s, first_s * 2.0 ** min(failures - 1, _DOUBLINGS)))
