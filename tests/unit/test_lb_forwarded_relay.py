"""A relay and its forwarding: when one is opened, and what is taken back from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from lb.config.schema import Target
from lb.http.body_framing import ChunkedDecoder
from lb.http.messages import RequestHead, ResponseHead
from lb.http.upstream import Pools, TargetConnection
from lb.proxy.fast_path import FastPath, StopReason
from lb.proxy.forwarded_relay import ForwardedRelay
from lb.proxy.ports import RelayHost
from lb.proxy.relay import PlainRelay
from tests.kit.lb_parts import StepLoop, Wire

CHUNK = b"9\r\ndata: 1\n\n\r\n"


class Forwarding:
    def __init__(self) -> None:
        self.passed: list[bytes] = []
        self.stopped = 0

    def take(self) -> bytes:
        taken, self.passed = b"".join(self.passed), []
        return taken

    def take_packed(self) -> None:
        raise NotImplementedError  # of a plain relay nothing is packed

    def held_bytes(self) -> int:
        return sum(map(len, self.passed))

    def counts(self) -> tuple[int, int, int, int]:
        return (1, len(CHUNK), 1, 0) if self.stopped == 0 else (0, 0, 0, 0)

    def pulse(self) -> bool:
        return bool(self.passed)

    def stop(self) -> None:
        self.stopped += 1


class SocketWire(Wire):
    """A wire on a socket, which a forwarding needs."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else super().get_extra_info(name, default)

    def fileno(self) -> int:
        return 7


class Host:
    """A request with a fast path, as its relay sees it. It is the helper in C and its event loop as well."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.opened: list[Forwarding] = []
        self.wire, self.target = SocketWire(), SocketWire()
        self.client = SimpleNamespace(transport=self.wire, closing=False, body_left=False)
        self.connection = TargetConnection(Pools().of(Target("a", "http://a.test")))
        self.connection.transport = cast(Any, self.target)
        self.head = RequestHead()
        self.fast_path = FastPath(cast(Any, self), cast(Any, self))
        self.status = 0
        self.is_early = False
        self.crashes: list[Exception] = []

    def fileno(self) -> int:
        return 8

    def run(self) -> list[Any]:
        return []

    def add_reader(self, descriptor: int, callback: Any) -> None:
        assert descriptor == self.fileno()

    def forwarding(self, *arguments: Any) -> Forwarding:
        self.opened.append(Forwarding())
        return self.opened[-1]

    def call_soon(self, callback: Any) -> None:
        self.loop.call_soon(callback)

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        return b""

    def connection_line(self) -> bytes:
        return b""

    def crashed(self, entrance: str, error: Exception) -> None:
        self.crashes.append(error)


def relay(host: Host) -> PlainRelay:
    response = ResponseHead()
    response.status, response.content_type = 200, b"text/event-stream"
    return PlainRelay(cast(RelayHost, host), response, ChunkedDecoder())


def test_a_forwarding_is_opened_once_in_the_next_turn() -> None:
    host = Host()
    one = relay(host)
    assert isinstance(one, ForwardedRelay)
    one.data(CHUNK)
    one.data(CHUNK)
    assert host.opened == []
    assert host.loop.turn() == 1
    assert len(host.opened) == 1
    assert not host.target.reading  # from here on the helper reads
    assert host.wire.sent == 2 * CHUNK


def test_what_the_client_has_not_taken_goes_first() -> None:
    host = Host()
    one = relay(host)
    host.wire.unwritten = 1
    one.data(CHUNK)
    host.loop.settle()
    assert host.opened == []
    host.wire.unwritten = 0
    one.data(CHUNK)
    host.loop.settle()
    assert len(host.opened) == 1


def test_a_client_that_does_not_read_gets_no_forwarding() -> None:
    host = Host()
    one = relay(host)
    one.blocked = True
    one.data(CHUNK)
    host.loop.settle()
    assert host.opened == []


def test_what_the_helper_leaves_to_us_is_handled_here() -> None:
    host = Host()
    one = relay(host)
    one.data(CHUNK)
    host.loop.settle()
    one.forwarding_stopped(StopReason.UNSENT, b"rest")
    assert host.target.reading
    assert host.wire.sent == CHUNK + b"rest"
    assert (one.chunks, one.sent_bytes) == (2, 2 * len(CHUNK))
    one.data(CHUNK)
    host.loop.settle()
    assert len(host.opened) == 2
    one.forwarding_stopped(StopReason.IRREGULAR, CHUNK)
    assert host.wire.sent.endswith(CHUNK)


def test_a_full_forwarding_is_followed_by_another() -> None:
    host = Host()
    one = relay(host)
    one.data(CHUNK)
    host.loop.settle()
    one.forwarding_stopped(StopReason.FULL, b"")
    assert len(host.opened) == 2
    assert not host.target.reading
    assert host.crashes == []


def test_a_halted_relay_has_all_that_went_through() -> None:
    host = Host()
    one = relay(host)
    one.data(CHUNK)
    host.loop.settle()
    one.pulse()
    host.opened[0].passed.append(CHUNK)
    assert one.pulse()
    assert one.held_bytes() == len(CHUNK)
    one.halt()
    assert one.held_bytes() == 0
    assert host.opened[0].stopped == 1
    one.halt()
    assert host.opened[0].stopped == 1
