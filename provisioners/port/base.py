"""The interface of a cloud: four methods, five errors (`errors`), a few values.

A replica of several nodes is one instance here: launched whole in one zone or not at all, shown as one, destroyed
as one. `multi_node` has the rule by which the states of its nodes become the state of the instance.

One contract suite (`provisioners.contract`) runs over every implementation and checks what the docstrings here promise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from policies.goals import AcceleratorQps
from policies.model import CapacityType, Offer, Role, Zone
from provisioners.port.docker_image import full_name
from provisioners.port.errors import ProvisionError, Refusal
from provisioners.port.lease import Lease

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection, Login

DOCKER = "docker:"
CACHE_VARIABLE = "SKYSERVE_CACHE"
DISK_GB = 256  # SkyPilot's default: it holds an engine, its image and the weights of a model


@dataclass(frozen=True, slots=True)
class Candidate:
    """One acceptable shape of a replica's nodes.

    None and "*" mean "any"; `max_hourly_cost` is of one node. Where an order is wanted, those of the least `preference`
    come first. Every offer for the candidate carries its `choice`.
    """

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    accelerator: str | None = None
    accelerator_count: float = 1.0
    cpus: str | None = None
    memory: str | None = None
    instance_type: str | None = None
    use_spot: bool = False
    max_hourly_cost: float | None = None
    preference: int = 0
    choice: int = 0
    reservation: str | None = None  # its name, or "none" for other capacity


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a service requires of a cloud.

    `ordered`: earlier candidates are preferred at any cost. A replica is `num_nodes` machines, and offers are
    priced for all of them. With `work` (what a replica serves, by accelerator) it is the price for the work that is
    compared. For a LOAD_BALANCER it is small machines without accelerators.
    """

    candidates: tuple[Candidate, ...]
    ordered: bool = False
    num_nodes: int = 1
    role: Role = Role.REPLICA
    work: tuple[AcceleratorQps, ...] = ()


PEERS_OFFSET = 443  # of the port for peers of a load balancer from the port for its clients
_LAST_PORT = 65_535


def peers_port(port: int) -> int:
    """Return the port for peers of a load balancer whose clients come to `port`."""
    return port + PEERS_OFFSET if port + PEERS_OFFSET <= _LAST_PORT else port - PEERS_OFFSET


