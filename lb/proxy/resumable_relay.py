"""Streams of models that outlive their target: the relay that can change engines under a running response.

While all is well the chunks go through a forwarding of the fast path (`lb.proxy.fast_path`), where there is one, which also
removes what the client did not request. Without it a chunk of an engine, which is one write and one whole event, passes
as it came; what it costs beyond that is a look at its ends and a place in the transcript. Only when something is unusual
(events cut in two, several chunks at once, fields to be removed) are bodies unframed and framed again.

When the target fails, stalls, gives up or is about to be taken away, the transcript has how far the stream has come
(`lb.stream.transcript`), `lb.stream.resume_request` makes the request that goes on from there, the request finds a target
for it like for any other, and `lb.stream.stream_merge` makes one stream of the two. What cannot go on ends with an error
event.

Whether a response is complete is decided by its last events, never by what its text contains.
"""

from __future__ import annotations

from dataclasses import replace

from lb.config.options import Continue
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
from lb.http.sse import EventBuffer, is_data, is_readable
from lb.proxy.fast_path import Forwarding, ForwardingMode
from lb.proxy.forwarded_relay import TAIL_BYTES, ForwardedRelay
from lb.proxy.ports import RelayHost
from lb.proxy.relay import begin_response
from lb.stream.dialect import Merger
from lb.stream.early_stream import KEEP_ALIVE
from lb.stream.first_request import Strip
from lb.stream.resume_rules import NotResumable, Reason
from lb.stream.resume_state import ResumeState
from lb.stream.stream_merge import stripper
from lb.stream.token_usage import Tokens, prompt_tokens_in, usage_of
from lb.stream.transcript import StreamProgress, Transcript

BY_ENGINE = frozenset({Reason.ENGINE, Reason.PROMPT_IDS, Reason.LAST_MESSAGE})  # another may be able to

# Kept by a forwarding, as they came, before it comes back: half of the transcript's limit, within these bounds.
_LEAST_FORWARDING_BYTES = 256 * 1024
_MOST_FORWARDING_BYTES = 1024 * 1024
_MAX_HELD_BYTES = 256 * 1024  # of an event that is not complete; a longer one is passed in pieces

_EVENT_END = b"\n\n\r\n"  # of an event that is a chunk
_MODES = {
    Strip.NOTHING: ForwardingMode.EVENTS,
    Strip.IDS: ForwardingMode.WITHOUT_IDS,
    Strip.COUNTS: ForwardingMode.WITHOUT_USAGE,  # the last one, which the client wants, has no choices: it comes back
    Strip.USAGE: ForwardingMode.WITHOUT_USAGE,
}


