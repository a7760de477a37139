"""Streams of models that outlive their target: the relay that can change engines under a running answer.

While all is well the chunks go through a forwarding of the fast_path (`lb.proxy.fast_path`), where there is one; without it a chunk of an
engine, which is one write and one whole event, passes as it came; what it costs beyond that is a look at its ends and a
place in the journal. Only when something is unusual (events cut in two, several chunks at once, token ids that the
client did not ask for) are bodies unframed and framed anew.

When the target dies, stalls, gives up or is about to be taken away, the journal says how far the stream has come
(`lb.stream.transcript`), `lb.stream.resume_request` makes the request that goes on from there, the exchange finds a target for it like for
any other, and `lb.stream.stream_merge` makes one stream of the two. What cannot go on ends with an error event that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lb.config.options import Continuation
from lb.core.targets import Health
from lb.engines.kinds import EngineKind
from lb.http.body_framing import (
    LAST_CHUNK,
    BodyDecoder,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    chunk,
    one_chunk,
)
from lb.http.messages import ResponseHead
from lb.http.sse import Gate, error_event, is_data, is_readable
from lb.proxy.fast_path import Forwarding, StopReason, descriptor_of
from lb.proxy.relay import begin_answer
from lb.stream.openai_request import ParsedRequest
from lb.stream.resume_request import NotResumable, Preparation, ResumeRequest, prepare, resume, with_fields
from lb.stream.resume_rules import Reason
from lb.stream.stream_merge import StreamMerger, closing, stripper
from lb.stream.token_usage import Tokens, usage_of
from lb.stream.transcript import StreamProgress, Transcript

if TYPE_CHECKING:
    from lb.http.upstream import TargetConnection
    from lb.proxy.request import ProxiedRequest

BY_ENGINE = frozenset({Reason.ENGINE, Reason.PROMPT_IDS, Reason.LAST_MESSAGE})  # another may be able to

_FORWARDING_BYTES = 256 * 1024  # kept by a forwarding before it comes back
_TAIL_BYTES = 4096  # in which the usage of a stream and its end mark are found

_EVENT_END = b"\n\n\r\n"  # of an event that is a chunk
_GOES_ON = b'"finish_reason":null'  # an event with this neither ends a stream nor gives it up


class ResumeState:
    """What a stream needs to be continued: the client's request, how far the answer has come, and how it is asked for."""

    __slots__ = (
        "_body",
        "_path",
        "_request",
        "breaks",
        "kind",
        "options",
        "preparation",
        "resumption",
        "sofar",
    )

    def __init__(self, path: bytes, ask: ParsedRequest, body: bytes, options: Continuation) -> None:
        self._path = path
        self._request = ask.json or {}
        self._body = body
        self.options = options
        self.breaks = 0
        self.kind = EngineKind.UNKNOWN  # of the present target
        self.sofar: StreamProgress | None = None  # None until the first break
        self.preparation: Preparation | None = None
        self.resumption: ResumeRequest | None = None

    def outgoing(self, kind: EngineKind) -> tuple[bytes | None, bytes]:
        """Path (None: the client's) and body of the request for a target of this kind. Raises NotResumable."""
        self.kind = kind
        if self.sofar is None:
            ready = prepare(self._path, self._request, kind, self.options.mode)
            self.preparation = ready
            return None, with_fields(self._body, self._request, ready.fields)
        self.resumption = resume(self._path, self._request, self.sofar, kind, self.options.mode)
        return self.resumption.path, self.resumption.body

    def could_resume(self, sofar: StreamProgress, kind: EngineKind) -> bool:
        """Whether a stream that has come so far could go on with an engine of this kind."""
        if self.breaks >= self.options.max_breaks:
            return False
        try:
            resume(self._path, self._request, sofar, kind, self.options.mode)
        except NotResumable:
            return False
        return True

    def closing(self, sofar: StreamProgress) -> bytes | None:
        """What is missing of a stream whose answer was complete; None if the answer was not."""
        return closing(self._path, self._request, sofar, self.kind)

    def stitcher(self) -> StreamMerger:
        assert self.sofar is not None  # noqa: S101 (for the type checker)
        assert self.resumption is not None  # noqa: S101 (for the type checker)
        return StreamMerger(self._path, self._request, self.sofar, self.resumption, self.options.buffer_bytes)


