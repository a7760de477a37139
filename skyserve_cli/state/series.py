"""Statements about what load balancers have counted: rings of 10 seconds for 2 hours, minutes for 2 days, quarters for 90 days.

A row is one slot of one service with all its replicas (`state.samples`), so a service has at most 720 + 2880 + 8640 rows
and no more than `samples.MOST_REPLICAS` replicas in each. Every function runs in a transaction of its caller. Longer slots are
made of shorter ones while these are kept; making one again gives the same row, so a process that is killed loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import statements as q
from skyserve_cli.state import tables as t
from skyserve_cli.state.samples import Slot, folded, packed, unpacked


class Ring(NamedTuple):
    """Slots of `span_s`, kept for `keep_s`."""

    span_s: int
    keep_s: int


RINGS = (Ring(10, 2 * 3600), Ring(60, 2 * 86_400), Ring(900, 90 * 86_400))
#: Slots that one transaction folds.
STEP = 120

_S = t.series.c


def write(c: Connection, span_s: int, at: int, slots: Mapping[str, Slot]) -> None:
    """Insert the slot that starts at `at` for each service, or overwrite it."""
    rows = [
        {"service": name, "span": span_s, "at": at, "samples": packed(slot)} for name, slot in slots.items()
    ]
    if rows:
        c.execute(q.UPSERT[t.series.name, c.dialect.name], rows)


def read(c: Connection, name: str, span_s: int, since: float, until: float) -> list[tuple[int, Slot]]:
    """Return the slots that start in [since, until), in order, with their starts in UNIX seconds."""
    query = sa.select(_S.at, _S.samples).where(
        _S.service == name, _S.span == span_s, _S.at >= since, _S.at < until
    )
    return [(row.at, unpacked(row.samples)) for row in c.execute(query.order_by(_S.at))]


def names(c: Connection) -> list[str]:
    return list(c.execute(sa.select(_S.service).distinct().order_by(_S.service)).scalars())


def fold(c: Connection, name: str, now: float) -> bool:
    """Make the longer slots that are over, at most STEP of each ring, and forget the slots that are too old.

    Returns whether slots are left to be made.
    """
    left = False
    for short, long in pairwise(RINGS):
        left |= _fold_ring(c, name, short.span_s, long.span_s, now)
    if not left:
        for ring in RINGS:
            old = sa.and_(_S.service == name, _S.span == ring.span_s, _S.at < now - ring.keep_s)
            c.execute(t.series.delete().where(old))
    return left


def _fold_ring(c: Connection, name: str, short_s: int, long_s: int, now: float) -> bool:
    newest = _edge(c, name, long_s, sa.func.max)
    oldest = _edge(c, name, short_s, sa.func.min)
    if oldest is None:
        return False
    first = oldest // long_s * long_s if newest is None else newest + long_s
    end = int(now // long_s) * long_s
    groups: dict[int, list[Slot]] = {}
    for at, slot in read(c, name, short_s, first, min(end, first + STEP * long_s)):
        groups.setdefault(at // long_s * long_s, []).append(slot)
    for at, slots in groups.items():
        write(c, long_s, at, {name: folded(slots)})
    if groups:
        return first + STEP * long_s < end
    later = sa.and_(_S.service == name, _S.span == short_s, _S.at >= first, _S.at < end)
    following = c.execute(sa.select(sa.func.min(_S.at)).where(later)).scalar()
    if following is None:
        return False
    at = following // long_s * long_s  # nothing was counted for longer than a step
    slots = [slot for _, slot in read(c, name, short_s, at, at + long_s)]
    write(c, long_s, at, {name: folded(slots)})
    return True


def _edge(c: Connection, name: str, span_s: int, edge: Callable[[Any], Any]) -> int | None:
    found: int | None = c.execute(
        sa.select(edge(_S.at)).where(_S.service == name, _S.span == span_s)
    ).scalar()
    return found
