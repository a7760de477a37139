"""One policy over one trace: the production controller in a recorded market.

The decision, the plan, the policies and `perform` are the production ones, and with `Setting.whole` the tick and the store
(`controllers`); `market` and `trace_ports` stand in for the cloud and the hands. Ticks in which nothing can happen are left out: after a tick that changed nothing the
next one is when an instance starts up, capacity falls below the fleet, a price or the load changes, or a wait of the plan or
of a replica terminates. `compressed=False` runs them all, to the same event log (a test compares the two).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from policies import deadlines
from policies.goals import ScalingGoal
from policies.model import ReplicaState
from policies.registry import scaler_for
from policies.scaling.request_rate import RequestRate
from skyserve_cli.account.runs import ON_DEMAND, SPOT, FleetSample, Run
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.controller.reconcile.planning import new_row
from skyserve_cli.sim.controllers import (
    SERVICE,
    Controller,
    DirectController,
    WholeController,
    World,
)
from skyserve_cli.sim.market import CLOUD, EPOCH_S, TickClock, TraceMarket, usual_spot_usd_hour
from skyserve_cli.sim.served import ServedRequests
from skyserve_cli.sim.settings import OVERPROVISIONING, Job, Setting
from skyserve_cli.sim.trace_ports import ReplayFleet
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from skyserve_cli.spec.placement import placement_of

_FALLING_BACK = frozenset({"spothedge", "spothedge_literal", "risk_hedge"})

_DAY_S = 86_400.0
_PROGRESS_TICKS = 2_880
_ORDER_TICKS = 2
_LATEST = 8  # changes of the wanted number whose growth may still count


def simulate(setting: Setting, job: Job, progress: Callable[[float], None] = lambda _: None) -> Run:
    """Run one job. `progress` is called with the fraction done, now and then."""
    began = time.process_time()
    run = (_omniscient if job.policy == "omniscient" else _best)(setting, job, progress)
    return replace(run, cpu_s=time.process_time() - began)


def _best(setting: Setting, job: Job, progress: Callable[[float], None]) -> Run:
    """Return the baselines that stay in one place get the place that turned out to be the best."""
    match job.policy:
        case "single_zone":
            places = sorted({zone.name for zone in setting.trace.zones})
        case "single_region" | "asg":
            places = sorted({zone.region for zone in setting.trace.zones})
        case _:
            return Replay(setting, job).run(progress)
    runs = []
    for number, place in enumerate(places):

        def report(done: float, number: int = number) -> None:
            progress((number + done) / len(places))

        runs.append(replace(Replay(setting, job, place).run(report), zones=place))
    return max(runs, key=lambda run: (run.availability, -run.cost_relative))


class Replay:
    """The world of one run."""

    def __init__(
        self, setting: Setting, job: Job, place: str | None = None, *, compressed: bool = True
    ) -> None:
        """`place` is the zone or region that policies find first."""
        self._setting = setting
        self._job = job
        self._compressed = compressed
        trace = setting.trace
        self._clock = TickClock(trace.tick_s)
        self.market = TraceMarket(
            trace,
            self._clock,
            cold_start_s=setting.cold_start_s,
            price_ratio=setting.price_ratio,
            seed=job.seed,
            notice_s=setting.notice_s,
        )
        if place is not None:
            self.market.prefer(lambda zone: place in (zone.name, zone.region))
        spec = _spec_of(setting, job)
        # Its size follows from the load of a moment, and from waits whose end it returns; others remember loads.
        self._same_load_is_nothing = isinstance(scaler_for(spec.scaling), RequestRate)
        served = None
        if setting.traffic is not None:
            served = ServedRequests.draw(setting.traffic, trace.length_s, trace.tick_s, job.seed)
        reported = served if spec.slo is not None else None
        self._fleet = ReplayFleet(self.market, setting.arrivals, spec.load_window_s, reported)
        known = () if reported is None else reported.known
        world = World(self._clock, self.market, self._fleet, spec, known, job.seed)
        self._goal = goal_of(new_row(spec, EPOCH_S), spec)  # its deadlines stay the same
        self.controller: Controller = (WholeController if setting.whole else DirectController)(world)
        self._account = _Account(setting, self.market, served)

    def run(self, progress: Callable[[float], None] = lambda _: None) -> Run:
        """Return the whole trace, once."""
        trace, clock, account = self._setting.trace, self._clock, self._account
        ticks = reported = 0
        while clock.tick < trace.n_ticks:
            self.controller.tick()
            ticks += 1
            until = min(self._next_tick(), trace.n_ticks)
            account.take(clock.tick, until, self.controller.plan.wanted, self._fleet.draining)
            clock.tick = until
            if until - reported >= _PROGRESS_TICKS:
                reported = until
                progress(until / trace.n_ticks)
        progress(1.0)
        run = account.run(self._job, ticks=ticks, digest=self.digest())
        self.controller.close()
        return run

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.controller.event_lines()).encode()).hexdigest()[:16]

    def _next_tick(self) -> int:
        """Return the next tick that may come to anything."""
        clock, market = self._clock, self.market
        following = clock.tick + 1
        if not self._compressed or market.has_changes or self._fleet.draining or not self.controller.idle:
            return following
        row = self.controller.row
        if any(
            replica.state in (ReplicaState.REQUESTED, ReplicaState.TERMINATING) for replica in row.replicas
        ):
            return following
        waits = (
            self.controller.plan.wake_at,
            deadlines.next_due(row.replicas, self._goal),
        )
        ticks = [clock.tick_at(at) for at in waits if at is not None]
        ticks += [market.next_start() + 1, market.next_preemption(), market.next_price()]
        ticks.append(self._fleet.next_load(same_again=self._same_load_is_nothing))
        return max(following, min(ticks))


class _Account:
    """What was ready and what it cost, tick by tick.

    Nothing can be ready before one cold start is over, so accounting begins there.
    """

    def __init__(self, setting: Setting, market: TraceMarket, served: ServedRequests | None = None) -> None:
        self._setting = setting
        self._served = served
        self._market = market
        self._first = market.start_ticks
        self._ticks = self._available = 0
        self._fraction = 0.0
        self._usd = self._usd_spot = self._usd_on_demand = 0.0
        self._machine_hours = 0.0
        self._steps: list[FleetSample] = []
        self._wanted: list[tuple[float, int]] = []
        self._requests = self._short = 0
        self._outages = self._grown = 0
        self._is_short = False

    def take(self, start: int, until: int, wanted: int, dismissed: frozenset[int]) -> None:
        """From `start` to `until` nothing is launched or lost; replicas may start up in between."""
        market, tick_s = self._market, self._setting.trace.tick_s
        if not self._wanted or self._wanted[-1][1] != wanted:
            self._wanted.append((start * tick_s, wanted))
        cuts = {start, max(start, self._first), until}
        cuts |= {m.born + market.start_ticks for m in market.alive.values()}
        cuts |= {self._grown_until(at_s) for at_s, _ in self._wanted[-_LATEST:]}
        edges = sorted(cut for cut in cuts if start <= cut <= until)
        for begin, end in pairwise(edges):
            self._span(begin, end, wanted, dismissed)

    def _span(self, begin: int, end: int, wanted: int, dismissed: frozenset[int]) -> None:
        market, tick_s = self._market, self._setting.trace.tick_s
        counts: dict[tuple[str, str], list[int]] = {}
        ready = 0
        usd_hour = usd_spot_hour = 0.0
        for machine in market.alive.values():
            serves = machine.born + market.start_ticks <= begin and machine.order.replica_id not in dismissed
            offer = machine.order.offer
            count = counts.setdefault((offer.zone.name, offer.capacity_type.value), [0, 0])
            count[0] += 1
            count[1] += serves
            ready += serves
            usd_hour += offer.price_usd_hour
            usd_spot_hour += offer.price_usd_hour if machine.place >= 0 else 0.0
        shown = tuple(sorted((zone, kind, *both) for (zone, kind), both in counts.items()))
        if not self._steps or self._steps[-1].counts != shown:
            self._steps.append(FleetSample(begin * tick_s, shown))  # type: ignore[arg-type]
        if self._served is not None:
            self._served.serve(begin, end, ready, counted=begin >= self._first)
        if begin < self._first:
            return
        span, hours = end - begin, (end - begin) * tick_s / 3600.0
        self._ticks += span
        self._available += span if ready >= wanted else 0
        self._outages += ready < wanted and not self._is_short
        self._is_short = ready < wanted
        self._grown += span if self._least_wanted(begin) <= ready < wanted else 0
        self._fraction += span * (min(ready, wanted) / wanted if wanted else 1.0)
        self._usd += usd_hour * hours
        self._usd_spot += usd_spot_hour * hours
        self._machine_hours += sum(machine.nodes for machine in market.alive.values()) * hours
        nodes = 1 if self._setting.spec is None else self._setting.spec.num_nodes
        cheapest = min(market.prices(index)[1] for index in range(len(market.trace.zones)))
        self._usd_on_demand += cheapest * nodes * wanted * hours
        if self._setting.arrivals is not None:
            came = self._setting.arrivals.count(begin * tick_s, end * tick_s)
            self._requests += came
            self._short += came if ready < wanted else 0

    def _least_wanted(self, tick: int) -> int:
        """Return the least that was wanted within the last cold start, and the two ticks in which a launch is ordered."""
        least = self._wanted[-1][1]
        for (_, before), (at_s, _) in zip(self._wanted[-2::-1], self._wanted[:0:-1], strict=True):
            if self._grown_until(at_s) <= tick:
                break
            least = min(least, before)
        return least

    def _grown_until(self, changed_at_s: float) -> int:
        """Return the tick by which what a change of the wanted number launched can be ready."""
        return round(changed_at_s / self._setting.trace.tick_s) + self._market.start_ticks + _ORDER_TICKS

    def run(self, job: Job, *, ticks: int, digest: str) -> Run:
        market, setting = self._market, self._setting
        days = self._ticks * setting.trace.tick_s / _DAY_S
        with_requests = setting.arrivals is not None
        latencies = None if self._served is None else self._served.latencies
        times = None if latencies is None else latencies.percentiles(setting.trace.length_s)
        return Run(
            policy=job.policy,
            overprovision=(job.overprovision or 0) if job.policy in OVERPROVISIONING else None,
            seed=job.seed,
            availability=self._available / self._ticks,
            capacity_fraction=self._fraction / self._ticks,
            cost_relative=self._usd / self._usd_on_demand if self._usd_on_demand else 0.0,
            preemptions_per_day=market.preemptions / days,
            failed_launches_per_day=market.failed_launches / days,
            on_demand_cost_share=1.0 - self._usd_spot / self._usd if self._usd else 0.0,
            days=days,
            usd=self._usd,
            usd_on_demand=self._usd_on_demand,
            launches=market.launches,
            cpu_s=0.0,
            ticks=ticks,
            digest=digest,
            zones="",
            steps=tuple(self._steps),
            n_target=setting.n_target,
            wanted=tuple(self._wanted),
            requests=self._requests if with_requests else None,
            requests_short=(self._short / self._requests if self._requests else 0.0)
            if with_requests
            else None,
            availability_target=job.availability_target,
            outages=self._outages,
            growth=self._grown / self._ticks,
            attainment=None if self._served is None else self._served.attainment,
            ttft_s=times and times[0],
            latency_s=times and times[1],
            requests_failed=None if self._served is None else self._served.failed,
            usd_beside=None
            if setting.beside_usd_hour is None
            else self._machine_hours * setting.beside_usd_hour,
        )


def _spec_of(setting: Setting, job: Job) -> ServiceSpec:
    """The service as the simulated controller gets it: the user's sizes and delays on the trace's zones."""
    given = setting.spec or ServiceSpec(
        name=SERVICE,
        run="serve",
        scaling=ScalingGoal(min_replicas=setting.n_target, max_replicas=setting.n_target),
    )
    resources = (ResourceChoice(cloud=CLOUD, use_spot=job.policy != "on_demand"),)
    falls_back = job.policy in _FALLING_BACK
    knobs = replace(
        given.placement,
        num_overprovision=(job.overprovision or 0) if job.policy in OVERPROVISIONING else 0,
        base_ondemand_fallback_replicas=given.placement.base_ondemand_fallback_replicas if falls_back else 0,
        availability_target=job.availability_target if job.policy == "risk_hedge" else None,
    )
    placement = placement_of(knobs, resources, spot_placer=job.policy, dynamic_ondemand_fallback=falls_back)
    start_limit_s = 10.0 * setting.cold_start_s + 3600.0
    return replace(
        given,
        name=SERVICE,
        placement=placement,
        probe=Probe(path="/health", initial_delay_s=start_limit_s),
        resources=resources,
        resources_ordered=False,
        secrets=(),
        envs=(),
        workdir=None,
    )


def _omniscient(setting: Setting, job: Job, progress: Callable[[float], None]) -> Run:
    """Return the cost of a plan that knows the future. It launches nothing that could fail or be taken."""
    from skyserve_cli.sim.omniscient import solve  # SciPy is of an extra; commands insist on it before

    trace = setting.trace
    market = TraceMarket(
        trace, TickClock(trace.tick_s), cold_start_s=0.0, price_ratio=setting.price_ratio, seed=job.seed
    )
    usual, on_demand = usual_spot_usd_hour(trace), market.prices(0)[1]
    found = solve(
        trace,
        n_target=setting.n_target,
        cold_start_s=setting.cold_start_s,
        price_ratio=on_demand / usual,
        availability=job.availability_target or 1.0,
        spot_prices={zone.name: market.prices(index)[0] / usual for index, zone in enumerate(trace.zones)},
        progress=lambda done, of: progress(done / of),
    )
    days = (trace.length_s - setting.cold_start_s) / _DAY_S
    usd_on_demand = setting.n_target * on_demand * days * 24.0
    series = {(zone.name, SPOT): found.spot[zone.name] for zone in trace.zones}
    series[trace.zones[0].name, ON_DEMAND] = found.on_demand
    edges = sorted({tick for steps in series.values() for tick in steps.ticks})
    return Run(
        policy=job.policy,
        overprovision=None,
        seed=job.seed,
        availability=found.availability,
        capacity_fraction=found.availability,
        cost_relative=found.cost_relative,
        preemptions_per_day=0.0,
        failed_launches_per_day=0.0,
        on_demand_cost_share=found.on_demand_cost_share,
        days=days,
        usd=found.cost_relative * usd_on_demand,
        usd_on_demand=usd_on_demand,
        launches=0,
        cpu_s=found.seconds,
        ticks=trace.n_ticks,
        digest=hashlib.sha256(repr((found.spot, found.on_demand)).encode()).hexdigest()[:16],
        zones="",
        steps=tuple(
            FleetSample(
                tick * trace.tick_s,
                tuple(
                    (zone, kind, steps.at(tick), steps.at(tick))
                    for (zone, kind), steps in sorted(series.items())
                    if steps.at(tick)
                ),
            )
            for tick in edges
        ),
        n_target=setting.n_target,
        availability_target=job.availability_target,
        cost_bound=found.cost_bound,
        status=found.status,
    )
