"""What an update would do to live replicas, played to its end without a cloud."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.goals import UpdateMode
from policies.model import Memory, Replica, ReplicaState
from skyserve_cli.commands.update import course_sentence
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.controller.reconcile.planning import new_row
from skyserve_cli.controller.reconcile.update_plan import changes, course, extra, usual_start_s
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from tests.unit.placement_world import ON_DEMAND, an_offer

OFFERS = (an_offer("c/r/a", 1.0, ON_DEMAND),)


def replicas(count: int, state: ReplicaState = ReplicaState.READY) -> list[Replica]:
    return [
        Replica(id=i, version=1, offer=OFFERS[0], state=state, since=0.0, created_at=0.0, ready_at=0.0)
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("mode", list(UpdateMode))
@pytest.mark.parametrize(
    ("wanted", "keeps", "launched", "ended"),
    [
        pytest.param(2, True, 0, 0, id="nothing"),
        pytest.param(3, True, 1, 0, id="one more"),
        pytest.param(1, True, 0, 1, id="one less"),
        pytest.param(2, False, 2, 2, id="all replaced"),
    ],
)
def test_an_update_is_planned_to_its_end(
    mode: UpdateMode, wanted: int, keeps: bool, launched: int, ended: int
) -> None:
    spec = load_text(f"service: {{replicas: {wanted}}}\nrun: serve\nresources: {{accelerators: L4}}").spec
    row = replace(
        new_row(spec, 0.0), version=2, update_mode=mode, same_replicas=frozenset({1} if keeps else ())
    )
    made = course(goal_of(row, spec), replicas(2), OFFERS, Memory(next_replica_id=3), 10_000.0)
    assert (len(made.launches), len({each.replica_id for each in made.ends})) == (launched, ended)
    assert made.target == wanted


def test_changes_are_by_path_and_show_no_digest() -> None:
    before = spec_to_json(load_text("service: {replicas: 1}\nrun: a").spec)
    after = spec_to_json(load_text("service: {replicas: 2}\nrun: b").spec)
    assert {each["path"]: (each["before"], each["after"]) for each in changes(before, after)} == {
        "run": ("a", "b"),
        "replica_policy.min_replicas": (1, 2),
        "replica_policy.max_replicas": (1, 2),
    }
    keys = [f"{{name: a, sha256: {'a' + digit * 63}, tokens_per_day: {digit}}}" for digit in "12"]
    text = "service: {{replicas: 1, load_balancer: {{api_keys: [{}]}}}}\nrun: a"
    shown = changes(*(spec_to_json(load_text(text.format(key)).spec) for key in keys))
    assert {each["path"].rpartition(".")[2]: (each["before"], each["after"]) for each in shown} == {
        "sha256": (None, None),
        "tokens_per_day": (1.0, 2.0),
    }
    assert changes(after, after) == []


@pytest.mark.parametrize(
    ("mode", "surge", "wanted", "steps", "more", "dollars"),
    [
        pytest.param(UpdateMode.ROLLING, 1, 3, 3, 1, 1.0, id="one by one"),
        pytest.param(UpdateMode.ROLLING, 2, 3, 2, 2, 2.0, id="two at once"),
        pytest.param(UpdateMode.BLUE_GREEN, 1, 3, 1, 3, 3.0, id="a second fleet"),
        pytest.param(UpdateMode.BLUE_GREEN, 1, 1, 1, 1, 1.0, id="a second, smaller fleet"),
    ],
)
def test_what_an_update_needs_meanwhile(
    mode: UpdateMode, surge: int, wanted: int, steps: int, more: int, dollars: float
) -> None:
    update = f"update: {{max_surge: {surge}}}"
    spec = load_text(
        f"service: {{replicas: {wanted}, {update}}}\nrun: serve\nresources: {{accelerators: L4}}"
    ).spec
    row = replace(new_row(spec, 0.0), version=2, update_mode=mode)
    running = replicas(3)
    made = course(goal_of(row, spec), running, OFFERS, Memory(next_replica_id=4), 10_000.0)
    assert (made.steps, extra(made, [each.offer for each in running])) == (steps, (more, dollars))
    assert len(made.left) == wanted


def test_the_usual_start_is_the_median_of_those_that_became_ready() -> None:
    started = [replace(each, ready_at=at) for each, at in zip(replicas(3), (10.0, 90.0, 20.0), strict=True)]
    assert usual_start_s(started) == 20.0
    assert usual_start_s([replace(each, ready_at=None) for each in started]) is None


def test_the_sentence_about_a_mode_has_its_cost_and_its_time() -> None:
    update = {"mode": "rolling", "steps": 3, "extra_replicas": 1, "extra_usd_per_hour": 0.7,
              "usual_start_s": 20.0, "drain_timeout_s": 120.0}  # fmt: skip
    assert course_sentence(update) == (
        "rolling: old replicas are replaced in 3 steps; up to 1 extra replica ($0.7000 per hour more) for about 1m, "
        "if new replicas start as fast as those that run; old replicas are paid for while they drain, up to 2m"
    )
    first = course_sentence(update | {"mode": "blue_green", "usual_start_s": None})
    assert first.startswith("blue-green: all new replicas start beside the old ones")
    assert "while new replicas start" in first
