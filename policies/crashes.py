"""How long replicas of a version live, and what follows where that is short. Pure.

A life is short if its replica ended through its own fault after it had been ready for less time than its start took, and in any case less
than SHORTEST_LIFE_S: its machine was paid for starting, not for serving. Replicas that end together count once. While the last lives
were short, one replica at a time is in trial; others that are ready serve on.

Memory: {"version": v, "short": lives in a row that were short, "limit_s": what they were shorter than, "at": [when replicas crashed
within the last hour, at most MOST_AN_HOUR]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.model import Event, GaveUp, Json, Replica, ReplicaState

SHORTEST_LIFE_S = 60.0  # for programs that start within seconds
MOST_SHORT = 5
MOST_AN_HOUR = 10
HOUR_S = 3600.0
FIRST_WAIT_S = 5.0
DOUBTFUL = 2  # short lives in a row; one may be an accident

_COMING = (ReplicaState.STARTING, ReplicaState.PROVISIONING, ReplicaState.REQUESTED)


def of(memory: Json, version: int) -> Json:
    """Return what a rollout's memory has about crashes of the version; {} if nothing."""
    found: Json = memory.get("crashes", {})
    return found if found.get("version") == version else {}


def row(memory: Json, version: int) -> int:
    """Return how many of the version's last lives were short."""
    return int(of(memory, version).get("short", 0))


def long_life_s(replica: Replica) -> float:
    """Return how long the replica must be ready for its life not to be short."""
    began = replica.created_at if replica.launched_at is None else replica.launched_at
    return max(SHORTEST_LIFE_S, (replica.ready_at or began) - began)


def was_short(event: Event, replica: Replica, now: float) -> bool:
    """Return whether the life was short that `event` ended. Time in which probes failed is not part of it."""
    is_silent = isinstance(event, GaveUp) and replica.state is ReplicaState.NOT_READY
    until = replica.since if is_silent else now
    return replica.ready_at is None or until - replica.ready_at < long_life_s(replica)


def learn(known: Json, event: Event, replica: Replica, version: int, now: float) -> Json:
    """Return what is known after one more crash. Of a replica that was never ready it counts only among short lives of others."""
    short = known.get("short", 0)
    if replica.ready_at is None and not short:
        return known
    ends = [at for at in known.get("at", ()) if now - HOUR_S <= at <= now]
    if ends and replica.created_at < ends[-1] and now - ends[-1] < SHORTEST_LIFE_S:
        return known
    limit_s = max(long_life_s(replica), known["limit_s"] if short else 0.0)
    short = short + 1 if was_short(event, replica, now) else 0
    return {"version": version, "short": short, "limit_s": limit_s, "at": [*ends, now][-MOST_AN_HOUR:]}


def is_hopeless(known: Json, replicas: Iterable[Replica]) -> bool:
    """Return whether to give the version up: it crashes, and none of its `replicas` has been ready through all of it."""
    if known.get("short", 0) < MOST_SHORT and len(known.get("at", ())) < MOST_AN_HOUR:
        return False
    return all(r.state is not ReplicaState.READY or _is_young(known["at"][0], r) for r in replicas)


def proven_at(known: Json, replicas: Iterable[Replica]) -> float | None:
    """Return when the first ready replica in trial will have lived long enough; None: there is none."""
    ready = [r for r in replicas if r.state is ReplicaState.READY and _is_young(known["at"][-1], r)]
    return min(((r.ready_at or 0.0) + long_life_s(r) for r in ready), default=None)


def in_trial(known: Json, replicas: Sequence[Replica]) -> list[Replica]:
    """Return those that are on their way, and those that became ready since the last crash, the most advanced first."""
    young = [r for r in replicas if r.state not in _COMING and _is_young(known["at"][-1], r)]
    coming = [replica for replica in replicas if replica.state in _COMING]
    return young + sorted(coming, key=lambda replica: (_COMING.index(replica.state), replica.id))


def account(known: Json) -> str:
    """Return what happened: ``4 lives in a row shorter than 60 s``."""
    short = known["short"]
    if not short:
        return f"{len(known['at'])} crashes within an hour"
    return f"{'1 life' if short == 1 else f'{short} lives in a row'} shorter than {known['limit_s']:.0f} s"


def _is_young(since: float, replica: Replica) -> bool:
    return replica.ready_at is not None and replica.ready_at > since
