"""Kubernetes under the contract: two clusters, the unmodified official client, and containers that are processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest
import yaml

from policies.model import CapacityType, Offer, Zone
from provisioners.contract.subject import Subject
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster, NodePrice
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import TransientError
from provisioners.port.vm import machine_token
from tests.clouds.kubernetes.kube_server import TOKEN, KubeServer, serving
from tests.clouds.kubernetes.kube_world import KubeWorld

PRICES = {"cpu": NodePrice(0.1, 0.03), "L4": NodePrice(0.8, 0.2)}
REGIONS = ("east", "west")
_REAL_S = 0.005


class KubernetesSubject(Subject):
    def __init__(self, home: Path) -> None:
        self.time = 1_800_000_000.0
        self.stack = ExitStack()
        self.worlds: dict[str, KubeWorld] = {}
        self.servers: dict[str, KubeServer] = {}
        for region in REGIONS:
            root = home / region
            root.mkdir()
            world = self.worlds[region] = KubeWorld(root, lambda: self.time)
            self.servers[region] = self.stack.enter_context(serving(world))
            for zone in ("a", "b"):
                for market in ("spot", "fixed"):
                    world.add_node(node(region, zone, market), f"{region}-{zone}", spot=market == "spot")
                    name = node(region, zone, f"{market}-gpu")
                    world.add_node(name, f"{region}-{zone}", spot=market == "spot", gpus=8)
            world.troubles.token = TOKEN
        self.kubeconfig = kubeconfig(home, self.servers)
        self.made: list[KubernetesProvisioner] = []
        self.cloud: KubernetesProvisioner = self.restarted()

    def restarted(self) -> KubernetesProvisioner:
        clusters = [Cluster(region, region, prices=PRICES) for region in REGIONS]
        made = KubernetesProvisioner(
            clusters,
            str(self.kubeconfig),
            now=lambda: self.time,
            steady=lambda: self.time,
            sleep=self._pass,
        )
        self.made.append(made)
        return made

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        market = "spot" if capacity_type is CapacityType.SPOT else "fixed"
        self.worlds[zone.region].set_pods(node(zone.region, zone.name[-1], market), count)

    def preempt_node(self, token: str, rank: int) -> None:
        self._world_of(token).lose(machine_token(token, rank))

    def warn_node(self, token: str, rank: int) -> None:
        name = machine_token(token, rank)
        self._world_of(token).disrupt(name, "EvictionByEvictionAPI", "Eviction API: evicting")

    def report_notice(self, token: str, rank: int) -> None:
        self.warn_node(token, rank)
        assert self._until(lambda: self._notices(token))

    def lose_response(self, order: LaunchOrder) -> None:
        self.worlds[order.offer.zone.region].troubles.cut = 1
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def pass_time(self) -> None:
        self._pass(1.0)

    def exhaust_quota(self, offer: Offer) -> str:
        self.worlds[offer.zone.region].admission.quota = ("team-quota", {"pods": 0})
        return "team-quota"

    def refuse_us(self) -> None:
        for world in self.worlds.values():
            world.troubles.token = "another"

    def know_us_again(self) -> None:
        for world in self.worlds.values():
            world.troubles.token = TOKEN

    def throttle(self) -> None:
        self.worlds[self.offer().zone.region].troubles.throttled = 3

    def launch_to_fail(self, order: LaunchOrder) -> None:
        self.cloud.launch(order)
        self.worlds[order.offer.zone.region].refuse_pod(order.token)

    def mute(self, zone: Zone) -> None:
        self.worlds[zone.region].troubles.is_mute = True
        assert self._until(lambda: zone.region in self.cloud.listing("owner-1").silent)

    def unmute(self) -> None:
        for world in self.worlds.values():
            world.troubles.is_mute = False

    def close(self) -> None:
        for one in self.made:
            one.close()
        self.stack.close()

    # --- inside

    def _world_of(self, token: str) -> KubeWorld:
        return next(
            world
            for world in self.worlds.values()
            if any(name == token or name.startswith(f"{token}-n") for name in world.pod_names())
        )

    def _notices(self, token: str) -> bool:
        return any(one.preempt_at is not None for one in self.cloud.reported("owner-1") if one.token == token)

    def _pass(self, seconds: float) -> None:
        self.time += seconds
        sleep(_REAL_S)  # the containers are processes
        for world in self.worlds.values():
            world.look()

    @staticmethod
    def _until(holds: Callable[[], bool]) -> bool:
        """The watch is a connection: what happens shows a moment later."""
        deadline = monotonic() + 20.0
        while monotonic() < deadline:
            if holds():
                return True
            sleep(_REAL_S)
        return False


def node(region: str, zone: str, kind: str) -> str:
    return f"{region}-{zone}-{kind}"


def kubeconfig(folder: Path, servers: dict[str, KubeServer]) -> Path:
    """One file with a context per server."""
    files = [server.kubeconfig(folder / f"{name}.yaml", name) for name, server in servers.items()]
    parts = [yaml.safe_load(file.read_text()) for file in files]
    merged = {
        **parts[0],
        **{key: [each[key][0] for each in parts] for key in ("clusters", "users", "contexts")},
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(merged))
    return path
