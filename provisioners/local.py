"""The local cloud: instances are real processes of this machine, in make-believe zones with prices, capacity, cold
starts and a spot market.

For the first try, for tests, and for policies on a laptop. There is no cloud daemon: the folder
$SKYSERVE_HOME/local is the cloud (`local_store`), and each instance has a host process that outlives us
(`local_host`). Accelerators are labels here: a replica asked for on an L4 runs on whatever this machine is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import ClassVar

from policies.model import CapacityType, Offer, Zone
from provisioners import local_net, local_process
from provisioners.base import Instance, InstanceState, LaunchOrder, Requirements
from provisioners.clock import unix_now
from provisioners.errors import CapacityError, InvalidRequestError, ProvisionError, TransientError
from provisioners.local_config import CloudConfig, load_cloud
from provisioners.local_host import HostOrder
from provisioners.local_log import log_window, read_log
from provisioners.local_market import load_market
from provisioners.local_store import CLOUD, InstanceFolder, LocalStore, Record, Status
from provisioners.offering import ZonePrices, offers_for

PORT_VARIABLE = "SKYSERVE_REPLICA_PORT"
_RETENTION_S = 3600.0
_RETAINED = 200
_HOST_MARGIN_S = 10.0  # what a host needs beyond the grace of its processes, on a machine that is busy
_PACKAGES = Path(__file__).resolve().parent.parent

Spawn = Callable[[InstanceFolder, HostOrder], None]

# Host processes outlive us, but while we live they are our children, and zombies once dead until we ask.
_hosts: list[subprocess.Popen[bytes]] = []
_hosts_lock = Lock()


class LocalProvisioner:
    """A `Provisioner` and `LogSource` over $SKYSERVE_HOME/local. Any number may share one home."""

    name: ClassVar[str] = CLOUD

    def __init__(
        self, home: Path, *, now: Callable[[], float] = unix_now, spawn: Spawn | None = None
    ) -> None:
        self._home = home.resolve()
        self._store = LocalStore(self._home)
        self._now = now
        self._spawn = spawn or spawn_host

    def offers(self, need: Requirements) -> Sequence[Offer]:
        prices = [
            ZonePrices(Zone(CLOUD, region, name), zone.spot_usd_hour, zone.on_demand_usd_hour)
            for region, name, zone in load_cloud(self._store).zones()
        ]
        return offers_for(need, prices, instance_type=CLOUD)

    def launch(self, order: LaunchOrder) -> Instance:
        check_token(order)
        with self._store.lock():
            folder = self._store.folder(order.token)
            known = folder.instance()
            if known is not None:
                return known  # whatever has become of its zone, its files or cloud.yaml since
            cloud = load_cloud(self._store)
            check_order(order, cloud)
            self._clean_up()
            self._check_capacity(order, cloud)
            record, folder = self._create(order, cloud)
            self._start(folder, record, order, cloud)
        launched = folder.instance()
        if launched is None:
            raise TransientError("the host process died before it lived", cloud=CLOUD)
        return launched

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        _reap_hosts()
        found = []
        for folder in self._store.folders():
            record = folder.record()
            if record is None or record.owner != owner or service not in (None, record.service):
                continue
            instance = folder.instance()
            if instance is not None:
                found.append(instance)
                if instance.state.is_gone:
                    self._bury(folder, record, instance.message)
        return found

    def terminate(self, instance: Instance) -> None:
        folder = self._store.folder(instance.token)
        record = folder.record()
        if record is None or record.id != instance.id:
            return
        with self._store.lock():  # not in the middle of its launch
            status = folder.status()
            if status is None or not status.state.is_gone:
                folder.ask_to_stop()
        _end_host(folder, record.stop_grace_s + _HOST_MARGIN_S)
        _reap_hosts()
        self._bury(folder, record, "")

    def read_log(self, instance: Instance, offset: int, max_bytes: int) -> bytes:
        return read_log(self._store.folder(instance.token).path, offset, max_bytes)

    def log_window(self, instance: Instance) -> tuple[int, int]:
        """The offsets between which the log can be read: old output is dropped beyond 64 MiB."""
        return log_window(self._store.folder(instance.token).path)

    def _check_capacity(self, order: LaunchOrder, cloud: CloudConfig) -> None:
        zone, capacity_type = order.offer.zone, order.offer.capacity_type
        room = capacity_of(self._store, cloud, zone.name, capacity_type, self._now())
        if room is not None and live_count(self._store, zone.name, capacity_type) >= room:
            raise CapacityError(
                f"{zone} has no {capacity_type.value.replace('_', '-')} capacity left (room for {room})",
                cloud=CLOUD,
                zone=zone,
            )

    def _create(self, order: LaunchOrder, cloud: CloudConfig) -> tuple[Record, InstanceFolder]:
        draft = self._store.draft(order.token)  # first, so that what follows can be found and undone
        try:
            record = self._record(order, cloud)
        except ProvisionError:
            self._forget(draft)
            raise
        return record, self._store.publish(draft, record)

    def _record(self, order: LaunchOrder, cloud: CloudConfig) -> Record:
        instance_id = self._store.instance_id(order.token)
        host, port, namespace = self._place(order, cloud, instance_id)
        return Record(
            id=instance_id,
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
            host=host,
            port=port,
            namespace=namespace,
        )

    def _place(self, order: LaunchOrder, cloud: CloudConfig, instance_id: str) -> tuple[str, int, str | None]:
        """The address the replica will answer on: (host, port, network namespace)."""
        records = [folder.record() for folder in self._store.folders() if folder.is_live()]
        taken = {record.port for record in records if record is not None and record.namespace is None}
        if order.port is None or PORT_VARIABLE in order.run or PORT_VARIABLE in (order.setup or ""):
            port = local_net.free_port(taken, seed=str(self._home))
            if port is None:
                raise TransientError("no port of this machine is free", cloud=CLOUD, retry_after_s=10.0)
            return local_net.LOOPBACK, port, None
        try:
            name = local_net.namespace_name(instance_id)
            return local_net.create_namespace(name, cloud.network), order.port, name
        except local_net.NotPermittedError as error:
            if order.port not in taken and local_net.is_port_free(order.port):
                return local_net.LOOPBACK, order.port, None
            raise InvalidRequestError(
                f"port {order.port} of this machine is taken and replicas cannot be isolated ({error}): "
                f"let `run` listen on ${PORT_VARIABLE}, or run as root",
                cloud=CLOUD,
            ) from error

    def _start(self, folder: InstanceFolder, record: Record, order: LaunchOrder, cloud: CloudConfig) -> None:
        host_order = HostOrder(
            home=str(self._home),
            setup=order.setup,
            run=order.run,
            env=replica_environment(order, record),
            workdir=order.workdir,
            file_mounts=dict(order.file_mounts),
            cold_start_s=cloud.cold_start_s,
            preemption_notice_s=cloud.preemption_notice_s,
        )
        try:
            self._spawn(folder, host_order)
        except BrokenPipeError:
            return  # it died at once; why, it left in host.err, which is the instance's message
        except OSError as error:
            self._forget(folder)
            raise TransientError(f"the host process did not start: {error}", cloud=CLOUD) from error

    def _bury(self, folder: InstanceFolder, record: Record, message: str) -> None:
        """What a host does on its way out, done for one that was killed. Once: its status is the gravestone."""
        with self._store.lock():
            status = folder.status()
            if folder.record() is None or (status is not None and status.state.is_gone):
                return  # somebody else was quicker
            local_process.kill_marked(record.id)
            if record.namespace is not None:
                local_net.remove_namespace(record.namespace)
            shutil.rmtree(folder.work_path, ignore_errors=True)
            folder.write_status(Status(InstanceState.TERMINATED, self._now(), message))

    def _clean_up(self) -> None:
        """Forget launches that were cut short and those that have been dead for long. With the lock held."""
        for draft in self._store.drafts():
            self._forget(draft)
        dead: list[tuple[float, InstanceFolder]] = []
        for folder in self._store.folders():
            if folder.instance() is None:
                self._forget(folder)
            elif (status := folder.status()) is not None and status.state.is_gone:
                dead.append((status.since, folder))
        dead.sort(key=lambda entry: entry[0], reverse=True)
        for place, (since, folder) in enumerate(dead):
            if place >= _RETAINED or since < self._now() - _RETENTION_S:
                self._forget(folder)

    def _forget(self, folder: InstanceFolder) -> None:
        local_net.remove_namespace(local_net.namespace_name(self._store.instance_id(folder.token)))
        shutil.rmtree(folder.path, ignore_errors=True)


def check_token(order: LaunchOrder) -> None:
    """Raise InvalidRequestError unless the token can name a folder."""
    if not re.fullmatch(r"[a-z0-9-]{1,63}", order.token):
        raise InvalidRequestError(
            f"{order.token!r} is no token: up to 63 lower-case letters, digits and hyphens", cloud=CLOUD
        )


def check_order(order: LaunchOrder, cloud: CloudConfig) -> None:
    """Raise InvalidRequestError that says everything that is wrong."""
    complaints = _complaints(order, cloud)
    if complaints:
        raise InvalidRequestError("; ".join(complaints), cloud=CLOUD, zone=order.offer.zone)


def _complaints(order: LaunchOrder, cloud: CloudConfig) -> list[str]:
    zone = order.offer.zone
    known = cloud.zone(zone.name)
    found = []
    if zone.cloud != CLOUD or known is None or known[0] != zone.region:
        found.append(f"there is no zone {zone} in the local cloud; see cloud.yaml")
    if order.num_nodes != 1:
        found.append(f"num_nodes is {order.num_nodes}, and a replica of the local cloud is one node")
    if order.port is not None and not 0 < order.port < 65536:
        found.append(f"{order.port} is no port")
    if order.workdir is not None and not Path(order.workdir).is_dir():
        found.append(f"workdir {order.workdir} is not a folder of this machine")
    for target, source in order.file_mounts.items():
        path = PurePosixPath(target)
        if path.is_absolute() or target.startswith("~") or ".." in path.parts:
            found.append(
                f"file_mounts: {target}: on the local cloud files are mounted below the work directory only; "
                "use a relative path"
            )
        if not Path(source).exists():
            found.append(f"file_mounts: {target}: {source} is not a file or folder of this machine")
    return found


def replica_environment(order: LaunchOrder, record: Record) -> dict[str, str]:
    """What `setup` and `run` see: the user's own environment, the service's variables, and who they are.

    Nothing of the controller's own settings (SKYSERVE_*: its database, its tokens) goes in. The programs
    installed beside this one are found last, so `serve engine` works whether or not its environment is active.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    count = order.offer.accelerator_count if order.offer.accelerator else 0
    return {
        **_own_environment(),
        "PATH": path,
        "SKYPILOT_NODE_IPS": local_net.LOOPBACK,
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": f"{count:g}",
        **order.env,
        **order.secrets,
        "SKYSERVE_SERVICE": record.service,
        "SKYSERVE_REPLICA_ID": str(record.replica_id),
        "SKYPILOT_SERVE_REPLICA_ID": str(record.replica_id),
        "SKYSERVE_REGION": record.region,
        "SKYSERVE_ZONE": record.zone,
        PORT_VARIABLE: str(record.port),
        local_process.INSTANCE_MARK: record.id,
    }


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SKYSERVE_")}


