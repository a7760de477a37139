"""One agent of the simulated world: production objects, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.traffic.workloads import Call
from lb.config.options import Limits, Pushing
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.hop import ReportId
from lb.core.peers import Peers, QueuePace, RegionReport, local_cost, region_report
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.target_choice import choose, takes_another
from lb.core.targets import Booking, TargetTable
from policies.regions.registry import make_region_policy
from policies.routing.base import Choice, RequestView

if TYPE_CHECKING:
    from benchmarks.regions.world import RegionalEngine, World

_DAY_S = 86_400.0
IDLE_POLL_S = 5.0  # as in `lb.engines.load_poller`, which is not pure
RECONSIDERED = 8  # held requests that are compared with the peers at each report
RECONSIDERED_FOR_CREDIT = 2  # and with each response that gives credit back
FULL_SLACK_S = 0.25  # a peer keeps a forwarded request that it can start within its reported wait and this


class Flight:
    """A request on its way, over all its attempts; to a scheduler it is a waiter."""

    def __init__(self, call: Call, region: str, now: float) -> None:
        self.call = call
        self.region = region  # of the client
        self.issued_at = now
        self.attempt = 0
        self.cached_tokens = 0
        self.first_at = now
        self.engine: RegionalEngine | None = None
        self.booking: Booking | None = None
        self.agent: Agent  # that pushes it to a replica
        self.origin: Agent  # that it entered
        self.hop = False
        # of a waiter
        self.view = RequestView("", "POST", "/v1/chat/completions")
        self.has_priority = False
        self.queue_left_s = _DAY_S
        self.tenant = ""
        self.weight = 1.0
        self.policy: str | None = None
        self.pin = ""

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets that may not have the request."""
        return self.agent.barred(self.region)

    def enter(self, agent: Agent) -> None:
        self.agent = self.origin = agent
        self.hop = self.has_priority = False
        self.booking = None


