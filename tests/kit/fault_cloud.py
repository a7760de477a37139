"""SimCloud: a cloud in virtual time, behind the same port as every other, with faults by seed.

An instance's life is decided when it is made (when it boots, whether its setup fails, when the market takes it
and with how much notice), so its state is a function of the clock and nothing has to be stepped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.model import CapacityType, Offer, Zone
from provisioners.port.base import Instance, InstanceList, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import AuthError, CapacityError, ProvisionError, QuotaError, TransientError
from tests.kit.clock import SimClock

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Faults:
    """How hostile the cloud is. Probabilities are per call or per instance, times are means in seconds."""

    transient: float = 0.0  # the call fails and has done nothing
    lost_answer: float = 0.0  # the call succeeds and its response is lost
    quota: float = 0.0
    auth: float = 0.0
    setup_failure: float = 0.0
    run_exit: float = 0.0
    spot_life_s: float = NEVER
    notice: float = 0.0  # the part of preemptions that are announced
    notice_s: float = 30.0
    one_node: float = 0.0  # the part of preemptions that take a single node of a replica of several
    dry_s: float = 0.0  # after a preemption the zone has no spot capacity for about this long
    slow_call_s: float = 1.0
    crash: float = 0.0  # of the controller, per tick
    probe_flap: float = 0.0


@dataclass(slots=True)
class SimInstance:
    """One replica's machine or machines, with their fate. With `loses_one` the market takes a single node of them
    at `preempt_at`, and the others stay until they are terminated."""

    id: str
    order: LaunchOrder
    made_at: float
    boot_at: float
    run_at: float
    healthy_at: float
    setup_fails: bool
    exits_at: float
    preempt_at: float
    notice_at: float
    loses_one: bool = False
    terminated_at: float = NEVER

    @property
    def ended_at(self) -> float:
        """When the last node was gone."""
        return self.terminated_at if self.loses_one else min(self.terminated_at, self.preempt_at)

    def nodes(self, now: float) -> int:
        """How many nodes live."""
        if not self.made_at <= now < self.ended_at:
            return 0
        return self.order.num_nodes - (self.loses_one and now >= self.preempt_at)

    def usd(self, now: float) -> float:
        """What it has cost, each node for as long as it lived."""
        end = min(self.ended_at, now)
        last_s = min(end, self.preempt_at) - self.made_at  # of the node that may be lost before the others
        others_s = end - self.made_at
        count = self.order.num_nodes
        return self.order.offer.price_usd_hour * ((count - 1) * others_s + last_s) / count / 3600.0

    def state(self, now: float) -> InstanceState:
        if now >= self.ended_at:
            taken = self.preempt_at <= self.terminated_at
            return InstanceState.PREEMPTED if taken else InstanceState.TERMINATED
        if now >= self.preempt_at:
            return InstanceState.BROKEN
        if now < self.boot_at:
            return InstanceState.PENDING
        if now < self.run_at:
            return InstanceState.SETUP
        if self.setup_fails:
            return InstanceState.SETUP_FAILED
        return InstanceState.RUN_EXITED if now >= self.exits_at else InstanceState.RUNNING


@dataclass(slots=True)
class SimZone:
    zone: Zone
    spot_usd_hour: float
    on_demand_usd_hour: float
    spot_capacity: int = 4
    on_demand_capacity: int = 50
    dry_until: float = 0.0


@dataclass(slots=True)
class SimCloud:
    """A Provisioner. `ledger` is the bill: what really ran, for how long, at which price."""

    name: ClassVar[str] = "sim"
    clock: SimClock
    rng: random.Random
    zones: Sequence[SimZone]
    faults: Faults = field(default_factory=Faults)
    made: dict[str, SimInstance] = field(default_factory=dict)  # by token
    by_id: dict[str, SimInstance] = field(default_factory=dict)
    mute: set[str] = field(default_factory=set)  # regions that do not respond

    def offers(self, need: Requirements) -> Sequence[Offer]:
        found = []
        for candidate in need.candidates:
            for zone in self.zones:
                for kind, price in (
                    (CapacityType.SPOT, zone.spot_usd_hour),
                    (CapacityType.ON_DEMAND, zone.on_demand_usd_hour),
                ):
                    if (kind is CapacityType.SPOT) == candidate.use_spot:
                        offer = Offer(
                            zone.zone,
                            "sim-1",
                            candidate.accelerator,
                            1.0,
                            kind,
                            price * need.num_nodes,
                            zone.on_demand_usd_hour * need.num_nodes,
                            choice=candidate.choice,
                        )
                        found.append(offer)
        return sorted(found, key=lambda offer: (offer.price_usd_hour, offer.zone))

    def launch(self, order: LaunchOrder) -> Instance:
        self._refuse_mute(order.offer.zone)
        self._stumble(order.offer.zone)
        known = self.made.get(order.token)
        if known is None:
            known = self._make(order)
        if self.rng.random() < self.faults.lost_answer:
            raise TransientError("the answer was lost", cloud=self.name)
        return self._shown(known)

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        now = self.clock.now()
        return [
            self._shown(one)
            for one in self.made.values()
            if one.order.owner == owner
            and service in (None, one.order.service)
            and now - one.ended_at < 600.0
        ]

    def listing(self, owner: str) -> InstanceList:
        shown = [one for one in self.instances(owner) if one.zone.region not in self.mute]
        return InstanceList(shown, {region: _no_response(region) for region in sorted(self.mute)})

    def terminate(self, instance: Instance) -> None:
        self._refuse_mute(instance.zone)
        self._stumble(instance.zone, only_transient=True)
        found = self.by_id.get(instance.id)
        if found is not None and self.clock.now() < found.ended_at:
            found.terminated_at = self.clock.now()
        if self.rng.random() < self.faults.lost_answer:
            raise TransientError("the answer was lost", cloud=self.name)

    def _refuse_mute(self, zone: Zone) -> None:
        if zone.region in self.mute:
            raise _no_response(zone.region)

    # --- what only the simulation may know ------------------------------------------------------------------

    def alive(self) -> list[SimInstance]:
        now = self.clock.now()
        return [one for one in self.made.values() if now < one.ended_at]

    def healthy(self, instance_id: str) -> bool:
        now, one = self.clock.now(), self.by_id[instance_id]
        return one.healthy_at <= now and one.state(now) is InstanceState.RUNNING

    def ledger_usd(self) -> float:
        now = self.clock.now()
        return sum(one.usd(now) for one in self.made.values())

    def preempt(self, instance_id: str, notice_s: float = 0.0, *, one_node: bool = False) -> None:
        """The market takes this one, or a single node of it, now or after a notice. What has ended or is broken stays so."""
        one = self.by_id[instance_id]
        if self.clock.now() >= min(one.preempt_at, one.terminated_at):
            return
        one.loses_one = one_node and one.order.num_nodes > 1
        one.notice_at = self.clock.now()
        one.preempt_at = self.clock.now() + notice_s

    def calm(self) -> None:
        """No fault from here on: fates that lie in the future are taken back."""
        now = self.clock.now()
        self.faults = Faults(slow_call_s=self.faults.slow_call_s)
        for zone in self.zones:
            zone.dry_until = 0.0
            zone.spot_capacity = 50  # or a full world would have no room for an update to come to its end
        for one in self.made.values():
            if one.preempt_at > now and one.notice_at > now:
                one.preempt_at = one.notice_at = NEVER
            if one.exits_at > now:
                one.exits_at = NEVER

    def _stumble(self, zone: Zone, *, only_transient: bool = False) -> None:
        draw = self.rng.random()
        if draw < self.faults.transient:
            raise TransientError("try again", cloud=self.name, zone=zone)
        if only_transient:
            return
        trouble: ProvisionError | None = None
        if draw < self.faults.transient + self.faults.quota:
            retry_at = self.clock.now() + 60.0
            trouble = QuotaError("quota sim-1 reached", cloud=self.name, zone=zone, retry_at=retry_at)
        elif draw < self.faults.transient + self.faults.quota + self.faults.auth:
            trouble = AuthError("not allowed to launch", cloud=self.name, zone=zone)
        if trouble is not None:
            raise trouble

    def _make(self, order: LaunchOrder) -> SimInstance:
        now, rng, faults = self.clock.now(), self.rng, self.faults
        place = next(zone for zone in self.zones if zone.zone == order.offer.zone)
        spot = order.offer.capacity_type is CapacityType.SPOT
        there = sum(
            one.nodes(now)
            for one in self.alive()
            if one.order.offer.zone == place.zone
            and one.order.offer.capacity_type is order.offer.capacity_type
        )
        capacity = place.spot_capacity if spot else place.on_demand_capacity
        if (spot and now < place.dry_until) or there + order.num_nodes > capacity:
            raise CapacityError(f"no capacity in {place.zone}", cloud=self.name, zone=place.zone)
        boot_at = now + rng.uniform(5.0, 40.0)
        run_at = boot_at + rng.uniform(1.0, 20.0)
        preempt_at = notice_at = NEVER
        if spot and faults.spot_life_s < NEVER:
            preempt_at = now + rng.expovariate(1.0 / faults.spot_life_s)
            notice_at = preempt_at - (faults.notice_s if rng.random() < faults.notice else 0.0)
            self.clock.after(preempt_at - now, lambda: self._dry_out(place))
        made = SimInstance(
            id=f"i-{len(self.made) + 1}",
            order=order,
            made_at=now,
            boot_at=boot_at,
            run_at=run_at,
            healthy_at=run_at + rng.uniform(1.0, 20.0),
            setup_fails=rng.random() < faults.setup_failure,
            exits_at=run_at + rng.uniform(1.0, 300.0) if rng.random() < faults.run_exit else NEVER,
            preempt_at=preempt_at,
            notice_at=notice_at,
            loses_one=order.num_nodes > 1 and rng.random() < faults.one_node,
        )
        self.made[order.token] = self.by_id[made.id] = made
        return made

    def _dry_out(self, place: SimZone) -> None:
        if self.faults.dry_s > 0:
            place.dry_until = self.clock.now() + self.rng.expovariate(1.0 / self.faults.dry_s)

    def _shown(self, one: SimInstance) -> Instance:
        now = self.clock.now()
        state = one.state(now)
        warned = one.notice_at <= now < one.preempt_at
        return Instance(
            id=one.id,
            token=one.order.token,
            owner=one.order.owner,
            service=one.order.service,
            replica_id=one.order.replica_id,
            zone=one.order.offer.zone,
            capacity_type=one.order.offer.capacity_type,
            state=state,
            endpoint=f"http://{one.id}.sim:8000" if state is InstanceState.RUNNING else None,
            preempt_at=one.preempt_at if warned and one.preempt_at < NEVER else None,
            message="simulated" if state in (InstanceState.SETUP_FAILED, InstanceState.RUN_EXITED) else "",
        )


def _no_response(region: str) -> TransientError:
    return TransientError(f"{region} does not respond", cloud="sim")
