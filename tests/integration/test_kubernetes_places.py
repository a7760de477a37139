"""What must hold on any cluster: the same tests on the fake and, where KUBECONFIG is set, on the cluster that it names.

On a real one they make Pods of two CPUs in the namespace of the current context, and delete them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep

import pytest

from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError
from provisioners.port.vm import Level
from tests.clouds.kubernetes.kube_controller import order_of
from tests.clouds.kubernetes.kube_places import living
from tests.integration.test_kubernetes_pods import until

pytestmark = pytest.mark.long
S = InstanceState
SMALL = Candidate(cpus="0.1", memory="0.2")


@dataclass
class Place:
    cloud: KubernetesProvisioner
    owner: str

    def order(self, name: str, **changes: object) -> LaunchOrder:
        offer = self.cloud.offers(Requirements((SMALL,)))[0]
        return order_of(f"{self.owner}-{name}", owner=self.owner, offer=offer, **changes)

    def shown(self, order: LaunchOrder) -> Instance | None:
        """As the watch has it."""
        listed = self.cloud.listing(self.owner).instances
        return next((one for one in listed if one.token == order.token), None)

    def reaches(self, order: LaunchOrder, *states: InstanceState) -> bool:
        return until(
            lambda: (found := self.shown(order)) is not None and found.state in states, lambda: sleep(0.1)
        )


@pytest.fixture(params=["fake", "real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    owner = f"test-{uuid.uuid4().hex[:8]}"
    if request.param == "real":
        kubeconfig = os.environ.get("KUBECONFIG")
        if kubeconfig is None:
            pytest.skip("there is no real cluster: KUBECONFIG is not set")
        yield from living_in(Place(KubernetesProvisioner([Cluster("real")], kubeconfig), owner))
        return
    with living(tmp_path) as (_, path):
        yield from living_in(Place(KubernetesProvisioner([Cluster("fake")], str(path)), owner))


def living_in(place: Place) -> Iterator[Place]:
    try:
        yield place
    finally:
        for one in place.cloud.instances(place.owner):
            place.cloud.terminate(one)
        place.cloud.close()


def test_the_cluster_is_usable(place: Place) -> None:
    assert [one for one in place.cloud.check() if one.level is Level.MISSING] == []
    assert place.cloud.offers(Requirements((SMALL,)))


def test_a_replica_runs_with_its_files_and_secrets_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hello.txt").write_text("hello\n")
    order = place.order(
        "one",
        setup="cat hello.txt",
        run='echo "$SECRET on $SKYPILOT_NODE_RANK"; exec sleep 1000',
        secrets={"SECRET": "s3cret"},
        workdir=str(tmp_path / "work"),
    )
    launched = place.cloud.launch(order)
    assert place.cloud.launch(order).id == launched.id
    assert place.reaches(order, S.RUNNING)
    running = place.shown(order)
    assert running is not None
    assert (running.endpoint or "").startswith("http://")
    assert until(
        lambda: place.cloud.read_log(running, 0, 1000) == b"hello\ns3cret on 0\n", lambda: sleep(0.5)
    )
    place.cloud.terminate(running)
    assert place.reaches(order, S.TERMINATED)
    assert place.cloud.launch(order).state is S.TERMINATED


def test_two_nodes_find_each_other(place: Place) -> None:
    order = place.order(
        "two", run='echo "$SKYPILOT_NODE_IPS" | wc -l | tr -d " "; exec sleep 1000', num_nodes=2
    )
    place.cloud.launch(order)
    assert place.reaches(order, S.RUNNING)
    running = place.shown(order)
    assert running is not None
    for rank in (0, 1):
        assert until(
            lambda rank=rank: place.cloud.read_log(running, 0, 100, rank) == b"2\n", lambda: sleep(0.5)
        )


def test_why_it_failed_is_said(place: Place) -> None:
    order = place.order("three", setup="echo no; exit 3")
    place.cloud.launch(order)
    assert place.reaches(order, S.SETUP_FAILED)
    failed = place.shown(order)
    assert failed is not None
    assert "exit code 3" in failed.message


def test_what_no_node_has_room_for_is_a_capacity_error_and_leaves_nothing(place: Place) -> None:
    order = place.order("four")
    large = replace(order, offer=replace(order.offer, instance_type="4000cpu-1gb"))
    with pytest.raises(CapacityError, match=r"nodes are available|no node that is ready"):
        place.cloud.launch(large)
    assert list(place.cloud.instances(place.owner)) == []
