"""The files of the local cloud, and which process may write which.

    $SKYSERVE_HOME/local/
      lock                   held while the cloud decides (launch, hand controls, clean-up)
      sequence               how many instances were ever launched
      cloud.yaml             zones, prices, capacities: the user's, see `local_config`
      market.json            what the spot market does: see `local_market`
      cache/OWNER/TEAM/SERVICE/    what replicas leave for those after them
      instances/TOKEN/
        record.json          the launch, never changed afterwards (no secrets, no scripts)
        alive                locked for as long as the host process runs: the kernel lets go when it exits,
                             for any reason, and no other process can inherit a false truth by its pid
        host.pid, host.err   the host process, and what it said if it broke
        status.json          the instance's progress, written by the host, or by its successor once it is dead
        stop, preempt.json   marks others leave for the host
        prepared             `setup` is done here: `run` starts when it is on every node
        log.OFFSET           output of `setup` and `run`, in segments named by their first byte
        work/                the replica's work directory, gone with the instance
        node.1/, …           the other nodes of a replica of several: the same files for each

The files above node.1/ are node 0's, the head's: a replica of several nodes appears and disappears with its head's folder. Hosts are
started last node first, so where the head's came up the launch was carried out.

The folder is the cloud's whole memory, so every process that can read it sees the same cloud.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from policies.model import CapacityType, Zone
from provisioners.files import read_json, write_json, write_text
from provisioners.multi_node import instance_of_nodes
from provisioners.port.base import Cache, Instance, InstanceState
from provisioners.port.errors import InvalidRequestError

CLOUD = "local"
_NODE = "node."  # no token has a dot in it


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """What was decided when a node was launched.

    `sequence` is its place in the order of launches; `price_usd_hour` is the whole replica's.
    """

    id: str
    token: str
    owner: str
    service: str
    replica_id: int
    version: int
    region: str
    zone: str
    capacity_type: CapacityType
    price_usd_hour: float
    sequence: int
    launched_at: float
    stop_grace_s: float
    host: str
    port: int
    namespace: str | None = None  # the network namespace, if it has one to itself
    rank: int = 0
    num_nodes: int = 1

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Status:
    """How far a node is, since when (UNIX seconds), and one sentence if that needs one."""

    state: InstanceState
    since: float
    message: str = ""
    preempt_at: float | None = None


class InstanceFolder:
    """One node on disk; the head's stands for the instance.

    Reading never fails because another process is writing: files are replaced whole.
    """

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def token(self) -> str:
        return self.head.path.name.removeprefix(".")

    @property
    def rank(self) -> int:
        return int(self.path.name.removeprefix(_NODE)) if self.path.name.startswith(_NODE) else 0

    @property
    def head(self) -> InstanceFolder:
        return InstanceFolder(self.path.parent) if self.rank else self

    def at(self, rank: int) -> InstanceFolder:
        """Return a node of the instance whose head this is, whether or not there is one of that rank."""
        return self if rank == 0 else InstanceFolder(self.path / f"{_NODE}{rank}")

    def nodes(self) -> list[InstanceFolder]:
        """Return every node of the instance whose head this is, by rank."""
        others = [InstanceFolder(path) for path in self.path.glob(f"{_NODE}*")]
        return [self, *sorted(others, key=lambda node: node.rank)]

    @property
    def alive_path(self) -> Path:
        return self.path / "alive"

    @property
    def work_path(self) -> Path:
        return self.path / "work"

    def record(self) -> LaunchRecord | None:
        raw = read_json(self.path / "record.json")
        return (
            None
            if raw is None
            else LaunchRecord(**{**raw, "capacity_type": CapacityType(raw["capacity_type"])})
        )

    def write_record(self, record: LaunchRecord) -> None:
        write_json(self.path / "record.json", asdict(record))

    def status(self) -> Status | None:
        raw = read_json(self.path / "status.json")
        return None if raw is None else Status(**{**raw, "state": InstanceState(raw["state"])})

    def write_status(self, status: Status) -> None:
        write_json(self.path / "status.json", asdict(status))

    def host_pid(self) -> int | None:
        try:
            return int((self.path / "host.pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write_host_pid(self, pid: int) -> None:
        write_text(self.path / "host.pid", str(pid))

    def host_error(self) -> str:
        """The last line the host process left when it broke; empty if it never did."""
        try:
            lines = (self.path / "host.err").read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            return ""
        return lines[-1] if lines else ""

    def is_host_alive(self) -> bool:
        """Return whether the host process holds its lock. It tests with a shared lock, so that tests do not see each other."""
        try:
            fd = os.open(self.alive_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def is_live(self) -> bool:
        """Return whether the node still takes a place in its zone."""
        status = self.status()
        return (status is None or not status.state.is_gone) and self.is_host_alive()

    def request_stop(self) -> None:
        (self.path / "stop").touch()

    def is_stop_requested(self) -> bool:
        return (self.path / "stop").exists()

    def mark_prepared(self) -> None:
        (self.path / "prepared").touch()

    def is_prepared(self) -> bool:
        """Return whether `setup` is done on every node of the instance."""
        return all((node.path / "prepared").exists() for node in self.head.nodes())

    def request_preemption(self, at: float) -> None:
        """Leave the host a preemption for the instant `at` (UNIX seconds)."""
        write_json(self.path / "preempt.json", {"at": at})

    def preempt_at(self) -> float | None:
        raw = read_json(self.path / "preempt.json")
        return None if raw is None else float(raw["at"])

    def instance(self) -> Instance | None:
        """Return the instance whose head this is, as the cloud reports it, or None if none of its hosts ever came up.

        If only the head's did not, it is PENDING: its launch is under way, or was cut short and will be undone.
        """
        head = self.node()  # before the others: if it came up, they did
        others = [node.node() for node in self.nodes()[1:]]
        if head is not None:
            never = replace(head, state=InstanceState.TERMINATED, message="its host died at once")
            return instance_of_nodes([head, *(node or never for node in others)])
        record = self.record()
        if record is None or not any(others):
            return None
        return _instance_of(record, InstanceState.PENDING)

    def was_launched(self) -> bool:
        """Return whether the launch of the instance whose head this is was carried out: the head's host came up."""
        return self.node() is not None

    def ended_at(self) -> float | None:
        """Return when the last node of the instance whose head this is ended (UNIX seconds); None while one has not."""
        ends = [node.status() for node in self.nodes()]
        gone = [status.since for status in ends if status is not None and status.state.is_gone]
        return max(gone) if len(gone) == len(ends) else None

    def node(self) -> Instance | None:
        """This node alone as the cloud reports it, or None if its host never came up.

        One that was stopped had: it may have died of that before it said a word.
        """
        record = self.record()
        if record is None:
            return None
        # In this order: a host writes its last status before it lets go of the lock.
        host_alive = self.is_host_alive()
        status = self.status()
        if status is None and not (host_alive or self.is_stop_requested() or self.host_error()):
            return None
        state, message = self._state(status, host_alive)
        preempt_at = None if status is None or state.is_gone else status.preempt_at
        return _instance_of(record, state, preempt_at, message)

    def _state(self, status: Status | None, host_alive: bool) -> tuple[InstanceState, str]:
        if status is not None and status.state.is_gone:
            return status.state, status.message
        if not host_alive:
            if self.is_stop_requested():
                return InstanceState.TERMINATED, ""
            return (
                InstanceState.TERMINATED,
                f"the host process died: {self.host_error() or 'the reason is unknown'}",
            )
        if self.is_stop_requested():
            return InstanceState.STOPPING, ""
        return (InstanceState.PENDING, "") if status is None else (status.state, status.message)


