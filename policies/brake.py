"""Which failed probes are acted upon: a controller that cannot trust its own probes terminates nothing for them. Pure.

A failed probe means that this controller did not reach a replica. That is the replica's fault, or the fault of something
between them: a network that is down, a process that was stopped, a host without CPU. Only the first is a reason to
terminate a machine. The rules, in order:

1. Time limits count from when the controller began to watch without a gap. A probe that ran across a gap is void, and a
   replica without a recent valid probe is not judged.
2. A replica that was reached (it sent a status that is not 200, or took the connection and sent nothing) is not ready. Of
   others a load balancer is a second observer: a replica that has sent it bytes is not terminated.
3. If nothing beyond this machine responds to the controller, it is the controller that is cut off.
4. Clients are witnesses (`health`). A replica that gives them responses is not terminated, however its probe fails.
5. If many replicas stop responding at once and fewer of the service respond than do not, one is replaced, and the others
   once a replica has become ready after that: then the controller can see, and they are lost.
6. A replica that gives clients nothing but errors is replaced, but if no other one does better, only one in a long time:
   it may be the requests that are wrong.
7. Replicas are terminated a few at a time, so that a mistake that passes all of this is a small one.

Held-back replicas are decided again in the next tick; nothing has to be cleared by hand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policies.goals import Goal
from policies.health import ALONE_EVERY_S, IDLE, FailedProbe, Work, does_better
from policies.model import EndReason, Event, GaveUp, Replica, ReplicaState

FRESH_S = 60.0  # a valid probe is recent for so long; one that fails is repeated every second
SHORTEST_WATCH_S = 60.0  # of the controller, before a replica that never was ready is given up
MANY = 2  # replicas, or MANY_SHARE of those with an address, whichever is more
MANY_SHARE = 0.2
PERIOD_S = 60.0
KEPT_S = 7200.0
PERIOD_SHARE = (
    0.1  # of the replicas with an address may be terminated for their probes per PERIOD_S, and one always
)

HELD_FOR_BALANCERS = "load balancers still get responses from replicas that this controller cannot reach"
HELD_OFFLINE = "nothing beyond its own machine responds to it"
HELD_MANY = "most replicas stopped responding to it at once"
KEPT_SERVING = "kept, because clients get responses from them although their readiness probes fail"

#: The reasons for which a running replica is terminated.
JUDGED = (EndReason.PROBE_FAILED, EndReason.ONLY_ERRORS)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a controller knows about its own view of one service. The default is a view without doubt.

    It has watched since `watching_since` without a gap. `failed` has the replicas whose last valid probe failed (None:
    probes are not recorded, and events count as they come). `responsive` are the replicas from which a load balancer has
    lately received anything, and `work` is what load balancers know of the replicas' work for clients. `online`: whether
    anything beyond this machine has lately responded; None if there is nothing that could.
    """

    watching_since: float = -math.inf
    failed: Mapping[int, FailedProbe] | None = None
    responsive: Collection[int] = frozenset()
    online: bool | None = None
    work: Mapping[int, Work] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The events that stand, and why others are held back, or ""."""

    events: tuple[Event, ...]
    note: str = ""


@dataclass(slots=True)
class TerminationLog:
    """When replicas of one service were terminated for their probes or their errors, the latest last."""

    at: list[float] = field(default_factory=list)

    def add(self, now: float) -> None:
        self.at = [*(at for at in self.at if now - at < KEPT_S), now]

    def between(self, after: float, until: float) -> int:
        return sum(after < at <= until for at in self.at)


def confirmed(
    overdue: Iterable[Event],
    replicas: Sequence[Replica],
    goal: Goal,
    evidence: Evidence,
    terminated: TerminationLog,
    now: float,
) -> ProbeVerdict:
    """Decide which of the events that are due by the clock stand, by the rules above. `terminated` is only read."""
    by_id = {replica.id: replica for replica in replicas}
    stand: list[Event] = []
    accused: list[GaveUp] = []
    reasons: set[str] = set()
    serving: list[int] = []
    failing: list[GaveUp] = []
    for event in overdue:
        if not isinstance(event, GaveUp):
            stand.append(event)
        elif event.reason is EndReason.ONLY_ERRORS:
            failing.append(event)
        elif event.reason is not EndReason.PROBE_FAILED:  # it never was ready: rules 1 and 3
            if evidence.online is False:
                reasons.add(HELD_OFFLINE)
            elif now - evidence.watching_since >= SHORTEST_WATCH_S:
                stand.append(event)
        elif now - evidence.watching_since >= goal.probe_failure_threshold_s:  # rules 1 to 4
            failed = _last_failure(by_id[event.replica_id], evidence, now)
            held = "" if failed is None else _why_held(event.replica_id, failed, evidence)
            if held:
                reasons.add(held)
            elif now - evidence.work.get(event.replica_id, IDLE).at < goal.probe_failure_threshold_s:
                serving.append(event.replica_id)
            elif failed is not None:
                accused.append(event)
    if failing and not does_better(replicas, evidence.work):  # rule 6
        failing = [] if terminated.between(now - ALONE_EVERY_S, now) else failing[:1]
    accused += failing
    accused, held = _few_of(accused, replicas, goal, evidence, terminated, now)
    if held:
        reasons.add(held)
    note = f"this controller may be cut off: {'; '.join(sorted(reasons))}; it terminates no replica for that"
    kept = f"replicas {', '.join(map(str, serving))} are {KEPT_SERVING}"
    notes = [*([note] if reasons else []), *([kept] if serving else [])]
    return ProbeVerdict((*stand, *accused), "; ".join(notes))


def _last_failure(replica: Replica, evidence: Evidence, now: float) -> FailedProbe | None:
    if evidence.failed is None:
        return FailedProbe(replica.since, reached=False)
    failed = evidence.failed.get(replica.id)
    if failed is None or now - failed.at > FRESH_S or failed.at < evidence.watching_since:
        return None
    return failed


def _why_held(replica_id: int, failed: FailedProbe, evidence: Evidence) -> str:
    if failed.reached:
        return ""
    if replica_id in evidence.responsive:
        return HELD_FOR_BALANCERS
    return HELD_OFFLINE if evidence.online is False else ""


def _few_of(
    accused: list[GaveUp],
    replicas: Sequence[Replica],
    goal: Goal,
    evidence: Evidence,
    terminated: TerminationLog,
    now: float,
) -> tuple[list[GaveUp], str]:
    """Return those that may be terminated now by rules 5 and 7, and the reason if it is rule 5 that holds others back."""
    if not accused or evidence.failed is None:
        return accused, ""
    passing = sum(replica.state is ReplicaState.READY for replica in replicas)
    addressed = sum(replica.endpoint is not None for replica in replicas)
    silent = sum(not failed.reached for failed in evidence.failed.values())
    if silent > max(MANY, MANY_SHARE * addressed) and silent > passing:
        last = max(
            (at for at in terminated.at if at <= now), default=-math.inf
        )  # a clock may have been set back
        sees = any(
            replica.ready_at is not None and replica.ready_at > last > -math.inf for replica in replicas
        )
        if not sees:
            waits = now - last < goal.probe_failure_threshold_s + goal.initial_delay_s
            return ([] if waits else accused[:1]), HELD_MANY
    most = max(1, int(PERIOD_SHARE * addressed)) - terminated.between(now - PERIOD_S, now)
    return accused[: max(0, most)], ""