def spawn_host(folder: InstanceFolder, order: HostOrder) -> None:
    """Start the host process, detached, and give it its order.

    The lock that says "alive" is taken here and inherited, so there is no instant at which a launched instance
    looks dead. If we die before the order is delivered whole, the host leaves without a trace.
    """
    alive = os.open(folder.alive_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ear, mouth = os.pipe()
    with os.fdopen(mouth, "wb") as pipe:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX)
            with (folder.path / "host.err").open("wb") as errors:
                host = subprocess.Popen(
                    [sys.executable, "-m", "provisioners.local_host", str(folder.path)],
                    cwd=_PACKAGES,
                    env=_own_environment(),
                    stdin=ear,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    pass_fds=(alive,),
                )
        finally:
            os.close(alive)
            os.close(ear)
        with _hosts_lock:
            _hosts.append(host)
        folder.write_host_pid(host.pid)
        pipe.write(json.dumps(asdict(order)).encode())


def _reap_hosts() -> None:
    with _hosts_lock:
        _hosts[:] = [host for host in _hosts if host.poll() is None]


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
    """Instances that take a place in the zone, whoever owns them."""
    records = [folder.record() for folder in store.folders() if folder.is_live()]
    return sum(
        record is not None and record.zone == zone and record.capacity_type is capacity_type
        for record in records
    )


def _end_host(folder: InstanceFolder, patience_s: float) -> None:
    """Tell the host to stop and wait until it has; kill it if it does not. Its pid is only believed while its
    lock is held, and held on to by a descriptor, so no other process can be meant."""
    pid = folder.host_pid()
    if pid is None:
        return
    try:
        host = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not folder.is_host_alive():
            return
        ended = select.poll()
        ended.register(host, select.POLLIN)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(host, signal_number)
            if ended.poll(patience_s * 1000):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(host)