class Agent:
    """The load balancer of a region."""

    def __init__(self, world: World, region: str, agents: Sequence[str]) -> None:
        self._world = world
        self.region = region
        self.down = False
        rule = world.rule
        self._pushing = Pushing(mode=rule.push)
        self._served = (
            list(world.engines)
            if rule.all_view
            else [engine for engine in world.engines if engine.region == region]
        )
        self._two_layers = rule.outer != "local"
        self._start_empty(0.0)
        self._outer = make_region_policy(rule.outer)
        self._others = [name for name in agents if name != region]
        self._peers = Peers(self._others)
        self._report_id = ReportId(1, 0)
        self._boots: dict[str, int] = {}  # of the peers
        self._polled_at: dict[str, float] = {}
        self._reported_wait_s = 0.0

    def _start_empty(self, now: float) -> None:
        self._table = TargetTable(self._described(), now, self._world.rule.make_inner)
        self._queue: RequestQueue[Flight] = RequestQueue()
        self._scheduler: Scheduler[Flight] = Scheduler(self._table, self._queue)
        self._pace = QueuePace()
        self._flights: dict[Flight, None] = {}
        self._measure_distances()

    def barred(self, client_region: str) -> Collection[int]:
        """Return the epochs of the targets here that may not have a request of that region's clients."""
        if not self._two_layers or client_region not in self._world.scenario.stay:
            return ()
        return self._table.residency.barred(frozenset({client_region}))

    def _described(self) -> Table:
        """Describe the targets. The zone of clients that stay somewhere has the name of their region."""
        stay = self._world.scenario.stay if self._two_layers else {}
        targets = tuple(
            Target(
                id=one.id,
                url=f"http://127.0.0.1:{one.index + 1}",
                region=one.region,
                zones=tuple(zone for zone, regions in stay.items() if one.region in regions),
            )
            for one in self._served
        )
        limits = Limits(hold_s=_DAY_S, max_held=1_000_000)
        return Table(
            "regions", "1", targets, policy=self._world.rule.inner, limits=limits, pushing=self._pushing
        )

    def _measure_distances(self) -> None:
        if self._world.rule.distances:
            for key, _, _ in self._table.probe_list():
                engine = self._world.engine_by_id[key.id]
                self._table.measured(key, self._world.rtt_s(self.region, engine.region))

    def start(self) -> None:
        for place, engine in enumerate(self._world.engines, 1):
            if engine in self._served and self._pushing.is_polled:
                key = self._table.key(engine.id)
                assert key is not None
                self._table.loaded(key, engine.load(), 0.0, 0.0)
            offset_s = self._pushing.probe_s * place / len(self._world.engines)
            self._world.events.at(offset_s, self._poll, engine)
        if self._two_layers:
            self._world.events.at(self._world.scenario.report_s, self._report, None)

    def check_balance(self) -> None:
        problems = self._table.audit()
        if problems or self._table.in_flight or len(self._queue):
            raise AssertionError(f"{self.region}: {'; '.join(problems) or 'requests are in flight or held'}")

    # --- requests

    def arrives(self, flight: Flight, now: float) -> None:
        """A request of a client, or (with `hop`) one that a peer forwarded."""
        if self.down:
            self._world.lose(flight, now)
            return
        flight.agent = self
        text = flight.call.prompt.text
        flight.view = RequestView(
            id=f"{flight.call.id}#{flight.attempt}",
            method="POST",
            path="/v1/chat/completions",
            body_bytes=len(text),
            prompt=text,
            scope=flight.call.scope,
            session=flight.call.session,
        )
        self._flights[flight] = None
        if not flight.hop and self._leaves(flight, choose(self._table, flight.view, now, flight.tried), now):
            return
        choice = self._scheduler.place(flight, now)
        if choice is not None:
            self._push(flight, choice, now)
            return
        if flight.hop and self._outer.needs_room and not self._starts_soon(flight, now):
            del self._flights[flight]
            self._world.events.at(
                now + self._world.rtt_s(self.region, flight.origin.region) / 2, flight.origin.returned, flight
            )
            return
        if self._scheduler.enqueue(flight, now) is None:
            raise AssertionError("the queue is unbounded here")

    def _leaves(self, flight: Flight, choice: Choice | None, now: float) -> bool:
        """Forwards the request to a peer if the region policy says so."""
        if not self._two_layers:
            return False
        peers = self._peers.views(flight.view, now, lambda region: self._world.allowed(flight.region, region))
        if not peers:
            return False
        cost = local_cost(choice, flight.view, self._pace.wait_s(len(self._queue), now))
        decision = self._outer.choose(len(flight.call.prompt.text), cost, peers, _DAY_S)
        if not decision.region:
            return False
        self._forward(flight, decision.region, now)
        return True

    def _forward(self, flight: Flight, region: str, now: float) -> None:
        world = self._world
        self._peers.forwarded(flight, flight.view, region, now)
        del self._flights[flight]
        flight.hop = True
        world.crossed(flight, self.region, region, world.request_bytes(flight.call))
        if world.passes(self.region, region, now):
            world.events.at(now + world.rtt_s(self.region, region) / 2, world.agents[region].arrives, flight)
        else:  # the connection attempt fails; the request goes back to the queue
            world.events.at(now + 1.0, self.returned, flight)

    def returned(self, flight: Flight, now: float) -> None:
        """A peer had no room for a request of ours: it waits here, at its old place."""
        if self.down:
            self._world.lose(flight, now)
            return
        self._peers.refused(flight, flight.agent.region)
        flight.agent, flight.hop, flight.has_priority = self, False, True
        self._flights[flight] = None
        choice = self._scheduler.place(flight, now)
        if choice is not None:
            self._push(flight, choice, now)
        elif self._scheduler.enqueue(flight, now) is None:
            raise AssertionError("the queue is unbounded here")

    def _starts_soon(self, flight: Flight, now: float) -> bool:
        cost = local_cost(
            choose(self._table, flight.view, now, flight.tried),
            flight.view,
            self._pace.wait_s(len(self._queue), now),
        )
        return cost.wait_s <= self._reported_wait_s + FULL_SLACK_S

    def _push(self, flight: Flight, choice: Choice, now: float) -> None:
        engine = self._world.engine_by_id[choice.target_id]
        flight.booking = self._table.book(flight.view, engine.id, now)
        self._world.send_to_engine(flight, engine, self, now)

    def _let_in(self, now: float) -> None:
        if len(self._queue):
            for flight, choice in self._scheduler.let_in(now):
                self._pace.left(now)
                self._push(flight, choice, now)

    def responded(self, about: tuple[Flight, int], now: float) -> None:
        """The first byte has come from the replica."""
        flight, attempt = about
        if flight not in self._flights or attempt != flight.attempt or flight.booking is None:
            return
        self._table.responded(flight.booking, now)
        if flight.hop:
            has_room = not len(self._queue) and takes_another(self._table, flight.booking, now, over=False)
            last = self._report_id if has_room else None
            self._to_origin(flight, flight.origin.peer_responded, (flight, self.region, last), now)
        self._let_in(now)

    def ended(self, about: tuple[Flight, int], now: float) -> None:
        flight, attempt = about
        if flight not in self._flights or attempt != flight.attempt or flight.booking is None:
            return
        del self._flights[flight]
        self._table.release(flight.booking, now, len(flight.call.answer))
        if flight.hop:
            self._to_origin(flight, flight.origin.peer_ended, (flight, self.region), now)
        self._let_in(now)

    def _to_origin(self, flight: Flight, act: Callable[[Any, float], None], about: Any, now: float) -> None:
        self._world.events.at(now + self._world.rtt_s(self.region, flight.origin.region) / 2, act, about)

    def peer_responded(self, about: tuple[Flight, str, ReportId | None], now: float) -> None:
        """The first byte has come from a peer."""
        flight, region, room_after = about
        if not self.down and self._peers.responded(flight, region, room_after):
            self._reconsider(now, RECONSIDERED_FOR_CREDIT)

    def peer_ended(self, about: tuple[Flight, str], now: float) -> None:
        """The last byte has come from a peer."""
        if not self.down and self._peers.ended(*about):
            self._reconsider(now, RECONSIDERED_FOR_CREDIT)

    # --- what it learns

    def _poll(self, engine: RegionalEngine, now: float) -> None:
        if not self._world.under_way:
            return
        if engine in self._served and not self.down:
            polled_at = self._polled_at.get(engine.id, -IDLE_POLL_S)
            if engine.items or len(self._queue) or now - polled_at >= IDLE_POLL_S:
                self._polled_at[engine.id] = now
                way_s = self._world.rtt_s(self.region, engine.region) / 2
                self._world.events.at(now + way_s, self._is_polled, (engine, now, way_s))
            self._let_in(now)
        self._world.events.at(now + self._pushing.probe_s, self._poll, engine)

    def _is_polled(self, about: tuple[RegionalEngine, float, float], now: float) -> None:
        engine, polled_at, way_s = about
        self._world.events.at(now + way_s, self._polled, (engine, polled_at, engine.load()))

    def _polled(self, about: tuple[RegionalEngine, float, EngineLoad], now: float) -> None:
        engine, polled_at, load = about
        key = self._table.key(engine.id)
        if key is not None and not self.down and self._table.loaded(key, load, polled_at, now):
            self._let_in(now)

    # --- reports

    def _report(self, _: None, now: float) -> None:
        world = self._world
        if not world.under_way:
            return
        if not self.down:
            self._report_id = ReportId(self._report_id.boot, self._report_id.seq + 1)
            report = region_report(
                self._table, len(self._queue), self._pace.wait_s(len(self._queue), now), now
            )
            self._reported_wait_s = report.wait_s
            for name in self._others:
                if world.passes(self.region, name, now):
                    way_s = world.rtt_s(self.region, name) / 2
                    world.events.at(
                        now + way_s, world.agents[name].hears, (self.region, report, now, self._report_id)
                    )
            self._reconsider(now)
        world.events.at(now + world.scenario.report_s, self._report, None)

    def hears(self, about: tuple[str, RegionReport, float, ReportId], now: float) -> None:
        region, report, made_at, report_id = about
        if self.down:
            return
        rtt_s = self._world.rtt_s(self.region, region)
        if report_id.boot != self._boots.get(region, report_id.boot):
            self._peers.forget(region)
        self._boots[region] = report_id.boot
        self._peers.reported(region, report, made_at, rtt_s, self._world.scenario.report_s, now, report_id)
        self._reconsider(now)

    def _reconsider(self, now: float, most: int = RECONSIDERED) -> None:
        """Compares the oldest held requests with the peers again."""
        if not len(self._queue):
            return
        waiting = []
        for ticket in self._queue.walk():
            waiting.append(ticket)
            if len(waiting) == most:
                break
        for ticket in waiting:
            flight = ticket.item
            if ticket.waits and not flight.hop:
                choice = choose(self._table, flight.view, now)
                if choice is not None and not choice.wait:
                    continue  # it goes in its turn
                if self._leaves(flight, choice, now):
                    self._queue.leave(ticket)

    # --- death

    def dies(self, now: float) -> None:
        """Everything that is held here or runs through here is lost."""
        self.down = True
        lost = list(self._flights)
        self._start_empty(now)
        for flight in lost:
            if flight.agent is self:
                self._world.abort(flight)
                flight.origin.agent_lost(flight, now)

    def agent_lost(self, flight: Flight, now: float) -> None:
        if self.down or flight.agent is self:
            self._world.lose(flight, now)
        else:  # the peer that it was forwarded to died: it begins again here
            self._peers.ended(flight, flight.agent.region)
            flight.attempt += 1
            flight.enter(self)
            self._world.events.at(
                now + self._world.rtt_s(self.region, flight.agent.region) / 2, self.arrives, flight
            )

    def returns(self, now: float) -> None:
        self.down = False
        self._start_empty(now)
        self._peers = Peers(self._others)
        self._report_id = ReportId(self._report_id.boot + 1, 0)

    def adopt(self, engines: Sequence[RegionalEngine], now: float) -> None:
        self._served = [*self._served, *(one for one in engines if one not in self._served)]
        self._table.apply(self._described(), now)
        self._measure_distances()
        self._let_in(now)

    def give_back(self, region: str, now: float) -> None:
        if not self._world.rule.all_view:
            self._served = [one for one in self._served if one.region != region]
            self._table.apply(self._described(), now)
