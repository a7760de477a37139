"""WebSocket frames as far as a tunnel needs them (RFC 6455 §5.2): where one ends, and the close frame. Pure."""

from __future__ import annotations

GOING_AWAY = 1001

_LENGTH_16 = 126
_LENGTH_64 = 127


def close_frame(code: int, *, masked: bool) -> bytes:
    """Return a close frame. One that goes to a server has to be masked; a mask of zeros leaves the payload as it is."""
    payload = code.to_bytes(2, "big")
    return b"\x88\x82\0\0\0\0" + payload if masked else b"\x88\x02" + payload


class FrameTracker:
    """Follows the frames of one direction by their headers. `between` is True where a frame of our own may be put."""

    __slots__ = ("_header", "_left")

    def __init__(self) -> None:
        self._header = b""
        self._left = 0  # of the payload

    @property
    def between(self) -> bool:
        return not self._left and not self._header

    def feed(self, data: bytes) -> None:
        """The next bytes of the direction."""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
                continue
            header = self._header + data[at : at + 14 - len(self._header)]
            need = _header_size(header)
            if need is None or len(header) < need:
                self._header = header
                return
            at += need - len(self._header)
            self._header = b""
            self._left = _payload_size(header)


def _header_size(header: bytes) -> int | None:
    if len(header) < 2:
        return None
    length = header[1] & 0x7F
    extra = 2 if length == _LENGTH_16 else 8 if length == _LENGTH_64 else 0
    return 2 + extra + (4 if header[1] & 0x80 else 0)


def _payload_size(header: bytes) -> int:
    length = header[1] & 0x7F
    if length == _LENGTH_16:
        return int.from_bytes(header[2:4], "big")
    if length == _LENGTH_64:
        return int.from_bytes(header[2:10], "big")
    return length
