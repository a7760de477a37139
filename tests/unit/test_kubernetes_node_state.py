"""What nodes show, and what that means for the Pods on them: in virtual time, by our own clock."""

from __future__ import annotations

from typing import Any

import pytest

from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.node_state import UNKNOWN, NodeFate, is_announced, is_ready, together
from provisioners.kubernetes.sightings import Instant

NOW = 1_800_000_000.0
LONG_AGO = "1970-01-01T00:00:00Z"
DRAINED = "ToBeDeletedByClusterAutoscaler"


class Time:
    def __init__(self) -> None:
        self.s = 0.0
        self.nodes = NodeCache(lambda: Instant(self.s, NOW + self.s))


def node(ready: str | None = "True", *taints: str) -> dict[str, Any]:
    conditions = (
        [] if ready is None else [{"type": "Ready", "status": ready, "reason": "R", "message": "why"}]
    )
    for one in conditions:
        one |= {"lastTransitionTime": LONG_AGO, "lastHeartbeatTime": LONG_AGO}
    marks = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return {"metadata": {"name": "a"}, "spec": {"taints": marks}, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("shown", "after_s", "fate"),
    [
        pytest.param(node(), 0, NodeFate(True), id="ready"),
        pytest.param(node(None), 0, NodeFate(True), id="just made"),
        pytest.param(node("True", "team"), 0, NodeFate(True), id="another taint"),
        pytest.param(
            node("True", DRAINED),
            500,
            NodeFate(True, NOW + 30, None, f"its node a announces that it goes: {DRAINED}"),
            id="a taint without a time has its full notice from when it was seen",
        ),
        pytest.param(
            node("Unknown"),
            5,
            NodeFate(True, None, 0.0, "its node a has stopped responding"),
            id="silent for a moment",
        ),
        pytest.param(
            node("Unknown"),
            6,
            NodeFate(True, NOW + 30, 0.0, "its node a has stopped responding"),
            id="silent",
        ),
        pytest.param(
            node("False"), 9, NodeFate(True, None, 0.0, "its node a is not ready: R: why"), id="a moment"
        ),
        pytest.param(
            node("False"),
            10,
            NodeFate(True, NOW + 30, 0.0, "its node a is not ready: R: why"),
            id="not ready",
        ),
    ],
)
def test_what_becomes_of_a_node(shown: dict[str, Any], after_s: float, fate: NodeFate) -> None:
    time, other = Time(), node() | {"metadata": {"name": "b"}}
    time.nodes.replace([shown, other])
    time.s = after_s
    time.nodes.replace([shown, other])
    assert time.nodes.fate("a") == fate
    assert is_ready(shown) == (fate.trouble_at is None)
    assert is_announced(shown) == (DRAINED in fate.why)


def test_a_node_that_comes_back_is_well_and_counts_from_the_start_the_next_time() -> None:
    time = Time()
    assert time.nodes.replace([node("Unknown")]) == {"a"}
    time.s = 20.0
    assert time.nodes.apply("MODIFIED", node("True")) == {"a"}
    assert time.nodes.apply("MODIFIED", node("True")) == frozenset()
    assert time.nodes.fate("a") == NodeFate(True)
    time.s = 25.0
    time.nodes.apply("MODIFIED", node("Unknown"))
    assert time.nodes.fate("a").trouble_at == 25.0


@pytest.mark.parametrize("how", ["watch", "list"])
def test_a_node_is_deleted_only_if_it_was_there(how: str) -> None:
    time = Time()
    assert time.nodes.fate("a") == UNKNOWN
    time.nodes.replace([])
    assert time.nodes.fate("a") == UNKNOWN  # the Pods of a new node may be seen first
    time.nodes.apply("ADDED", node())
    gone = time.nodes.apply("DELETED", node()) if how == "watch" else time.nodes.replace([])
    assert gone == {"a"}
    assert time.nodes.fate("a") == NodeFate(True, None, 0.0, "its node a was deleted")
    time.s = 10.0
    assert time.nodes.fate("a").notice_at == NOW + 30
    time.nodes.apply("ADDED", node())
    assert time.nodes.fate("a") == NodeFate(True)


def test_nodes_that_were_deleted_long_ago_are_forgotten() -> None:
    time = Time()
    time.nodes.replace([node()])
    time.nodes.replace([])
    time.s = 3601.0
    time.nodes.replace([])
    assert time.nodes.fate("a") == UNKNOWN


@pytest.mark.parametrize(
    ("ages_s", "nodes", "many"),
    [
        pytest.param([0], 9, 0, id="one"),
        pytest.param([0, 5], 8, 0, id="two of eight"),
        pytest.param([0, 5, 10], 8, 3, id="three of eight"),
        pytest.param([0, 5, 10], 13, 0, id="three of thirteen"),
        pytest.param([0, 5, 1000], 8, 0, id="one of three has been for long"),
        pytest.param([0, 1000, 2000, 3000], 9, 0, id="one after the other"),
        pytest.param([0, 3, 9, 5000], 8, 3, id="three, and one for long"),
        pytest.param([0], 1, 1, id="the only one"),
        pytest.param([0, 5000], 2, 2, id="all"),
        pytest.param([0], 2, 0, id="one of two"),
    ],
)
def test_nodes_that_are_unready_together_with_many_are_not_believed_to_be_dead(
    ages_s: list[float], nodes: int, many: int
) -> None:
    unready = {f"n{number}": 10_000.0 - age_s for number, age_s in enumerate(ages_s)}
    assert len(together(unready, nodes)) == many


@pytest.mark.parametrize("ready", ["Unknown", "False"])
def test_what_is_believed_of_a_node_changes_with_the_others(ready: str) -> None:
    time = Time()
    names = [f"n{number}" for number in range(4)]
    time.nodes.replace([node("True") | {"metadata": {"name": name}} for name in names])
    for name in names[:3]:
        time.nodes.apply("MODIFIED", node(ready) | {"metadata": {"name": name}})
        time.s += 2.0
    time.s += 20.0
    assert [time.nodes.fate(name).notice_at for name in names] == [None] * 4
    assert [time.nodes.fate(name).trouble_at for name in names] == [0.0, 2.0, 4.0, None]
    time.nodes.apply("MODIFIED", node() | {"metadata": {"name": "n1"}})
    assert [time.nodes.fate(name).notice_at for name in names] == [NOW + 30, None, NOW + 34, None]
