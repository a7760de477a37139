"""Readiness probes against a real server: requests, readiness, and the events for the tick."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.model import Event, ProbeFailed, ProbePassed
from skyserve_cli.controller.readiness import HttpProber
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.reconcile.ports import ProbeOrder
from skyserve_cli.spec.model import Probe

QUICK = Probe("/health", timeout_s=5.0, interval_s=0.01)


@dataclass
class Replica:
    """A server that responds as it is configured and remembers its requests."""

    status: int = 200
    silent: bool = False
    location: str = "http://192.0.2.1/elsewhere?key=secret"
    size: int = 100_000
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    peers: set[object] = field(default_factory=set)  # one for each connection

    async def answer(self, request: web.Request) -> web.Response:
        self.peers.add(request.transport and request.transport.get_extra_info("peername"))
        self.seen.append((request.method, request.path_qs, dict(request.headers), await request.read()))
        if self.silent:
            await asyncio.sleep(3600)
        headers = {"Location": self.location} if 300 <= self.status < 400 else {}
        status = 200 if request.path == self.location.partition("?")[0] else self.status
        return web.Response(status=status, body=b"x" * self.size, headers=headers)


class Probing:
    """A prober, and the replica it looks at."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.prober = HttpProber(asyncio.get_running_loop(), self._wake)
        self.url = ""
        self.events: list[Event] = []
        self.woken = 0

    def _wake(self) -> None:
        self.woken += 1

    def order(
        self, probe: Probe = QUICK, passing: bool | None = None, url: str = "", number: int = 1
    ) -> ProbeOrder:
        return ProbeOrder("chat", number, url or self.url, probe, passing)

    async def eventually(self, holds: Callable[[], bool]) -> None:
        for _ in range(1000):
            self.events += [event for _, event in self.prober.drain()]
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it did not come to be; events: {self.events[:5]}")

    async def first_event(self, order: ProbeOrder) -> Event:
        self.prober.watch([order])
        await self.eventually(lambda: bool(self.events))
        return self.events[0]

    async def asked(self, times: int) -> None:
        """Wait until the replica was probed this number of times more."""
        goal = len(self.replica.seen) + times
        await self.eventually(lambda: len(self.replica.seen) >= goal)


@pytest.fixture
async def probing() -> AsyncIterator[Probing]:
    probing = Probing()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", probing.replica.answer)
    server = TestServer(app)
    await server.start_server()
    probing.url = str(server.make_url("/")).rstrip("/")
    yield probing
    await probing.prober.close()
    await server.close()


async def test_a_get(probing: Probing) -> None:
    event = await probing.first_event(
        probing.order(Probe("/health?deep=1", headers=(("X-Key", "k"),), interval_s=0.01))
    )
    assert event == ProbePassed(1)
    assert probing.woken >= 1
    method, path, headers, body = probing.replica.seen[0]
    assert (method, path, headers["X-Key"], body) == ("GET", "/health?deep=1", "k", b"")


@pytest.mark.parametrize(
    ("headers", "kind"),
    [((), "application/json"), ((("Content-Type", "text/plain"),), "text/plain")],
    ids=["JSON by default", "as the headers say"],
)
async def test_a_post_with_its_payload(probing: Probing, headers: Any, kind: str) -> None:
    probe = Probe("/v1/chat", post_data='{"prompt": "é"}', headers=headers, interval_s=0.01)
    assert await probing.first_event(probing.order(probe)) == ProbePassed(1)
    method, path, sent, body = probing.replica.seen[0]
    assert (method, path, body.decode()) == ("POST", "/v1/chat", '{"prompt": "é"}')
    assert sent["Content-Type"].startswith(kind)


async def test_a_slash_too_many_is_one_slash(probing: Probing) -> None:
    await probing.first_event(probing.order(url=probing.url + "/"))
    assert probing.replica.seen[0][1] == "/health"


