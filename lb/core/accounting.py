"""Reads the bookings of a table: statistics of a window of time."""

from __future__ import annotations

from collections.abc import Iterable

from lb.config.stats import TargetHealth, TargetStats
from lb.core.target_state import Health, TargetState


def stats(entries: Iterable[TargetState], now: float, window_s: float) -> tuple[TargetStats, ...]:
    """Per target id, all its generations together."""
    merged: dict[str, TargetStats] = {}
    for entry in entries:
        one = TargetStats(
            id=entry.key.id,
            in_flight=entry.view.in_flight,
            requests=entry.requests.count(now, window_s),
            errors=entry.errors.count(now, window_s),
            ejected=entry.health(now) is Health.EJECTED,
            heard_s=max(0.0, now - entry.received_at),
            served_s=None if entry.served_at is None else max(0.0, now - entry.served_at),
            health=_health(entry, now),
        )
        before = merged.get(one.id)
        merged[one.id] = one if before is None else _sum(before, one)
    return tuple(merged.values())


def _sum(one: TargetStats, other: TargetStats) -> TargetStats:
    return TargetStats(
        id=one.id,
        in_flight=one.in_flight + other.in_flight,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        ejected=one.ejected or other.ejected,
        heard_s=_least(one.heard_s, other.heard_s),
        served_s=_least(one.served_s, other.served_s),
        health=one.health if other.health is None else other.health,  # the later generation's
    )


def _health(entry: TargetState, now: float) -> TargetHealth | None:
    view, row, worked_at = entry.view, entry.error_row, entry.worked_at
    running = view.running
    if row is None and running is None and worked_at is None and not view.in_flight:
        return None
    return TargetHealth(
        worked_s=None if worked_at is None else max(0.0, now - worked_at),
        errors=0 if row is None else row.errors,
        first_error_s=0.0 if row is None else max(0.0, now - row.first_at),
        last_error_s=0.0 if row is None else max(0.0, now - row.last_at),
        running=None if running is None else running + view.queued,
        queued=None if view.pending is None else view.queued,
        kv_usage=view.kv_usage,
    )


def _least(one: float | None, other: float | None) -> float | None:
    return min((known for known in (one, other) if known is not None), default=None)
