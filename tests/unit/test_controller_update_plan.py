"""What an update would do to live replicas, played to its end without a cloud."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.model import Memory, Replica, ReplicaState, UpdateMode
from skyserve_cli.controller.orders import goal_of
from skyserve_cli.controller.planning import _new_row
from skyserve_cli.controller.update_plan import changes, course
from skyserve_cli.spec import load_text, spec_to_json
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
        _new_row(spec, 0.0), version=2, update_mode=mode, same_replicas=frozenset({1} if keeps else ())
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
    hidden = {"load_balancer": {"api_keys": [{"name": "a", "sha256": "f00"}]}}
    shown = changes({"load_balancer": {}}, hidden)
    assert "load_balancer.api_keys[0].sha256" in [each["path"] for each in shown]
    assert "f00" not in str(shown)
    assert changes(after, after) == []
