"""One agent of the simulated world: production objects, and the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from benchmarks.regions.rules import RingForwarding
from benchmarks.table_audit import audit
from benchmarks.traffic.workloads import Call
from lb.config.options import Limits, Pushing
from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.beats import decode, encode_digest, frames
from lb.core.forwarding import Forwarding
from lb.core.hop import ReportId
from lb.core.peers import RegionReport
from lb.core.queue import RequestQueue
from lb.core.residency import Zones
from lb.core.scheduler import Scheduler
from lb.core.target_choice import choose
from lb.core.targets import Booking, TargetTable
from policies.routing.base import Choice, RequestView
from policies.routing.cache_digest import Digest

if TYPE_CHECKING:
    from benchmarks.regions.world import RegionalEngine, World

_CACHE_KEY = b"of one service"
_DAY_S = 86_400.0
IDLE_POLL_S = 5.0  # as in `lb.engines.load_poller`, which is not pure
RECONSIDERED = 8  # held requests that are compared with the peers at each report
RECONSIDERED_FOR_CREDIT = 2  # and with each response that gives credit back


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
        self.peer_booking: Booking | None = None  # of the origin on a peer
        self.forwarding: Forwarding  # that has made it
        self.way = 1.0  # how long its messages take, of the usual time
        # of a waiter
        self.view = RequestView("", "POST", "/v1/chat/completions")
        self.has_priority = False
        self.queue_left_s = _DAY_S
        self.tenant = ""
        self.weight = 1.0
        self.policy: str | None = None
        self.pin = ""
        self.started = False

    @property
    def tried(self) -> Collection[int]:
        """The epochs of targets that may not have the request."""
        return self.agent.barred(self.region)

    def enter(self, agent: Agent) -> None:
        self.agent = self.origin = agent
        self.hop = self.has_priority = False
        self.booking = None


class Agent:
    """A load balancer of a region."""

    def __init__(self, world: World, name: str, region: str, others: Sequence[tuple[str, str]]) -> None:
        """`others` are the names and the regions of the other agents."""
        self._world = world
        self.name = name
        self.region = region
        self.down = False
        rule = world.rule
        self._pushing = Pushing(mode=rule.push)
        self._served = [one for one in world.engines if rule.all_view or one.region == region]
        self._others = tuple((*one,) for one in others if one[1] != region) if rule.outer != "local" else ()
        alike = () if rule.all_view else tuple(one for one in others if one[1] == region)
        self._siblings = alike if rule.digests else ()
        self.digest_bytes = 0  # sent
        self._start_empty(0.0)
        self._report_id = ReportId(1, 0)
        self._heard: dict[str, ReportId] = {}  # from peers
        self._polled_at: dict[str, float] = {}
        self._polling: set[str] = set()

    def _start_empty(self, now: float) -> None:
        self._table = TargetTable(self._described(), now, self._world.rule.make_inner)
        self._queue: RequestQueue[Flight] = RequestQueue()
        self._scheduler: Scheduler[Flight] = Scheduler(self._table, self._queue)
        self._flights: dict[Flight, None] = {}
        made = RingForwarding if self._world.rule.ring else Forwarding
        key = _CACHE_KEY if self._world.rule.digests else b""
        self._forwarding = made(self._table, self._regions(), now, key)
        self._measure_distances()

    def _regions(self) -> Regions:
        world = self._world
        scenario = world.scenario
        agents = tuple(
            PeerAgent(
                name,
                region,
                f"https://127.0.0.1:{8000 + index}",
                name,
                world.zones_of(region),
                scenario.region(self.region).egress_usd_per_gb,
                scenario.region(region).egress_usd_per_gb,
            )
            for index, (name, region) in enumerate((*self._others, *self._siblings))
        )
        peers, siblings = agents[: len(self._others)], agents[len(self._others) :]
        usd = scenario.usd_per_second
        return Regions(
            self.name, self.region, world.rule.outer, peers=peers, usd_per_second=usd, siblings=siblings
        )

    def barred(self, client_region: str) -> Collection[int]:
        """Return the epochs of the targets here that may not have a request of that region's clients."""
        zones = self._zones(client_region)
        return self._table.residency.barred(zones) if zones else ()

    def _zones(self, client_region: str) -> Zones:
        """Return the zone of clients that stay somewhere, which has the name of their region."""
        return frozenset({client_region} & self._world.scenario.stay.keys())

    def _described(self) -> Table:
        targets = tuple(
            Target(
                id=one.id,
                url=f"http://127.0.0.1:{one.index + 1}",
                region=one.region,
                accelerator=one.profile,
                zones=self._world.zones_of(one.region),
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
            self._poll_from(self._pushing.probe_s * place / len(self._world.engines), engine)
        if self._others or self._siblings:
            self._world.events.at(self._world.scenario.report_s, self._report, None)

    def check_balance(self) -> None:
        problems = audit(self._table)
        if problems or self._table.in_flight or len(self._queue):
            raise AssertionError(f"{self.name}: {'; '.join(problems) or 'requests are in flight or held'}")

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
        self._forwarding.meets(flight.view, now)
        if not flight.hop and self._leaves(flight, now):
            return
        choice = self._scheduler.place(flight, now)
        if choice is not None:
            self._push(flight, choice, now)
            return
        queued = len(self._queue)
        if flight.hop and not self._forwarding.starts_soon(flight.view, queued, now, flight.tried):
            del self._flights[flight]
            self._to_origin(flight, flight.origin.returned, flight, now)
            return
        if self._scheduler.enqueue(flight, now) is None:
            raise AssertionError("the queue is unbounded here")

    def _leaves(self, flight: Flight, now: float) -> bool:
        """Forward the request to a peer if the region policy chooses one."""
        zones = self._zones(flight.region)
        decision = self._forwarding.elsewhere(
            flight.view, len(self._queue), _DAY_S, now, flight.tried, zones=zones
        )
        if decision is None or not decision.region:
            return False
        self._forward(flight, decision.region, now)
        return True

    def _forward(self, flight: Flight, name: str, now: float) -> None:
        world, peer = self._world, self._world.agents[name]
        flight.forwarding = self._forwarding
        flight.peer_booking = self._forwarding.book(flight.view, name, now)
        del self._flights[flight]
        flight.hop = True
        world.crossed(flight, self.region, peer.region, world.request_bytes(flight.call))
        if world.passes(self.region, peer.region, now):
            world.events.at(now + world.way_s(self.region, peer.region, flight), peer.arrives, flight)
        else:  # the connection attempt fails; the request goes back to the queue
            world.events.at(now + 1.0, self.returned, flight)

    def _release_peer(self, flight: Flight, now: float) -> None:
        """What was forwarded is over. Does nothing if this agent has been restarted since."""
        booking, flight.peer_booking = flight.peer_booking, None
        if booking is not None and flight.forwarding is self._forwarding:
            self._forwarding.peer_table.release(booking, now)

    def returned(self, flight: Flight, now: float) -> None:
        """A peer had no room for a request of ours: it waits here, at its old place."""
        if self.down:
            self._world.lose(flight, now)
            return
        if flight.peer_booking is not None and flight.forwarding is self._forwarding:
            self._forwarding.returned(flight.peer_booking)
        self._release_peer(flight, now)
        flight.agent, flight.hop, flight.has_priority = self, False, True
        self._flights[flight] = None
        choice = self._scheduler.place(flight, now)
        if choice is not None:
            self._push(flight, choice, now)
        elif self._scheduler.enqueue(flight, now) is None:
            raise AssertionError("the queue is unbounded here")

    def _push(self, flight: Flight, choice: Choice, now: float) -> None:
        engine = self._world.engine_by_id[choice.target_id]
        flight.booking = self._table.book(flight.view, engine.id, now)
        self._forwarding.sent(flight.view, engine.id, self._zones(flight.region), now)
        self._world.send_to_engine(flight, engine, self, now)

    def _let_in(self, now: float) -> None:
        if len(self._queue):
            for flight, choice in self._scheduler.let_in(now):
                self._forwarding.pace.left(now)
                self._push(flight, choice, now)

    def responded(self, about: tuple[Flight, int], now: float) -> None:
        """The first byte has come from the replica."""
        flight, attempt = about
        if flight not in self._flights or attempt != flight.attempt or flight.booking is None:
            return
        self._table.responded(flight.booking, now)
        if flight.hop:
            origin = flight.origin
            line = (
                b"" if len(self._queue) else self._forwarding.credit(origin.name, flight.booking, now, False)
            )
            credit = line.partition(b": ")[2].strip()
            self._to_origin(flight, origin.peer_responded, (flight, flight.peer_booking, credit), now)
        self._let_in(now)

    def ended(self, about: tuple[Flight, int], now: float) -> None:
        flight, attempt = about
        if flight not in self._flights or attempt != flight.attempt or flight.booking is None:
            return
        del self._flights[flight]
        self._table.release(flight.booking, now, len(flight.call.answer))
        if flight.hop:
            self._to_origin(flight, flight.origin.peer_ended, (flight, flight.peer_booking), now)
        self._let_in(now)

    def _to_origin(self, flight: Flight, act: Callable[[Any, float], None], about: Any, now: float) -> None:
        way_s = self._world.way_s(self.region, flight.origin.region, flight)
        self._world.events.at(now + way_s, act, about)

    def peer_responded(self, about: tuple[Flight, Booking | None, bytes], now: float) -> None:
        """The first byte has come from a peer."""
        flight, booking, credit = about
        if self._is_ours(booking, flight) and self._forwarding.responded(booking, credit):
            self._reconsider(now, RECONSIDERED_FOR_CREDIT)

    def peer_ended(self, about: tuple[Flight, Booking | None], now: float) -> None:
        """The last byte has come from a peer."""
        flight, booking = about
        if not self._is_ours(booking, flight):
            return
        back = self._forwarding.ended(booking, self._world.response_bytes(flight.call))
        self._release_peer(flight, now)
        if back:
            self._reconsider(now, RECONSIDERED_FOR_CREDIT)

    def _is_ours(self, booking: Booking | None, flight: Flight) -> TypeGuard[Booking]:
        """Return whether what a peer sends belongs to a request that this life of the agent has forwarded."""
        return (
            not self.down
            and booking is not None
            and booking is flight.peer_booking
            and flight.forwarding is self._forwarding
        )

    # --- what it learns

    def _poll_from(self, at_s: float, engine: RegionalEngine) -> None:
        if engine in self._served and engine.id not in self._polling:
            self._polling.add(engine.id)
            self._world.events.at(at_s, self._poll, engine)

    def _poll(self, engine: RegionalEngine, now: float) -> None:
        if not self._world.under_way or engine not in self._served:
            self._polling.discard(engine.id)
            return
        if not self.down:
            polled_at = self._polled_at.get(engine.id, -IDLE_POLL_S)
            if engine.items or len(self._queue) or now - polled_at >= IDLE_POLL_S:
                self._polled_at[engine.id] = now
                way_s = self._world.way_s(self.region, engine.region)
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
            report = self._forwarding.report(len(self._queue), now)
            for name, region in self._others:
                self._forwarding.report_ids[name] = self._report_id
                if world.passes(self.region, region, now):
                    way_s = world.way_s(self.region, region)
                    about = (self, report, self._report_id)
                    world.events.at(now + way_s, world.agents[name].hears, about)
            self._share_caches(now)
            self._reconsider(now)
        world.events.at(now + world.scenario.report_s, self._report, None)

    def _share_caches(self, now: float) -> None:
        """Send digests to the other agents, on the connections of the reports."""
        world = self._world
        for name, region in (*self._others, *self._siblings):
            if not world.passes(self.region, region, now):
                continue
            digest = self._forwarding.caches.unsent(name, world.zones_of(region), now)
            if digest is not None:
                sent = encode_digest(digest)
                self.digest_bytes += len(sent)
                way_s = world.way_s(self.region, region)
                world.events.at(now + way_s, world.agents[name].hears_digest, (self.name, sent))

    def hears_digest(self, about: tuple[str, bytes], now: float) -> None:
        name, sent = about
        for kind, data in () if self.down else frames(sent)[0]:
            found = decode(kind, data)
            assert isinstance(found, Digest)
            self._forwarding.caches.reported(name, found, now)

    def hears(self, about: tuple[Agent, RegionReport, ReportId], now: float) -> None:
        peer, report, report_id = about
        before = self._heard.get(peer.name, report_id)
        if self.down or report_id < before:
            return
        self._heard[peer.name] = report_id
        if report_id.boot != before.boot:
            self._forwarding.restarted(peer.name)
            self._forwarding.caches.connected(peer.name)
        rtt_s = self._world.rtt_s(self.region, peer.region)
        every_s = self._world.scenario.report_s
        self._forwarding.receive_report(peer.name, report, rtt_s, every_s, now, report_id)
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
                choice = choose(self._table, flight.view, now, flight.tried)
                if choice is not None and not choice.wait:
                    continue  # it goes in its turn
                if self._leaves(flight, now):
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
            if self._is_ours(flight.peer_booking, flight):
                self._forwarding.ended(flight.peer_booking, 0)
            self._release_peer(flight, now)
            way_s = self._world.way_s(self.region, flight.agent.region, flight)
            flight.attempt += 1
            flight.enter(self)
            self._world.events.at(now + way_s, self.arrives, flight)

    def returns(self, now: float) -> None:
        self.down = False
        self._start_empty(now)
        self._report_id = ReportId(self._report_id.boot + 1, 0)

    def adopt(self, engines: Sequence[RegionalEngine], now: float) -> None:
        self._served = [*self._served, *(one for one in engines if one not in self._served)]
        self._table.apply(self._described(), now)
        self._measure_distances()
        for engine in engines:
            self._poll_from(now + self._pushing.probe_s, engine)
        self._let_in(now)

    def give_back(self, region: str, now: float) -> None:
        if not self._world.rule.all_view:
            self._served = [one for one in self._served if one.region != region]
            self._table.apply(self._described(), now)
