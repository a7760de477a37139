"""What probes and requests together say of a replica: alive, ready, loaded. Pure.

A probe alone cannot tell a replica that hangs from one that is busy: both let it wait. The requests of clients can, because
only a replica that lives gives responses. So there are two witnesses, and what the controller does follows from both:

| probe                | clients since then              | verdict | the controller                                          |
|----------------------|---------------------------------|---------|---------------------------------------------------------|
| passes               | whatever is not in the last row | READY   | sends it requests                                       |
| times out            | get responses, or wait          | LOADED  | sends it what others have no room for; wants more of them |
| times out            | wait, and get nothing for long  | UNREADY | sends it requests if nothing else is left               |
| times out            | there are none                  | UNREADY | the same                                                |
| refused, or not 200  | whatever is not in the last row | UNREADY | the same                                                |
| whatever             | get errors (5xx) and nothing else | FAILING | replaces it                                           |

An UNREADY replica is given up after `probe_failure_threshold_s` in which no client got a response from it (`brake`); clients count
from their last response, so one that serves is never given up. "For long" is a third of that threshold, and an UNREADY
replica that was LOADED has been failing since its last response: one that hangs is given up as soon as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from policies.history import Load
from policies.model import EndReason, Event, GaveUp, ProbeFailed, Replica, ReplicaState

#: Of the threshold: without any response for longer, a replica with requests is not only loaded.
LOADED_SHARE = 1 / 3
#: Of the threshold: nothing but errors for so long is no accident.
FAILING_SHARE = 1 / 2
LEAST_ERRORS = 5
#: Where no other replica does better, requests may be to blame, and a new replica is only a try.
ALONE_EVERY_S = 1800.0


@dataclass(frozen=True, slots=True)
class FailedProbe:
    """The last valid probe of a replica, which failed, as all have since `first_at` (None: this is the first).

    `reached` is true if a connection was made: a replica that then sends nothing hangs, and its load balancer may receive bytes from
    it anyway, on a path that needs no engine. `timed_out`: the time for it was over, before a connection or before a response. `why` says how it failed.
    """

    at: float
    reached: bool
    timed_out: bool = False
    first_at: float | None = None
    why: str = ""

    @property
    def since(self) -> float:
        return self.at if self.first_at is None else self.first_at


@dataclass(frozen=True, slots=True)
class Work:
    """What load balancers know of a replica's work for clients.

    The last byte of a response that is no error of the replica (5xx) came at `at`. Of `errors` responses since then all were such errors,
    the first at `first_error_at` and the last at `last_error_at`. `waiting` requests are on it now: sent by load balancers, or by its
    engine's own account. Of those `queued` wait in the engine, whose KV cache is used to `kv_usage` (0 to 1); None: it does not
    report that.
    """

    at: float = -math.inf
    errors: int = 0
    first_error_at: float = math.inf
    last_error_at: float = -math.inf
    waiting: int = 0
    queued: int | None = None
    kv_usage: float | None = None

    def moved(self, by_s: float) -> Work:
        """Return it on a clock that is ahead by so much."""
        return replace(
            self,
            at=self.at + by_s,
            first_error_at=self.first_error_at + by_s,
            last_error_at=self.last_error_at + by_s,
        )


IDLE = Work()


class Verdict(Enum):
    READY = "ready"
    LOADED = "loaded"
    UNREADY = "unready"
    FAILING = "failing"


def judged(failed: FailedProbe | None, work: Work, threshold_s: float, now: float) -> Verdict:
    """Return the row of the table. `failed` is None if the last probe passed."""
    lasted_s = work.last_error_at - work.first_error_at
    is_over = now - work.last_error_at >= threshold_s  # no request has come since
    if work.errors >= LEAST_ERRORS and lasted_s >= FAILING_SHARE * threshold_s and not is_over:
        return Verdict.FAILING
    if failed is None:
        return Verdict.READY
    if not failed.timed_out or (not work.waiting and work.at < failed.since):
        return Verdict.UNREADY
    return (
        Verdict.LOADED if now - silent_since(failed, work) < LOADED_SHARE * threshold_s else Verdict.UNREADY
    )


def silent_since(failed: FailedProbe, work: Work) -> float:
    """Return since when neither probes nor clients have had a response."""
    return max(failed.since, work.at)


def sifted(
    events: Iterable[Event],
    failed: Mapping[int, FailedProbe],
    work: Mapping[int, Work],
    threshold_s: float,
    now: float,
) -> list[Event]:
    """Return the events without the failed probes of replicas that are only loaded.

    One that is no longer only loaded has been failing since its last response.
    """
    kept: list[Event] = []
    for event in events:
        if isinstance(event, ProbeFailed) and event.replica_id in failed:
            last, done = failed[event.replica_id], work.get(event.replica_id, IDLE)
            if judged(last, done, threshold_s, now) is Verdict.LOADED:
                continue
            if last.timed_out:
                event = ProbeFailed(event.replica_id, event.message, silent_since(last, done))
        kept.append(event)
    return kept


def loaded(
    replicas: Iterable[Replica],
    failed: Mapping[int, FailedProbe],
    work: Mapping[int, Work],
    threshold_s: float,
    now: float,
) -> frozenset[int]:
    """Return the replicas that are READY and loaded."""
    if not failed:
        return frozenset()
    ready = {replica.id for replica in replicas if replica.state is ReplicaState.READY}
    return frozenset(
        number
        for number, last in failed.items()
        if number in ready and judged(last, work.get(number, IDLE), threshold_s, now) is Verdict.LOADED
    )


def with_engines(load: Load, replicas: Iterable[Replica], work: Mapping[int, Work]) -> Load:
    """Return the load with what the engines of ready replicas report."""
    if not work:
        return load
    ready = [work[one.id] for one in replicas if one.state is ReplicaState.READY and one.id in work]
    reporting = [done for done in ready if done.queued is not None or done.kv_usage is not None]
    return replace(
        load,
        engines=len(reporting),
        engine_queue=float(sum(done.queued or 0 for done in reporting)),
        kv_usage=sum(done.kv_usage or 0.0 for done in reporting),
    )


def failing(
    replicas: Iterable[Replica], work: Mapping[int, Work], threshold_s: float, now: float
) -> list[GaveUp]:
    """Return the ends that are due of replicas that give clients nothing but errors; see `brake` for those that stand."""
    due = []
    for replica in replicas if work else ():
        done = work.get(replica.id)
        if replica.state not in (ReplicaState.READY, ReplicaState.NOT_READY) or done is None:
            continue
        if judged(None, done, threshold_s, now) is Verdict.FAILING:
            over_s = done.last_error_at - done.first_error_at
            message = f"clients got {done.errors} errors (5xx) in {over_s:.0f} s and nothing else"
            due.append(GaveUp(replica.id, EndReason.ONLY_ERRORS, message))
    return due


def does_better(replicas: Iterable[Replica], work: Mapping[int, Work]) -> bool:
    """Return whether some READY replica gives clients responses while others give them errors only."""
    first = min(
        (done.first_error_at for done in work.values() if done.errors >= LEAST_ERRORS), default=math.inf
    )
    ready = {replica.id for replica in replicas if replica.state is ReplicaState.READY}
    return any(number in ready and done.at > first for number, done in work.items())
