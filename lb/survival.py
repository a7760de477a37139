"""Streams of models that outlive their target: the relay that can change engines under a running answer.

While all is well the chunks go through a lane of the pump (`lb.pump`), where there is one; without it a chunk of an
engine, which is one write and one whole event, passes as it came; what it costs beyond that is a look at its ends and a
place in the journal. Only when something is unusual (events cut in two, several chunks at once, token ids that the
client did not ask for) are bodies unframed and framed anew.

When the target dies, stalls, gives up or is about to be taken away, the journal says how far the stream has come
(`lb.journal`), `lb.continuation` makes the request that goes on from there, the exchange finds a target for it like for
any other, and `lb.stitch` makes one stream of the two. What cannot go on ends with an error event that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lb.continuation import NotContinuable, Preparation, Resumption, prepare, resume, with_fields
from lb.engines import EngineKind
from lb.framing import LAST_CHUNK, ChunkWalker, CloseWalker, FramingError, Walker, chunk, one_chunk
from lb.heads import AnswerHead
from lb.journal import Journal, SoFar
from lb.options import Continuation
from lb.prompt import Ask
from lb.pump import Lane, News, descriptor_of
from lb.refusals import Reason
from lb.relay import begin_answer
from lb.sse import Gate, error_event, is_data, is_readable
from lb.stitch import Stitcher, closing, stripper
from lb.targets import Standing
from lb.usage import Tokens, usage_of

if TYPE_CHECKING:
    from lb.exchange import Exchange
    from lb.upstream import TargetConnection

BY_ENGINE = frozenset({Reason.ENGINE, Reason.PROMPT_IDS, Reason.LAST_MESSAGE})  # another may be able to

_LANE_BYTES = 256 * 1024  # kept by a lane before it comes back
_TAIL_BYTES = 4096  # in which the usage of a stream and its end mark are found

_EVENT_END = b"\n\n\r\n"  # of an event that is a chunk
_GOES_ON = b'"finish_reason":null'  # an event with this neither ends a stream nor gives it up


class Keeper:
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

    def __init__(self, path: bytes, ask: Ask, body: bytes, options: Continuation) -> None:
        self._path = path
        self._request = ask.json or {}
        self._body = body
        self.options = options
        self.breaks = 0
        self.kind = EngineKind.UNKNOWN  # of the present target
        self.sofar: SoFar | None = None  # None until the first break
        self.preparation: Preparation | None = None
        self.resumption: Resumption | None = None

    def outgoing(self, kind: EngineKind) -> tuple[bytes | None, bytes]:
        """Path (None: the client's) and body of the request for a target of this kind. Raises NotContinuable."""
        self.kind = kind
        if self.sofar is None:
            ready = prepare(self._path, self._request, kind, self.options.mode)
            self.preparation = ready
            return None, with_fields(self._body, self._request, ready.fields)
        self.resumption = resume(self._path, self._request, self.sofar, kind, self.options.mode)
        return self.resumption.path, self.resumption.body

    def could_resume(self, sofar: SoFar, kind: EngineKind) -> bool:
        """Whether a stream that has come so far could go on with an engine of this kind."""
        if self.breaks >= self.options.max_breaks:
            return False
        try:
            resume(self._path, self._request, sofar, kind, self.options.mode)
        except NotContinuable:
            return False
        return True

    def closing(self, sofar: SoFar) -> bytes | None:
        """What is missing of a stream whose answer was complete; None if the answer was not."""
        return closing(self._path, self._request, sofar, self.kind)

    def stitcher(self) -> Stitcher:
        assert self.sofar is not None  # noqa: S101 (for the type checker)
        assert self.resumption is not None  # noqa: S101 (for the type checker)
        return Stitcher(self._path, self._request, self.sofar, self.resumption, self.options.buffer_bytes)


class EventRelay:
    """A stream of events that can go on from another target."""

    __slots__ = (
        "_exchange",
        "_gate",
        "_heard",
        "_journal",
        "_keeper",
        "_lane",
        "_last",
        "_payloads",
        "_pump_due",
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

    def __init__(self, exchange: Exchange, keeper: Keeper, answer: AnswerHead, walker: Walker) -> None:
        self._exchange = exchange
        self._keeper = keeper
        self._walker = walker
        self._heard = True
        self._lane: Lane | None = None
        self._pump_due = False
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0
        self._last = b""
        limit = keeper.options.buffer_bytes
        chunked = isinstance(walker, ChunkWalker)
        self._journal = Journal(chunked, limit)
        self._gate = Gate(min(limit, 256 * 1024))
        ready = keeper.preparation
        self._strip = stripper(ready.strip) if ready is not None else None
        self._stitcher: Stitcher | None = None
        begin_answer(exchange, answer, walker)
        self._unchunked = exchange.head.http_1_0
        self._payloads: list[bytes] = []
        if isinstance(walker, ChunkWalker):
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
            if not self._pump_due and self._exchange.proxy.pump is not None:
                self._pump_due = True  # when what was written has gone
                self._exchange.proxy.loop.call_soon(self._open_lane)
        else:
            self._walk(data)

    # --- the lane

    def _open_lane(self) -> None:
        """Let the pump move what comes, if nothing is in between."""
        self._pump_due = False
        exchange = self._exchange
        pump, connection, client = exchange.proxy.pump, self._connection(), exchange.client.transport
        if pump is None or connection is None or self._lane is not None or not self._quick or self.blocked:
            return
        source, sink = descriptor_of(connection.transport), descriptor_of(client)
        if source is None or sink is None or connection.transport.is_closing() or client.is_closing():
            return
        if client.get_write_buffer_size():
            return  # what it holds must go first; the next chunk tries again
        connection.transport.pause_reading()
        self._lane = pump.lane(source, sink, _LANE_BYTES, self)

    def lane_stopped(self, news: News, data: bytes) -> None:
        """The lane has met something that it leaves to us."""
        self._absorb()
        self._lane = None
        connection = self._connection()
        if connection is None:
            return
        if news is News.FULL:
            self._open_lane()
            if self._lane is None:  # its client is slow
                connection.transport.resume_reading()
            return
        connection.transport.resume_reading()
        if news is News.UNSENT:
            self._write(data)
        elif news is News.DATA:
            self.data(data)

    def _connection(self) -> TargetConnection | None:
        attempt = self._exchange.attempt
        return attempt.connection if attempt is not None else None

    def _absorb(self) -> None:
        """Take over what has gone through the lane."""
        lane = self._lane
        if lane is None:
            return
        passed = lane.take()
        if passed:
            self._journal.add(passed)
            self._last = passed[-_TAIL_BYTES:]
        chunks, size = lane.counts()
        self.chunks += chunks
        self.sent_bytes += size
        if lane.pulse():
            self._heard = True

    def halt(self) -> None:
        if self._lane is not None:
            self._lane.stop()
            self._absorb()
            self._lane = None

    def pulse(self) -> bool:
        heard, self._heard = self._heard, False
        return (self._lane is not None and self._lane.pulse()) or heard

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
        if isinstance(walker, ChunkWalker):
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
                and isinstance(walker, ChunkWalker)
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
        if not isinstance(self._walker, CloseWalker):
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
            well = (target.id for target, standing, _ in proxy.table.rows(now) if standing is Standing.GOOD)
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
        self._quick = False  # nor is a lane opened on the next one, before it has begun to answer
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

    def next_leg(self, walker: Walker) -> None:
        """Another target has begun to answer where the last one stopped."""
        self._walker = walker
        self._payloads.clear()
        if isinstance(walker, ChunkWalker):
            walker.payloads = self._payloads
        self._quick = False
        self._stitcher = self._keeper.stitcher()
        self._heard = True
        self.silent_s = 0.0

    def refuse(self, error: NotContinuable) -> None:
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

    def _sofar(self) -> SoFar:
        if self._stitcher is not None:
            return self._stitcher.sofar()
        if self._keeper.sofar is not None and self._keeper.breaks:
            return self._keeper.sofar  # between two legs
        self._absorb()
        return self._journal.read()


def survives(answer: AnswerHead) -> bool:
    """Whether this answer is a stream that can be kept."""
    return answer.status == 200 and not answer.encoded and is_readable(answer.content_type, b"")
