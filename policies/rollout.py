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
So is one whose replicas become ready and crash (`crashes`). The user sees the failure in `serve status` and updates again.

Memory: {"good": newest version that became ready, "before": the good one before it, "failed": [versions], "refused": [those of
them that every offer refused], "failures": n, "failing": version, "retry_at": s, "why": how the last replica failed, "crashes":
see `crashes`, "serving": newest version that has been in the load balancers' tables}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from policies import crashes
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
_WHY_CHARS = 400

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
            _learn_ready(after, replica.version, version, goal)
        elif _is_failure(event, replica, now) or zone_backoff.is_early_loss(event, replica):
            _learn_failure(after, event, replica, version, now)
            same = [r for r in replicas.values() if r is not replica and is_wanted(r, goal, version)]
            if _is_hopeless(after, event, version, goal, same):
                after = _failed(after, version, goal)
    return after


def _learn_ready(after: dict[str, Any], ready: int, version: int, goal: Goal) -> None:
    """A replica of version `ready`, which is or stands for the wanted `version`, is ready."""
    is_failed = version in after.get("failed", ())
    if is_failed and crashes.of(after, version):
        return  # others were ready, too, before they crashed
    good = after.get("good", 0)
    if good and good < ready and good not in goal.same_replicas and not _is_doubtful(good, after):
        after["before"] = good
    after["good"] = max(ready, good)
    if is_failed:
        after["failed"] = [failed for failed in after["failed"] if failed != version]
    if not crashes.row(after, version):
        _forget_failures(after, version)


def _learn_failure(after: dict[str, Any], event: Event, replica: Replica, version: int, now: float) -> None:
    failures = after.get("failures", 0) + 1 if after.get("failing") == version else 1
    after["failing"], after["failures"] = version, failures
    message = getattr(event, "message", "")[:_WHY_CHARS]
    after["why"] = "".join(char if char.isprintable() else " " for char in message)
    if _is_failure(event, replica, now) and not isinstance(event, LaunchFailed):
        known = crashes.learn(crashes.of(after, version), event, replica, version, now)
        after.update({"crashes": known} if known else {})
    row = crashes.row(after, version)
    first_s = crashes.FIRST_WAIT_S if row else FIRST_RETRY_S
    after["retry_at"] = now + delay_s(row or failures, first_s, LONGEST_RETRY_S)


def _forget_failures(after: dict[str, Any], version: int) -> None:
    if after.get("failing") == version:
        for key in ("failures", "failing", "retry_at", "why"):
            after.pop(key, None)


def _is_hopeless(memory: Json, event: Event, version: int, goal: Goal, others: Sequence[Replica]) -> bool:
    """Return whether the version never worked and fails, or crashes. `others` are its other replicas."""
    if crashes.is_hopeless(crashes.of(memory, version), others):
        return True
    hopeless = isinstance(event, LaunchFailed) or memory["failures"] >= FAILURES_UNTIL_FAILED
    return hopeless and not _works(version, goal, memory)


def _is_doubtful(version: int, memory: Json) -> bool:
    return crashes.row(memory, version) >= crashes.DOUBTFUL


def _failed(memory: Json, version: int, goal: Goal) -> dict[str, Any]:
    """Return the memory once `version` is given up. Of the others that were good, one whose lives were short comes last."""
    after = {**memory, "failed": sorted({*memory.get("failed", ()), version})}
    same = goal.same_replicas if version == goal.version else frozenset()
    named = [after.pop(key) for key in ("good", "before") if key in after]
    usable = [one for one in named if one not in after["failed"] and one not in same]
    usable.sort(key=lambda one: _is_doubtful(one, memory))
    return {**after, **dict(zip(("good", "before"), usable, strict=False))}


def give_up(goal: Goal, memory: Json) -> Json:
    """The memory once every offer has refused the wanted version.

    One that works, or has failed already, is left as it is: what refuses it now may take it again.
    """
    version = wanted_version(goal, memory)
    if version in memory.get("failed", ()) or _works(version, goal, memory):
        return memory
    refused = sorted({*memory.get("refused", ()), version})
    return {**_failed(memory, version, goal), "refused": refused}


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
    version = wanted_version(goal, memory)
    if has_failed(goal, memory) and "good" not in memory:
        is_refused = version in memory.get("refused", ())
        why = "every machine on offer was refused" if is_refused else _why(version, memory)
        return f"version {version} has failed{why and f': {why}'}; update the service", None
    # An update stops the wait: it is there to put right what failed.
    if memory.get("failing") == version and now < memory.get("retry_at", 0.0):
        waits = "the last replica failed; waiting before the next launch"
        return crash_note(version, memory) or waits, memory["retry_at"]
    return "", None


class Trial(NamedTuple):
    """What short lives of the wanted version mean: which of its replicas are `kept`, how many more are launched, until when."""

    memory: Json
    kept: Sequence[Replica]
    surplus: Sequence[Replica] = ()
    limit: int = NO_LIMIT
    until: float | None = None
    note: str = ""


def trial(memory: Json, new: Sequence[Replica], goal: Goal, now: float) -> Trial:
    """Return the trial of the wanted version, or its end. `new` are the counted replicas of that version."""
    version = wanted_version(goal, memory)
    known = crashes.of(memory, version)
    if not known.get("short") or version in memory.get("failed", ()):
        return Trial(memory, new)
    until = crashes.proven_at(known, new)
    if until is not None and now >= until:
        after = {**memory, "crashes": {**known, "short": 0}}
        _forget_failures(after, version)
        return Trial(after, new)
    tried = crashes.in_trial(known, new)
    surplus = [r for r in tried[1:] if r.ready_at is None] if _is_doubtful(version, memory) else []
    kept = [replica for replica in new if replica not in surplus]
    return Trial(memory, kept, surplus, max(0, 1 - len(tried)), until, crash_note(version, memory))


def crash_note(version: int, memory: Json) -> str:
    """Return that the version crashes, and how; "" if its last life was not short."""
    is_short = crashes.row(memory, version) > 0
    return f"version {version} crashes: {_why(version, memory)}; one replica in trial" if is_short else ""


def _why(version: int, memory: Json) -> str:
    """Return how its replicas crash, and how the last one failed."""
    known = crashes.of(memory, version)
    last = memory.get("why", "") if memory.get("failing") == version else ""
    return "; ".join(filter(None, (crashes.account(known), last and f"the last: {last}"))) if known else last


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
    return [replica.state for replica in replicas].count(ReplicaState.READY)


def _serves(replica: Replica, goal: Goal, memory: Json) -> bool:
    """Return whether an old replica serves requests: up, and not of a blue-green fleet that was never switched to."""
    if replica.state not in (ReplicaState.READY, ReplicaState.NOT_READY):
        return False
    hidden = goal.update_mode is UpdateMode.BLUE_GREEN and replica.version > memory.get(
        "serving", replica.version
    )
    return not hidden


def _is_failure(event: Event, replica: Replica, now: float) -> bool:
    """Return whether the replica ended through its own fault, or can start nowhere."""
    match event:
        case BootstrapFailed() | RunExited() | LaunchFailed(kind=FailureKind.CONFIG):
            return True
        case GaveUp(reason=EndReason.START_TIMEOUT):
            return True
        case GaveUp(reason=EndReason.PROBE_FAILED | EndReason.ONLY_ERRORS):
            return replica.ready_at is not None and crashes.was_short(event, replica, now)
        case _:
            return False


def _works(version: int, goal: Goal, memory: Json) -> bool:
    good = memory.get("good")
    return good == version or (version == goal.version and good in goal.same_replicas)
