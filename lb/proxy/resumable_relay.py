"""Streams of models that outlive their target: the relay that can change engines under a running response.

While all is well the chunks go through a forwarding of the fast_path (`lb.proxy.fast_path`), where there is one; without it a chunk of an
engine, which is one write and one whole event, passes as it came; what it costs beyond that is a look at its ends and a
place in the transcript. Only when something is unusual (events cut in two, several chunks at once, token ids that the
client did not ask for) are bodies unframed and framed anew.

When the target dies, stalls, gives up or is about to be taken away, the transcript says how far the stream has come
(`lb.stream.transcript`), `lb.stream.resume_request` makes the request that goes on from there, the request finds a target for it like for
any other, and `lb.stream.stream_merge` makes one stream of the two. What cannot go on ends with an error event that says so.
"""

from __future__ import annotations

from collections.abc import Callable

from lb.config.options import Continuation
from lb.core.failures import Failure
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
from lb.proxy.ports import RelayHost
from lb.proxy.relay import begin_response
from lb.stream.openai_request import ParsedRequest
from lb.stream.resume_request import NotResumable, Preparation, ResumeRequest, prepare, resume, with_fields
from lb.stream.resume_rules import Reason
from lb.stream.stream_merge import StreamMerger, closing, stripper
from lb.stream.token_usage import Tokens, usage_of
from lb.stream.transcript import StreamProgress, Transcript

BY_ENGINE = frozenset({Reason.ENGINE, Reason.PROMPT_IDS, Reason.LAST_MESSAGE})  # another may be able to

_FORWARDING_BYTES = 256 * 1024  # kept by a forwarding before it comes back
_TAIL_BYTES = 4096  # in which the usage of a stream and its end mark are found

_EVENT_END = b"\n\n\r\n"  # of an event that is a chunk
_GOES_ON = b'"finish_reason":null'  # an event with this neither ends a stream nor gives it up


class ResumeState:
    """What a stream needs to be continued: the client's request, how far the response has come, and how it is asked for."""

    __slots__ = (
        "_body",
        "_path",
        "_request",
        "breaks",
        "kind",
        "options",
        "preparation",
        "progress",
        "resumption",
    )

    def __init__(self, path: bytes, ask: ParsedRequest, body: bytes, options: Continuation) -> None:
        self._path = path
        self._request = ask.json or {}
        self._body = body
        self.options = options
        self.breaks = 0
        self.kind = EngineKind.UNKNOWN  # of the present target
        self.progress: StreamProgress | None = None  # None until the first break
        self.preparation: Preparation | None = None
        self.resumption: ResumeRequest | None = None

    def outgoing(self, kind: EngineKind) -> tuple[bytes | None, bytes]:
        """Path (None: the client's) and body of the request for a target of this kind. Raises NotResumable."""
        self.kind = kind
        if self.progress is None:
            ready = prepare(self._path, self._request, kind, self.options.mode)
            self.preparation = ready
            return None, with_fields(self._body, self._request, ready.fields)
        self.resumption = resume(self._path, self._request, self.progress, kind, self.options.mode)
        return self.resumption.path, self.resumption.body

    def could_resume(self, progress: StreamProgress, kind: EngineKind) -> bool:
        """Whether a stream that has come so far could go on with an engine of this kind."""
        if self.breaks >= self.options.max_breaks:
            return False
        try:
            resume(self._path, self._request, progress, kind, self.options.mode)
        except NotResumable:
            return False
        return True

    def closing(self, progress: StreamProgress) -> bytes | None:
        """What is missing of a stream whose response was complete; None if the response was not."""
        return closing(self._path, self._request, progress, self.kind)

    def merger(self) -> StreamMerger:
        assert self.progress is not None  # noqa: S101 (for the type checker)
        assert self.resumption is not None  # noqa: S101 (for the type checker)
        return StreamMerger(
            self._path, self._request, self.progress, self.resumption, self.options.buffer_bytes
        )


