"""What a relay, its request and the client's connection see of each other: Protocols and nothing else.

Each of them imports this module instead of the others, so that no two modules of the package import each other. A Protocol
that has one user stands beside that user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from lb.core.failures import Failure
from lb.engines.kinds import EngineKind
from lb.http.messages import Hop, RequestHead, ResponseHead
from lb.http.upstream import TargetConnection
from lb.proxy.fast_path import FastPath
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


class ClientPort(Downstream, Protocol):
    """A client's connection, as the proxy keeps it."""

    def close_soon(self, grace_s: float, fresh_s: float | None = None) -> None: ...
    def check_upload(self, now: float) -> None:
        """Refuse the body that is arriving, if it is too slow."""
        ...

    def identify(self) -> None:
        """Find out again who the client is: other proxies are trusted."""
        ...


class RelayHost(Protocol):
    """A request, as its relay uses it."""

    status: int  # what the client was sent
    continues: bool  # the client has not forbidden to resume its stream
    is_early: bool  # the client was sent a head before any target had one for it

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

    def resumed_inexactly(self, reason: Reason) -> None:
        """Count a stream that goes on with tokens that an undisturbed engine need not have made."""
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

    def usage_bytes(self) -> bytes:
        """Return the end of a stream that no other has continued, where its usage is; empty if there is none."""
        ...

    def text(self) -> str:
        """Return the text of a stream that is kept and is nothing but text; else empty."""
        ...

    def data(self, data: bytes) -> None:
        """Bytes of the target's connection."""
        ...

    def pulse(self) -> bool:
        """Return True if something has come since the last call."""
        ...

    def held_bytes(self) -> int:
        """Return about how many bytes of memory hold what has been sent."""
        ...

    def keep_alive(self) -> None:
        """Send the client a comment, if it is a stream of events and between two of them."""
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