class ResumableRelay(ForwardedRelay):
    """A stream of events that can go on from another target."""

    __slots__ = (
        "_decoder",
        "_dialect",
        "_gate",
        "_last",
        "_may_pass_whole",
        "_merger",
        "_payloads",
        "_prompt_tokens",
        "_reported",
        "_resume_state",
        "_strip",
        "_transcript",
        "_unchunked",
        "_verdict",
    )

    def __init__(
        self, request: RelayHost, resume_state: ResumeState, response: ResponseHead, decoder: BodyDecoder
    ) -> None:
        limit = resume_state.options.buffer_bytes
        forwarding_bytes = max(_LEAST_FORWARDING_BYTES, min(limit // 2, _MOST_FORWARDING_BYTES))
        super().__init__(request, _MODES[resume_state.strip], forwarding_bytes)
        self._resume_state = resume_state
        self._dialect = dialect = resume_state.dialect
        self._decoder = decoder
        self._last = b""  # the last events, as the engine wrote them
        self._prompt_tokens = 0  # as the first event reports them, where the last does not
        chunked = isinstance(decoder, ChunkedDecoder)
        kept = None if request.fast_path is None else request.fast_path.kept_events()
        self._transcript = Transcript(chunked, limit, dialect.tally, kept)
        self._gate = EventBuffer(min(limit, _MAX_HELD_BYTES), dialect.gives_up)
        self._strip = stripper(resume_state.strip)
        self._merger: Merger | None = None
        self._reported = False  # how the present leg differs
        self._verdict: tuple[object, bool] | None = None  # of `may_continue`, and for what
        begin_response(request, response, decoder)
        self._unchunked = request.head.http_1_0
        self._payloads: list[bytes] = []
        if isinstance(decoder, ChunkedDecoder):
            decoder.payloads = self._payloads
        # All that came is whole chunks of whole events of the first target, so the next may pass without the decoder.
        self._may_pass_whole = chunked and not self._unchunked

    # --- while all is well

    def data(self, data: bytes) -> None:
        self.chunks += 1
        if (
            self._may_pass_whole
            and self._strip is None
            and data[-4:] == _EVENT_END
            and self._dialect.may_pass(data)
            and one_chunk(data)
        ):
            self._has_received = True
            self._last = data
            self._counter.add(data)
            self._transcript.add(data)
            self.sent_bytes += len(data)
            self._write(data)
        else:
            self._walk(data)
        if self._may_pass_whole:
            self._expect_forwarding()

    def _may_forward(self) -> bool:
        return self._may_pass_whole

    def _take_from(self, forwarding: Forwarding) -> None:
        passed = forwarding.take_packed()
        if passed is not None:
            self._last = passed.tail(TAIL_BYTES)
            self._transcript.join(passed)

    def held_bytes(self) -> int:
        return super().held_bytes() + self._transcript.held_bytes

    # --- special cases

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
            self._has_received = True
        if self._merger is not None:
            self._send(self._merger.feed(payload))
            if self._is_refused(self._merger):
                return
            gave_up = bool(self._merger.error)
        else:
            self._transcript.add(body)
            events = self._gate.feed(payload)
            if events:
                if not self._last and b'"message_start"' in events:
                    self._prompt_tokens = prompt_tokens_in(events)
                sent = events if self._strip is None else self._strip(events)
                # The usage matters at the end, also if it is not sent. Token ids do not, and a prompt has many.
                ending = sent if self._mode is ForwardingMode.WITHOUT_IDS else events
                self._last = (self._last + ending)[-TAIL_BYTES:]
                self._counter.add(events)
                self._send(sent)
            gave_up = bool(self._gate.error)
            self._may_pass_whole = (
                not self._unchunked
                and self._gate.clear
                and isinstance(decoder, ChunkedDecoder)
                and decoder.between
            )
        if gave_up:
            self._request.broke(Failure.GAVE_UP, "the engine has given the request up")
        elif end >= 0:
            self._over(rest=end < len(data), reusable=True)

    def _is_refused(self, merger: Merger) -> bool:
        """Report how the leg differs from an undisturbed one; True if it is no continuation, which ends the stream."""
        if merger.inexact is not None and not self._reported:
            self._reported = True
            self._request.resumed_inexactly(merger.inexact)
        if merger.refused is None:
            return False
        self._refused(merger.refused, "the rest does not continue the stream")
        return True

    def _send(self, events: bytes) -> None:
        if events:
            self.sent_bytes += len(events)
            self._write(events if self._unchunked else chunk(events))

    def keep_alive(self) -> None:
        if self._take_over():
            return  # it is not silent
        if not self._gate.torn:  # else what the client has may end within an event
            self._write(KEEP_ALIVE if self._unchunked else chunk(KEEP_ALIVE))

    def collected(self, body: bytes) -> None:
        raise NotImplementedError  # streams of events are never collected

    def ended(self) -> bool:
        if not isinstance(self._decoder, CloseDelimitedDecoder):
            return False
        self._over(rest=False, reusable=False)
        return True

    def _over(self, rest: bool, reusable: bool) -> None:
        """The target has completed its response."""
        missing = self._missing()
        if (
            missing is None
        ):  # a server that shuts down ends the response it is writing, or has not started to write
            self._request.broke(Failure.SHORT, "the stream ended before its response")
            return
        self._send(missing)
        self._finish()
        self._request.relayed(rest=rest, reusable=reusable)

    def _missing(self) -> bytes | None:
        """Return what the client lacks of a stream whose target has closed it; None if that is more than its end mark and usage."""
        merger, dialect = self._merger, self._dialect
        if merger.over if merger is not None else dialect.is_over(self._last):
            return b""
        if merger is None and dialect.is_over(self._last + self._gate.rest()):
            return dialect.end_mark  # it lacked only its empty line
        progress = self._progress()
        missing = self._closing(progress)
        if missing is not None:
            return missing
        if not (progress.strange or progress.lost or (merger is None and dialect.has_finished(self._last))):
            return None
        # A dialect that is not known here, or more than the transcript keeps: its last event decides, or else its framing.
        if merger is None and dialect.has_finished(self._last):
            return self._end_without_usage(progress)
        return None if progress.lost or isinstance(self._decoder, CloseDelimitedDecoder) else b""

    def _end_without_usage(self, progress: StreamProgress) -> bytes | None:
        """Return the end mark of a whole response, and report if it is without the usage that the client has asked for."""
        if self._resume_state.loses_usage(progress):
            if self._resume_state.options.mode is Continue.EXACT:
                return None
            self._request.resumed_inexactly(Reason.USAGE)
        return self._dialect.end_mark

    def _finish(self) -> None:
        if not self._unchunked:
            self._write(LAST_CHUNK)

    def tokens(self) -> Tokens | None:
        self._absorb()
        if self._merger is not None:
            return self._merger.usage
        tokens = usage_of(self._last)
        return tokens and Tokens(tokens.prompt or self._prompt_tokens, tokens.out)

    def generated(self) -> int:
        if self._merger is not None:
            return self._merger.tokens
        if self._resume_state.progress is not None:  # between two legs
            return self._resume_state.progress.tokens
        tokens = self.tokens()
        return max(self._counter.tokens, tokens.out if tokens is not None else 0)

    def usage_bytes(self) -> bytes:
        self._absorb()
        return self._last if self._merger is None else b""

    def text(self) -> str:
        progress = self._progress()
        return (
            ""
            if progress.reasoning or progress.tool_call or progress.lost or progress.strange
            else progress.text
        )

    # --- when it is not

    def may_continue(self, *, now_or_later: bool = False) -> bool:
        # Silent streams are checked every second, and a verdict takes a parse of the transcript and a new request for each kind.
        self._absorb()
        kinds = self._request.kinds_elsewhere(now_or_later=now_or_later)
        circumstances = (self.chunks, self._resume_state.breaks, frozenset(kinds))
        if self._verdict is None or self._verdict[0] != circumstances:
            self._verdict = circumstances, self._could_continue(kinds)
        return self._verdict[1]

    def _could_continue(self, kinds: set[EngineKind]) -> bool:
        progress = self._progress()
        if self._resume_state.closing(progress) is not None:
            return True  # only the end mark is missing, and the relay can send it itself
        return any(self._resume_state.could_resume(progress, kind) for kind in kinds)

    def resume(self, why: str) -> bool:
        resume_state = self._resume_state
        self.halt()  # an old target that runs (a drain, a stall) goes on speaking until its connection is closed
        self._may_pass_whole = False  # nor is a forwarding opened on the next one
        progress = self._progress()
        if self._merger is not None and self._is_refused(self._merger):
            return False
        rest = self._closing(progress)
        if rest is not None:
            self._send(rest)
            self._finish()
            self._request.ended_early()
            return False
        if not self._request.continues:
            self._refused(Reason.OFF, why)
            return False
        if not resume_state.broken(progress):
            self._refused(Reason.TOO_OFTEN, why)
            return False
        self._merger = None
        return True

    def _closing(self, progress: StreamProgress) -> bytes | None:
        """Return the end of a stream whose response is complete; None if it is not. Reports what is lost by that."""
        rest = self._resume_state.closing(progress)
        if rest is not None and self._resume_state.loses_usage(progress):
            self._request.resumed_inexactly(Reason.USAGE)
        return rest

    def next_leg(self, decoder: BodyDecoder) -> None:
        """The response of another target has started where the last one stopped."""
        self._decoder = decoder
        self._payloads.clear()
        if isinstance(decoder, ChunkedDecoder):
            decoder.payloads = self._payloads
        self._may_pass_whole = False
        self._merger = self._resume_state.merger()
        self._reported = False
        self._has_received = True
        self.silent_s = 0.0

    def refuse(self, error: NotResumable) -> None:
        """No target can go on with it."""
        self._refused(error.reason, "the stream cannot be continued")

    def _refused(self, reason: Reason, why: str) -> None:
        self._request.not_resumed(reason)
        self.fail(
            "stream_interrupted", f"The replica was lost before the end of its response ({reason.value})."
        )

    def fail(self, code: str, message: str) -> None:
        own = self._gate.error if self._merger is None else self._merger.error
        self._send(own or self._dialect.error_event(code, message, self._progress()))
        self._finish()
        self._request.ended_in_error(code)

    def _progress(self) -> StreamProgress:
        if self._merger is not None:
            return self._merger.progress()
        if self._resume_state.progress is not None and self._resume_state.breaks:
            return self._resume_state.progress  # between two legs
        self._absorb()
        progress = self._transcript.read()
        return replace(progress, lost=True) if self._gate.torn else progress


def is_resumable(response: ResponseHead) -> bool:
    """Return whether this response is a stream that can be kept."""
    return response.status == 200 and not response.encoded and is_readable(response.content_type, b"")
