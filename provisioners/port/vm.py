"""The interface of a cloud that rents machines: what it must do, one machine at a time.

`provisioners.vm_provisioner` makes a `Provisioner` of it: offers, replicas of several machines, bootstrap over SSH, logs,
preemption notices and orphans are the same everywhere and are written once, there. A cloud's own module says how to
request a machine from its SDK, how to read what the SDK lists, and what its error codes mean.

*Names before calls.* Everything that a cloud creates for us has our tags from its creation on, and a name or an idempotency
token that follows from the order alone. So a call whose response was lost can be repeated, and what no database row names can
be found and attributed (`OWNER_TAG`). *User data has no secret* but the private half of the host key by which the machine is
recognized until the first login (`first_login`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from policies.model import CapacityType, Role, Scope, Zone
from provisioners.port.errors import ProvisionError, Refusal, RefusedError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.image_family import ImageFamily, image_family
from provisioners.port.regions import ClosedRegions

OWNER_TAG = "skyserve-owner"
SERVICE_TAG = "skyserve-service"
REPLICA_TAG = "skyserve-replica"
TOKEN_TAG = "skyserve-token"  # noqa: S105 (an idempotency token is no secret)
RANK_TAG = "skyserve-rank"
NODES_TAG = "skyserve-nodes"
ROLE_TAG = "skyserve-role"
PORTS_TAG = "skyserve-ports"  # of a security group: what the rules for its machines are made for
PUBLIC_PORTS_TAG = "skyserve-public-ports"
CAPACITY_TAG = "skyserve-capacity"
CONTROLLER_OWNER = (
    "controller-"  # how the owner of a controller's own machine begins: no orphan finder touches what it has
)

MAX_TOKEN = 58  # of a replica; a machine's has its rank on top, and clouds allow 63


@dataclass(frozen=True, slots=True)
class MachineOrder:
    """One machine. The same order may be sent any number of times, and makes one machine.

    `token` is the machine's own: `machine_token` of the replica's token and the rank. `user_data` is run as root at
    first boot. `public_key` is the OpenSSH line of who may log in as `user`. `ports` and port 22 are reachable from `sources`
    (CIDR blocks) and from those whom `Machines.admit` names; `public_ports` from everywhere. `image` is the cloud's own name of one, None for its default. `disk_gb` is of the boot
    disk, None for the cloud's default. `reservation` is the name in config.yaml of the reserved capacity to use, if any.
    """

    token: str
    owner: str
    service: str
    replica_id: int
    rank: int
    num_nodes: int
    zone: Zone
    instance_type: str
    capacity_type: CapacityType
    public_key: str
    user: str = "skyserve"
    user_data: str = ""
    accelerator: str | None = None
    accelerator_count: float = 0.0
    image: str | None = None
    disk_gb: int | None = None
    ports: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    role: Role = Role.REPLICA
    public_ports: tuple[int, ...] = ()
    reservation: str = ""

    @property
    def tags(self) -> dict[str, str]:
        """Everything by which the machine, and what comes with it, is found again.

        The user's labels come first, so that they cannot take the place of ours.
        """
        return {
            **self.labels,
            OWNER_TAG: self.owner,
            SERVICE_TAG: self.service,
            REPLICA_TAG: str(self.replica_id),
            TOKEN_TAG: self.token,
            RANK_TAG: str(self.rank),
            NODES_TAG: str(self.num_nodes),
            CAPACITY_TAG: self.capacity_type.value,
            ROLE_TAG: self.role.value,
        }

    def machine(self, machine_id: str, state: MachineState, **more: Any) -> Machine:
        """Return the machine that is made of it, before the cloud shows it; `more` are other fields of Machine."""
        return Machine(
            id=machine_id,
            token=self.token,
            owner=self.owner,
            service=self.service,
            replica_id=self.replica_id,
            rank=self.rank,
            num_nodes=self.num_nodes,
            zone=self.zone,
            capacity_type=self.capacity_type,
            state=state,
            **more,
        )


class MachineState(str, Enum):
    """The state of one machine as its cloud reports it. What runs on it is reported by the machine."""

    PENDING = "pending"  # accepted, not running yet
    RUNNING = "running"
    STOPPING = "stopping"  # being deleted, on anyone's request
    PREEMPTED = "preempted"  # the cloud took it
    TERMINATED = "terminated"  # gone on request, or for an unknown reason
    FAILED = "failed"  # it never ran and never will, but something of it is left: to be destroyed

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left running or billed."""
        return self in (MachineState.PREEMPTED, MachineState.TERMINATED)


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as its cloud reports it.

    `address` is where it can be reached from here, `private_address` from its own region. `launched_at` and `preempt_at`
    are UNIX seconds; the latter stands while the cloud's API (not the machine's metadata service) says that it will be
    taken. `message` is one sentence about how it came to its end, and `refusal` what that means where the cloud terminated it
    because it could not, or would not, start it. A cloud that has names and no tags shows every machine as a replica, and of its
    service what `service_in` returns.
    """

    id: str
    token: str
    owner: str
    service: str
    replica_id: int
    rank: int
    num_nodes: int
    zone: Zone
    capacity_type: CapacityType
    state: MachineState
    address: str | None = None
    private_address: str | None = None
    launched_at: float | None = None
    preempt_at: float | None = None
    message: str = ""
    instance_type: str = ""
    refusal: Refusal | None = None
    role: Role = Role.REPLICA


class SpotPrice(Protocol):
    """What a machine costs in a zone now."""

    def __call__(self, instance_type: str, zone: Zone) -> float | None: ...


@dataclass(frozen=True, slots=True)
class OrphanedResource:
    """Something that is billed, or in the way, and belongs to no machine any more: a disk, an address, a card.

    The rest is as far as it is known: `token` of the machine that it came with, `created_at` in UNIX seconds, and about
    what it costs.
    """

    kind: str
    id: str
    region: str
    token: str = field(default="", compare=False)
    created_at: float | None = field(default=None, compare=False)
    usd_month: float | None = field(default=None, compare=False)


class Level(str, Enum):
    """How much a finding of `serve check` matters."""

    FINE = "fine"
    NOTE = "note"  # worth knowing, or not possible to determine: machines can be rented anyway
    MISSING = "missing"  # without it no machine can be rented


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `serve check`: what was checked, how much the result matters, and what to do about it."""

    what: str
    level: Level = Level.FINE
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.level is not Level.MISSING


