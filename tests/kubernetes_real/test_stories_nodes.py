"""What happens to nodes and Pods of a real cluster while two replicas run: who is replaced, when, and what is left."""

from __future__ import annotations

from functools import partial
from time import time

import pytest

from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.pod_events import STUCK_S
from provisioners.port.base import Instance, InstanceState
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.spaces import Space, await_state, insist, listed, state

S = InstanceState
pytestmark = pytest.mark.timeout(420)
RUN = "echo hello; exec sleep 1000"


class Pair:
    """A controller, and two replicas of it that run on two nodes."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.cloud: KubernetesProvisioner = space.controller()
        self._number = 0
        for node in space.nodes[:2]:
            self.launch(on=node)

    def launch(self, on: str | None = None) -> str:
        """Launch another replica, on a node if one is named; return its token when it runs."""
        self._number += 1
        token = f"chat-{self._number}"
        order = self.space.order(self.cloud, token, replica_id=self._number, secrets={"A": "b"}, run=RUN)
        others = [] if on is None else [one for one in self.space.nodes if one != on]
        self.space.cordon(*others)
        insist(lambda: self.cloud.launch(order))
        self.cloud.listing(OWNER)
        await_state(self.cloud, token, S.RUNNING)
        self.space.cordon(*others, on=False)
        return token

    def replace(self, lost: str, other: str) -> None:
        """As a controller does: a successor, and the end of the lost one. Nothing of it is left, and the other one has not noticed."""
        successor = self.launch()
        if not self.of(lost).state.is_gone:
            insist(lambda: self.cloud.terminate(self.of(lost)))
        until(lambda: lost not in self.pods(), f"the Pod {lost} is left")
        until(lambda: not self.secrets(lost), f"the Secret of {lost} is left")
        assert self.pods() == {other, successor}
        assert self.of(other).state is S.RUNNING
        assert self.of(other).preempt_at is None

    def finish(self) -> None:
        """Terminate all; nothing is left."""
        for one in listed(self.cloud).values():
            if not one.state.is_gone:
                insist(partial(self.cloud.terminate, one))
        self.space.await_nothing()

    def of(self, token: str) -> Instance:
        return listed(self.cloud)[token]

    def pods(self) -> set[str]:
        return {one["metadata"]["name"] for one in self.space.api.list("pods", self.space.name)}

    def secrets(self, token: str) -> list[str]:
        found = [one["metadata"] for one in self.space.api.list("secrets", self.space.name)]
        return [
            meta["name"]
            for meta in found
            if any(owner["name"] == token for owner in meta.get("ownerReferences") or ())
        ]


@pytest.fixture
def pair(space: Space) -> Pair:
    return Pair(space)


def test_two_replicas_run_and_have_logs(pair: Pair) -> None:
    assert {token: one.state for token, one in listed(pair.cloud).items()} == {
        "chat-1": S.RUNNING,
        "chat-2": S.RUNNING,
    }
    assert len({one.endpoint for one in listed(pair.cloud).values()}) == 2
    until(lambda: b"hello" in pair.cloud.read_log(pair.of("chat-1"), 0, 10_000), "its log lacks hello")
    pair.finish()


def test_a_replica_that_is_evicted_is_replaced(pair: Pair) -> None:
    pair.space.evict("chat-1")
    took_s = await_state(pair.cloud, "chat-1", S.PREEMPTED)
    print(f"an eviction: preempted after {took_s:.1f} s")
    pair.replace("chat-1", "chat-2")
    pair.finish()


def test_a_taint_that_evicts_takes_the_replica_of_its_node_alone(pair: Pair) -> None:
    node = pair.space.node_of("chat-1")
    pair.space.hollow.taint(node, {"key": "maintenance", "value": "now", "effect": "NoExecute"})
    took_s = await_state(pair.cloud, "chat-1", S.PREEMPTED)
    print(f"a NoExecute taint: preempted after {took_s:.1f} s")
    pair.replace("chat-1", "chat-2")
    pair.finish()


def test_a_taint_that_announces_the_end_of_a_node_is_a_notice_of_its_full_length(pair: Pair) -> None:
    node, before = pair.space.node_of("chat-1"), time()
    taint = {
        "key": "ToBeDeletedByClusterAutoscaler",
        "value": str(int(before)),
        "effect": "NoSchedule",
    }
    pair.space.hollow.taint(node, taint)
    until(lambda: pair.of("chat-1").preempt_at is not None, "no notice")
    assert pair.of("chat-1").state is S.RUNNING
    assert before + 25.0 <= (pair.of("chat-1").preempt_at or 0.0) <= time() + 31.0
    pair.replace("chat-1", "chat-2")
    pair.finish()


def test_the_replica_of_a_deleted_node_is_replaced(pair: Pair) -> None:
    pair.space.hollow.remove(pair.space.node_of("chat-1"))
    took_s = until(lambda: is_lost(pair, "chat-1"), "it is not lost", 90.0)
    print(f"a deleted node: lost after {took_s:.1f} s")
    assert took_s <= 60.0
    pair.replace("chat-1", "chat-2")
    pair.finish()


@pytest.mark.parametrize("dies", [True, False], ids=["that died", "whose containers go on"])
def test_the_replica_of_a_silent_node_is_replaced_and_its_pod_removed(pair: Pair, dies: bool) -> None:
    """Its Node object stays, so that nothing but our deletion removes the Pod."""
    node = pair.space.node_of("chat-1")
    pair.space.hollow.silence(node, dies=dies)
    noticed_s = until(lambda: pair.of("chat-1").preempt_at is not None, "no notice", 90.0)
    print(f"a silent node: a notice after {noticed_s:.1f} s")
    assert noticed_s <= 55.0  # 40 s until the cluster says so; 50 s since 1.32
    pair.launch()
    lost_s = noticed_s + until(lambda: is_lost(pair, "chat-1"), "it is not lost", 90.0)
    print(f"a silent node: lost after {lost_s:.1f} s")
    insist(lambda: pair.cloud.terminate(pair.of("chat-1")))
    until(lambda: "chat-1" not in pair.pods(), "its Pod is left")
    until(lambda: not pair.secrets("chat-1"), "its Secret is left")
    assert pair.pods() == {"chat-2", "chat-3"}
    assert state(pair.cloud, "chat-2") is S.RUNNING
    pair.finish()


def test_what_only_an_event_says_is_shown(space: Space) -> None:
    """No sandbox for a Pod can be made on its node: its status does not say so."""
    cloud, kubelet = space.controller(), space.hollow.kubelet
    kubelet.without_network |= set(space.nodes)
    cloud.launch(space.order(cloud))

    def is_shown() -> bool:
        cloud.listing(OWNER)  # which reads the events of a Pod that has been stuck for long
        return "sandbox" in listed(cloud)["chat-1"].message

    until(is_shown, lambda: listed(cloud), STUCK_S + 30.0)
    kubelet.without_network -= set(space.nodes)
    await_state(cloud, "chat-1", S.RUNNING)
    cloud.terminate(listed(cloud)["chat-1"])
    space.await_nothing()


def is_lost(pair: Pair, token: str) -> bool:
    found = listed(pair.cloud).get(token)
    return found is None or found.state in (S.BROKEN, S.PREEMPTED)
