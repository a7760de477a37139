"""The values of the domain: replicas, offers, events, actions. Frozen, without behaviour beyond their fields.

Units are in the names: `_s` seconds, `_usd_hour` US dollars per hour. `now`, `since`, `at` and every other
instant are seconds on the controller's clock (UNIX time in the daemon, virtual in the simulator).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Union

from policies.goals import Goal, TeamRoom
from policies.history import NO_LOAD, History, Load


class CapacityType(str, Enum):
    """How an instance is bought: spot may be preempted, on-demand may not."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


class ReplicaState(str, Enum):
    """What a replica is doing. The only edge back is NOT_READY -> READY; see `lifecycle`."""

    REQUESTED = "REQUESTED"  # intent committed, the cloud has not responded yet
    PROVISIONING = "PROVISIONING"  # the cloud accepted; the instance boots and runs `setup`
    STARTING = "STARTING"  # `run` was started; no readiness probe has passed yet
    READY = "READY"
    NOT_READY = "NOT_READY"  # was ready; the last probe failed
    DRAINING = "DRAINING"  # gets no new request; finishes what it has
    TERMINATING = "TERMINATING"  # intent to destroy the instance committed
    GONE = "GONE"


class EndReason(str, Enum):
    """Why a replica terminated, beside the state that says that it did."""

    PREEMPTED = "PREEMPTED"
    CAPACITY = "CAPACITY"  # the zone had no room
    QUOTA = "QUOTA"
    AUTH = "AUTH"
    CONFIG = "CONFIG"  # the order is wrong wherever it is sent
    REFUSED = "REFUSED"  # the cloud refused the order there; elsewhere it may take it
    CLOUD_ERROR = "CLOUD_ERROR"  # a transient error that outlived its retries
    SETUP_FAILED = "SETUP_FAILED"
    RUN_EXITED = "RUN_EXITED"
    START_TIMEOUT = "START_TIMEOUT"
    PROBE_FAILED = "PROBE_FAILED"
    ONLY_ERRORS = "ONLY_ERRORS"  # clients got errors (5xx) from it and nothing else
    SCALED_DOWN = "SCALED_DOWN"
    REPLACED = "REPLACED"  # by an update
    SERVICE_DOWN = "SERVICE_DOWN"
    USER = "USER"  # `serve down NAME --replica-id N`
    LOST = "LOST"  # the cloud no longer knows an instance that was not preempted


class FailureKind(str, Enum):
    """What a failed launch means for the next decision (DESIGN: errors are classes by what the caller does next)."""

    CAPACITY = "capacity"  # another zone, now; teaches placement
    QUOTA = "quota"  # leave that region and capacity type until retry_at
    AUTH = "auth"  # stop using the cloud, or its region, until a person has acted
    REFUSED = "refused"  # not there, for a long while; fail the version once every offer was refused
    CONFIG = "config"  # fail the version, do not retry
    TRANSIENT = "transient"  # the bounded retries of one order are used up


class Scope(str, Enum):
    """What a failed launch is evidence about, from the narrowest to the widest."""

    OFFER = "offer"  # this machine type in this zone and market
    TYPE = "type"  # this machine type in the region
    ZONE = "zone"  # every machine in the zone
    REGION = "region"  # every machine in the region
    CLOUD = "cloud"  # every machine of the cloud; of a quota: of that accelerator and market


class Role(str, Enum):
    """What an instance is for. The first two have the same life (`lifecycle`); a CONTROLLER belongs to no service."""

    REPLICA = "replica"
    LOAD_BALANCER = "load_balancer"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, order=True)
class Zone:
    """A failure domain, or capacity in one that is reserved for the user.

    The name of the `reservation`, a zone of its own to placement, because its room and its price are its own. Sort zones,
    never iterate a set of them.
    """

    cloud: str
    region: str
    name: str
    reservation: str = ""

    def __str__(self) -> str:
        return f"{self.cloud}/{self.region}/{self.label}"

    @property
    def label(self) -> str:
        """Its name within the region, also for people: ``use1-az4``, or ``use1-az4+h100-block``."""
        return f"{self.name}+{self.reservation}" if self.reservation else self.name

    @property
    def physical(self) -> Zone:
        """Where its machines are."""
        return replace(self, reservation="") if self.reservation else self


