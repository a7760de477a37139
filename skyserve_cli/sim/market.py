"""A recorded spot market as a provisioner.

Time goes in ticks, and within a tick in this order (the trace replay of SkyServe §5.2):

1. the production tick decides on what could be seen at the end of the tick before;
2. instances are terminated that it wants terminated; the zone's capacity becomes that of this tick, and instances beyond it are
   preempted, victims drawn at random; then launches are tried, and one succeeds if its zone has room;
3. the tick is accounted: every running instance is paid for, from its launch on, and is ready when it has lived
   for the cold start.

On-demand instances are always available, and need the same time to start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from policies.model import CapacityType, Offer, Zone
from provisioners.port.base import Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError
from skyserve_cli.sim.trace import Steps, Trace, ZoneTrace

CLOUD = "trace"
EPOCH_S = 1_000_000.0
NEVER = 1 << 60
DEFAULT_RATIO = 3.0  # of the on-demand price to the usual spot price, where the trace has none

_LONG_GONE_TICKS = 20  # how long the cloud still lists what has terminated


class TickClock:
    """The time of the tick that is under way."""

    def __init__(self, tick_s: float) -> None:
        self.tick = 0
        self._tick_s = tick_s

    def now(self) -> float:
        return EPOCH_S + self.tick * self._tick_s

    def tick_at(self, at: float) -> int:
        """Return the first tick whose time is not before `at`."""
        return math.ceil((at - EPOCH_S) / self._tick_s - 1e-9)


def usual_spot_usd_hour(trace: Trace) -> float:
    """Return the mean over zones of the spot price the trace begins with; 1 if it knows none."""
    known = [zone.spot_usd_hour.at(0) for zone in trace.zones if zone.spot_usd_hour is not None]
    return fmean(known) if known else 1.0


@dataclass(slots=True)
class SimulatedInstance:
    """One instance (of one or more nodes)."""

    id: str
    order: LaunchOrder
    place: int  # index of its zone; -1: on demand
    born: int  # tick
    ended: int = NEVER  # the tick in which it no longer lived
    preempted: bool = False
    doomed: int = NEVER  # the tick in which it will be taken, once that is announced

    @property
    def nodes(self) -> int:
        return self.order.num_nodes


class TraceMarket:
    """A provisioner over a trace. `seed` decides who is preempted, and the order of zones that cost the same.

    With `notice_s` the instances that will be beyond a zone's capacity are chosen and announced that long before.
    """

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        trace: Trace,
        clock: TickClock,
        *,
        cold_start_s: float,
        price_ratio: float | None,
        seed: int,
        notice_s: float = 0.0,
    ) -> None:
        self.trace = trace
        self.clock = clock
        self.start_ticks = max(1, round(cold_start_s / trace.tick_s))
        self._notice_ticks = round(notice_s / trace.tick_s)
        self.alive: dict[str, SimulatedInstance] = {}  # by id, oldest first
        self.preemptions = self.failed_launches = self.launches = 0
        self._rng = random.Random(seed)
        self._ratio = price_ratio
        self._usual = usual_spot_usd_hour(trace)
        self._machines: dict[str, SimulatedInstance] = {}  # by token
        self._ended: list[SimulatedInstance] = []
        self._index = {zone.name: index for index, zone in enumerate(trace.zones)}
        self._order = self._rng.sample(range(len(trace.zones)), len(trace.zones))
        self.has_changes = True  # whether a listing would show anything that the last one did not
        self._prices = [zone.spot_usd_hour for zone in trace.zones if zone.spot_usd_hour is not None]
        self.prices_move = any(len(prices.ticks) > 1 for prices in self._prices)

    # --- what a provisioner does ----------------------------------------------------------------------------

    def offers(self, need: Requirements) -> list[Offer]:
        found = []
        first = {one.use_spot: one.choice for one in reversed(need.candidates)}
        for use_spot, choice in sorted(first.items(), reverse=True):
            kind = CapacityType.SPOT if use_spot else CapacityType.ON_DEMAND
            for index in self._order:
                spot, on_demand = self.prices(index)
                paid = (spot if use_spot else on_demand) * need.num_nodes
                zone = self._zone(self.trace.zones[index])
                full = on_demand * need.num_nodes
                found.append(Offer(zone, "trace", "GPU", 1.0, kind, paid, full, choice=choice))
        return sorted(found, key=lambda offer: offer.price_usd_hour)

    def launch(self, order: LaunchOrder) -> Instance:
        known = self._machines.get(order.token)
        if known is not None:
            return self._shown(known)
        spot = order.offer.capacity_type is CapacityType.SPOT
        place = self._index[order.offer.zone.name] if spot else -1
        if spot and self.held(place) + order.num_nodes > self._capacity(place):
            self.failed_launches += 1
            raise CapacityError(f"no room in {order.offer.zone.name}", cloud=CLOUD, zone=order.offer.zone)
        self.launches += 1
        made = SimulatedInstance(f"i-{self.launches}", order, place, self.clock.tick)
        self._machines[order.token] = self.alive[made.id] = made
        self.has_changes = True
        return self._shown(made)

    def instances(self, owner: str, service: str | None = None) -> list[Instance]:
        """The machines of the one owner there is."""
        recent = self.clock.tick - _LONG_GONE_TICKS
        while self._ended and self._ended[0].ended < recent:
            old = self._ended.pop(0)
            del self._machines[old.order.token]
        return [self._shown(machine) for machine in (*self.alive.values(), *self._ended)]

    def terminate(self, instance: Instance) -> None:
        machine = self.alive.get(instance.id)
        if machine is not None:
            self._end(machine, preempted=False)

    # --- what only the simulation does ------------------------------------------------------------------------

    def prefer(self, first: Callable[[ZoneTrace], bool]) -> None:
        """Among zones of one price, offer these first."""
        self._order.sort(key=lambda index: not first(self.trace.zones[index]))

    def prices(self, index: int) -> tuple[float, float]:
        """Spot and on-demand USD per hour of one node, now. A zone without a price has the usual one."""
        zone = self.trace.zones[index]
        spot = self._usual if zone.spot_usd_hour is None else zone.spot_usd_hour.at(self.clock.tick)
        if self._ratio is None and zone.on_demand_usd_hour is not None:
            return spot, zone.on_demand_usd_hour
        return spot, self._usual * (self._ratio or DEFAULT_RATIO)

    def preempt(self) -> None:
        """Take the instances whose time is over and those beyond this tick's capacity, and announce later losses."""
        for machine in [one for one in self.alive.values() if one.doomed <= self.clock.tick]:
            self._take(machine)
        for place in range(len(self.trace.zones)):
            excess = self.held(place) - self._capacity(place)
            while excess > 0:
                victim = self._victim(place, announced=False) or self._victim(place, announced=True)
                assert victim is not None  # noqa: S101 - more are held than there is room for
                self._take(victim)
                excess -= victim.nodes
            if self._notice_ticks:
                self._announce(place)

    def next_preemption(self) -> int:
        """Return the next tick in which an instance is taken, or its loss is announced, if things stay as they are."""
        ticks = [machine.doomed for machine in self.alive.values()]
        for place in range(len(self.trace.zones)):
            count = self._unannounced(place)
            if count:
                falls_at = self._falls_below(place, count)
                ticks.append(max(self.clock.tick + 1, falls_at - self._notice_ticks))
        return min(ticks, default=NEVER)

    def _announce(self, place: int) -> None:
        """Choose who goes in the time that notices are given ahead, at every fall of the capacity."""
        capacity: Steps[int] = self.trace.zones[place].capacity
        tick = capacity.next_change(self.clock.tick)
        while tick is not None and tick <= self.clock.tick + self._notice_ticks:
            staying = sum(m.nodes for m in self.alive.values() if m.place == place and m.doomed > tick)
            excess = staying - capacity.at(tick)
            while excess > 0 and (victim := self._victim(place, announced=False)) is not None:
                victim.doomed = tick
                self.has_changes = True
                excess -= victim.nodes
            tick = capacity.next_change(tick)

    def _victim(self, place: int, *, announced: bool) -> SimulatedInstance | None:
        here = [m for m in self.alive.values() if m.place == place and (m.doomed < NEVER) == announced]
        return here[self._rng.randrange(len(here))] if here else None

    def _take(self, machine: SimulatedInstance) -> None:
        self._end(machine, preempted=True)
        self.preemptions += 1

    def _unannounced(self, place: int) -> int:
        return sum(m.nodes for m in self.alive.values() if m.place == place and m.doomed == NEVER)

    def next_price(self) -> int:
        """Return the next tick in which some zone's spot price is another."""
        changes = (prices.next_change(self.clock.tick) for prices in self._prices)
        return min((tick for tick in changes if tick is not None), default=NEVER)

    def held(self, place: int) -> int:
        return sum(machine.nodes for machine in self.alive.values() if machine.place == place)

    def is_ready(self, endpoint: str, tick: int) -> bool:
        """Return whether the instance there had started up by the end of `tick`."""
        machine = self.alive.get(endpoint.removeprefix("http://").removesuffix(":80"))
        return machine is not None and machine.born + self.start_ticks <= tick

    def next_start(self) -> int:
        """Return the first tick, this one or later, at whose end an instance will just have started up."""
        starts = (machine.born + self.start_ticks for machine in self.alive.values())
        return min((at for at in starts if at >= self.clock.tick), default=NEVER)

    def _capacity(self, place: int) -> int:
        return self.trace.zones[place].capacity.at(self.clock.tick)

    def _falls_below(self, place: int, count: int) -> int:
        capacity: Steps[int] = self.trace.zones[place].capacity
        tick = capacity.next_change(self.clock.tick)
        while tick is not None and capacity.at(tick) >= count:
            tick = capacity.next_change(tick)
        return NEVER if tick is None else tick

    def _end(self, machine: SimulatedInstance, *, preempted: bool) -> None:
        machine.ended, machine.preempted = self.clock.tick, preempted
        del self.alive[machine.id]
        self._ended.append(machine)
        self.has_changes = True

    def _zone(self, zone: ZoneTrace) -> Zone:
        return Zone(CLOUD, zone.region, zone.name)

    def _shown(self, machine: SimulatedInstance) -> Instance:
        state = InstanceState.RUNNING
        if machine.ended < NEVER:
            state = InstanceState.PREEMPTED if machine.preempted else InstanceState.TERMINATED
        return Instance(
            id=machine.id,
            token=machine.order.token,
            owner=machine.order.owner,
            service=machine.order.service,
            replica_id=machine.order.replica_id,
            zone=machine.order.offer.zone,
            capacity_type=machine.order.offer.capacity_type,
            state=state,
            endpoint=f"http://{machine.id}:80",
            preempt_at=EPOCH_S + machine.doomed * self.trace.tick_s if machine.doomed < NEVER else None,
        )