@pytest.mark.parametrize("status", [201, 204, 302, 401, 404, 500, 503])
async def test_only_200_is_ready(probing: Probing, status: int) -> None:
    probing.replica.status = status
    event = await probing.first_event(probing.order(passing=True))
    leads_to = ", to http://192.0.2.1/elsewhere" if status == 302 else ""
    assert event == ProbeFailed(1, f"probe returned {status}{leads_to}")
    assert {path for _, path, _, _ in probing.replica.seen} == {"/health"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_replica_that_redirects_to_itself_is_ready(probing: Probing, status: int) -> None:
    probing.replica.status, probing.replica.location = status, "/health/"
    probe = Probe("/health", post_data="{}", timeout_s=5.0, interval_s=0.01)
    assert await probing.first_event(probing.order(probe)) == ProbePassed(1)
    (_, first, _, sent), (method, second, _, body) = probing.replica.seen[:2]
    assert (first, sent, second) == ("/health", b"{}", "/health/")
    assert (method, body) == (("POST", b"{}") if status in (307, 308) else ("GET", b""))


async def test_a_circle_of_redirects_ends(probing: Probing) -> None:
    probing.replica.status, probing.replica.location = 307, "/health?again=1"
    probing.replica.location = "/circle/../health?k=secret"
    event = await probing.first_event(probing.order(Probe("/x", timeout_s=5.0, interval_s=5.0), passing=True))
    assert event == ProbeFailed(1, "probe returned 307, to /circle/../health")
    assert len(probing.replica.seen) == 4


async def test_an_answer_that_takes_too_long(probing: Probing) -> None:
    probing.replica.silent = True
    event = await probing.first_event(
        probing.order(Probe("/", timeout_s=0.05, interval_s=0.01), passing=True)
    )
    assert event == ProbeFailed(1, "probe took longer than 0.05 s")


async def test_nobody_listens(probing: Probing) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        event = await probing.first_event(probing.order(passing=True, url=url))
    assert isinstance(event, ProbeFailed)
    assert event.message.startswith("probe failed: ")


@pytest.mark.parametrize(
    "header", [("X-Key", "a\r\nX-Evil: 1"), ("X Key", "a"), ("X-Key", "secret\x00")], ids=repr
)
async def test_a_header_that_cannot_be_sent_fails_without_showing_its_value(
    probing: Probing, header: tuple[str, str]
) -> None:
    """And goes on failing: the task must not end, or the replica would never be probed again."""
    probing.prober.watch([probing.order(Probe("/", headers=(header,), interval_s=0.01), passing=True)])
    await probing.eventually(lambda: len(probing.events) >= 2)
    for event in probing.events:
        assert isinstance(event, ProbeFailed)
        assert "secret" not in event.message
        assert "Evil" not in event.message


async def test_what_the_tick_knows_is_not_repeated(probing: Probing) -> None:
    probing.prober.watch([probing.order(passing=True)])
    await probing.asked(5)
    assert probing.events == []
    assert probing.woken == 0


@pytest.mark.parametrize("passing", [None, False], ids=["never passed", "failed before"])
async def test_failing_on_is_not_news(probing: Probing, passing: bool | None) -> None:
    probing.replica.status = 503
    probing.prober.watch([probing.order(passing=passing)])
    await probing.asked(3)
    assert probing.events == []


async def test_news_is_repeated_until_the_tick_has_taken_it(probing: Probing) -> None:
    """A response that was lost with a tick that failed comes again by itself."""
    probing.prober.watch([probing.order(passing=None)])
    await probing.eventually(lambda: len(probing.events) >= 3)
    assert set(probing.events) == {ProbePassed(1)}
    probing.prober.watch([probing.order(passing=True)])
    await probing.asked(3)
    probing.events.clear()
    await probing.asked(3)
    assert probing.events == []


async def test_a_change_is_noticed(probing: Probing) -> None:
    probing.prober.watch([probing.order(passing=True)])
    await probing.asked(2)
    probing.replica.status = 500
    await probing.eventually(lambda: ProbeFailed(1, "probe returned 500") in probing.events)


async def test_every_replica_is_probed_by_itself(probing: Probing) -> None:
    """One that hangs does not keep the others waiting."""
    stuck = Probe("/stuck", timeout_s=60.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        probing.prober.watch([probing.order(stuck, url=url), *[probing.order(number=n) for n in (2, 3)]])
        await probing.eventually(lambda: {2, 3} <= {event.replica_id for event in probing.events})
    assert 1 not in {event.replica_id for event in probing.events}


async def test_who_is_not_watched_any_more_is_left_alone(probing: Probing) -> None:
    probing.prober.watch([probing.order(passing=True)])
    await probing.asked(1)
    probing.prober.watch([])
    await asyncio.sleep(0)  # the loop takes the order
    before = len(probing.replica.seen)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert len(probing.replica.seen) <= before + 1  # one may have been on its way


class _NoCpu(Attention):
    """Of a process that had no CPU while its probes ran."""

    def was_lost(self, begun: float) -> bool:
        return True


async def test_a_probe_that_failed_while_this_process_had_no_cpu_says_nothing(probing: Probing) -> None:
    loop = asyncio.get_running_loop()
    prober = HttpProber(loop, probing._wake, _NoCpu(loop, SystemClock()))
    try:
        probing.replica.status = 500
        prober.watch([probing.order(passing=True)])
        await probing.asked(5)
        assert prober.drain() == []
        assert prober.failed("chat") == {}
        probing.replica.status = 200  # one that passes is worth something regardless of delays
        prober.watch([probing.order(passing=None)])
        await probing.asked(2)
        assert ("chat", ProbePassed(1)) in prober.drain()
    finally:
        await prober.close()


async def test_the_last_failure_is_kept_until_a_probe_passes(probing: Probing) -> None:
    probing.replica.status = 503
    probing.prober.watch(
        [probing.order(passing=True), probing.order(passing=True, url="http://127.0.0.1:1", number=2)]
    )
    await probing.eventually(lambda: len(probing.prober.failed("chat")) == 2)
    failed = probing.prober.failed("chat")
    assert (failed[1].reached, failed[2].reached) == (True, False)
    assert probing.prober.failed("another") == {}
    probing.replica.status = 200
    await probing.eventually(lambda: 1 not in probing.prober.failed("chat"))
    probing.prober.watch([])
    await probing.eventually(lambda: not probing.prober.failed("chat"))


async def test_replicas_on_this_machine_do_not_show_that_the_network_works(probing: Probing) -> None:
    await probing.first_event(probing.order())
    assert probing.prober.reached_at() is None
    probing.prober.watch([probing.order(), probing.order(url="http://192.0.2.1:1", number=2)])
    await probing.asked(2)
    assert probing.prober.reached_at() == float("-inf")


async def test_a_replica_that_passes_is_probed_over_kept_connections_and_now_and_then_over_new_ones(
    probing: Probing,
) -> None:
    probing.replica.size = 10
    probing.prober.watch([probing.order(passing=True)])
    await probing.asked(40)
    assert len(probing.replica.peers) < len(probing.replica.seen) / 5
    assert len(probing.replica.peers) >= 3


async def test_a_replica_that_takes_the_connection_and_says_nothing_was_reached(probing: Probing) -> None:
    probing.replica.silent = True
    probing.prober.watch([probing.order(Probe("/health", timeout_s=0.2, interval_s=0.01), passing=True)])
    await probing.eventually(lambda: 1 in probing.prober.failed("chat"))
    assert probing.prober.failed("chat")[1].reached
