"""The dialect of `/v1/chat/completions` and `/v1/completions` (see `lb.stream.dialect`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.sse import DONE, GIVES_UP, ends_with_done, error_event
from lb.stream.first_request import Preparation, prepare
from lb.stream.resume_request import ResumeRequest, resume
from lb.stream.resume_rules import Reason, refusal
from lb.stream.stream_merge import StreamMerger, closing
from lb.stream.transcript import ProgressTally, StreamProgress, has_finished

_GOES_ON = b'"finish_reason":null'  # an event with this does not end a stream


class ChatCompletions:
    """One of the two APIs: their events differ in where the text is."""

    __slots__ = ("_path",)

    def __init__(self, path: bytes) -> None:
        self._path = path

    @property
    def end_mark(self) -> bytes:
        return DONE

    @property
    def gives_up(self) -> tuple[bytes, ...]:
        return GIVES_UP

    def refusal(self, request: Mapping[str, Any]) -> Reason | None:
        return refusal(self._path, request)

    def prepare(self, request: Mapping[str, Any], kind: EngineKind, mode: Continue) -> Preparation:
        return prepare(self._path, request, kind, mode)

    def tally(self) -> ProgressTally:
        return ProgressTally()

    def resume(
        self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, mode: Continue
    ) -> ResumeRequest:
        return resume(self._path, request, sofar, kind, mode)

    def merger(
        self,
        request: Mapping[str, Any],
        before: StreamProgress,
        resumption: ResumeRequest,
        limit_bytes: int,
    ) -> StreamMerger:
        return StreamMerger(self._path, request, before, resumption, limit_bytes)

    def closing(self, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bytes | None:
        return closing(self._path, request, sofar, kind)

    def error_event(self, code: str, message: str, sofar: StreamProgress | None) -> bytes:
        return error_event(code, message)

    def is_over(self, events: bytes) -> bool:
        return ends_with_done(events)

    def has_finished(self, events: bytes) -> bool:
        return has_finished(events)

    def may_pass(self, data: bytes) -> bool:
        return _GOES_ON in data and GIVES_UP[0] not in data and GIVES_UP[1] not in data
