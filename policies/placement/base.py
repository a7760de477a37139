"""The port of a placement policy, and the values it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from policies.goals import PlacementGoal
from policies.model import Event, Json, Offer, Replica


@dataclass(frozen=True, slots=True)
class View:
    """What a placer sees, once per tick.

    `wanted` is the number of replicas the load needs (the paper's N_tar). `replicas` are those of the wanted
    version that live and are not being terminated. `others` are of an older version and serve beside them during a
    rolling update: a placer neither terminates nor replaces them, but they occupy zones and serve requests. `offers`
    are best first; on-demand ones are among them where the goal has a use for them. At most `limit` launches may
    be made now.

    `wanted_qps` is what the wanted replicas have to carry together, where replicas differ in what they can do; None: as
    many as `wanted` of the best offer can. At least `least` replicas are wanted whatever each of them can do.
    What a scaler forecasts, each None where it does not: `wanted_later[i]` is the chance that i replicas more than `wanted` are
    needed when a replica launched now would be ready; `wanted_then` of those wanted are still wanted at that time; and
    `needed_now` are enough for the present demand, the others are there ahead of it. `leaving` are replicas with a preemption notice: they still serve, and are
    lost to everything else.
    """

    now: float
    wanted: int
    goal: PlacementGoal
    replicas: tuple[Replica, ...]
    others: tuple[Replica, ...]
    offers: tuple[Offer, ...]
    limit: int
    wanted_qps: float | None = None
    least: int = 1
    wanted_later: tuple[float, ...] | None = None
    leaving: tuple[Replica, ...] = ()
    wanted_then: int | None = None
    needed_now: int | None = None

    @property
    def passing(self) -> int:
        """How many of the wanted replicas will not be wanted any more when one launched now would be ready."""
        return 0 if self.wanted_then is None else max(0, self.wanted - self.wanted_then)

    @property
    def ahead(self) -> int:
        """How many of the wanted replicas are for demand that has yet to come, or for headroom."""
        return 0 if self.needed_now is None else max(0, self.wanted - self.needed_now)


class PlannedLaunch(NamedTuple):
    """One decided launch: where, and why there."""

    offer: Offer
    why: str


class PlannedTermination(NamedTuple):
    """One replica too many, and why this one."""

    replica_id: int
    why: str


class Decision(NamedTuple):
    """`target` is how many replicas should serve; `launches` come most urgent first.

    `wake_at` is the earliest instant at which the decision may differ although nothing has happened; None: never.
    """

    target: int
    memory: Json
    launches: Sequence[PlannedLaunch] = ()
    ends: Sequence[PlannedTermination] = ()
    wake_at: float | None = None
    notes: tuple[str, ...] = ()


class PlacementPolicy(Protocol):
    """Decides how many replicas of which capacity go where, and which are too many.

    Pure; what it remembers is JSON in `memory`, which changes only when something has happened: every change is
    a write to the database. Deciding again on the outcome of a decision gives nothing more to do. Ties go by the
    order of the offers.
    """

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        """Return what the events teach.

        `replicas` are as they were before the events. Only capacity errors and preemptions say something about a zone;
        quota and permission errors say where not to launch.
        """
        ...

    def decide(self, view: View, memory: Json) -> Decision:
        """The launches and terminations that bring the fleet to what it should be now."""
        ...
