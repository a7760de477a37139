"""Kubernetes under the contract on a real API server: two regions are two namespaces, each with nodes of its own."""

from __future__ import annotations

from time import sleep, time

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.contract.subject import Subject
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import TransientError
from provisioners.port.vm import machine_token
from tests.clouds.kubernetes.kube_store import stamp
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.hollow import Node
from tests.kubernetes_real.real_api import STRATEGIC, Json
from tests.kubernetes_real.spaces import RealWorld, Space
from tests.kubernetes_real.wire import Wire

REGIONS = ("east", "west")
ROOM = 110
_LOOK_S = 0.2


class Regions:
    """The namespaces, which tests leave empty. Each has spot and on-demand nodes in two zones, with and without GPUs."""

    def __init__(self, world: RealWorld) -> None:
        self.world = world
        self.spaces = {name: Space(world, name) for name in REGIONS}
        for name, space in self.spaces.items():
            nodes = [
                Node(
                    node_name(name, zone, market, gpus), f"{name}-{zone}", is_spot=market == "spot", gpus=gpus
                )
                for zone in ("a", "b")
                for market in ("spot", "fixed")
                for gpus in (0, 8)
            ]
            space.add_nodes(*nodes)
        contexts = {name: space.context for name, space in self.spaces.items()}
        self.kubeconfig = world.plane.kubeconfig("regions", contexts)

    def close(self) -> None:
        for one in self.spaces.values():
            one.close()


def node_name(region: str, zone: str, market: str, gpus: int = 0) -> str:
    return f"{region}-{zone}-{market}" + ("-gpu" if gpus else "")


class RealSubject(Subject):
    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self.wire = Wire()
        self.made: list[KubernetesProvisioner] = []
        self.cloud: KubernetesProvisioner = self.restarted()

    def restarted(self) -> KubernetesProvisioner:
        clusters = [space.cluster() for space in self.regions.spaces.values()]
        made = KubernetesProvisioner(clusters, str(self.regions.kubeconfig), client=self.wire.client)
        self.made.append(made)
        return made

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        market = "spot" if capacity_type is CapacityType.SPOT else "fixed"
        self.regions.world.hollow.set_pods(node_name(zone.region, zone.name[-1], market), count)

    def preempt_node(self, token: str, rank: int) -> None:
        """As the garbage collector of Pods ends those of nodes that are gone."""
        name = machine_token(token, rank)
        space, pod = self._find(name)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        space.api.delete("pods", space.name, name, options)

    def warn_node(self, token: str, rank: int) -> None:
        """As an eviction begins. The deletion, by which a kubelet ends its containers at once, comes after it."""
        name = machine_token(token, rank)
        space, _ = self._find(name)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
            "lastTransitionTime": stamp(time()),
        }
        status = {"status": {"conditions": [condition]}}
        space.api.patch_status("pods", space.name, name, status, STRATEGIC)

    def report_notice(self, token: str, rank: int) -> None:
        self.warn_node(token, rank)
        until(lambda: self._notices(token), "no notice")

    def lose_response(self, order: LaunchOrder) -> None:
        self.wire.cut = 1
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def pass_time(self) -> None:
        sleep(_LOOK_S)

    def exhaust_quota(self, offer: Offer) -> str:
        space = self.regions.spaces[offer.zone.region]
        body = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "team-quota"},
            "spec": {"hard": {"pods": "0"}},
        }
        space.api.create("resourcequotas", space.name, body)
        until(lambda: space.is_counted("team-quota"), "the quota is not in force")
        return "team-quota"

    def refuse_us(self) -> None:
        self.wire.authorization = "Bearer another"

    def know_us_again(self) -> None:
        self.wire.authorization = None

    def throttle(self) -> None:
        pytest.skip("a real server throttles by its load: test_priority_and_fairness has it")

    def launch_to_fail(self, order: LaunchOrder) -> None:
        """Its kubelet accepts none of what the scheduler has placed."""
        self.regions.world.hollow.kubelet.refused.add(order.token)
        self.cloud.launch(order)

    def mute(self, zone: Zone) -> None:
        self.regions.spaces[zone.region].relay.cut()
        until(lambda: zone.region in self.cloud.listing("owner-1").silent, "the region is not silent")

    def unmute(self) -> None:
        for space in self.regions.spaces.values():
            space.relay.restore()

    def close(self) -> None:
        self.unmute()
        for one in self.made:
            one.close()
        hollow = self.regions.world.hollow
        hollow.kubelet.refused.clear()
        for space in self.regions.spaces.values():
            space.sweep()
            for name in space.nodes:
                hollow.set_pods(name, ROOM)

    # --- inside

    def _find(self, pod: str) -> tuple[Space, Json]:
        for space in self.regions.spaces.values():
            for found in space.api.list("pods", space.name):
                if found["metadata"]["name"] == pod:
                    return space, found
        raise AssertionError(f"there is no Pod {pod}")

    def _notices(self, token: str) -> bool:
        return any(one.preempt_at is not None for one in self.cloud.reported("owner-1") if one.token == token)
