"""What the parts of the proxy see of each other: Protocols and nothing else.

A request (`request`) stands between its client's connection (`downstream`) and its attempts (`attempt`), and a relay passes
its response on. Each of them imports this module instead of the others, so that no two modules of the package import each
other, and what a part may use of another is written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from lb.core.failures import Failure
from lb.engines.kinds import EngineKind
from lb.http.messages import Hop, RequestHead
from lb.http.upstream import TargetConnection
from lb.proxy.fast_path import FastPath
from lb.stream.resume_rules import Reason


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
        """The `Connection` header of the response, as a line."""
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
