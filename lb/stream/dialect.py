"""What the API of a stream decides about its continuation: the Protocols that an API implements. Pure.

A stream is kept, broken, resumed and merged in one way, whichever API its client speaks. What differs is how its events are
read, which request continues it, and how its events have to be written. `lb.stream.dialects` has the table of paths;
`lb.stream.chat_completions` is the dialect of chats and completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.stream.first_request import Preparation
from lb.stream.resume_request import ResumeRequest
from lb.stream.resume_rules import Reason
from lb.stream.token_usage import Tokens
from lb.stream.transcript import StreamProgress, Tally


class Merger(Protocol):
    """One further leg of a stream: turns the response to a ResumeRequest into the rest of the client's stream.

    `error` is the event in which the engine has given up, or which shows that the leg is no continuation; `feed` does not return
    it. Another leg may go on from `progress()` then.
    """

    error: bytes
    refused: Reason | None  # why the leg is no continuation: the stream must end as an error
    inexact: (
        Reason | None
    )  # how the rest may differ from what an undisturbed engine would send; None: not at all

    @property
    def over(self) -> bool:
        """Whether the stream is complete, or the leg broken: `feed` returns nothing more."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens of the response, over all legs."""
        ...

    @property
    def usage(self) -> Tokens | None:
        """The usage that an engine reported last, over all legs."""
        ...

    def feed(self, payload: bytes) -> bytes:
        """Return the whole events for the client that these bytes of the body, without chunk framing, complete."""
        ...

    def progress(self) -> StreamProgress:
        """Return how far the stream has come, with all of its legs."""
        ...


class Dialect(Protocol):
    """An API whose streams can be continued. Stateless: one value serves all streams of its paths.

    `request` is always the parsed body that the client has sent, `kind` that of the engine in question.
    """

    @property
    def end_mark(self) -> bytes:
        """The last event of a complete stream."""
        ...

    @property
    def gives_up(self) -> tuple[bytes, ...]:
        """Bytes that occur only in an event in which an engine gives a stream up; text would have them escaped."""
        ...

    def refusal(self, request: Mapping[str, Any]) -> Reason | None:
        """Return why a response cannot be continued once the client has some of it; None if it can."""
        ...

    def prepare(self, request: Mapping[str, Any], kind: EngineKind, mode: Continue) -> Preparation:
        """Return what the first request asks of its engine, and what of the response the client must not see."""
        ...

    def tally(self) -> Tally:
        """Return an empty tally, which reads the data of one event after the other into a StreamProgress."""
        ...

    def resume(
        self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, mode: Continue
    ) -> ResumeRequest:
        """Return the request that continues a broken stream. Raises NotResumable."""
        ...

    def merger(
        self,
        request: Mapping[str, Any],
        before: StreamProgress,
        resumption: ResumeRequest,
        limit_bytes: int,
    ) -> Merger:
        """Return the merger for the response to `resumption`.

        A stream of more than about `limit_bytes` is merged to its end, but cannot be continued once more.
        """
        ...

    def closing(self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bytes | None:
        """Return the missing events of a stream whose response is complete; None if it is not, or if that is not known."""
        ...

    def error_event(self, code: str, message: str, sofar: StreamProgress | None) -> bytes:
        """Return the event that ends a stream as an error. `sofar` is None where nothing has been read of it."""
        ...

    def is_over(self, events: bytes) -> bool:
        """Return whether the last data event of these bytes, chunk-framed or not, is the end of the stream."""
        ...

    def has_finished(self, events: bytes) -> bool:
        """Return whether one of these events completes the response, so that only the end mark can be missing.

        The bytes may begin within an event, and be chunk-framed.
        """
        ...

    def may_pass(self, data: bytes) -> bool:
        """Return whether these whole events, chunk-framed or not, surely neither end a stream nor give it up."""
        ...
