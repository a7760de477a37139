"""What the parts of the proxy see of each other: Protocols and nothing else.

A request (`request`) stands between its client's connection (`downstream`) and its attempts (`attempt`), and a relay passes
its response on. Each of them imports this module instead of the others, so that no two modules of the package import each
other, and what a part may use of another is written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from lb.config.options import Limits
from lb.core.api_keys import Admission
from lb.core.byte_budget import ByteBudget
from lb.core.failures import Failure
from lb.engines.kinds import EngineKind
from lb.http.body_framing import BodyDecoder
from lb.http.cors import CorsRules
from lb.http.messages import Hop, Reader, RequestHead, ResponseHead
from lb.http.upstream import Pools, TargetConnection
from lb.http.write_batch import WriteBatcher
from lb.proxy.fast_path import FastPath
from lb.proxy.faults import Faults
from lb.stream.resume_rules import Reason
from lb.stream.token_usage import Tokens


class Downstream(Protocol):
    """A client's connection, as a request and its relay use it."""

    closing: bool  # after the response under way
    body_left: bool  # the request began before its body was over
    length: int  # of the body, if it is not chunked
    hop: Hop

    @property
    def transport(self) -> asyncio.Transport: ...

    def send_soon(self, response: bytes) -> None:
        """Send a whole response at the end of this turn of the loop."""
        ...

    def next(self) -> None:
        """The response is over: go on to the next request, or close."""
        ...

    def hang_up(self, *, abort: bool = False) -> None:
        """Close without an end mark for the response under way."""
        ...

    def tunnel(self) -> bytes:
        """Pass all bytes to the request as they are from now on. Returns what came ahead."""
        ...

    def pause_reading(self, who: int) -> None: ...
    def resume_reading(self, who: int) -> None: ...


class RelayHost(Protocol):
    """A request, as its relay uses it."""

    status: int  # what the client was sent
    continues: bool  # the client has not forbidden to resume its stream

    @property
    def head(self) -> RequestHead: ...
    @property
    def request_id(self) -> bytes: ...
    @property
    def client(self) -> Downstream: ...
    @property
    def connection(self) -> TargetConnection | None:
        """Of the present attempt."""
        ...

    @property
    def fast_path(self) -> FastPath | None: ...

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the next turn of the loop, guarded."""
        ...

    def connection_line(self) -> bytes:
        """Return the `Connection` header of the response, as a line."""
        ...

    def response_head(self, response: ResponseHead, framing: bytes) -> bytes:
        """Return the head that the client gets. `framing` are whole lines on length and connection."""
        ...

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        """The relay has passed the whole response; `rest` if more came on the connection than that."""
        ...

    def broke(self, failure: Failure, why: str) -> None:
        """The response broke off after its first byte."""
        ...

    def cut(self, why: str) -> None:
        """Nothing more can be sent: what was sent stays sent, and the client sees a broken connection."""
        ...

    def ended_early(self) -> None:
        """The target was lost, but the relay has completed the response without it."""
        ...

    def ended_in_error(self, code: str) -> None:
        """The relay has sent the client an error event."""
        ...

    def kinds_elsewhere(self, *, now_or_later: bool) -> set[EngineKind]:
        """Kinds of the engines that could take the request over: those with room, or (`now_or_later`) all healthy ones."""
        ...

    def not_resumed(self, reason: Reason) -> None:
        """Count a stream that cannot be resumed."""
        ...

    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class Relay(Protocol):
    """A response on its way to the client, as its request and its attempt use it. Made with its first byte."""

    blocked: bool  # the client has no room
    silent_s: float  # for how long nothing has come, as far as the sweep knows
    chunks: int
    sent_bytes: int  # of the body

    def tokens(self) -> Tokens | None:
        """Return how long prompt and response were, if the response has it."""
        ...

    def generated(self) -> int:
        """Return how many tokens the client has been sent, counted or estimated."""
        ...

    def data(self, data: bytes) -> None:
        """Bytes of the target's connection."""
        ...

    def pulse(self) -> bool:
        """Return True if something has come since the last call."""
        ...

    def halt(self) -> None:
        """The target's connection is about to be closed, or taken away."""
        ...

    def collected(self, body: bytes) -> None:
        """The beginning of the body, without framing: the decoder has walked over it already."""
        ...

    def ended(self) -> bool:
        """The target's connection is closed. Returns False if the body had not."""
        ...

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        """Return True if the response could go on without its target.

        From another that has room, or (`now_or_later`) from any that is healthy.
        """
        ...

    def resume(self, why: str) -> bool:
        """Prepare for going on elsewhere. Returns False if the response is over instead, one way or another."""
        ...

    def fail(self, code: str, message: str) -> None:
        """End the response as an error."""
        ...


