"""What nodes show, and what that means for the Pods on them: in virtual time, by our own clock."""

from __future__ import annotations

from typing import Any

import pytest

from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.node_state import UNKNOWN, NodeFate, is_announced, is_ready
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
            0,
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
    ("silent", "nodes", "too_many"),
    [
        (0, 0, False),
        (0, 9, False),
        (1, 1, True),
        (1, 2, False),
        (2, 3, False),
        (3, 3, True),
        (3, 5, True),
        (3, 6, False),
    ],
)
def test_where_most_nodes_are_silent_it_is_not_believed(silent: int, nodes: int, too_many: bool) -> None:
    time = Time()
    names = [f"n{number}" for number in range(nodes)]
    listed = [node("Unknown" if number < silent else "True") for number in range(nodes)]
    for name, one in zip(names, listed, strict=True):
        one["metadata"] = {"name": name}
    assert time.nodes.replace(listed) == set(names[:silent])
    for name in names[:silent]:
        fate = time.nodes.fate(name)
        assert (fate.trouble_at, fate.notice_at is None, fate.is_believed) == (0.0, too_many, not too_many)
    if too_many:
        back = time.nodes.apply("MODIFIED", {**listed[0], "status": node("True")["status"]})
        still = [name for name in names[1:silent] if time.nodes.fate(name).is_believed]
        assert back == {names[0], *still}