class ResumableRelay:
    """A stream of events that can go on from another target."""

    __slots__ = (
        "_exchange",
        "_fast_path_due",
        "_forwarding",
        "_gate",
        "_heard",
        "_journal",
        "_keeper",
        "_last",
        "_payloads",
        "_quick",
        "_stitcher",
        "_strip",
        "_unchunked",
        "_walker",
        "_write",
        "blocked",
        "chunks",
        "sent_bytes",
        "silent_s",
    )

    def __init__(
        self, exchange: ProxiedRequest, keeper: ResumeState, answer: ResponseHead, walker: BodyDecoder
    ) -> None:
        self._exchange = exchange
        self._keeper = keeper
        self._walker = walker
        self._heard = True
        self._forwarding: Forwarding | None = None
        self._fast_path_due = False
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0
        self._last = b""
        limit = keeper.options.buffer_bytes
        chunked = isinstance(walker, ChunkedDecoder)
        self._journal = Transcript(chunked, limit)
        self._gate = Gate(min(limit, 256 * 1024))
        ready = keeper.preparation
        self._strip = stripper(ready.strip) if ready is not None else None
        self._stitcher: StreamMerger | None = None
        begin_answer(exchange, answer, walker)
        self._unchunked = exchange.head.http_1_0
        self._payloads: list[bytes] = []
        if isinstance(walker, ChunkedDecoder):
            walker.payloads = self._payloads
        self._quick = chunked and not self._unchunked and self._strip is None
        self._write: Callable[[bytes], None] = exchange.client.transport.write

    # --- while all is well

    def data(self, data: bytes) -> None:
        self.chunks += 1
        if self._quick and data[-4:] == _EVENT_END and _GOES_ON in data and one_chunk(data):
            self._heard = True
            self._last = data
            self._journal.add(data)
            self.sent_bytes += len(data)
            self._write(data)
            if not self._fast_path_due and self._exchange.proxy.fast_path is not None:
                self._fast_path_due = True  # when what was written has gone
                self._exchange.proxy.loop.call_soon(self._open_forwarding)
        else:
            self._walk(data)

    # --- the forwarding

    def _open_forwarding(self) -> None:
        """Let the fast_path move what comes, if nothing is in between."""
        self._fast_path_due = False
        exchange = self._exchange
        fast_path, connection, client = (
            exchange.proxy.fast_path,
            self._connection(),
            exchange.client.transport,
        )
        if (
            fast_path is None
            or connection is None
            or self._forwarding is not None
            or not self._quick
            or self.blocked
        ):
            return
        source, sink = descriptor_of(connection.transport), descriptor_of(client)
        if source is None or sink is None or connection.transport.is_closing() or client.is_closing():
            return
        if client.get_write_buffer_size():
            return  # what it holds must go first; the next chunk tries again
        connection.transport.pause_reading()
        self._forwarding = fast_path.forwarding(source, sink, _FORWARDING_BYTES, self)

    def forwarding_stopped(self, news: StopReason, data: bytes) -> None:
        """The forwarding has met something that it leaves to us."""
        self._absorb()
        self._forwarding = None
        connection = self._connection()
        if connection is None:
            return
        if news is StopReason.FULL:
            self._open_forwarding()
            if self._forwarding is None:  # its client is slow
                connection.transport.resume_reading()
            return
        connection.transport.resume_reading()
        if news is StopReason.UNSENT:
            self._write(data)
        elif news is StopReason.DATA:
            self.data(data)

    def _connection(self) -> TargetConnection | None:
        attempt = self._exchange.attempt
        return attempt.connection if attempt is not None else None

    def _absorb(self) -> None:
        """Take over what has gone through the forwarding."""
        forwarding = self._forwarding
        if forwarding is None:
            return
        passed = forwarding.take()
        if passed:
            self._journal.add(passed)
            self._last = passed[-_TAIL_BYTES:]
        chunks, size = forwarding.counts()
        self.chunks += chunks
        self.sent_bytes += size
        if forwarding.pulse():
            self._heard = True

    def halt(self) -> None:
        if self._forwarding is not None:
            self._forwarding.stop()
            self._absorb()
            self._forwarding = None

    def pulse(self) -> bool:
        heard, self._heard = self._heard, False
        return (self._forwarding is not None and self._forwarding.pulse()) or heard

    # --- what is not plain

    def _walk(self, data: bytes) -> None:
        """Anything that is not one event in one chunk."""
        walker, payloads = self._walker, self._payloads
        try:
            end = walker.feed(data)
        except FramingError as error:
            self._exchange.broke_framing(str(error))
            return
        body = data if end < 0 else data[:end]
        if isinstance(walker, ChunkedDecoder):
            payload = b"".join(payloads)
            payloads.clear()
        else:
            payload = body
        if is_data(payload):
            self._heard = True
        if self._stitcher is not None:
            self._send(self._stitcher.feed(payload))
            gave_up = bool(self._stitcher.error)
        else:
            self._journal.add(body)
            events = self._gate.feed(payload)
            if events:
                self._last = (self._last + events)[-_TAIL_BYTES:]
                self._send(events if self._strip is None else self._strip(events))
            gave_up = bool(self._gate.error)
            self._quick = (
                not self._unchunked
                and self._strip is None
                and self._gate.clear
                and isinstance(walker, ChunkedDecoder)
                and walker.between
            )
        if gave_up:
            self._exchange.broke_giving_up()
        elif end >= 0:
            self._over(rest=end < len(data), reusable=True)

    def _send(self, events: bytes) -> None:
        if events:
            self.sent_bytes += len(events)
            self._write(events if self._unchunked else chunk(events))

    def collected(self, body: bytes) -> None:
        raise NotImplementedError  # streams of events are never collected

    def ended(self) -> bool:
        if not isinstance(self._walker, CloseDelimitedDecoder):
            return False
        self._over(rest=False, reusable=False)
        return True

    def _over(self, rest: bool, reusable: bool) -> None:
        """The target has ended its answer in good order, whatever it was."""
        if b"[DONE]" not in self._last and self._stitcher is None:
            sofar = self._journal.read()
            if not (sofar.finish_reason or sofar.done or sofar.strange or sofar.lost) and (
                sofar.events or self._gate.clear
            ):
                self._exchange.broke_short()  # a server that shuts down closes what it was saying, or had not begun to say
                return
        elif self._stitcher is not None and not self._stitcher.over:
            sofar = self._stitcher.sofar()
            if not (sofar.finish_reason or sofar.done or sofar.strange):
                self._exchange.broke_short()
                return
        if self._stitcher is None:
            self._send(self._gate.rest())
        self._finish()
        self._exchange.relayed(rest=rest, reusable=reusable)

    def _finish(self) -> None:
        if not self._unchunked:
            self._write(LAST_CHUNK)

    def tokens(self) -> Tokens | None:
        self._absorb()
        if self._stitcher is not None:
            usage = self._stitcher.sofar().usage
            if usage is None:
                return None
            return Tokens(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        return usage_of(self._last)

    # --- when it is not

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        exchange = self._exchange
        proxy, booking = exchange.proxy, exchange.booking
        if booking is None:
            return False
        now = proxy.clock()
        if now_or_later:
            well = (target.id for target, standing, _ in proxy.table.rows(now) if standing is Health.GOOD)
            others = {one for one in well if one != booking.key.id}
        else:
            others = {view.id for view in proxy.table.candidates(now, exchange.tried)[1]}
        sofar = self._sofar()
        if self._keeper.closing(sofar) is not None:
            return True  # only its last words are missing, and nobody is needed for them
        return any(
            self._keeper.could_resume(sofar, kind) for kind in {proxy.kind_of_id(one) for one in others}
        )

    def resume(self, why: str) -> bool:
        keeper = self._keeper
        self.halt()  # an old target that lives (a drain, a stall) goes on speaking until its connection is closed
        self._quick = False  # nor is a forwarding opened on the next one, before it has begun to answer
        sofar = self._sofar()
        rest = keeper.closing(sofar)
        if rest is not None:
            self._send(rest)
            self._finish()
            self._exchange.ended_early()
            return False
        if not self._exchange.continues or keeper.breaks >= keeper.options.max_breaks:
            self._refused(Reason.OFF, why)
            return False
        keeper.breaks += 1
        keeper.sofar = sofar
        self._stitcher = None
        return True

    def next_leg(self, walker: BodyDecoder) -> None:
        """Another target has begun to answer where the last one stopped."""
        self._walker = walker
        self._payloads.clear()
        if isinstance(walker, ChunkedDecoder):
            walker.payloads = self._payloads
        self._quick = False
        self._stitcher = self._keeper.stitcher()
        self._heard = True
        self.silent_s = 0.0

    def refuse(self, error: NotResumable) -> None:
        """No target can go on with it."""
        self._refused(error.reason, "the stream cannot be continued")

    def _refused(self, reason: Reason, why: str) -> None:
        self._exchange.proxy.metrics.counts.continue_refused[reason.value] += 1
        self.fail("stream_interrupted", f"The replica was lost in the midst of its answer ({reason.value}).")

    def fail(self, code: str, message: str) -> None:
        own = self._gate.error if self._stitcher is None else self._stitcher.error
        self._send(own or error_event(code, message))
        self._finish()
        self._exchange.ended_in_error(code)

    def _sofar(self) -> StreamProgress:
        if self._stitcher is not None:
            return self._stitcher.sofar()
        if self._keeper.sofar is not None and self._keeper.breaks:
            return self._keeper.sofar  # between two legs
        self._absorb()
        return self._journal.read()


def is_resumable(answer: ResponseHead) -> bool:
    """Whether this answer is a stream that can be kept."""
    return answer.status == 200 and not answer.encoded and is_readable(answer.content_type, b"")