@dataclass(frozen=True, slots=True)
class Cache:
    """Folders that outlive replicas, one for each of `variables`, below `folder` (OWNER/TEAM/SERVICE) of the node.

    With `claim` they are in that PersistentVolumeClaim of Kubernetes. Raises ValueError for another `folder`.
    """

    folder: str
    variables: tuple[str, ...]
    claim: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(
            r"[A-Za-z0-9-][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9-][A-Za-z0-9._-]{0,99}){2}", self.folder
        ):
            raise ValueError(f"{self.folder!r} is no folder of a cache")

    def environment(self, root: str) -> dict[str, str]:
        """Return the variables of a replica that sees the folder at `root`."""
        return {CACHE_VARIABLE: root, **{name: f"{root}/{name.lower()}" for name in self.variables}}


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Everything one launch needs; the same order with the same token may be sent any number of times.

    `token` is derived from owner, service, replica id and offer, and fit for instance names and tags
    (lower-case letters, digits, hyphens; at most 63 characters). `owner` marks everything this controller
    ever launched. `env` are plain variables, `secrets` those that must never reach a log, a command line or a
    disk in clear. `port` is the port the user's server listens on, or None if it takes $SKYSERVE_REPLICA_PORT; a
    LOAD_BALANCER's is open to the world, and with `has_peers` its `peers_port` to the other load balancers of the service.

    `setup` and `run` start on each of `num_nodes` machines, `run` when `setup` is done on all of them. They report
    each other apart by $SKYPILOT_NODE_RANK (0 is the head, which serves the port), and find each other by
    $SKYPILOT_NODE_IPS (a line per node, by rank), $SKYPILOT_NUM_NODES and $SKYPILOT_NUM_GPUS_PER_NODE.

    `file_mounts` are by target, what it is filled from: a path of this machine, or the URL of a bucket. `image` is what
    a machine boots, as its cloud calls it, or "docker:NAME" for the container that the scripts run in. `disk_gb` is of
    the boot disk. None is the cloud's default, where the user has set none for all. `pod` is a patch over
    the Pod of a replica in Kubernetes, as JSON.
    """

    token: str
    owner: str
    service: str
    replica_id: int
    version: int
    offer: Offer
    setup: str | None
    run: str
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    workdir: str | None = None
    file_mounts: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    role: Role = Role.REPLICA
    has_peers: bool = False
    image: str | None = None
    disk_gb: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    pod: str | None = None
    cache: Cache | None = None

    @property
    def machine_image(self) -> str | None:
        """What the machine is to boot."""
        return None if self.docker_image is not None else self.image

    @property
    def docker_image(self) -> str | None:
        """What the scripts are to run in, with its registry."""
        if self.image is None or not self.image.startswith(DOCKER):
            return None
        return full_name(self.image.removeprefix(DOCKER), {**self.env, **self.secrets})


class InstanceState(str, Enum):
    """The state of an instance, setup included; for one of several nodes see `multi_node`."""

    PENDING = "pending"  # accepted, not booted
    UNSUPERVISED = "unattended"  # it runs without a supervisor, because the process that set it up has exited: send its order again
    SETUP = "setup"  # booted; `setup` runs
    RUNNING = "running"  # `run` was started
    SETUP_FAILED = "setup_failed"
    RUN_EXITED = "run_exited"
    BROKEN = "broken"  # a part of it is gone, and the rest is of no use until it is terminated
    STOPPING = "stopping"  # we requested its end
    PREEMPTED = "preempted"  # the cloud took it
    TERMINATED = "terminated"  # it is gone on request, or for an unknown reason

    @property
    def is_gone(self) -> bool:
        """Whether nothing of the instance is left running or billed."""
        return self in (InstanceState.PREEMPTED, InstanceState.TERMINATED)


@dataclass(frozen=True, slots=True)
class Instance:
    """One replica's machine or machines as the cloud reports it; `id` and `endpoint` are those of the head.

    `preempt_at` (UNIX seconds) is set while a preemption notice stands, for whichever node. `retire_at` is when a node will be
    stopped or taken, as announced long before: 0.0 if nothing is announced, None if that is not known. `endpoint` is the base
    URL on which the replica's port can be reached, once known. `message` is one sentence about a failed state. `refusal` says
    that the cloud accepted the instance and then could not, or would not, start it: it counts as if refused at once. `lease` is that of
    the machine that terminates first.
    """

    id: str
    token: str
    owner: str
    service: str
    replica_id: int
    zone: Zone
    capacity_type: CapacityType
    state: InstanceState
    endpoint: str | None = None
    preempt_at: float | None = None
    retire_at: float | None = None
    message: str = ""
    refusal: Refusal | None = None
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class InstanceList:
    """The instances of an owner in the places that responded.

    `silent`: why, for each region or zone that did not; instances there may be missing here and exist anyway.
    `closed`: a sentence for each region that does not let us in, which is left out of offers; it may be silent, too.
    """

    instances: Sequence[Instance]
    silent: Mapping[str, ProvisionError] = field(default_factory=dict)
    closed: Mapping[str, str] = field(default_factory=dict)


def is_silent(zone: Zone, silent: Collection[str]) -> bool:
    """Return whether the zone, or its region, is among the places that did not respond."""
    return bool(silent) and (zone.region in silent or zone.name in silent)


class Provisioner(Protocol):
    """A cloud. Thread-safe: calls for different replicas come from different threads at once."""

    name: ClassVar[str]

    def offers(self, need: Requirements) -> Sequence[Offer]:
        """Return what could be launched for `need` here, cheapest first (or in the order of the candidates).

        An offer has the `choice` of the candidate that it fits; one that fits several candidates, of the first.

        Capacity is not promised: a zone without room is still offered. Unknown accelerators or regions give
        an empty result, not an error. Takes seconds at most; may use a cache.
        """
        ...

    def launch(self, order: LaunchOrder) -> Instance:
        """Start an instance; returns once the cloud accepted it, long before it is of use.

        All nodes of it start in the offer's zone, or none does: a zone with room for some of them has no room.

        The same token twice gives the same instance, even if it has terminated since. Raises the classes of
        `provisioners.port.errors` only; after an error other than TransientError nothing is left behind.
        """
        ...

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        """Return every instance of `owner` (of one service), by tag. Instances that are being terminated, or were recently, are included.

        Never another owner's. An instance that was launched and is not listed is gone.
        """
        ...

    def terminate(self, instance: Instance) -> None:
        """Terminate the instance with all its nodes and all that came with it.

        Already gone is success. Returns once it is gone or the cloud has accepted the request; `instances` shows when it is
        gone.
        """
        ...


@runtime_checkable
class RegionalSource(Protocol):
    """A provisioner whose regions fail one by one."""

    def listing(self, owner: str) -> InstanceList:
        """Like `instances`, but a region that does not respond is named and no error, unless no region responds."""
        ...


@runtime_checkable
class ReportSource(Protocol):
    """A provisioner that learns from the machines themselves, between two listings, what has become of an instance.

    A preemption notice above all, which leaves no time to wait for the next listing.
    """

    def on_report(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever `reported` may show another state, endpoint or notice than before.

        It comes from any thread, holds no lock and returns at once. Replaces the callback of before.
        """
        ...

    def reported(self, owner: str) -> Sequence[Instance]:
        """Return the instances as last listed, with what their machines have reported since.

        The cloud is not called, so an instance that is missing here may well exist. Returns at once.
        """
        ...


