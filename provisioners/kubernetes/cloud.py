"""The `kubernetes` cloud: a provisioner over the namespaces that config.yaml names. A region is a namespace of a cluster.

Lists are taken when someone must be sure (`instances`, a launch); the tick reads what one watch per namespace has brought
(`listing`, `reported`), and calls nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from policies.model import Offer, Role
from provisioners.clock import steady_now, unix_now
from provisioners.kubernetes import nodes as node_rules
from provisioners.kubernetes.agent_cache import AgentCache
from provisioners.kubernetes.agent_objects import MAIN as AGENT_MAIN
from provisioners.kubernetes.agent_objects import is_agent
from provisioners.kubernetes.agents import RegionAgents
from provisioners.kubernetes.api import Json, KubeApi, client_of
from provisioners.kubernetes.check import check_cluster
from provisioners.kubernetes.dead_man import DeadMan
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.logs import PodLogs
from provisioners.kubernetes.machines import RegionPods
from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.nodes import NodeShape
from provisioners.kubernetes.own_events import OwnEvents
from provisioners.kubernetes.pod_cache import PodCache
from provisioners.kubernetes.pod_events import PodEvents
from provisioners.kubernetes.rehearsal import CLAIM, of_replica
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.sightings import Instant
from provisioners.kubernetes.translate import MAIN, check_order
from provisioners.kubernetes.watch import Watcher
from provisioners.offers.explain_no_offer import NoOffer
from provisioners.port.agents import AgentProcess, AgentRelease
from provisioners.port.base import Candidate, Instance, InstanceList, LaunchOrder, Requirements
from provisioners.port.errors import AuthError, ProvisionError, RefusedError
from provisioners.port.vm import Finding

NO_AGENT_IMAGE = "load balancers in a cluster need clouds.kubernetes.agent_image in config.yaml"
_FIRST_LIST_S = 20.0
_NODES_FRESH_S = 30.0  # without a watch of them

#: Makes the official client for a context of a kubeconfig, and returns the context's namespace.
ClientOf = Callable[[str | None, str | None], tuple[Any, str]]


class KubernetesProvisioner:
    """A `Provisioner`, `RegionalSource`, `ReportSource`, `LogSource` and `AgentSource`.

    Raises ValueError for two clusters of one name.
    """

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        clusters: Sequence[Cluster],
        kubeconfig: str | None = None,
        *,
        client: ClientOf = client_of,
        now: Callable[[], float] = unix_now,
        steady: Callable[[], float] = steady_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._regions: dict[str, _Region] = {}
        for cluster in clusters:
            if cluster.region in self._regions:
                raise ValueError(f"clouds.kubernetes.contexts: {cluster.region} is named twice")
            self._regions[cluster.region] = _Region(cluster, kubeconfig, client, now, steady, sleep)
        self._logs = PodLogs(now)

    def close(self) -> None:
        """End the watches."""
        for region in self._regions.values():
            region.stop()

    def check(self) -> Sequence[Finding]:
        """Return what `serve check` reports: nothing is launched or changed."""
        return [
            finding
            for region in self._regions.values()
            for finding in check_cluster(region.cluster, region.api)
        ]

    # --- Provisioner

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return node_rules.offers_of(need, self._shapes())

    def explain_no_offer(self, candidate: Candidate) -> NoOffer | None:
        """Return which wish of the candidate left nothing; None if it has an offer, or the reason is unknown."""
        try:
            return node_rules.explain_no_offer(candidate, self._shapes())
        except ProvisionError as error:
            return NoOffer("cloud", error.message, "run `serve check`")

    def launch(self, order: LaunchOrder) -> Instance:
        check_order(order, self._regions)
        region = self._regions[order.offer.zone.region]
        if order.role is Role.LOAD_BALANCER:
            if region.cluster.agent_image is None:
                raise RefusedError(NO_AGENT_IMAGE, cloud=CLOUD, code="NoImage", zone=order.offer.zone)
            return region.agents.launch(order)
        shapes = region.shapes()
        labels = node_rules.accelerator_labels(shapes, order.offer.accelerator)
        return region.pods.launch(order, labels, has_node=node_rules.has_node(order.offer, shapes))

    def rehearse(self, order: LaunchOrder) -> list[tuple[str, ProvisionError | None]]:
        """Return the kinds of the objects of a launch, each with why the API server would refuse it. Nothing is created."""
        check_order(order, self._regions)
        region = self._regions[order.offer.zone.region]
        labels = node_rules.accelerator_labels(region.shapes(), order.offer.accelerator)
        found = of_replica(region.cluster, region.api, order, labels)
        # Whether a claim is there may be unknown: the printed role has no right to it.
        return [
            (one.kind, None if one.kind == CLAIM and isinstance(one.error, AuthError) else one.error)
            for one in found
        ]

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        for region in self._regions.values():
            region.pods.list_owner(owner)
            region.list_agents(owner)
        return [one for one in self.reported(owner) if service in (None, one.service)]

    def terminate(self, instance: Instance) -> None:
        region = self._regions.get(instance.zone.region)
        if region is not None and not region.terminate_agent(instance):
            region.pods.terminate(instance)

    # --- RegionalSource

    def listing(self, owner: str) -> InstanceList:
        """What the watches have brought; a region whose watch has none is silent."""
        silent: dict[str, ProvisionError] = {}
        for region in self._regions.values():
            region.start()
        for name, region in self._regions.items():
            error = region.watcher.wait(_FIRST_LIST_S) or region.trouble_of_agents(owner)
            if error is None:
                region.dead_man.visit(owner)
                region.events.visit()
                region.own_events.visit(owner)
            else:
                silent[name] = error
        if silent and len(silent) == len(self._regions):
            raise next(iter(silent.values()))
        closed = {name: error.message for name, error in silent.items() if isinstance(error, AuthError)}
        found = [one for one in self.reported(owner) if one.zone.region not in silent]
        return InstanceList(found, dict(sorted(silent.items())), closed)

    # --- ReportSource

    def on_report(self, changed: Callable[[], None]) -> None:
        for region in self._regions.values():
            region.cache.changed = region.agent_cache.changed = changed
            region.start()

    def reported(self, owner: str) -> Sequence[Instance]:
        return [
            one
            for region in self._regions.values()
            for one in (*region.cache.instances(owner), *region.agent_cache.instances(owner))
        ]

    # --- AgentSource

    def agent_version(self) -> str:
        images = {region.cluster.agent_image or "" for region in self._regions.values()}
        return ", ".join(sorted(filter(None, images)))

    def run_agent(self, instance: Instance, release: AgentRelease) -> Sequence[AgentProcess]:
        return self._regions[instance.zone.region].agents.run(instance, release)

    # --- LogSource

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        found = self._log_of(instance, node)
        return b"" if found is None else self._logs.read(*found, offset, max_bytes)

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        found = self._log_of(instance, node)
        return (0, 0) if found is None else self._logs.window(*found)

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        found = self._log_of(instance, node)
        return b"" if found is None else self._logs.times(*found, after, offset, most)

    # --- inside

    def _shapes(self) -> list[tuple[Cluster, Sequence[NodeShape]]]:
        """Return the nodes of each cluster. One that does not respond has none; if none responds, that is an error."""
        found: list[tuple[Cluster, Sequence[NodeShape]]] = []
        failed: ProvisionError | None = None
        for region in self._regions.values():
            try:
                found.append((region.cluster, region.shapes()))
            except ProvisionError as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    def _log_of(self, instance: Instance, node: int) -> tuple[str, Callable[[int | None, int], bytes]] | None:
        region = self._regions.get(instance.zone.region)
        if region is None:
            return None
        is_agent = region.agent_cache.has(instance.token)
        pod = region.agent_cache.newest_pod(instance.token) if is_agent else region.pods.pod(instance, node)
        if pod is None:
            return None
        name, container = pod["metadata"]["name"], AGENT_MAIN if is_agent else MAIN

        def fetch(seconds: int | None, most: int) -> bytes:
            try:
                return region.api.read_log(name, container, seconds, most)
            except ProvisionError as error:
                if error.code in ("BadRequest", "NotFound"):
                    return b""  # it has not started yet, or is gone
                raise

        return pod["metadata"]["uid"], fetch


class _Region:
    """One namespace: its calls, what is known of its Pods, and the watches that bring it."""

    def __init__(
        self,
        cluster: Cluster,
        kubeconfig: str | None,
        client: ClientOf,
        now: Callable[[], float],
        steady: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        def at() -> Instant:
            return Instant(steady(), now())

        self.cluster = cluster
        self.api = KubeApi(
            cluster.region,
            cluster.namespace,
            lambda: client(cluster.context, kubeconfig),
            steady=steady,
            sleep=sleep,
        )
        self._nodes = NodeCache(at)
        self.cache = PodCache(cluster, at, self._nodes)
        self.events = PodEvents(cluster.region, self.api, self.cache, steady)
        self.own_events = OwnEvents(cluster.region, self.api, self.cache, steady, now)
        self.dead_man = DeadMan(cluster, self.api, at)
        self.pods = RegionPods(cluster, self.api, self.cache, now, sleep)
        self.agent_cache = AgentCache(cluster, at, self._nodes)
        self.agents = RegionAgents(cluster, self.api, self.agent_cache, now)
        self.watcher = Watcher(
            cluster.region, lambda: self.api.list("pod"), self.api.watch_pods, _PodSink(self)
        )
        self._agent_watcher = Watcher(
            f"{cluster.region}-agents",
            lambda: self.api.list("deployment"),
            self.api.watch_deployments,
            self.agent_cache,
        )
        self._node_watcher = Watcher(
            f"{cluster.region}-nodes", self.api.list_nodes, self.api.watch_nodes, _NodeSink(self)
        )
        self._steady = steady
        self._listed_at = float("-inf")
        self._is_watched = False
        self._lock = threading.Lock()

    def start(self) -> None:
        self.watcher.start()
        self._node_watcher.start()
        if self.cluster.agent_image is not None:
            self._agent_watcher.start()
        self._is_watched = True

    def stop(self) -> None:
        self.watcher.stop()
        self._node_watcher.stop()
        self._agent_watcher.stop()

    # --- load balancer agents, where there can be any

    def list_agents(self, owner: str) -> None:
        """List the agents now. Raises ProvisionError."""
        if self.cluster.agent_image is not None:
            found = self.api.list("deployment")
            self.agent_cache.replace(found.items, found.version)
            self.agents.look_up_services(owner)

    def trouble_of_agents(self, owner: str) -> ProvisionError | None:
        """Return why it is not known which agents there are."""
        if self.cluster.agent_image is None:
            return None
        error = self._agent_watcher.wait(_FIRST_LIST_S)
        if error is None:
            try:
                self.agents.look_up_services(owner)
            except ProvisionError as found:
                return found
        return error

    def terminate_agent(self, instance: Instance) -> bool:
        """Return whether the instance is an agent. An unknown one is looked up: its Pods alone would come back."""
        if self.cluster.agent_image is None or (
            not self.agent_cache.has(instance.token) and self.cache.pods(instance.token)
        ):
            return False
        return self.agents.terminate(instance)

    # --- nodes

    def shapes(self) -> list[NodeShape]:
        """Return the nodes, as the watch has them, or listed now; if neither works, as they were known last.

        Without permission to list nodes there are the pools. Raises ProvisionError if nothing is known.
        """
        if self._is_watched and self._node_watcher.wait(_FIRST_LIST_S) is None:
            return self._shapes()
        with self._lock:
            is_old = self._steady() - self._listed_at >= _NODES_FRESH_S
        if is_old:
            try:
                self.take_nodes(self.api.list_nodes().items)
            except AuthError:
                pass
            except ProvisionError:
                if not self._shapes():
                    raise
            with self._lock:
                self._listed_at = self._steady()
        return self._shapes()

    def take_nodes(self, nodes: Sequence[Json]) -> None:
        self._announce(self._nodes.replace(nodes))

    def take_node(self, kind: str, node: Mapping[str, Any]) -> None:
        self._announce(self._nodes.apply(kind, node))

    def _announce(self, changed: frozenset[str]) -> None:
        self.cache.nodes_changed(changed)
        self.agent_cache.take_nodes(node_rules.cordoned(self._nodes.nodes()))

    def _shapes(self) -> list[NodeShape]:
        return node_rules.shapes_of(self._nodes.nodes(), self.cluster)


class _PodSink:
    """Gives Pods to those who know what they are: replicas, or load balancer agents."""

    def __init__(self, region: _Region) -> None:
        self._region = region

    def replace(self, items: list[Json], version: str) -> None:
        self._region.cache.replace([pod for pod in items if not is_agent(pod)], version)
        self._region.agent_cache.replace_pods([pod for pod in items if is_agent(pod)])

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        if is_agent(item):
            self._region.agent_cache.apply_pod(kind, item)
        else:
            self._region.cache.apply(kind, item)


class _NodeSink:
    def __init__(self, region: _Region) -> None:
        self._region = region

    def replace(self, items: list[Json], version: str) -> None:
        self._region.take_nodes(items)

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        self._region.take_node(kind, item)