@runtime_checkable
class Checked(Protocol):
    """A provisioner that can say what keeps it from launching."""

    def check(self) -> Sequence[Finding]:
        """Check credentials, permissions and quotas. Nothing is launched or changed."""
        ...


@dataclass(frozen=True, slots=True)
class Trial:
    """A machine that `serve check` validates with a cloud without launching it."""

    zone: Zone
    instance_type: str
    capacity_type: CapacityType
    accelerator: str | None = None


#: Called with a region that cannot be listed, and why, while the others are listed. May be called on other threads.
Silent = Callable[[str, ProvisionError], None]


class Machines(Protocol):
    """A cloud that rents machines. Thread-safe. Raises only the classes of `provisioners.port.errors`.

    What a list lacks counts as gone, so a region that cannot be listed is an error. A caller that can use a part of the list
    gives `silent`, which is called with each region (or zone) that did not respond; if none responded, that is an error. Regions
    that are known to be closed (`closed`) are left out, and `silent` is called with those that `machines` leaves out.
    """

    closed: ClosedRegions  # what was found closed; `VmProvisioner` adds what launches find

    @property
    def name(self) -> str:
        """Return the cloud's name."""

    def create(self, order: MachineOrder) -> Machine:
        """Create the machine; return once the cloud has accepted it.

        The network, firewall and key that it needs are created as needed, and shared.

        The same order twice is the same machine, even if that has terminated since (as TERMINATED or PREEMPTED, as long as the cloud
        lists it). After an error other than TransientError nothing is left behind. A machine that the cloud accepts and then
        cannot start shows as FAILED; if the method waited for the outcome, it deletes the machine and raises the error.
        """
        ...

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        """Return the owner's machines in all regions, by tag.

        Machines that are being deleted are included, and deleted ones as long as the cloud lists them.
        """
        ...

    def destroy(self, machine: Machine) -> None:
        """Destroy the machine and all that came with it. Already gone is success."""
        ...

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        """Return USD per hour by (instance type, zone name), as far as the cloud lists them. May take seconds.

        Only `instance_types` matter; empty means every type. With `silent`, a region that does not respond loses only its own prices,
        and `silent` gets the region and the error.
        """
        ...

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        """Return what has the owner's tag and belongs to no machine, in an order in which it can be removed.

        What machines share (`shared`) is not included.
        """
        ...

    def remove(self, orphan: OrphanedResource) -> None:
        """Remove one orphan. Already gone is success. The cloud rejects the removal of what a machine uses."""
        ...

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        """Return what the owner's machines share: what `delete_shared` removes."""
        ...

    def admit(self, owner: str, access: FirewallAccess) -> None:
        """Let exactly these open ports of the owner's machines, of present and of future ones.

        Idempotent; the next call completes an interrupted one. Ports are opened before others are closed. If some rules cannot be
        changed, the rest is changed, then the error is raised.
        """
        ...

    def delete_shared(self, owner: str) -> Sequence[str]:
        """Delete what the owner's machines share (groups, keys, networks).

        To be called when there are no machines and none will be launched. Returns a sentence for each thing that could not
        be deleted.
        """
        ...

    def check(self) -> Sequence[Finding]:
        """Check credentials, permissions (by dry runs, which change nothing) and quotas, in this order.

        If the credentials fail, nothing else is checked.
        """
        ...


