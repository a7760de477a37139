"""What an update of a running service would do: what changes in its spec, and which replicas start and end. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from policies.goals import Goal
from policies.lifecycle import request
from policies.model import Drain, Launch, Memory, Observation, Offer, Replica, ReplicaState, Terminate
from policies.plan import plan
from policies.registry import policies_for
from skyserve_cli.spec.problems import dotted

_MOST_TICKS = 1000
_HIDDEN = re.compile(r"load_balancer\.access\.keys\[\d+\]\.sha256")


class Course(NamedTuple):
    """The launches of an update and the replicas that it terminates, each in order, with the last target.

    `steps` is how often it waits for replicas to become ready, `most` are the replicas of its most expensive moment,
    draining ones left out.
    """

    launches: tuple[Launch, ...]
    ends: tuple[Drain | Terminate, ...]
    target: int
    notes: tuple[str, ...]
    steps: int
    most: tuple[Offer, ...]
    left: tuple[Offer, ...]


def course(
    goal: Goal, replicas: Sequence[Replica], offers: Sequence[Offer], memory: Memory, now: float
) -> Course:
    """The decisions until the service is as `goal` wants it, if every launch succeeds at once."""
    live = {each.id: each for each in replicas if each.state is not ReplicaState.GONE}
    launches: list[Launch] = []
    ends: list[Drain | Terminate] = []
    policies = policies_for(goal)
    notes: tuple[str, ...] = ()
    target = steps = 0
    most = [each.offer for each in live.values()]
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
        steps += any(isinstance(action, Launch) for action in decided.actions)
        most = max(most, [each.offer for each in live.values()], key=_price)
        starting = [each for each in live.values() if each.state in _STARTING]
        if not decided.actions and not starting:
            break
        for each in starting:
            live[each.id] = replace(each, state=ReplicaState.READY, ready_at=now)
    left = tuple(each.offer for each in live.values())
    return Course(tuple(launches), tuple(ends), target, notes, steps, tuple(most), left)


def extra(made: Course, before: Sequence[Offer]) -> tuple[int, float]:
    """Return how many replicas, and how many dollars per hour, the update needs at most in addition.

    In addition to the larger of `before` and the fleet after it.
    """
    after = made.left
    dollars = _price(made.most) - max(_price(before), _price(after))
    return max(0, len(made.most) - max(len(before), len(after))), max(0.0, dollars)


def usual_start_s(replicas: Sequence[Replica]) -> float | None:
    """Return the median time from launch to ready of replicas that became ready; None if there is none."""
    return median(times) if (times := [r.ready_at - r.created_at for r in replicas if r.ready_at]) else None


def _price(offers: Sequence[Offer]) -> float:
    return sum(offer.price_usd_hour for offer in offers)


_STARTING = (ReplicaState.REQUESTED, ReplicaState.PROVISIONING, ReplicaState.STARTING)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the keys in which two specs differ: `path`, `before` and `after`. Digests of API keys are not shown."""
    old, new = dict(_leaves(before, ())), dict(_leaves(after, ()))
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    shown = []
    for path in paths:
        hidden = _HIDDEN.fullmatch(path) is not None
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
