"""A namespace of a real cluster with nodes of its own, the account of a controller, and controllers of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep, time
from typing import Any, TypeVar

import urllib3

from policies.model import Offer
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster, NodePrice
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import TransientError
from tests.clouds.kubernetes.kube_controller import OWNER, order_of
from tests.kubernetes_real.cluster import Context, ControlPlane, until
from tests.kubernetes_real.hollow import Hollow, Node, hollow
from tests.kubernetes_real.real_api import RealApi
from tests.kubernetes_real.relay import Relay
from tests.kubernetes_real.rights import make_space, token
from tests.kubernetes_real.wire import Wire

LABEL = "skyserve.test/space"
PRICES = {"cpu": NodePrice(0.1, 0.03), "L4": NodePrice(0.8, 0.2)}
SMALL = Candidate(cpus="0.1", memory="0.1")
T = TypeVar("T")
_OURS = "app.kubernetes.io/managed-by=skyserve"
_KINDS = ("deployments", "pods", "secrets", "services")


class RealWorld:
    """A control plane, its nodes, and the namespaces in it."""

    def __init__(self, plane: ControlPlane, nodes: Hollow, spaces: set[str]) -> None:
        self.plane = plane
        self.hollow = nodes
        self.spaces = spaces
        self._numbers = itertools.count(1)

    @property
    def api(self) -> RealApi:
        return self.plane.api

    @contextmanager
    def space(self, name: str = "story", nodes: int = 3, **changes: Any) -> Iterator[Space]:
        """A namespace with nodes in one zone. In the end its Pods and nodes are gone, whatever happened."""
        made = Space(self, f"{name}-{next(self._numbers)}")
        made.add_nodes(*(Node(f"{made.name}-{at}", f"{made.name}-a", **changes) for at in range(nodes)))
        try:
            yield made
        finally:
            made.close()


class Space:
    def __init__(self, world: RealWorld, name: str) -> None:
        self.world, self.api, self.hollow = world, world.api, world.hollow
        self.name = name
        self.relay = Relay(int(world.plane.url.rpartition(":")[2]))
        world.spaces.add(name)
        make_space(self.api, name)
        self.context = Context(name, {"token": token(self.api, name)}, self.relay.port)
        self.kubeconfig = world.plane.kubeconfig(name, {name: self.context})
        self.nodes: list[str] = []
        self._made: list[KubernetesProvisioner] = []

    def add_nodes(self, *nodes: Node) -> None:
        for one in nodes:
            one.labels = {**one.labels, LABEL: self.name}
        self.hollow.add(*nodes)
        self.nodes += [one.name for one in nodes]

    def admin_kubeconfig(self) -> Path:
        plane = self.world.plane
        return plane.kubeconfig(
            f"{self.name}-admin", {self.name: Context(self.name, plane.certificate_of("admin"))}
        )

    def controller(
        self, wire: Wire | None = None, skew_s: float = 0.0, **settings: Any
    ) -> KubernetesProvisioner:
        """Return another controller of the namespace, which remembers nothing. Its clock is ahead by `skew_s`."""
        more: dict[str, Any] = {"now": lambda: time() + skew_s}
        more |= {} if wire is None else {"client": wire.client}
        made = KubernetesProvisioner([self.cluster(**settings)], str(self.kubeconfig), **more)
        self._made.append(made)
        return made

    def cluster(self, **settings: Any) -> Cluster:
        plain: dict[str, Any] = {
            "prices": PRICES,
            "context": self.name,
            "node_selector": {LABEL: self.name},
            "schedule_wait_s": 5.0,
        }
        return Cluster(self.name, **(plain | settings))

    def offer(self, cloud: KubernetesProvisioner) -> Offer:
        """Return what it offers. Nodes that could not renew their leases, as the server was away, take no Pods for a moment."""
        need = Requirements((SMALL,))
        until(lambda: cloud.offers(need), "no node is known that takes Pods")
        return cloud.offers(need)[0]

    def order(self, cloud: KubernetesProvisioner, name: str = "chat-1", **changes: Any) -> LaunchOrder:
        return order_of(name, offer=self.offer(cloud), **changes)

    def cordon(self, *nodes: str, on: bool = True) -> None:
        self.hollow.cordon(nodes, on=on)

    def evict(self, pod: str) -> None:
        """As `kubectl drain` does."""
        body = {
            "apiVersion": "policy/v1" if self.world.plane.minor >= 22 else "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.name},
        }
        self.api.call("POST", f"api/v1/namespaces/{self.name}/pods/{pod}/eviction", body)

    # --- what there is

    def ours(self) -> dict[str, int]:
        """Return how many of our objects there are, by kind."""
        found = {kind: len(self.api.list(kind, self.name, _OURS)) for kind in _KINDS}
        return {kind: count for kind, count in found.items() if count}

    def is_counted(self, quota: str) -> bool:
        """Return whether a ResourceQuota is in force."""
        return bool(self.api.get("resourcequotas", self.name, quota).get("status", {}).get("hard"))

    def node_of(self, pod: str) -> str:
        return self.hollow.node_of(self.name, pod)

    def phase_of(self, pod: str) -> str:
        return str(self.api.get("pods", self.name, pod)["status"].get("phase", ""))

    def await_nothing(self, within_s: float = 60.0) -> float:
        """Wait until nothing of ours is left, owned objects neither; return after how many seconds."""
        return until(lambda: not self.ours(), lambda: f"there is {self.ours()}", within_s, 0.25)

    def sweep(self) -> None:
        """Remove what a test has left."""
        for pod in self.api.list("pods", self.name):
            self.api.delete("pods", self.name, pod["metadata"]["name"], {"gracePeriodSeconds": 0})
        for kind in ("resourcequotas", "limitranges"):
            for one in self.api.list(kind, self.name):
                self.api.delete(kind, self.name, one["metadata"]["name"])
        self.await_nothing()

    def stop_controllers(self) -> None:
        for one in self._made:
            one.close()
        self._made.clear()

    def close(self) -> None:
        self.stop_controllers()
        self.relay.close()
        self.sweep()
        for one in self.nodes:
            self.hollow.remove(one)
            self.hollow.nodes.pop(one)
        self.api.delete("namespaces", "", self.name)


def listed(cloud: KubernetesProvisioner, owner: str = OWNER) -> dict[str, Instance]:
    """Return what the watch has brought."""
    return {one.token: one for one in cloud.reported(owner)}


def state(cloud: KubernetesProvisioner, token: str) -> InstanceState | None:
    found = listed(cloud).get(token)
    return None if found is None else found.state


def await_state(
    cloud: KubernetesProvisioner, token: str, *states: InstanceState, within_s: float = 60.0
) -> float:
    return until(
        lambda: state(cloud, token) in states,
        lambda: f"{token} is {listed(cloud).get(token)}, not {[one.name for one in states]}",
        within_s,
    )


def insist(act: Callable[[], T], times: int = 60) -> T:
    """As a controller does: the same again after a transient error, a bounded number of times."""
    for _ in range(times):
        try:
            return act()
        except (TransientError, urllib3.exceptions.HTTPError):
            sleep(0.25)
    return act()


@contextmanager
def real_world(plane: ControlPlane, folder: Path) -> Iterator[RealWorld]:
    spaces: set[str] = set()
    with hollow(plane, folder, spaces) as nodes:
        yield RealWorld(plane, nodes, spaces)