def _instance_of(
    record: LaunchRecord, state: InstanceState, preempt_at: float | None = None, message: str = ""
) -> Instance:
    return Instance(
        id=record.id,
        token=record.token,
        owner=record.owner,
        service=record.service,
        replica_id=record.replica_id,
        zone=Zone(CLOUD, record.region, record.zone),
        capacity_type=record.capacity_type,
        state=state,
        endpoint=record.endpoint,
        preempt_at=preempt_at,
        message=message,
    )


class LocalStore:
    """The folder of one local cloud."""

    def __init__(self, home: Path) -> None:
        self.root = home / "local"
        self.instances_path = self.root / "instances"

    @property
    def config_path(self) -> Path:
        return self.root / "cloud.yaml"

    @property
    def market_path(self) -> Path:
        return self.root / "market.json"

    def cache_path(self, cache: Cache) -> Path:
        """Return the folder that outlives replicas. No link leads elsewhere."""
        path = self.root.resolve() / "cache" / cache.folder
        if path.resolve() != path:
            raise InvalidRequestError(
                f"{path} is a link, or in one: a cache is a folder of ours", cloud=CLOUD
            )
        return path

    def create(self) -> None:
        self.instances_path.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)  # logs may hold what users typed

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Alone among all threads and processes, until the block ends or the process exits."""
        self.create()
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def next_sequence(self) -> int:
        """Call with the lock held."""
        path = self.root / "sequence"
        sequence = 1 + (int(path.read_text()) if path.exists() else 0)
        write_text(path, str(sequence))
        return sequence

    def folder(self, token: str) -> InstanceFolder:
        return InstanceFolder(self.instances_path / token)

    def folders(self) -> list[InstanceFolder]:
        """Return one for each instance."""
        return [folder for folder in self._entries() if not folder.path.name.startswith(".")]

    def nodes(self) -> list[InstanceFolder]:
        """Return every node of every instance."""
        return [node for folder in self.folders() for node in folder.nodes()]

    def drafts(self) -> list[InstanceFolder]:
        return [folder for folder in self._entries() if folder.path.name.startswith(".")]

    def _entries(self) -> list[InstanceFolder]:
        try:
            return [InstanceFolder(path) for path in sorted(self.instances_path.iterdir())]
        except FileNotFoundError:
            return []

    def draft(self, token: str, num_nodes: int) -> InstanceFolder:
        """Return a folder in the making, invisible to others: what a launch that is cut short leaves behind.

        Call with the lock held.
        """
        draft = InstanceFolder(self.instances_path / f".{token}")
        shutil.rmtree(draft.path, ignore_errors=True)
        draft.path.mkdir(mode=0o700)
        draft.work_path.mkdir()
        for rank in range(1, num_nodes):
            draft.at(rank).work_path.mkdir(parents=True)
        return draft

    def publish(self, draft: InstanceFolder, records: Sequence[LaunchRecord]) -> InstanceFolder:
        """Make the drafted instance appear, all nodes of it in one step."""
        for node, record in zip(draft.nodes(), records, strict=True):
            node.write_record(record)
        folder = self.folder(draft.token)
        draft.path.rename(folder.path)
        return folder

    def node_id(self, node: InstanceFolder) -> str:
        """Return an id no other home uses, and the same again after a launch that was cut short.

        The head's is the instance's.
        """
        name = node.token if node.rank == 0 else f"{node.token}.{node.rank}"
        return "i-" + sha256(f"{self.root.resolve()}\0{name}".encode()).hexdigest()[:12]