class ResumableRelay:
    """A stream of events that can go on from another target."""

    __slots__ = (
        "_decoder",
        "_fast_path_due",
        "_forwarding",
        "_gate",
        "_heard",
        "_last",
        "_merger",
        "_payloads",
        "_quick",
        "_request",
        "_resume_state",
        "_strip",
        "_transcript",
        "_unchunked",
        "_write",
        "blocked",
        "chunks",
        "sent_bytes",
        "silent_s",
    )

    def __init__(
        self, request: RelayHost, resume_state: ResumeState, response: ResponseHead, decoder: BodyDecoder
    ) -> None:
        self._request = request
        self._resume_state = resume_state
        self._decoder = decoder
        self._heard = True
        self._forwarding: Forwarding | None = None
        self._fast_path_due = False
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0
        self._last = b""
        limit = resume_state.options.buffer_bytes
        chunked = isinstance(decoder, ChunkedDecoder)
        self._transcript = Transcript(chunked, limit)
        self._gate = Gate(min(limit, 256 * 1024))
        ready = resume_state.preparation
        self._strip = stripper(ready.strip) if ready is not None else None
        self._merger: StreamMerger | None = None
        begin_response(request, response, decoder)
        self._unchunked = request.head.http_1_0
        self._payloads: list[bytes] = []
        if isinstance(decoder, ChunkedDecoder):
            decoder.payloads = self._payloads
        self._quick = chunked and not self._unchunked and self._strip is None
        self._write: Callable[[bytes], None] = request.client.transport.write

    # --- while all is well

    def data(self, data: bytes) -> None:
        self.chunks += 1
        if self._quick and data[-4:] == _EVENT_END and _GOES_ON in data and one_chunk(data):
            self._heard = True
            self._last = data
            self._transcript.add(data)
            self.sent_bytes += len(data)
            self._write(data)
            if not self._fast_path_due and self._request.fast_path is not None:
                self._fast_path_due = True  # when what was written has gone
                self._request.call_soon(self._open_forwarding)
        else:
            self._walk(data)

    # --- the forwarding

    def _open_forwarding(self) -> None:
        """Let the fast_path move what comes, if nothing is in between."""
        self._fast_path_due = False
        request = self._request
        fast_path, connection, client = (
            request.fast_path,
            self._request.connection,
            request.client.transport,
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
        connection = self._request.connection
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

    def _absorb(self) -> None:
        """Take over what has gone through the forwarding."""
        forwarding = self._forwarding
        if forwarding is None:
            return
        passed = forwarding.take()
        if passed:
            self._transcript.add(passed)
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
        decoder, payloads = self._decoder, self._payloads
        try:
            end = decoder.feed(data)
        except FramingError as error:
            self._request.broke(Failure.MALFORMED, str(error))
            return
        body = data if end < 0 else data[:end]
        if isinstance(decoder, ChunkedDecoder):
            payload = b"".join(payloads)
            payloads.clear()
        else:
            payload = body
        if is_data(payload):
            self._heard = True
        if self._merger is not None:
            self._send(self._merger.feed(payload))
            gave_up = bool(self._merger.error)
        else:
            self._transcript.add(body)
            events = self._gate.feed(payload)
            if events:
                self._last = (self._last + events)[-_TAIL_BYTES:]
                self._send(events if self._strip is None else self._strip(events))
            gave_up = bool(self._gate.error)
            self._quick = (
                not self._unchunked
                and self._strip is None
                and self._gate.clear
                and isinstance(decoder, ChunkedDecoder)
                and decoder.between
            )
        if gave_up:
            self._request.broke(Failure.GAVE_UP, "the engine has given the request up")
        elif end >= 0:
            self._over(rest=end < len(data), reusable=True)

    def _send(self, events: bytes) -> None:
        if events:
            self.sent_bytes += len(events)
            self._write(events if self._unchunked else chunk(events))

    def collected(self, body: bytes) -> None:
        raise NotImplementedError  # streams of events are never collected

    def ended(self) -> bool:
        if not isinstance(self._decoder, CloseDelimitedDecoder):
            return False
        self._over(rest=False, reusable=False)
        return True

    def _over(self, rest: bool, reusable: bool) -> None:
        """The target has ended its response in good order, whatever it was."""
        if b"[DONE]" not in self._last and self._merger is None:
            progress = self._transcript.read()
            if not (progress.finish_reason or progress.done or progress.strange or progress.lost) and (
                progress.events or self._gate.clear
            ):
                self._request.broke(
                    Failure.SHORT, "the stream ended before its response"
                )  # a server that shuts down closes what it was saying, or had not begun to say
                return
        elif self._merger is not None and not self._merger.over:
            progress = self._merger.progress()
            if not (progress.finish_reason or progress.done or progress.strange):
                self._request.broke(Failure.SHORT, "the stream ended before its response")
                return
        if self._merger is None:
            self._send(self._gate.rest())
        self._finish()
        self._request.relayed(rest=rest, reusable=reusable)

    def _finish(self) -> None:
        if not self._unchunked:
            self._write(LAST_CHUNK)

    def tokens(self) -> Tokens | None:
        self._absorb()
        if self._merger is not None:
            usage = self._merger.progress().usage
            if usage is None:
                return None
            return Tokens(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        return usage_of(self._last)

    # --- when it is not

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        progress = self._progress()
        if self._resume_state.closing(progress) is not None:
            return True  # only the end mark is missing, and the relay can send it itself
        kinds = self._request.kinds_elsewhere(now_or_later=now_or_later)
        return any(self._resume_state.could_resume(progress, kind) for kind in kinds)

    def resume(self, why: str) -> bool:
        resume_state = self._resume_state
        self.halt()  # an old target that lives (a drain, a stall) goes on speaking until its connection is closed
        self._quick = False  # nor is a forwarding opened on the next one, before it has begun to response
        progress = self._progress()
        rest = resume_state.closing(progress)
        if rest is not None:
            self._send(rest)
            self._finish()
            self._request.ended_early()
            return False
        if not self._request.continues or resume_state.breaks >= resume_state.options.max_breaks:
            self._refused(Reason.OFF, why)
            return False
        resume_state.breaks += 1
        resume_state.progress = progress
        self._merger = None
        return True

    def next_leg(self, decoder: BodyDecoder) -> None:
        """Another target has begun to response where the last one stopped."""
        self._decoder = decoder
        self._payloads.clear()
        if isinstance(decoder, ChunkedDecoder):
            decoder.payloads = self._payloads
        self._quick = False
        self._merger = self._resume_state.merger()
        self._heard = True
        self.silent_s = 0.0

    def refuse(self, error: NotResumable) -> None:
        """No target can go on with it."""
        self._refused(error.reason, "the stream cannot be continued")

    def _refused(self, reason: Reason, why: str) -> None:
        self._request.not_resumed(reason)
        self.fail(
            "stream_interrupted", f"The replica was lost in the midst of its response ({reason.value})."
        )

    def fail(self, code: str, message: str) -> None:
        own = self._gate.error if self._merger is None else self._merger.error
        self._send(own or error_event(code, message))
        self._finish()
        self._request.ended_in_error(code)

    def _progress(self) -> StreamProgress:
        if self._merger is not None:
            return self._merger.progress()
        if self._resume_state.progress is not None and self._resume_state.breaks:
            return self._resume_state.progress  # between two legs
        self._absorb()
        return self._transcript.read()


def is_resumable(response: ResponseHead) -> bool:
    """Whether this response is a stream that can be kept."""
    return response.status == 200 and not response.encoded and is_readable(response.content_type, b"")
