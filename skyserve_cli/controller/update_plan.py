"""What an update of a running service would do: what changes in its spec, and which replicas start and end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policies.lifecycle import request
from policies.model import Drain, Goal, Launch, Memory, Observation, Offer, Replica, ReplicaState, Terminate
from policies.plan import plan
from policies.registry import policies_for
from skyserve_cli.spec.problems import dotted

_MOST_TICKS = 1000
_HIDDEN = "load_balancer.api_keys"


class Course(NamedTuple):
    """The launches of an update and the replicas that it ends, each in order, with the last target."""

    launches: tuple[Launch, ...]
    ends: tuple[Drain | Terminate, ...]
    target: int
    notes: tuple[str, ...]


def course(
    goal: Goal, replicas: Sequence[Replica], offers: Sequence[Offer], memory: Memory, now: float
) -> Course:
    """The decisions until the service is as `goal` wants it, if every launch succeeds at once."""
    live = {each.id: each for each in replicas if each.state is not ReplicaState.GONE}
    launches: list[Launch] = []
    ends: list[Drain | Terminate] = []
    policies = policies_for(goal)
    notes: tuple[str, ...] = ()
    target = 0
    for _ in range(_MOST_TICKS):
        decided = plan(Observation(now, goal, tuple(live.values()), tuple(offers)), memory, policies)
        memory, target, notes = decided.memory, decided.target, notes or decided.notes
        for action in decided.actions:
            if isinstance(action, Launch):
                launches.append(action)
                ready = replace(request(action, now), state=ReplicaState.READY, launched_at=now, ready_at=now)
                live[action.replica_id] = ready
            elif live.pop(action.replica_id, None) is not None:
                ends.append(action)
        starting = [each for each in live.values() if each.state in _STARTING]
        if not decided.actions and not starting:
            break
        for each in starting:
            live[each.id] = replace(each, state=ReplicaState.READY, ready_at=now)
    return Course(tuple(launches), tuple(ends), target, notes)


_STARTING = (ReplicaState.REQUESTED, ReplicaState.PROVISIONING, ReplicaState.STARTING)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keys in which two specs differ: `path`, `before` and `after`. Digests of API keys are not shown."""
    old, new = dict(_leaves(before, ())), dict(_leaves(after, ()))
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    shown = []
    for path in paths:
        hidden = path.startswith(_HIDDEN)
        shown.append(
            {
                "path": path,
                "before": None if hidden else old.get(path),
                "after": None if hidden else new.get(path),
            }
        )
    return shown


def _leaves(value: object, loc: tuple[str | int, ...]) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*loc, key))
    elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*loc, index))
    else:
        yield dotted(loc), value
