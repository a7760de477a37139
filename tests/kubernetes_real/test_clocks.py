"""Clocks that differ by a minute: controllers ahead and behind decide the same about Pods of nodes that are ahead and behind.

The clock of the API server cannot be set. That it is ahead is that nodes and controllers are behind, and all pairs are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic, time

import pytest

from policies.model import FailureKind
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.port.base import InstanceState
from provisioners.port.errors import ProvisionError
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.hollow import Node
from tests.kubernetes_real.spaces import Space, insist, listed

S = InstanceState
SKEWS = (0.0, 60.0, -60.0)
NOTICE_S = 30.0
pytestmark = pytest.mark.timeout(420)


class Clocks:
    """A controller for each clock, and a node for each, which has a Pod."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.nodes = {skew_s: f"{space.name}-clock-{number}" for number, skew_s in enumerate(SKEWS)}
        space.hollow.kubelet.skews |= {node: skew_s for skew_s, node in self.nodes.items()}
        more = [
            f"{space.name}-more-{number}" for number in range(7)
        ]  # a quarter that is silent is not believed
        space.add_nodes(*(Node(name, f"{space.name}-a") for name in (*self.nodes.values(), *more)))
        self.clouds = {skew_s: space.controller(skew_s=skew_s) for skew_s in SKEWS}

    def launch(self, name: str, cloud: KubernetesProvisioner) -> list[str]:
        """Launch a Pod on each of the nodes; return the tokens when each controller has all of them running."""
        tokens = [f"{name}-{number}" for number in range(len(SKEWS))]
        orders = [self.space.order(cloud, token, replica_id=at) for at, token in enumerate(tokens)]
        for order, node in zip(orders, self.nodes.values(), strict=True):
            self.space.cordon(node, on=False)  # first: at each moment some node takes Pods
            self.space.cordon(*(other for other in self.space.nodes if other != node))
            insist(partial(cloud.launch, order))
        self.space.cordon(*self.space.nodes, on=False)
        for one in self.clouds.values():
            one.listing(OWNER)
        self.all_are(tokens, lambda cloud, token: listed(cloud)[token].state is S.RUNNING)
        return tokens

    def all_are(
        self, tokens: list[str], holds: Callable[[KubernetesProvisioner, str], bool], within_s: float = 60.0
    ) -> list[float]:
        """Wait until that holds of each Pod for each controller; return after how many seconds it did, pair by pair."""
        began, left = monotonic(), {(skew_s, token) for skew_s in SKEWS for token in tokens}
        found: list[float] = []

        def is_over() -> bool:
            for skew_s, token in sorted(left):
                if holds(self.clouds[skew_s], token):
                    left.discard((skew_s, token))
                    found.append(monotonic() - began)
            return not left

        until(
            is_over,
            lambda: f"not so: {[(one, listed(self.clouds[one[0]])[one[1]]) for one in left]}",
            within_s,
        )
        return found

    def notices(self, tokens: list[str]) -> list[float]:
        """Return how many seconds each controller gives each Pod."""
        wait = self.all_are(tokens, lambda cloud, token: listed(cloud)[token].preempt_at is not None, 90.0)
        assert max(wait) - min(wait) <= 3.0
        at = [(skew_s, listed(self.clouds[skew_s])[token].preempt_at) for skew_s in SKEWS for token in tokens]
        return [(each or 0.0) - time() - skew_s for skew_s, each in at]


def test_clocks_that_differ_by_a_minute_change_no_decision(space: Space) -> None:
    clocks = Clocks(space)
    cloud = clocks.clouds[0.0]
    evicted = clocks.launch("evicted", cloud)
    for token in evicted:
        space.evict(token)
    clocks.all_are(evicted, lambda cloud, token: listed(cloud)[token].state is S.PREEMPTED)
    tainted = clocks.launch("tainted", cloud)
    for node in clocks.nodes.values():
        space.hollow.taint(node, {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"})
    left_s = clocks.notices(tainted)
    print(f"a taint: a notice of {min(left_s):.1f} to {max(left_s):.1f} s")
    assert NOTICE_S - 4.0 <= min(left_s) <= max(left_s) <= NOTICE_S + 1.0
    for node in clocks.nodes.values():
        space.hollow.taint(node)
    clocks.all_are(tainted, lambda cloud, token: listed(cloud)[token].preempt_at is None)
    for node in clocks.nodes.values():
        space.hollow.silence(node)
    left_s = clocks.notices(tainted)
    lost_s = clocks.all_are(tainted, lambda cloud, token: listed(cloud)[token].state is S.BROKEN)
    print(
        f"silent nodes: a notice of {min(left_s):.1f} to {max(left_s):.1f} s, lost within {max(lost_s):.1f} s"
    )
    assert max(lost_s) - min(lost_s) <= 3.0
    for token in tainted:
        insist(partial(cloud.terminate, listed(cloud)[token]))
    space.await_nothing()


def test_a_pod_without_a_place_is_given_up_after_the_same_time(space: Space) -> None:
    """The scheduler's clock is the API server's."""
    for node in space.nodes:
        space.hollow.set_pods(node, 0)
    for skew_s in SKEWS:
        cloud, began = space.controller(skew_s=skew_s), monotonic()
        with pytest.raises(ProvisionError) as caught:
            insist(partial(cloud.launch, space.order(cloud)))
        print(f"{skew_s:+.0f} s: {caught.value.kind.value} after {monotonic() - began:.1f} s")
        assert caught.value.kind is FailureKind.CAPACITY
        assert caught.value.code == "Unschedulable"
        assert monotonic() - began >= 2.0
        space.await_nothing()
