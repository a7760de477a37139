"""Whether what a load balancer's table of targets counts agrees with the requests that are open: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lb.core.target_state import Booking, TargetState
from lb.core.targets import TargetTable


def audit(table: TargetTable) -> list[str]:
    """Return each difference between bookings and counts as a sentence."""
    books = table.books()
    draining = [one for one in books.known if one.drain_at is not None and not one.handed_over]
    lists = {
        "busy": (books.busy, [one for one in books.present if one.view.in_flight]),
        "left out": (books.left_out, [one for one in books.present if one.ejected_until is not None]),
        "draining": (books.draining, draining),
    }
    return [
        *_uncounted(books.known, books.open),
        *(problem for name, (kept, right) in lists.items() for problem in _differ(name, kept, right)),
    ]


def _differ(name: str, kept: Iterable[TargetState], right: Iterable[TargetState]) -> list[str]:
    """Return what a list of targets that is kept up to date has too much or too little, as sentences."""
    listed, wanted = set(kept), set(right)
    return [
        *(f"{entry.key} is listed as {name} and is not" for entry in listed - wanted),
        *(f"{entry.key} is {name} and not listed" for entry in wanted - listed),
    ]


def _uncounted(entries: Iterable[TargetState], open_bookings: Collection[Booking]) -> list[str]:
    """Return every way in which what was counted does not agree with open requests, as sentences."""
    problems = []
    on: dict[TargetState, list[Booking]] = {entry: [] for entry in entries}
    for booking in open_bookings:
        if booking.entry in on:
            on[booking.entry].append(booking)
        else:
            problems.append(f"open {booking} is on an unknown target")
    for entry, bookings in on.items():
        waiting = sum(not booking.responded for booking in bookings)
        if entry.view.in_flight != len(bookings):
            problems.append(
                f"{entry.key} counts {entry.view.in_flight} in flight, {len(bookings)} bookings are open"
            )
        if entry.view.waiting != waiting:
            problems.append(f"{entry.key} counts {entry.view.waiting} waiting, {waiting} have no first byte")
        if entry.trial is not None and entry.trial not in open_bookings:
            problems.append(f"{entry.key} waits for a trial that is over")
        if any(sent not in bookings or sent.responded for sent in entry.gate.unproven):
            problems.append(f"{entry.key} waits for proof of an ended request")
        if entry.departed and not bookings:
            problems.append(f"{entry.key} left, idle, and is still remembered")
    return problems
