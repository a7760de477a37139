"""The life of a replica: one table, and the only code that changes a replica's state.

    REQUESTED > PROVISIONING > STARTING > READY <> NOT_READY > DRAINING > TERMINATING > GONE

`TRANSITIONS` maps (state, kind of event or action) to the next state. A pair that is not listed raises
`InvalidTransition`, which names it: in tests and in the simulator that fails the run, in the daemon the event
is set aside and recorded as an error. Print the table with `python -m policies.lifecycle`.

Three rules hold for every state in which an instance may exist: a Terminate is accepted, a Preempted terminates it,
and a NodeLost terminates it by way of TERMINATING, because the nodes that are left must go too. TERMINATING swallows
events that arrive late, because a call that was under way when the end was decided still returns. GONE ignores
nothing: a Launched that reaches it is an orphan, and a bug.
"""

from __future__ import annotations

from dataclasses import replace

from policies.model import (
    Action,
    BootstrapFailed,
    Bootstrapped,
    CapacityType,
    Drain,
    Drained,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Launch,
    Launched,
    LaunchFailed,
    NodeLost,
    Preempted,
    PreemptionNotice,
    ProbeFailed,
    ProbePassed,
    Progressed,
    Replica,
    ReplicaState,
    RetireNotice,
    Role,
    RunExited,
    Terminate,
    Terminated,
)

_S = ReplicaState
Kind = type

_ALIVE: dict[Kind, ReplicaState] = {
    Preempted: _S.GONE,
    NodeLost: _S.TERMINATING,
    Terminate: _S.TERMINATING,
}
_LATE: dict[Kind, ReplicaState] = dict.fromkeys(
    (
        Launched,
        Progressed,
        Bootstrapped,
        BootstrapFailed,
        RunExited,
        ProbePassed,
        ProbeFailed,
        GaveUp,
        PreemptionNotice,
        RetireNotice,
        NodeLost,
        Drained,
    ),
    _S.TERMINATING,
)

TRANSITIONS: dict[ReplicaState, dict[Kind, ReplicaState]] = {
    _S.REQUESTED: {
        Launched: _S.PROVISIONING,
        Progressed: _S.REQUESTED,
        LaunchFailed: _S.GONE,
        GaveUp: _S.TERMINATING,  # a launch without a response may have made a machine anyway
        Terminate: _S.TERMINATING,
    },
    _S.PROVISIONING: _ALIVE
    | {
        LaunchFailed: _S.TERMINATING,  # the cloud accepted it, and terminated it; something may be left
        Progressed: _S.PROVISIONING,
        Bootstrapped: _S.STARTING,
        BootstrapFailed: _S.TERMINATING,
        RunExited: _S.TERMINATING,
        GaveUp: _S.TERMINATING,
        PreemptionNotice: _S.TERMINATING,  # no request depends on it yet, and it will be preempted
        RetireNotice: _S.PROVISIONING,
    },
    _S.STARTING: _ALIVE
    | {
        LaunchFailed: _S.TERMINATING,
        ProbePassed: _S.READY,
        ProbeFailed: _S.STARTING,
        RunExited: _S.TERMINATING,
        GaveUp: _S.TERMINATING,
        PreemptionNotice: _S.TERMINATING,
        RetireNotice: _S.STARTING,
    },
    _S.READY: _ALIVE
    | {
        ProbePassed: _S.READY,
        ProbeFailed: _S.NOT_READY,
        RunExited: _S.TERMINATING,
        GaveUp: _S.TERMINATING,
        PreemptionNotice: _S.READY,  # it serves on, and is drained shortly before its end (`notices`)
        RetireNotice: _S.READY,
        Drain: _S.DRAINING,
    },
    _S.NOT_READY: _ALIVE
    | {
        ProbePassed: _S.READY,
        ProbeFailed: _S.NOT_READY,
        RunExited: _S.TERMINATING,
        GaveUp: _S.TERMINATING,
        PreemptionNotice: _S.DRAINING,
        RetireNotice: _S.NOT_READY,
        Drain: _S.DRAINING,
    },
    _S.DRAINING: _ALIVE
    | {
        Drained: _S.TERMINATING,
        RunExited: _S.TERMINATING,
        ProbePassed: _S.DRAINING,
        ProbeFailed: _S.DRAINING,
        PreemptionNotice: _S.DRAINING,
        RetireNotice: _S.DRAINING,
    },
    _S.TERMINATING: _LATE | {Terminated: _S.GONE, Preempted: _S.GONE, LaunchFailed: _S.GONE},
    _S.GONE: {},
}

REASON_OF_FAILURE: dict[FailureKind, EndReason] = {
    FailureKind.CAPACITY: EndReason.CAPACITY,
    FailureKind.QUOTA: EndReason.QUOTA,
    FailureKind.AUTH: EndReason.AUTH,
    FailureKind.REFUSED: EndReason.REFUSED,
    FailureKind.CONFIG: EndReason.CONFIG,
    FailureKind.TRANSIENT: EndReason.CLOUD_ERROR,
}

