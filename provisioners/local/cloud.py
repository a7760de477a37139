"""The local cloud: instances are processes of this machine.

Its zones are made up, with prices, capacity, cold starts and a spot market.

For the first try, for tests, and for policies on a laptop. There is no cloud daemon: the folder
$SKYSERVE_HOME/local is the cloud (`local_store`), and each node has a host process that outlives us
(`local_host`). Accelerators are labels here: a replica requested on an L4 runs on this machine's own hardware.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from policies.model import CapacityType, Offer, Zone
from provisioners.clock import unix_now
from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.config import CloudConfig, load_cloud
from provisioners.local.host import HostOrder
from provisioners.local.log import log_window, read_log
from provisioners.local.spawn import Spawn, end_host, reap_hosts, spawn_host
from provisioners.local.spot_market import load_market
from provisioners.local.store import CLOUD, InstanceFolder, LaunchRecord, LocalStore, Status
from provisioners.local.translate import PORT_VARIABLE, check_order, check_token, node_environment
from provisioners.offers.explain_no_offer import NoOffer
from provisioners.offers.zone_offers import ZonePrices, explain_no_offer, offers_for
from provisioners.port.base import Cache, Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError, InvalidRequestError, ProvisionError, TransientError
from provisioners.remote.bootstrap_steps import cached_setup
from provisioners.remote.host_agent.log_times import read_times

_RETENTION_S = 3600.0
_RETAINED = 200
_HOST_MARGIN_S = 10.0  # what a host needs beyond the grace of its processes, on a machine that is busy


class NodeAddress(NamedTuple):
    """The address at which a node responds; `namespace` is the network namespace it has to itself, if any."""

    host: str
    port: int
    namespace: str | None = None


class LocalProvisioner:
    """A `Provisioner` and `LogSource` over $SKYSERVE_HOME/local. Any number may share one home."""

    name: ClassVar[str] = CLOUD

    def __init__(self, home: Path, *, now: Callable[[], float] = unix_now, spawn: Spawn = spawn_host) -> None:
        self._home = home.resolve()
        self._store = LocalStore(self._home)
        self._now = now
        self._spawn = spawn

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return offers_for(need, self.prices(), instance_type=CLOUD)

    def explain_no_offer(self, candidate: Candidate) -> NoOffer | None:
        """Return which wish of the candidate left nothing; None if it has an offer."""
        return explain_no_offer(candidate, self.prices())

    def prices(self) -> list[ZonePrices]:
        """Return what a node costs in each zone, as cloud.yaml says."""
        return [
            ZonePrices(Zone(CLOUD, region, name), zone.spot_usd_hour, zone.on_demand_usd_hour)
            for region, name, zone in load_cloud(self._store).zones()
        ]

    def launch(self, order: LaunchOrder) -> Instance:
        check_token(order)
        with self._store.lock():
            folder = self._store.folder(order.token)
            known = folder.instance()
            if known is not None and folder.was_launched():
                return known  # also if its zone, its files or cloud.yaml have changed since
            cloud = load_cloud(self._store)
            check_order(order, cloud)
            self._clean_up()
            self._check_capacity(order, cloud)
            cache = self._cache(order)
            records, folder = self._create(order, cloud)
            self._start(folder, records, replace(order, env={**order.env, **cache}), cloud)
        launched = folder.instance()
        if launched is None or not folder.was_launched():
            raise TransientError("the host process died before it lived", cloud=CLOUD)
        return launched

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        reap_hosts()
        found = []
        for folder in self._store.folders():
            record = folder.record()
            if record is None or record.owner != owner or service not in (None, record.service):
                continue
            instance = folder.instance()
            if instance is not None:
                found.append(instance)
                if instance.state.is_gone or instance.state is InstanceState.BROKEN:
                    self._mark_gone_nodes(folder)
        return found

    def terminate(self, instance: Instance) -> None:
        folder = self._store.folder(instance.token)
        record = folder.record()
        if record is None or record.id != instance.id:
            return
        nodes = folder.nodes()
        with self._store.lock():  # not in the middle of its launch
            for node in nodes:
                status = node.status()
                if status is None or not status.state.is_gone:
                    node.request_stop()  # all of them, so that all end at once
        for node in nodes:
            end_host(node, record.stop_grace_s + _HOST_MARGIN_S)
        reap_hosts()
        for node in nodes:
            self._mark_gone(node, "")

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        return read_log(self._store.folder(instance.token).at(node).path, offset, max_bytes)

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        """Return the offsets between which the log can be read: old output is dropped beyond 64 MiB."""
        return log_window(self._store.folder(instance.token).at(node).path)

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        return read_times(self._store.folder(instance.token).at(node).path, after, offset, most)

    def _check_capacity(self, order: LaunchOrder, cloud: CloudConfig) -> None:
        zone, capacity_type = order.offer.zone, order.offer.capacity_type
        room = capacity_of(self._store, cloud, zone.name, capacity_type, self._now())
        if room is not None and live_count(self._store, zone.name, capacity_type) + order.num_nodes > room:
            wanted = "" if order.num_nodes == 1 else f" for {order.num_nodes} nodes"
            raise CapacityError(
                f"{zone} has no {capacity_type.value.replace('_', '-')} capacity left{wanted} (room for {room})",
                cloud=CLOUD,
                zone=zone,
            )

    def _create(self, order: LaunchOrder, cloud: CloudConfig) -> tuple[list[LaunchRecord], InstanceFolder]:
        # The draft comes first, so that what follows can be found and undone.
        draft = self._store.draft(order.token, order.num_nodes)
        try:
            places = self._places(order, cloud, draft)
        except ProvisionError:
            self._forget(draft)
            raise
        records = [
            self._record(order, cloud, node, place) for node, place in zip(draft.nodes(), places, strict=True)
        ]
        return records, self._store.publish(draft, records)

    def _record(
        self, order: LaunchOrder, cloud: CloudConfig, node: InstanceFolder, place: NodeAddress
    ) -> LaunchRecord:
        return LaunchRecord(
            id=self._store.node_id(node),
            token=order.token,
            owner=order.owner,
            service=order.service,
            replica_id=order.replica_id,
            version=order.version,
            region=order.offer.zone.region,
            zone=order.offer.zone.name,
            capacity_type=order.offer.capacity_type,
            price_usd_hour=order.offer.price_usd_hour,
            sequence=self._store.next_sequence(),
            launched_at=self._now(),
            stop_grace_s=cloud.stop_grace_s,
            host=place.host,
            port=place.port,
            namespace=place.namespace,
            rank=node.rank,
            num_nodes=order.num_nodes,
        )

    def _places(self, order: LaunchOrder, cloud: CloudConfig, draft: InstanceFolder) -> list[NodeAddress]:
        """Return the endpoints of the nodes, by rank."""
        records = [node.record() for node in self._store.nodes() if node.is_live()]
        taken = {record.port for record in records if record is not None and record.namespace is None}
        if order.port is None or PORT_VARIABLE in order.run or PORT_VARIABLE in (order.setup or ""):
            return self._ports(order.num_nodes, taken)
        try:
            names = [local_net.namespace_name(self._store.node_id(node)) for node in draft.nodes()]
            hosts = local_net.create_namespaces(names, cloud.network)
            return [NodeAddress(host, order.port, name) for host, name in zip(hosts, names, strict=True)]
        except local_net.NotPermittedError as error:
            if order.port not in taken and local_net.is_port_free(order.port):
                others = self._ports(order.num_nodes - 1, taken | {order.port})
                return [NodeAddress(local_net.LOOPBACK, order.port), *others]
            raise InvalidRequestError(
                f"port {order.port} of this machine is taken and replicas cannot be isolated ({error}): "
                f"let `run` listen on ${PORT_VARIABLE}, or run as root",
                cloud=CLOUD,
            ) from error

    def _ports(self, count: int, taken: set[int]) -> list[NodeAddress]:
        """Return that many free ports of the loopback interface."""
        found: list[int] = []
        for _ in range(count):
            port = local_net.free_port({*taken, *found}, seed=str(self._home))
            if port is None:
                raise TransientError("no port of this machine is free", cloud=CLOUD, retry_after_s=10.0)
            found.append(port)
        return [NodeAddress(local_net.LOOPBACK, port) for port in found]

    def _start(
        self, folder: InstanceFolder, records: Sequence[LaunchRecord], order: LaunchOrder, cloud: CloudConfig
    ) -> None:
        """Start every node's host, the head's last: once that has come up the launch is carried out."""
        node_ips = [record.host for record in records]
        for node, record in reversed(list(zip(folder.nodes(), records, strict=True))):
            host_order = HostOrder(
                home=str(self._home),
                setup=cached_setup(order),
                run=order.run,
                env=node_environment(order, record, node_ips),
                workdir=order.workdir,
                file_mounts=dict(order.file_mounts),
                cold_start_s=cloud.cold_start_s,
                preemption_notice_s=cloud.preemption_notice_s,
            )
            try:
                self._spawn(node, host_order)
            except BrokenPipeError:
                continue  # it died at once; why, it left in host.err, which is its message
            except OSError as error:
                self._undo(folder)
                raise TransientError(f"the host process did not start: {error}", cloud=CLOUD) from error

    def _cache(self, order: LaunchOrder) -> dict[str, str]:
        """Return the variables of the folder that outlives the replica, which is made."""
        if order.cache is None or order.cache.claim is not None:
            return {}
        path = self._store.cache_path(order.cache)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise TransientError(f"the folder of the cache cannot be made: {error}", cloud=CLOUD) from error
        return order.cache.environment(str(path))

    def remove_cache(self, cache: Cache) -> tuple[list[str], list[str]]:
        """Return the folder if it was there, and why it could not be removed."""
        path = self._store.cache_path(cache)
        if not path.exists():
            return [], []
        try:
            shutil.rmtree(path)
        except OSError as error:
            return [], [f"{path} is not removed: {error}"]
        return [str(path)], []

    def _mark_gone_nodes(self, folder: InstanceFolder) -> None:
        for node in folder.nodes():
            ended = node.node()
            if ended is None or ended.state.is_gone:
                self._mark_gone(node, "" if ended is None else ended.message)

    def _mark_gone(self, node: InstanceFolder, message: str) -> None:
        """Do for a host that was killed what a host does when it stops. Its status marks that this is done."""
        with self._store.lock():
            record, status = node.record(), node.status()
            if record is None or (status is not None and status.state.is_gone):
                return  # another process did it
            local_process.kill_marked(record.id)
            if record.namespace is not None:
                local_net.remove_namespace(record.namespace)
            shutil.rmtree(node.work_path, ignore_errors=True)
            node.write_status(Status(InstanceState.TERMINATED, self._now(), message))

    def _clean_up(self) -> None:
        """Forget launches that were cut short and those that have been dead for long. With the lock held."""
        for draft in self._store.drafts():
            self._forget(draft)
        dead: list[tuple[float, InstanceFolder]] = []
        for folder in self._store.folders():
            if not folder.was_launched():
                self._undo(folder)
            elif (ended_at := folder.ended_at()) is not None:
                dead.append((ended_at, folder))
        dead.sort(key=lambda entry: entry[0], reverse=True)
        for place, (since, folder) in enumerate(dead):
            if place >= _RETAINED or since < self._now() - _RETENTION_S:
                self._forget(folder)

    def _undo(self, folder: InstanceFolder) -> None:
        """Take back a launch that was not carried out: no node of a replica of several nodes stays without the others."""
        for node in folder.nodes():
            end_host(node, _HOST_MARGIN_S)
            local_process.kill_marked(self._store.node_id(node))
        self._forget(folder)

    def _forget(self, folder: InstanceFolder) -> None:
        for node in folder.nodes():
            local_net.remove_namespace(local_net.namespace_name(self._store.node_id(node)))
        shutil.rmtree(folder.path, ignore_errors=True)


def capacity_of(
    store: LocalStore, cloud: CloudConfig, zone: str, capacity_type: CapacityType, now: float
) -> int | None:
    """Room in a zone now, taken places included; None is any number."""
    limit = load_market(store.market_path).limit(zone, capacity_type, now)
    if limit is not None:
        return limit.capacity
    known = cloud.zone(zone)
    return 0 if known is None else known[1].capacity(capacity_type)


def live_count(store: LocalStore, zone: str, capacity_type: CapacityType) -> int:
    """Nodes that take a place in the zone, of any owner."""
    records = [node.record() for node in store.nodes() if node.is_live()]
    return sum(
        record is not None and record.zone == zone and record.capacity_type is capacity_type
        for record in records
    )
