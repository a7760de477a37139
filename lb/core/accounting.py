"""Reading the books of a table: what they say of a window of time, and whether they balance."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lb.config.schema import TargetStats
from lb.core.target_state import Booking, Health, TargetState


def stats(entries: Iterable[TargetState], now: float, window_s: float) -> tuple[TargetStats, ...]:
    """Per target id, all its generations together."""
    merged: dict[str, TargetStats] = {}
    for entry in entries:
        before = merged.get(entry.key.id, TargetStats(entry.key.id, 0, 0, 0, False))
        heard_s = max(0.0, now - entry.heard_at)
        merged[entry.key.id] = TargetStats(
            id=entry.key.id,
            in_flight=before.in_flight + entry.view.in_flight,
            requests=before.requests + entry.requests.count(now, window_s),
            errors=before.errors + entry.errors.count(now, window_s),
            ejected=before.ejected or entry.standing(now) is Health.EJECTED,
            heard_s=heard_s if before.heard_s is None else min(heard_s, before.heard_s),
        )
    return tuple(merged.values())


def audit(entries: Iterable[TargetState], open_bookings: Collection[Booking]) -> list[str]:
    """Every way in which what was counted does not agree with what is open, as sentences."""
    problems = []
    on: dict[TargetState, list[Booking]] = {entry: [] for entry in entries}
    for booking in open_bookings:
        if booking.entry in on:
            on[booking.entry].append(booking)
        else:
            problems.append(f"open {booking} is on an unknown target")
    for entry, bookings in on.items():
        unanswered = sum(not booking.answered for booking in bookings)
        if entry.view.in_flight != len(bookings):
            problems.append(
                f"{entry.key} counts {entry.view.in_flight} in flight, {len(bookings)} bookings are open"
            )
        if entry.view.waiting != unanswered:
            problems.append(
                f"{entry.key} counts {entry.view.waiting} waiting, {unanswered} have no first byte"
            )
        if entry.trial is not None and entry.trial not in open_bookings:
            problems.append(f"{entry.key} waits for a trial that is over")
        if any(sent not in bookings or sent.answered for sent in entry.gate.unproven):
            problems.append(f"{entry.key} waits for proof of what is over")
        if entry.departed and not bookings:
            problems.append(f"{entry.key} left, idle, and is still remembered")
    return problems