ANNOUNCED = "maintenance of its machine is announced"
REPLACED_FIRST = f"{ANNOUNCED}: a replacement comes first"

# A notice leaves this much of the warning unused, so that the drain ends before the instance does.
NOTICE_MARGIN_S = 0.5


class InvalidTransition(Exception):
    """`state` has no transition for this event or action."""

    def __init__(self, replica: Replica, cause: Event | Action) -> None:
        super().__init__(f"{replica.state.value} replica {replica.id} cannot handle {cause}")


def next_state(replica: Replica, cause: Event | Action) -> ReplicaState:
    """Return where `cause` takes the replica. Raises InvalidTransition."""
    try:
        return TRANSITIONS[replica.state][type(cause)]
    except KeyError:
        raise InvalidTransition(replica, cause) from None


def request(action: Launch, now: float) -> Replica:
    """Return the replica a Launch brings into being."""
    return Replica(
        id=action.replica_id,
        version=action.version,
        offer=action.offer,
        state=_S.REQUESTED,
        since=now,
        created_at=now,
        role=action.role,
        message=action.why,
    )


def apply(replica: Replica, cause: Event | Drain | Terminate, now: float, drain_timeout_s: float) -> Replica:
    """Return the replica after `cause`. The same object comes back when nothing changed. Raises InvalidTransition."""
    state = next_state(replica, cause)
    after = _record(replica, cause, now, drain_timeout_s)
    if state is replica.state:
        return after
    began_at = cause.since if isinstance(cause, ProbeFailed) and cause.since is not None else now
    after = replace(after, state=state, since=min(began_at, now))
    if state is _S.GONE:
        after = replace(after, ended_at=now)
    return after


def _record(
    replica: Replica, cause: Event | Drain | Terminate, now: float, drain_timeout_s: float
) -> Replica:
    """Return what the cause leaves on the replica besides its state. The first reason to end is the one kept."""
    match cause:
        case Launched(instance_id=instance_id):
            return replace(replica, instance_id=instance_id, launched_at=now)
        case LaunchFailed(kind=kind, message=message):
            return _ending(replica, REASON_OF_FAILURE[kind], message)
        case Progressed(message=message) if replica.state is not _S.TERMINATING:
            return replica if replica.message == message else replace(replica, message=message)
        case Bootstrapped(endpoint=endpoint):
            return replace(replica, endpoint=endpoint, message="")
        case BootstrapFailed(message=message):
            return _ending(replica, EndReason.SETUP_FAILED, message)
        case RunExited(message=message):
            return _ending(replica, EndReason.RUN_EXITED, message)
        case GaveUp(reason=reason, message=message):
            return _ending(replica, reason, message)
        case ProbePassed() if replica.state in (_S.STARTING, _S.NOT_READY):
            first = now if replica.ready_at is None else replica.ready_at
            return replace(replica, ready_at=first, message="")
        case ProbeFailed(message=message) if replica.state is _S.READY:
            return replace(replica, message=message)
        case PreemptionNotice(preempt_at=preempt_at):
            if replica.preempt_at == preempt_at:
                return replica
            left_s = max(0.0, preempt_at - now)
            ending = _ending(replica, EndReason.PREEMPTED, f"preemption notice: {left_s:.0f} s left")
            if replica.state is _S.READY:
                return replace(ending, preempt_at=preempt_at)
            by = min(now + drain_timeout_s, preempt_at - NOTICE_MARGIN_S)
            if replica.drain_by is not None:
                by = min(by, replica.drain_by)
            return replace(ending, preempt_at=preempt_at, drain_by=by)
        case RetireNotice(retire_at=retire_at):
            if replica.end_reason is not None:
                return replica
            message = REPLACED_FIRST if replica.role is Role.REPLICA else ANNOUNCED
            return replace(replica, retire_at=retire_at, message=message if retire_at is not None else "")
        case Preempted(lost=lost, message=message):
            reason = EndReason.LOST if lost else EndReason.PREEMPTED
            return _ending(replica, reason, message)
        case NodeLost(message=message):
            spot = replica.offer.capacity_type is CapacityType.SPOT
            return _ending(replica, EndReason.PREEMPTED if spot else EndReason.LOST, message)
        case Drain(reason=reason, why=why, drain_by=drain_by):
            return replace(_ending(replica, reason, why), drain_by=drain_by)
        case Terminate(reason=reason, why=why):
            return _ending(replica, reason, why)
        case _:
            return replica


def _ending(replica: Replica, reason: EndReason, message: str) -> Replica:
    if replica.end_reason is not None:
        return replica
    return replace(replica, end_reason=reason, message=message or replica.message)


def table() -> str:
    """Return the automaton as text, a row per state."""
    rows = []
    for state, answers in TRANSITIONS.items():
        pairs = ", ".join(f"{kind.__name__} > {to.value}" for kind, to in answers.items())
        rows.append(f"{state.value:13} {pairs or '(final)'}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
