"""What the proxy keeps of a stream so that it can be resumed: the client's request and how far the response has come. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lb.config.options import Continuation, Continue
from lb.engines.kinds import EngineKind
from lb.stream.dialect import Dialect, Merger
from lb.stream.dialects import DIALECTS
from lb.stream.first_request import Preparation, Strip, with_fields
from lb.stream.openai_request import ParsedRequest, read
from lb.stream.resume_request import ResumeRequest
from lb.stream.resume_rules import NotResumable
from lb.stream.stream_merge import loses_usage, stripper
from lb.stream.transcript import StreamProgress


class ResumeState:
    """`progress` is None until the first break, `kind` that of the present target.

    `breaks` are those in a row after which the stream had not come farther: a stream that advances between two may break often.

    Only the bytes of the request are kept: they are parsed again when a stream has to be resumed, which few have to, and
    objects take more room than their text for as long as the stream runs.
    """

    __slots__ = (
        "_body",
        "_parsed",
        "breaks",
        "dialect",
        "kind",
        "options",
        "preparation",
        "progress",
        "resumption",
    )

    def __init__(self, path: bytes, ask: ParsedRequest, body: bytes, options: Continuation) -> None:
        self.dialect: Dialect = DIALECTS[path]
        self._parsed: Mapping[str, Any] | None = ask.json  # until a target has it
        self._body = body
        self.options = options
        self.breaks = 0
        self.kind = EngineKind.UNKNOWN
        self.progress: StreamProgress | None = None
        self.preparation: Preparation | None = None
        self.resumption: ResumeRequest | None = None

    @property
    def strip(self) -> Strip:
        """What to remove from the first response."""
        return self.preparation.strip if self.preparation is not None else Strip.NOTHING

    def shown(self, events: bytes) -> bytes:
        """Return the whole first response as the client may see it."""
        strip = stripper(self.strip)
        return events if strip is None else strip(events)

    def outgoing(self, kind: EngineKind) -> tuple[bytes | None, bytes]:
        """Path (None: the client's) and body of the request for a target of this kind.

        Raises NotResumable, but never for the first request: what cannot be written again is sent as it came.
        """
        self.kind = kind
        if self.progress is not None:
            self.resumption = self.dialect.resume(self._request(), self.progress, kind, self.options.mode)
            self._parsed = None
            return self.resumption.path, self.resumption.body
        request, self._parsed = self._request(), None
        ready = self.dialect.prepare(request, kind, self.options.mode)
        try:
            body = with_fields(self._body, request, ready.fields)
        except NotResumable as error:
            ready, body = Preparation({}, refused=error.reason), self._body
        self.preparation = ready
        return None, body

    def could_resume(self, progress: StreamProgress, kind: EngineKind) -> bool:
        """Return whether a stream that has come so far could go on with an engine of this kind."""
        return self._breaks_after(progress) <= self.options.max_breaks and self.can_go_on(progress, kind)

    def broken(self, progress: StreamProgress) -> bool:
        """Take note of a break; False if there have been too many in a row without a token in between."""
        self.breaks = self._breaks_after(progress)
        self.progress = progress
        return self.breaks <= self.options.max_breaks

    def _breaks_after(self, progress: StreamProgress) -> int:
        before = self.progress
        has_advanced = before is not None and len(progress.text) > len(before.text)
        return 1 if has_advanced and self.options.max_breaks else self.breaks + 1

    @property
    def breaks_left(self) -> int:
        """Return how often the stream may still be resumed."""
        return max(0, self.options.max_breaks - self.breaks)

    def can_go_on(self, progress: StreamProgress, kind: EngineKind) -> bool:
        """Return whether an engine of this kind can continue from there, however often the stream has been resumed."""
        try:
            self.dialect.resume(self._request(), progress, kind, self.options.mode)
        except NotResumable:
            return False
        return True

    def closing(self, progress: StreamProgress) -> bytes | None:
        """Return the missing part of a stream whose response was complete; None if the response was not.

        Also None if the client would not get all of it, and wants no other than the exact response.
        """
        if self.options.mode is Continue.EXACT and self.loses_usage(progress):
            return None
        return self.dialect.closing(self._request(), progress, self.kind)

    def loses_usage(self, progress: StreamProgress) -> bool:
        """Return whether the client does not get the usage that it has asked for when the stream is closed."""
        return loses_usage(self._request(), progress)

    def merger(self) -> Merger:
        assert self.progress is not None  # noqa: S101 (for the type checker)
        assert self.resumption is not None  # noqa: S101 (for the type checker)
        request, self._parsed = self._request(), None
        return self.dialect.merger(request, self.progress, self.resumption, self.options.buffer_bytes)

    def _request(self) -> Mapping[str, Any]:
        if self._parsed is None:  # kept until a target has it: several may be asked whether they could go on
            self._parsed = read(self._body).json or {}
        return self._parsed