def in_region(setting: str | Mapping[str, str] | None, region: str) -> str | None:
    """Return the region's value of a setting for all regions, or for each; None: the cloud's default."""
    return setting.get(region) if isinstance(setting, Mapping) else setting


def default_image(
    order: MachineOrder, images: Mapping[ImageFamily, str], accelerator: str | None = None
) -> str:
    """Return the image of `images`, a cloud's own, that fits the order's machine type.

    `accelerator` is the type's, if the order names none. Raises RefusedError if none fits: the machine would boot without
    working accelerators, or not at all.
    """
    cloud = order.zone.cloud
    machine_type = order.instance_type.partition("+")[0]
    family = image_family(cloud, machine_type, order.accelerator or accelerator)
    if family not in images:
        raise RefusedError(
            f"{order.instance_type} needs an image of the family {family.value!r}, and {cloud} has no default one here: "
            f"name an image in the service file or in clouds.{cloud}.image",
            cloud=cloud,
            code="NoDefaultImage",
            zone=order.zone,
            scope=Scope.TYPE,
        )
    return images[family]


@runtime_checkable
class OwnerSource(Protocol):
    """`Machines` of a cloud that can list whose things there are."""

    def owners(self, silent: Silent | None = None) -> Sequence[str]:
        """Return every owner (`OWNER_TAG`) of anything there, sorted; perhaps one of which nothing is left."""
        ...


def role_in(tags: Mapping[str, str]) -> Role:
    """Return the role of a machine with these tags. Machines without such a tag have that of a replica."""
    found = tags.get(ROLE_TAG, "")
    return Role(found) if found in {role.value for role in Role} else Role.REPLICA


def machine_token(token: str, rank: int) -> str:
    """Return the token of the replica's machine of that rank. The head's is the replica's own."""
    return token if rank == 0 else f"{token}-n{rank}"


def token_of_replica(token: str) -> str:
    """Return the token of the replica whose machine has that token. A replica's own ends in hexadecimal digits."""
    return re.sub(r"-n[1-9][0-9]*$", "", token)


def service_in(token: str, owner: str) -> str:
    """Return what the token of a machine says of its service: in lower case, and if it is long, only its first part.

    A token that names no service stands for itself.
    """
    found = re.fullmatch(rf"{re.escape(owner)}-(.+)-[0-9]+-[0-9a-f]{{10}}", token_of_replica(token))
    return token_of_replica(token) if found is None else found[1]


def replica_token(machine: Machine) -> str:
    """Return the token of the replica that the machine is a part of."""
    return machine.token.removesuffix(f"-n{machine.rank}") if machine.rank else machine.token


@runtime_checkable
class KeyKeeper(Protocol):
    """A provisioner whose machines get other keys while they run."""

    def with_older_keys(self, owner: str) -> int:
        """Return how many running machines are not known to have the present keys yet. The cloud is not called."""
        ...


@runtime_checkable
class Renting(Protocol):
    """A provisioner of a cloud that rents machines, as `provisioners.vm_provisioner` makes it."""

    machines: Machines

    def poll_s(self) -> float:
        """Return the seconds until the next listing."""
        ...

    def clock_warning(self) -> str:
        """Return a sentence if the cloud's clock differs from ours; "" if it does not."""
        ...

    def usd_hour(self, machine: Machine) -> float | None:
        """Return what the machine costs per hour, if that is known."""
        ...

    def delete_shared(self, owner: str) -> Sequence[str]:
        """Delete what machines share, once the owner has none. Returns why not, if it has."""
        ...
