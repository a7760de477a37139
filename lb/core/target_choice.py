"""The choice among the targets of a table, by a routing policy: functions over the facts of the table. Pure.

The table (`lb.core.targets`) says who may take a request; the policy that the request names, or else the table's own, says who
is best. `policy` is that name everywhere below, None for the table's own; a name that does not exist raises UnknownPolicyError.
Nothing here changes bookings or targets: the caller books what was chosen.
"""

from __future__ import annotations

from collections.abc import Collection

from lb.config.options import PushMode
from lb.core.target_state import Booking
from lb.core.targets import TargetTable
from policies.routing.base import Choice, RequestView


def choose(
    table: TargetTable,
    request: RequestView,
    now: float,
    exclude: Collection[int] = (),
    policy: str | None = None,
) -> Choice | None:
    """Return the choice among the targets that may take the request now, but those whose epochs are in `exclude`; None if none may.

    A policy that waits chooses among all of the best health, and marks if the request is to wait for the target.
    """
    policies = table.policies
    chooser = policies.own if policy is None else policies.named(policy)
    if policy is not None:
        policies.used(policy, now)
    may_wait = waits(table, policy)
    views = table.offers(now, exclude, not may_wait)
    if not views:
        return None
    choice = chooser.choose(request, views, now)
    if choice is None or not choice.wait:
        return choice
    # A target with room takes it at once, unless the policy keeps that room for requests with deadlines.
    entry = table.entry(choice.target_id) if may_wait else None
    holds = entry is not None and (not entry.admits() or chooser.keeps_room(now))
    choice.wait = holds
    return choice


def choose_only(
    table: TargetTable, request: RequestView, target_id: str, now: float, policy: str | None = None
) -> Choice | None:
    """Return the choice of that one target, for a request that has waited for it."""
    entry = table.entry(target_id)
    return table.policies.named(policy).choose(request, [entry.view], now) if entry is not None else None


def waits(table: TargetTable, policy: str | None = None) -> bool:
    """Return whether requests of that policy wait for a target of their own, and not for any that has room."""
    policies = table.policies
    by_work = policies.own_waits if policy is None else policies.named(policy).waits
    return by_work and table.table.pushing.mode is PushMode.WORK


def ready(
    table: TargetTable, target_id: str, now: float, policy: str | None = None, urgent: bool = False
) -> bool:
    """Return whether a target could take work now: its engine has nothing pending, or little to do before it.

    `urgent`: the work is a request with a deadline that can still be kept.
    """
    entry = table.entry(target_id)
    if entry is None:
        return False
    if not waits(table, policy):
        return entry.admits()
    chooser = table.policies.named(policy)
    if entry.admits() and not chooser.keeps_room(now):
        return True
    return chooser.ready(entry.view, now, urgent)


def takes_another(table: TargetTable, booking: Booking, now: float, over: bool) -> bool:
    """Return whether the booking's target is healthy and takes one more request.

    `over`: the booked request is over, so its place counts as free.
    """
    entry = booking.entry
    if not entry.health(now).is_good:
        return False
    return entry.view.in_flight - over < entry.gate.cap or ready(table, entry.key.id, now)