@dataclass(frozen=True, slots=True)
class Offer:
    """A priced instance type in one zone and capacity type.

    Prices are for all nodes of a replica together. Where the user gave an order, offers of a lower `preference` are taken
    before all others at any cost; it is of no interest once a replica has the offer, and is not stored.

    `choice` is the index of the alternative under `resources` that the offer belongs to. It is stored with the replica,
    because image, disk and labels are the alternative's, and no field of the offer distinguishes equal machines of two
    alternatives apart. Policies do not read it.

    `places` is how many replicas the user's own hosts of this zone, or reservations there can hold when they are idle;
    None for a cloud, whose limits only a launch reveals. Like `preference`, it is not stored with a replica.
    """

    zone: Zone
    instance_type: str
    accelerator: str | None
    accelerator_count: float
    capacity_type: CapacityType
    price_usd_hour: float
    on_demand_usd_hour: float | None = None  # what the same instance costs on demand, for the comparison
    preference: int = 0
    choice: int = 0
    places: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One attempt to run one copy of the engine in one zone. A retry is a new replica with a new id.

    `since` is when `state` began. `launched_at` is when the cloud accepted it: its cost is the offer's price
    from then to `ended_at` (or now). `drain_by` is the instant by which a DRAINING replica must be empty.
    `retire_at` is when its machine will go or be stopped, as announced long before.

    A load balancer agent on a machine of its own is one of these, too, in another `role`: it is READY when the agent
    has its table, and DRAINING while clients may still know its address.
    """

    id: int
    version: int
    offer: Offer
    state: ReplicaState
    since: float
    created_at: float
    instance_id: str | None = None
    endpoint: str | None = None
    launched_at: float | None = None
    ready_at: float | None = None
    drain_by: float | None = None
    preempt_at: float | None = None
    ended_at: float | None = None
    end_reason: EndReason | None = None
    message: str = ""  # the last sentence worth showing: why it failed, why it drains
    role: Role = Role.REPLICA
    retire_at: float | None = None

    @property
    def zone(self) -> Zone:
        return self.offer.zone


# --- Events: what happened. Every event names its replica. -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launched:
    """The cloud accepted the launch."""

    replica_id: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """The cloud refused the launch, or accepted it and terminated the instance before it was of use.

    `scope` None is the usual one of the kind (`placement.zone_backoff`).
    """

    replica_id: int
    kind: FailureKind
    message: str = ""
    retry_at: float | None = None
    scope: Scope | None = None


@dataclass(frozen=True, slots=True)
class Progressed:
    """Bringing it up has come to another step, or waits for something: `message` names it."""

    replica_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """`setup` is done and `run` was started; `endpoint` is the base URL the replica will serve on."""

    replica_id: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class BootstrapFailed:
    replica_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class RunExited:
    """The `run` command ended without a request to stop; the instance may still be alive."""

    replica_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class ProbePassed:
    replica_id: int


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """`since` is when it began to fail; None: now."""

    replica_id: int
    message: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A limit was reached: `reason` is START_TIMEOUT or PROBE_FAILED (of time), ONLY_ERRORS, or CLOUD_ERROR (of tries)."""

    replica_id: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """The cloud will take the instance at `preempt_at`."""

    replica_id: int
    preempt_at: float


@dataclass(frozen=True, slots=True)
class RetireNotice:
    """The cloud will stop or take the instance at `retire_at`, long enough from now to replace it before; None: not any more."""

    replica_id: int
    retire_at: float | None


@dataclass(frozen=True, slots=True)
class Preempted:
    """The instance is gone and we did not request it. `lost`: not a spot preemption, the reason is unknown."""

    replica_id: int
    lost: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A replica of several nodes has lost one for good: the rest runs, costs money, and is of no use."""

    replica_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is in flight any more, or the time to drain is over (`message` names which)."""

    replica_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Terminated:
    """The cloud confirmed that the instance is gone."""

    replica_id: int


Event = Union[  # noqa: UP007 - evaluated at run time, and Python 3.10 has no `type` statement
    Launched, LaunchFailed, Progressed, Bootstrapped, BootstrapFailed, RunExited, ProbePassed, ProbeFailed, GaveUp,
    PreemptionNotice, RetireNotice, Preempted, NodeLost, Drained, Terminated,
]  # fmt: skip


# --- Actions: what was decided. Every action has its reason. -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    replica_id: int
    offer: Offer
    version: int
    why: str
    role: Role = Role.REPLICA


@dataclass(frozen=True, slots=True)
class Drain:
    replica_id: int
    reason: EndReason
    why: str
    drain_by: float


@dataclass(frozen=True, slots=True)
class Terminate:
    replica_id: int
    reason: EndReason
    why: str


Action = Union[Launch, Drain, Terminate]  # noqa: UP007


# --- What a decision sees and leaves behind -----------------------------------------------------------------


Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """What policies remember from tick to tick: JSON, one row in the store, never attributes of an object."""

    next_replica_id: int = 1
    placement: Json = field(default_factory=dict)
    scaling: Json = field(default_factory=dict)
    rollout: Json = field(default_factory=dict)
    balancers: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """The immutable input of a tick.

    `replicas` are the live ones (not GONE), events already applied. `room_usd_hour` is the rest of the budget of all
    services together, `team` what the service's team leaves to it (None: no team, or one without limits). `history` is None where
    no policy reads it. More than `most_launches` are not made now.
    """

    now: float
    goal: Goal
    replicas: tuple[Replica, ...]
    offers: tuple[Offer, ...]
    load: Load = NO_LOAD
    events: tuple[Event, ...] = ()
    room_usd_hour: float = math.inf
    history: History | None = None
    team: TeamRoom | None = None
    most_launches: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, what to remember, and sentences for the event log (`notes`).

    `wanted` is how many replicas the load needs (`why`: a sentence, or empty), `target` how many should serve so that they are
    there. `wake_at` is the earliest instant at which the plan may differ
    although nothing has happened (a wait ends); None: never.
    """

    actions: tuple[Action, ...]
    memory: Memory
    notes: tuple[str, ...] = ()
    target: int = 0
    wanted: int = 0
    wake_at: float | None = None
    why: str = ""
