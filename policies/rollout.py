"""Which version is wanted, which replicas may serve, and how one version replaces another.

Rolling: at most `max_surge` replicas more than the target live at once (SkyPilot launches the whole new fleet
at once, which needs twice the quota). An old replica is drained for each new one that is ready, so the number
of ready replicas does not sink below the target by more than `max_unavailable`.

Blue-green: the whole new fleet comes up beside the old one and gets no request; when it is ready to the last
replica all requests move at once and the old fleet drains. A fleet that another update overtakes before it was
complete has never served and never will: it is terminated at once.

A version that never had a ready replica and has failed `FAILURES_UNTIL_FAILED` times (or once in a way that
cannot get better: the order is wrong wherever it is sent), or that every offer has refused, is failed: it is not
launched again, and the last version that did work is wanted instead, so that its lost replicas are still replaced.
The user sees the failure in `serve status` and updates again.

Memory: {"good": version, "failed": [versions], "refused": [those of them that every offer refused], "failures": n,
"failing": version, "retry_at": s, "serving": newest version that has been in the load balancers' tables}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.backoff import delay_s
from policies.goals import Goal, UpdateMode
from policies.model import (
    BootstrapFailed,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Json,
    LaunchFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    RunExited,
)
from policies.placement import zone_backoff

FAILURES_UNTIL_FAILED = 3
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 300.0

#: States of replicas that count towards the target: they serve, or are on their way to.
COUNTED = (
    ReplicaState.REQUESTED,
    ReplicaState.PROVISIONING,
    ReplicaState.STARTING,
    ReplicaState.NOT_READY,
    ReplicaState.READY,
)

NO_LIMIT = 1_000_000

_ENDING = (ReplicaState.DRAINING, ReplicaState.TERMINATING)


def learn(
    memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], goal: Goal, now: float
) -> Json:
    """Return what the events say about versions: which works, which fails, and how long to wait before a retry."""
    after = dict(memory)
    for event in events:
        replica = replicas.get(event.replica_id)
        if replica is None or replica.state in _ENDING:
            continue
        version = wanted_version(goal, after)
        if not is_wanted(replica, goal, version):
            continue  # what becomes of the old fleet is no evidence about the version that replaces it
        if isinstance(event, ProbePassed):
            after["good"] = max(replica.version, after.get("good", 0))
            if version in after.get("failed", ()):
                after["failed"] = [failed for failed in after["failed"] if failed != version]
            if after.get("failing") == version:
                for key in ("failures", "failing", "retry_at"):
                    after.pop(key, None)
        elif _is_failure(event) or zone_backoff.is_early_loss(event, replica):
            failures = after.get("failures", 0) + 1 if after.get("failing") == version else 1
            after["failing"], after["failures"] = version, failures
            after["retry_at"] = now + delay_s(failures, FIRST_RETRY_S, LONGEST_RETRY_S)
            hopeless = isinstance(event, LaunchFailed) or failures >= FAILURES_UNTIL_FAILED
            if hopeless and not _works(version, goal, after):
                after["failed"] = sorted({*after.get("failed", ()), version})
    return after


def give_up(goal: Goal, memory: Json) -> Json:
    """The memory once every offer has refused the wanted version.

    One that works, or has failed already, is left as it is: what refuses it now may take it again.
    """
    version = wanted_version(goal, memory)
    if version in memory.get("failed", ()) or _works(version, goal, memory):
        return memory
    return {
        **memory,
        "failed": sorted({*memory.get("failed", ()), version}),
        "refused": sorted({*memory.get("refused", ()), version}),
    }


def wanted_version(goal: Goal, memory: Json) -> int:
    """Return the version to launch: the newest, or the last that worked if the newest has failed."""
    if has_failed(goal, memory) and "good" in memory:
        return int(memory["good"])
    return goal.version


def has_failed(goal: Goal, memory: Json) -> bool:
    """Return whether the newest version is given up."""
    return goal.version in memory.get("failed", ())


def may_launch(goal: Goal, memory: Json, now: float) -> tuple[str, float | None]:
    """("", None) if new replicas may be launched now, else a sentence with the reason, and until when."""
    if has_failed(goal, memory) and "good" not in memory:
        why = ": every machine on offer was refused" if goal.version in memory.get("refused", ()) else ""
        return f"version {goal.version} has failed{why}; update the service", None
    # An update stops the wait: it is there to put right what failed.
    if memory.get("failing") == wanted_version(goal, memory) and now < memory.get("retry_at", 0.0):
        return "the last replica failed; waiting before the next launch", memory["retry_at"]
    return "", None


def is_wanted(replica: Replica, goal: Goal, version: int) -> bool:
    """Return whether the replica is what `version` requests (same version, or one whose replicas are identical)."""
    return replica.version == version or (version == goal.version and replica.version in goal.same_replicas)


def split(replicas: Sequence[Replica], goal: Goal, memory: Json) -> tuple[list[Replica], list[Replica]]:
    """Return the counted replicas as (wanted, old)."""
    version = wanted_version(goal, memory)
    counted = [replica for replica in replicas if replica.state in COUNTED]
    new = [replica for replica in counted if is_wanted(replica, goal, version)]
    old = [replica for replica in counted if not is_wanted(replica, goal, version)]
    return new, old


def launch_limit(size: int, new: Sequence[Replica], old: Sequence[Replica], goal: Goal) -> int:
    """Return how many replicas of the wanted version may be launched now, however many are missing."""
    if not old or goal.update_mode is UpdateMode.BLUE_GREEN:
        return NO_LIMIT
    return max(0, size + goal.max_surge - len(new) - len(old))


def is_complete(size: int, new: Sequence[Replica]) -> bool:
    """Return whether the new fleet is ready to the last replica."""
    return _ready(new) >= size


def is_enough(wanted: int, new: Sequence[Replica]) -> bool:
    """Return whether the new fleet carries the load, and nothing more of it is on its way."""
    return _ready(new) >= wanted and _ready(new) == len(new)


def to_retire(
    size: int, new: Sequence[Replica], old: Sequence[Replica], goal: Goal, memory: Json
) -> list[Replica]:
    """Return the old replicas to end now: those that do not serve at once, the others as new ones take over."""
    idle = [replica for replica in old if not _serves(replica, goal, memory)]
    serving = [replica for replica in old if replica not in idle]
    if is_complete(size, new):
        return idle + serving
    if goal.update_mode is UpdateMode.BLUE_GREEN:
        return idle
    # An old replica that is not ready protects no request: it goes first.
    serving.sort(key=lambda replica: (replica.state is ReplicaState.READY, replica.version, replica.id))
    keep = max(0, size - _ready(new) - goal.max_unavailable)
    return idle + serving[: max(0, len(serving) - keep)]


def serving(replicas: Sequence[Replica], goal: Goal, memory: Json) -> list[Replica]:
    """Return the replicas that belong in the load balancers' tables, draining ones included.

    During a blue-green update the new fleet stays out as long as an old replica is ready.
    """
    listed = (ReplicaState.READY, ReplicaState.NOT_READY, ReplicaState.DRAINING)
    candidates = [replica for replica in replicas if replica.state in listed and replica.endpoint]
    if goal.update_mode is UpdateMode.ROLLING:
        return candidates
    version = wanted_version(goal, memory)
    old = [r for r in candidates if not is_wanted(r, goal, version) and _serves(r, goal, memory)]
    if not any(replica.state is ReplicaState.READY for replica in old):
        return candidates
    return [r for r in candidates if r.state is ReplicaState.DRAINING or r in old]


def settle(complete: bool, old: Sequence[Replica], goal: Goal, memory: Json) -> Json:
    """The memory once the wanted version is the one that serves.

    At once when rolling, else when requests have moved to it because it is complete, or when there is nothing else for
    them.
    """
    version = wanted_version(goal, memory)
    old_ready = any(r.state is ReplicaState.READY and _serves(r, goal, memory) for r in old)
    if goal.update_mode is UpdateMode.BLUE_GREEN and old_ready and not complete:
        return memory
    return memory if memory.get("serving") == version else {**memory, "serving": version}


def _ready(replicas: Sequence[Replica]) -> int:
    return sum(replica.state is ReplicaState.READY for replica in replicas)


def _serves(replica: Replica, goal: Goal, memory: Json) -> bool:
    """Return whether an old replica serves requests: up, and not of a blue-green fleet that was never switched to."""
    if replica.state not in (ReplicaState.READY, ReplicaState.NOT_READY):
        return False
    hidden = goal.update_mode is UpdateMode.BLUE_GREEN and replica.version > memory.get(
        "serving", replica.version
    )
    return not hidden


def _is_failure(event: Event) -> bool:
    match event:
        case BootstrapFailed() | RunExited() | LaunchFailed(kind=FailureKind.CONFIG):
            return True
        case GaveUp(reason=EndReason.START_TIMEOUT):
            return True
        case _:
            return False


def _works(version: int, goal: Goal, memory: Json) -> bool:
    good = memory.get("good")
    return good == version or (version == goal.version and good in goal.same_replicas)
