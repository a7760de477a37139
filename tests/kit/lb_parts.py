"""The parts of the load balancer's data plane with plain doubles: a loop that the test steps, wires, and one target per name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast

from benchmarks.table_audit import audit
from lb.config.options import Limits
from lb.config.schema import Table, Target
from lb.core.api_keys import Admission, ApiKeyStore
from lb.core.forwarding import Forwarding
from lb.core.retry import Tries
from lb.core.targets import Booking, Key, TargetTable
from lb.engines.kinds import EngineKind, Fetched
from lb.http.messages import Hop, Reader, RequestHead
from lb.http.upstream import Pools, TargetConnection
from lb.observe.access_log import RequestRecord
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch, Engines
from lb.proxy.ending import Arrival
from lb.proxy.home_finder import HomeFinder
from lb.proxy.registry import RequestRegistry
from lb.proxy.request import ProxiedRequest
from lb.proxy.runtime import Runtime
from policies.routing.base import RequestView

GET = b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"


_ORDER = count(1)


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class StepLoop:
    """An event loop in virtual time: nothing happens but in `turn` and `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._soon: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._later: list[tuple[float, int, Timer, Callable[..., object], tuple[Any, ...]]] = []
        self._number = 0

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._soon.append((callback, arguments))

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        return self.call_at(self.now + delay_s, callback, *arguments)

    def call_at(self, at: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        self._number += 1
        timer = Timer()
        heappush(self._later, (at, self._number, timer, callback, arguments))
        return timer

    def turn(self) -> int:
        """Run what is due at once, and not what that adds. Returns how many callbacks there were."""
        due, self._soon = self._soon, []
        for callback, arguments in due:
            callback(*arguments)
        return len(due)

    def settle(self) -> None:
        """Run turns until nothing is due at once."""
        for _ in range(100):
            if not self.turn():
                return
        raise AssertionError("the loop never rests")

    def sleep(self, seconds: float) -> None:
        """Let the time pass, with all timers in it."""
        until = self.now + seconds
        self.settle()
        while self._later and self._later[0][0] <= until:
            at, _, timer, callback, arguments = heappop(self._later)
            self.now = max(self.now, at)
            if not timer.cancelled:
                callback(*arguments)
                self.settle()
        self.now = until


class Wire:
    """A transport whose other end is the test."""

    def __init__(self, peer: str = "192.0.2.7") -> None:
        self.order = 0  # when it was first written to, among all wires; 0: never
        self.sent = b""
        self.peer = peer
        self.reading = True
        self.closed = self.aborted = self.eof = False
        self.unwritten = 0  # bytes that the other end has not taken

    def write(self, data: bytes) -> None:
        assert not self.closed, "written after its end"
        self.order = self.order or next(_ORDER)
        self.sent += data

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.write(b"".join(parts))

    def take(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.peer, 1234) if name == "peername" else default


class Stock:
    """Idle connections to every target, so that nothing has to be dialled."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._made: dict[str, list[TargetConnection]] = {}
        self._last: dict[str, TargetConnection] = {}

    def fill(self, targets: Iterable[Target]) -> None:
        """See to it that there is an idle connection to each of them."""
        for target in targets:
            pool = self._pools.of(target)
            connection = pool.take()
            if connection is None:
                connection = TargetConnection(pool)
                connection.transport = cast(Any, Wire())
                connection.used = True
                self._made.setdefault(target.id, []).append(connection)
            pool.give(connection, 0.0)

    @property
    def used(self) -> dict[str, list[TargetConnection]]:
        """The connections that were sent anything, by target, in the order of first use."""
        used = [(wire_of(one).order, name, one) for name, made in self._made.items() for one in made]
        found: dict[str, list[TargetConnection]] = {}
        for order, name, one in sorted(used, key=lambda row: row[0]):
            if order:
                found.setdefault(name, []).append(one)
        return found

    def last(self, target_id: str) -> TargetConnection:
        """Return the connection to a target that has an attempt, or the last one that had."""
        for connection in self._made[target_id]:
            if connection.sink is not None:
                self._last[target_id] = connection
        return self._last.get(target_id) or self.used[target_id][-1]

    def sent(self, target_id: str) -> bytes:
        """Return what that connection has been sent since the last call."""
        return wire_of(self.last(target_id)).take()


def wire_of(connection: TargetConnection) -> Wire:
    return cast(Wire, connection.transport)


class Client:
    """A client's connection, as a request uses it."""

    def __init__(self) -> None:
        self.closing = False
        self.body_left = False
        self.length = 0
        self.hop = Hop(b"192.0.2.7", b"http", False)
        self.wire = Wire()
        self.events: list[str] = []
        self.ahead = b""

    @property
    def transport(self) -> Any:
        return self.wire

    def send_soon(self, response: bytes) -> None:
        self.wire.write(response)

    def next(self) -> None:
        self.events.append("next")

    def hang_up(self, *, abort: bool = False) -> None:
        self.events.append("abort" if abort else "hang_up")

    def tunnel(self) -> bytes:
        self.events.append("tunnel")
        return self.ahead

    def pause_reading(self, who: int) -> None:
        self.events.append(f"pause {who}")

    def resume_reading(self, who: int) -> None:
        self.events.append(f"resume {who}")

    def close_soon(self, grace_s: float, fresh_s: float | None = None) -> None:
        self.events.append(f"close_soon {grace_s} {fresh_s}")

    def check_upload(self, now: float) -> None:
        self.events.append(f"check_upload {now}")

    def identify(self) -> None:
        self.events.append("identify")


async def _refuse(target: Target, path: str, timeout_s: float, lines: bytes) -> Fetched:
    """No target can be asked for its resources."""
    raise ConnectionRefusedError


class Plane:
    """The parts of one agent on a table of targets, without an agent."""

    def __init__(
        self,
        *targets: str,
        table: Table | None = None,
        kind: EngineKind = EngineKind.UNKNOWN,
        forwarding: Callable[[TargetTable], Forwarding] | None = None,
        **options: Any,
    ) -> None:
        self.loop = StepLoop()
        some = tuple(Target(name, f"http://{name}.test:80") for name in targets)
        self.limits = options.pop("limits", None) or Limits()
        table = table or Table("service", "1", some, policy="round_robin", limits=self.limits, **options)
        self.table = TargetTable(table, 0.0)
        self.runtime = Runtime(cast(Any, self.loop), self.loop.time)
        self.forwarding = None if forwarding is None else forwarding(self.table)
        self.registry = RequestRegistry(self.table, self.forwarding, self.runtime)
        self.records: list[RequestRecord] = []
        self.metrics = Metrics("service", "")
        self.metrics.use_table(table)
        self.account = Account(
            self.table,
            self.metrics,
            Explanations(running=self.registry.explanations),
            ApiKeyStore(table.access, 0.0),
            0.0,
            self.records.append,
        )
        self.wrong: list[Key] = []
        self.missing = 0
        pools = Pools()
        self.stock = Stock(pools)
        engines = Engines(lambda key: kind, self.wrong.append, self._missing)
        homes = HomeFinder(self.table, _refuse, self.loop.time)
        self.dispatch = Dispatch(self.registry, pools, self.account, engines, random.Random(1), homes)

    def _missing(self) -> None:
        self.missing += 1

    @property
    def counts(self) -> Any:
        return self.metrics.counts

    def arrival(self, raw: bytes = GET, **more: Any) -> Arrival:
        head, _ = Reader().request(raw, 100)
        return arrival(head, self.loop.now, **more)

    def request(
        self,
        raw: bytes = GET,
        body: bytes = b"",
        client: Client | None = None,
        *,
        repeatable: bool = True,
        **more: Any,
    ) -> ProxiedRequest:
        """Return a request that has arrived and is not placed."""
        self.stock.fill(self.table.table.targets)
        client = client or Client()
        tries = Tries(repeatable, self.limits.time_to_first_byte_s, self.limits.hold_s)
        if self.runtime.buffers.take(len(body)):
            self.account.began(self.loop.now)
        arrived = self.arrival(raw, **more)
        return ProxiedRequest(self.dispatch, self.account, client, arrived, tries, body, len(body))

    def fill(self, target_id: str) -> Booking:
        """Give a target a request of another client."""
        return self.table.book(RequestView("other", "GET", "/"), target_id, self.loop.now)

    def answer(self, target_id: str, data: bytes) -> None:
        """Let the target of an attempt send these bytes."""
        self.loop.settle()
        self.stock.last(target_id).data_received(data)

    def check(self) -> None:
        """Nothing is left of any request."""
        assert audit(self.table) == []
        assert self.table.in_flight == 0
        assert not self.registry.waiting
        assert not self.registry.relays
        assert not self.registry.tunnels
        assert self.registry.queued == 0
        assert self.runtime.buffers.taken == 0
        assert self.runtime.faults.total == 0


def arrival(head: RequestHead, now: float, **more: Any) -> Arrival:
    """Return a request as it arrived, with these fields of `Arrival` in place of the usual ones."""
    view = RequestView("id-1", head.method_text, head.path_text)
    fields: dict[str, Any] = {
        "at": now,
        "head": head,
        "request_id": b"id-1",
        "view": view,
        "model": "",
        "admission": Admission(None, ()),
        "explanation": Explanation("id-1", head.method_text, head.path_text, now),
    }
    return Arrival(**fields | more)


def steps(request: ProxiedRequest) -> list[str]:
    """Return what has been noted of a request, in order."""
    return [step["event"] for step in request.arrival.explanation.to_json()["steps"]]