@runtime_checkable
class Gated(Protocol):
    """A provisioner whose machines are behind a firewall that we set."""

    def admit(self, owner: str, balancers: Mapping[str, frozenset[str]]) -> None:
        """Only this host and, by service, load balancers with these addresses may open ports of the owner's replicas.

        To be called over and over; calls its cloud only if something has changed, or was not checked for some minutes.
        Raises ProvisionError.
        """
        ...


@runtime_checkable
class LogSource(Protocol):
    """A provisioner that can show what a replica printed, node by node; node 0 is the head."""

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        """Return bytes of the node's log (setup, then run) from `offset`; empty at the end.

        Works for dead instances as long as their logs are kept. A node that is none has an empty log.
        """
        ...

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        """Return the offsets that can be read: (first kept byte, end).

        Old parts of a long log are dropped, and reading before the first kept byte starts there.
        """
        ...

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        """Return when the node's log was written.

        The first `most` marks later than `after` (UNIX seconds of its machine) and not before `offset`, as in
        `host_agent.log_times`. Empty where there are none.
        """
        ...


@runtime_checkable
class LoginSource(Protocol):
    """A provisioner whose machines can be logged in to: load balancer agents can stand on them."""

    def log_in(self, instance: Instance) -> HostConnection:
        """Return a connection of the caller's own to the head of the instance. Raises ShellError or ProvisionError."""
        ...

    def login(self, instance: Instance, node: int = 0) -> Login:
        """Return how to log in to a node of the instance, which gets its lasting keys first if it has others.

        Raises ProvisionError if it has no address, or ShellError.
        """
        ...

    def work_folder(self, instance: Instance, node: int = 0) -> str:
        """Return where `run` was started, below the home of the user who is logged in."""
        ...


def is_url(source: str) -> bool:
    """Return whether files of an order come from elsewhere than this host."""
    return "://" in source