class AttemptServices(Protocol):
    """What attempts share."""

    write_batcher: WriteBatcher
    pools: Pools
    limits: Limits
    heads: Reader

    @property
    def clock(self) -> Callable[[], float]: ...


class Responding(Protocol):
    """An attempt whose target has started to respond."""

    response: ResponseHead
    response_length: int | None
    decoder: BodyDecoder

    def pause(self) -> None: ...


class AttemptHost(Protocol):
    """A request, as its attempt uses it."""

    span: str
    hop_lines: bytes  # of a request that is forwarded to another region
    relay: Relay | None

    @property
    def head(self) -> RequestHead: ...
    @property
    def request_id(self) -> bytes: ...
    @property
    def client(self) -> Downstream: ...
    @property
    def services(self) -> AttemptServices: ...

    def outgoing(self) -> tuple[bytes, bytes] | None:
        """Return path and body for the target of the attempt; None if it cannot serve the request: the attempt is over."""
        ...

    def halt(self) -> None:
        """One of the two connections is about to be closed."""
        ...

    def attempt_failed(self, failure: Failure, why: str) -> None:
        """Before the first byte."""
        ...

    def broke(self, failure: Failure, why: str) -> None:
        """After the first byte."""
        ...

    def responded_whole(self, response: ResponseHead, body: bytes) -> None:
        """All of the response is here."""
        ...

    def begin_relay(self, attempt: Responding) -> Relay:
        """The first byte has come of a response that is passed on as it comes."""
        ...

    def open_tunnel(self, response: ResponseHead, rest: bytes) -> None: ...
    def tunnel_data(self, data: bytes) -> None: ...
    def target_closed_tunnel(self) -> None: ...
    def websocket_refused(self) -> None: ...
    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class ClientRequest(Protocol):
    """A request, as its client's connection uses it."""

    def place(self) -> None:
        """Go to a target, or wait for one."""
        ...

    def client_data(self, data: bytes) -> None:
        """Bytes for the tunnel."""
        ...

    def client_lost(self) -> None: ...
    def client_full(self) -> None: ...
    def client_drained(self) -> None: ...
    def halt(self) -> None: ...
    def more_body(self, part: bytes, last: bool) -> None: ...
    def bad_body(self, status: int, code: str, message: str) -> None: ...
    def crashed(self, entrance: str, error: Exception) -> None: ...


class Rejection(NamedTuple):
    """An error response of our own to a request that is not let in."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Entrance(Protocol):
    """The proxy, as clients' connections use it."""

    loop: asyncio.AbstractEventLoop
    write_batcher: WriteBatcher
    faults: Faults
    buffers: ByteBudget
    limits: Limits
    heads: Reader
    closing: bool
    clients: set[ClientPort]

    @property
    def cors(self) -> CorsRules | None:
        """Which web pages may call; None if CORS is off."""
        ...

    @property
    def clock(self) -> Callable[[], float]: ...

    def arrived(self) -> None:
        """The head of a request is here."""
        ...

    def is_trusted_proxy(self, peer: str) -> bool:
        """Return True if this address is one of a proxy whose word on its own clients is taken."""
        ...

    def is_full(self) -> bool:
        """Return True if there are more clients than descriptors allow."""
        ...

    def check(self, head: RequestHead) -> Rejection | Admission | bytes:
        """Decide on the head alone whether a request is let in. Bytes are a complete response to it."""
        ...

    def begin(
        self, client: ClientPort, head: RequestHead, body: bytes, admission: Admission
    ) -> ClientRequest | Rejection:
        """A request is here with its body, or with as much of it as is kept. The caller places it."""
        ...

    def abandoned(self, admission: Admission) -> None:
        """Settle a request that was let in and did not begin, for example because its body never came."""
        ...

    def client_gone(self) -> None:
        """Count a client that left before its request was whole."""
        ...

    def refused(self, refusal: Rejection) -> None:
        """Count a response to what never became a request."""
        ...


class ClientPort(Downstream, Protocol):
    """A client's connection, as the proxy keeps it."""

    def close_soon(self, grace_s: float, fresh_s: float | None = None) -> None: ...
    def identify(self) -> None:
        """Find out again who the client is: other proxies are trusted."""
        ...
