"""Server-sent events as engines write them, read from bytes that may be cut anywhere. Pure.

Line ends are LF, CR LF or CR; `data:` may lack its space, be spread over several lines, and mix with comments.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"
ABORT: Final = "abort"  # the finish_reason of an engine that gives a request up (vLLM, SGLang)

_BOM: Final = b"\xef\xbb\xbf"
_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
# An error, or a finish reason that no client asks for. Within a text these bytes would be escaped: where they occur they are what
# they seem to be.
GIVES_UP: Final = (b'data: {"error"', b'"finish_reason":"abort"')


def is_data(payload: bytes) -> bool:
    """Return whether there is a data event in these bytes, chunk-framed or not.

    Comments, which keep a connection open, are no sign that the engine still works.
    """
    return payload.startswith(b"data") or b"\ndata" in payload or b"\rdata" in payload


def ends_with_done(events: bytes) -> bool:
    """Return whether the last data event of these bytes, chunk-framed or not, is the end mark.

    Text that contains `[DONE]` is part of a longer line, so only whole lines are compared.
    """
    for line in reversed(events.splitlines()):
        if line.startswith(b"data:"):
            return line[5:].strip() == b"[DONE]"
    return False


def is_readable(content_type: bytes, content_encoding: bytes) -> bool:
    """Return whether a response with these headers is a stream of events whose bytes can be read as they are."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"text/event-stream" and content_encoding.strip().lower() in (b"", b"identity")


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def error_event(code: str, message: str) -> bytes:
    """Return the last event of a stream that cannot go on, in the shape OpenAI's clients raise an error for.

    No `[DONE]` follows it: the response is not whole.
    """
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return event({"error": error})


class EventBuffer:
    """Lets whole events pass and holds the beginning of one back.

    A client that was sent half an event could not be helped: what another target sends would be appended to it. Engines
    write whole events, so the gate nearly never holds anything.

    An event in which the engine gives up (with one of the signs in `gives_up`) does not pass, nor what follows it: it is kept
    in `error`, to be sent if the stream cannot be continued. An event longer than `limit_bytes` is let through in pieces, like
    all that follows; the stream is then `torn`, and must not be continued.
    """

    __slots__ = ("_gives_up", "_limit", "_tail", "error", "torn")

    def __init__(self, limit_bytes: int, gives_up: tuple[bytes, ...] = GIVES_UP) -> None:
        self._limit = limit_bytes
        self._gives_up = gives_up
        self._tail = b""
        self.error = b""
        self.torn = False

    @property
    def clear(self) -> bool:
        """Nothing is held back, and nothing has gone wrong."""
        return not (self._tail or self.error or self.torn)

    def feed(self, payload: bytes) -> bytes:
        """Return what may be sent of the stream now that `payload`, without chunk framing, has come; possibly nothing."""
        if self._tail or self.error or self.torn or not payload.endswith(_ENDS):
            payload = self._cut(payload)
        for sign in self._gives_up:
            if sign in payload:
                return self._before_error(payload)
        return payload

    def rest(self) -> bytes:
        """Return the beginning of an incomplete event: to be sent last if the target closed in good order."""
        rest, self._tail = self._tail, b""
        return rest

    def _cut(self, payload: bytes) -> bytes:
        if self.error:
            self.error += payload[: max(0, self._limit - len(self.error))]
            return b""
        if self.torn:
            return payload
        known = max(0, len(self._tail) - 2)  # an end may lie across the two
        data = self._tail + payload
        cut = max(_after(data, end, known) for end in _ENDS)
        self._tail = data[cut:]
        if len(self._tail) > self._limit:
            self.torn = True
            self._tail = b""
            return data
        return data[:cut]

    def _before_error(self, payload: bytes) -> bytes:
        at = min(place for sign in self._gives_up if (place := payload.find(sign)) >= 0)
        begin = payload.rfind(b"\n", 0, at) + 1
        self.error, self._tail = payload[begin:] + self._tail, b""
        return payload[:begin]


def _after(data: bytes, end: bytes, start: int) -> int:
    at = data.rfind(end, start)
    return at + len(end) if at >= 0 else 0


class EventReader:
    """The data of each event, in order."""

    __slots__ = ("_begun", "_edge", "_parts", "held_bytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an event that is not complete
        self._edge = b""  # their last bytes: an end may lie across two parts
        self._begun = False
        self.held_bytes = 0

    def feed(self, payload: bytes) -> list[bytes]:
        """Return the data of the events that are whole by now; comments and events without data are left out.

        Parts of a long event are joined once, when it is complete: joining at every call would take quadratic time.
        """
        if not self._begun:
            payload = self._begin(payload)
        window = self._edge + payload
        if not any(end in window for end in _ENDS):
            self._parts.append(payload)
            self._edge = window[-3:]
            self.held_bytes += len(payload)
            return []
        payload, half = b"".join(self._parts) + payload, b""
        if b"\r" in payload:
            if payload[-1:] == b"\r" and payload[-2:-1] != b"\r":
                payload, half = payload[:-1], b"\r"  # half of a CR LF, perhaps
            payload = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, tail = payload.split(b"\n\n")
        self._keep(tail + half)
        found = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                found.append(block[6:])
            elif (data := _data_of(block)) is not None:
                found.append(data)
        return found

    def _begin(self, payload: bytes) -> bytes:
        """Return the bytes so far, less a byte order mark."""
        payload = b"".join(self._parts) + payload
        self._keep(b"")
        self._begun = len(payload) >= len(_BOM)
        return payload.removeprefix(_BOM)

    def _keep(self, tail: bytes) -> None:
        self._parts = [tail] if tail else []
        self._edge = tail[-3:]
        self.held_bytes = len(tail)


def _data_of(block: bytes) -> bytes | None:
    lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return None
    return b"\n".join(line[1:] if line.startswith(b" ") else line for line in lines)
