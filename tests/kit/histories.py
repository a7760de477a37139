"""Histories of demand from plain numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from policies.history import History


def history_of(
    first: int,
    requests: Iterable[float],
    within_slo: Iterable[float],
    ready: Iterable[float] | None = None,
    tokens: tuple[Iterable[float], Iterable[float]] | None = None,
) -> History:
    """Return a history of series of the same length; `tokens` are those of prompts and of responses."""
    optional = (ready, *(tokens or (None, None)))
    views = [
        None if one is None else memoryview(array("d", one)).toreadonly()
        for one in (requests, within_slo, *optional)
    ]
    return History(first, *views)  # type: ignore[arg-type]
