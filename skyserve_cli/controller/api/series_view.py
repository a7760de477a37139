"""Numbers over time, as JSON in columns: pure functions of stored slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyserve_cli.state.samples import WHOLE, Sample, Slot, folded
from skyserve_cli.state.series import RINGS

MOST_POINTS = 1500
_COLUMNS = tuple(Sample().view())


def span_for(since: float, now: float) -> int:
    """Return the seconds of a slot: the shortest whose ring reaches back to `since` in at most MOST_POINTS slots."""
    length_s = now - since
    fitting = (r.span_s for r in RINGS if length_s <= r.keep_s and length_s <= r.span_s * MOST_POINTS)
    return next(fitting, RINGS[-1].span_s)


def series_view(
    name: str, key: int, span_s: int, since: float, until: float, slots: Sequence[tuple[int, Slot]]
) -> dict[str, Any]:
    """Return one list per number, and of each replica its numbers over the whole time.

    `key` is a replica's id, or `WHOLE`. Slots in which nothing was counted are left out.
    """
    rows = [(at, slot[key].view()) for at, slot in slots if key in slot]
    whole = folded(slot for _, slot in slots)
    return {
        "name": name,
        "replica_id": None if key == WHOLE else key,
        "span_s": span_s,
        "since": since,
        "until": until,
        "at": [at for at, _ in rows],
        **{column: [view[column] for _, view in rows] for column in _COLUMNS},
        "total": whole[WHOLE].view() if WHOLE in whole else None,
        "replicas": {str(id_): sample.view() for id_, sample in whole.items() if id_ != WHOLE},
    }
