"""Transitions of the replicas of one service during one tick, and the events that record them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from policies.goals import Goal
from policies.lifecycle import InvalidTransition, apply, request
from policies.model import (
    Action,
    Event,
    Launch,
    ProbeFailed,
    ProbePassed,
    Progressed,
    Replica,
    ReplicaState,
    Role,
)
from skyserve_cli.controller.reconcile.listing_events import events_of
from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.state.values import AGENT_WORD, EventRecord

log = logging.getLogger(__name__)


class TickTransitions:
    """The replicas (or the agents) of one service during one tick, and the events of the tick.

    Every event of an agent starts with AGENT_WORD.
    """

    def __init__(self, before: Iterable[Replica], goal: Goal, now: float, role: Role = Role.REPLICA) -> None:
        self.before: Mapping[int, Replica] = {replica.id: replica for replica in before}
        self._role = role
        self._live: tuple[Replica, ...] | None = None  # None: to be computed again
        self.replicas = dict(self.before)
        self.events: list[Event] = []
        self.records: list[EventRecord] = []
        self.now = now
        self._goal = goal

    def observe(self, results: Iterable[Event], listings: Iterable[InstanceListing]) -> None:
        """Apply the results of cloud calls, then what the clouds list."""
        self.take(results)
        for listing in listings:
            instances = listing.by_id
            here = [r for r in self.replicas.values() if r.zone.cloud == listing.cloud]
            # Nothing follows from what a report, or a region that did not respond, lacks.
            here = [r for r in here if r.instance_id in instances or listing.shows(r)]
            self.take(events_of(here, instances, listing.asked_at))

    def take(self, events: Iterable[Event]) -> None:
        """Apply events in order. An event that a replica cannot handle is set aside and recorded as an error."""
        for event in events:
            replica = self.replicas.get(event.replica_id)
            if replica is None or replica.state is ReplicaState.GONE:
                continue  # a stale result for a replica that is gone
            try:
                after = apply(replica, event, self.now, self._goal.drain_timeout_s)
            except InvalidTransition as error:
                log.error("%s", error)
                self.records.append(EventRecord("error", str(error), replica.id))
                continue
            self.events.append(event)
            self._record(type(event).__name__, replica, after, event)

    def scale(self, before: int, wanted: int, why: str = "") -> None:
        if before != wanted:
            sentence = f"{wanted} replicas wanted" + (f", {before} before" if before else "")
            sentence += f": {why}" if why else ""
            self.records.append(EventRecord("scale", sentence, state=str(wanted)))

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                born = request(action, self.now)
                self.replicas[born.id] = born
                self._live = None
                self.records.append(
                    EventRecord(
                        self._event_kind("Launch"), _launch_message(action), born.id, born.state.value
                    )
                )
                continue
            replica = self.replicas[action.replica_id]
            after = apply(replica, action, self.now, self._goal.drain_timeout_s)
            self._record(type(action).__name__, replica, after, action)

    def live(self) -> tuple[Replica, ...]:
        if self._live is None:
            self._live = tuple(r for r in self.replicas.values() if r.state is not ReplicaState.GONE)
        return self._live

    def changed(self) -> list[Replica]:
        return [r for i, r in self.replicas.items() if self.before.get(i) is not r]

    def _record(self, kind: str, before: Replica, after: Replica, cause: Event | Action) -> None:
        self.replicas[after.id] = after
        self._live = None
        if after is before and isinstance(cause, (ProbePassed, ProbeFailed, Progressed)):
            return
        message = getattr(cause, "message", "") or getattr(cause, "why", "") or _detail(cause)
        self.records.append(EventRecord(self._event_kind(kind), message, after.id, after.state.value))

    def _event_kind(self, kind: str) -> str:
        return kind if self._role is Role.REPLICA else f"{AGENT_WORD}{kind}"


def _launch_message(launch: Launch) -> str:
    offer = launch.offer
    price = f"{offer.price_usd_hour:.3f} USD/h"
    return f"{offer.zone} {offer.capacity_type.value} at {price}: {launch.why}"


def _detail(cause: Event | Action) -> str:
    for name in ("endpoint", "instance_id"):
        value = getattr(cause, name, None)
        if value:
            return str(value)
    return ""
