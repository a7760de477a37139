"""A controller of one fake cluster, by the unmodified client: what tests of the provisioner share. Time is virtual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client as kube_client

from policies.model import CapacityType, Offer, Zone
from provisioners.kubernetes.api import tuned
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster, NodePrice
from provisioners.port.base import Instance, LaunchOrder
from provisioners.port.errors import TransientError
from tests.clouds.kubernetes.kube_server import KubeServer, serving
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld

OWNER = "owner-1"
ZONE = Zone("kubernetes", "prod", "zone-a")
PRICES = {"cpu": NodePrice(0.1, 0.03), "L4": NodePrice(0.8, 0.2)}
ON_DEMAND = Offer(ZONE, "2cpu-4gb", None, 0.0, CapacityType.ON_DEMAND, 0.1)
T = TypeVar("T")


class Controller:
    """`cluster` are the settings. A restart forgets everything."""

    def __init__(self, server: KubeServer, clock: list[float], cluster: Cluster) -> None:
        self.server = server
        self.world = server.world
        self.clock = clock
        self.cluster = cluster
        self.made: list[KubernetesProvisioner] = []
        self.skew_s = 0.0  # how far the controller's clock is ahead
        self.restart()

    def restart(self) -> None:
        self.world.troubles.crash, self.world.troubles.is_down = None, False
        for one in self.made:
            one.close()
        self.cloud = KubernetesProvisioner(
            [self.cluster],
            client=self._client,
            now=lambda: self.clock[0] + self.skew_s,
            steady=lambda: self.clock[0],
            sleep=self.advance,
        )
        self.made.append(self.cloud)

    def advance(self, seconds: float) -> None:
        self.clock[0] += seconds
        self.world.look()

    def listed(self) -> dict[str, Instance]:
        return {one.token: one for one in self.insist(lambda: self.cloud.instances(OWNER))}

    def insist(self, act: Callable[[], T]) -> T:
        """As a controller does: the same again after a transient error, a bounded number of times."""
        for _ in range(20):
            try:
                return act()
            except TransientError:
                self.advance(5.0)
        return act()

    def _client(self, _context: str | None, _kubeconfig: str | None) -> tuple[Any, str]:
        return tuned(kube_client.ApiClient(kube_client.Configuration(host=self.server.url))), NAMESPACE


@contextmanager
def controller(
    root: Path | None = None, *, strict: bool = True, pods: int = 110, cluster: Cluster | None = None
) -> Iterator[Controller]:
    """Of a cluster with a node on demand and one on spot, each without and with GPUs."""
    clock = [1_800_000_000.0]
    world = KubeWorld(root, lambda: clock[0], strict=strict)
    world.add_node("fixed", ZONE.name, pods=pods)
    world.add_node("spot", ZONE.name, spot=True, pods=pods)
    world.add_node("fixed-gpu", ZONE.name, gpus=8)
    world.add_node("spot-gpu", ZONE.name, spot=True, gpus=8)
    with serving(world) as server:
        made = Controller(server, clock, cluster or Cluster("prod", prices=PRICES))
        try:
            yield made
        finally:
            for one in made.made:
                one.close()


def order_of(name: str = "chat-1", **changes: Any) -> LaunchOrder:
    plain = LaunchOrder(
        token=name,
        owner=OWNER,
        service="chat",
        replica_id=1,
        version=1,
        offer=ON_DEMAND,
        setup=None,
        run="exec sleep 1000",
    )
    return replace(plain, **changes)
