"""Where a body ends: decoders of the bytes of one, which never change them.

Chunked bodies are walked size by size (RFC 9112 §7.1), not searched for their last bytes: `0\\r\\n\\r\\n` may well
occur within a body. Sizes are hexadecimal digits and nothing else; extensions and trailers are bounded. Anything
malformed raises `FramingError`: a message whose end is in doubt must not share a connection with another.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

MAX_SIZE_LINE: Final = 4096  # with its extensions; a trailer as well
MAX_TRAILER_BYTES: Final = 16 * 1024  # all of them
LAST_CHUNK: Final = b"0\r\n\r\n"

_HEX: Final = re.compile(rb"[0-9a-fA-F]{1,15}")
_TEXT: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TRAILER: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_SIZES: Final[dict[bytes, int]] = {}
_MAX_SIZES: Final = 8192


class FramingError(Exception):
    """The body is malformed; its end cannot be known."""


class BodyDecoder(Protocol):
    """`feed` takes the next bytes of the connection and returns how many of them belong to the body.

    As many as there are, and -1, while it goes on; else up to its end.
    """

    def feed(self, data: bytes) -> int:
        """Return the index one past the body's end in `data`, or -1 if all of it belongs to the body and more must come."""
        ...


class LengthDecoder:
    """A body of `length` bytes."""

    __slots__ = ("left",)

    def __init__(self, length: int) -> None:
        self.left = length

    def feed(self, data: bytes) -> int:
        size = len(data)
        if size < self.left:
            self.left -= size
            return -1
        end, self.left = self.left, 0
        return end


class CloseDelimitedDecoder:
    """A body that ends with its connection."""

    __slots__ = ()

    def feed(self, data: bytes) -> int:
        return -1


class ChunkedDecoder:
    """A chunked body. With `payloads` a list, the data within the chunks is appended to it."""

    __slots__ = ("_left", "_line", "_trailer", "payloads")

    def __init__(self, payloads: list[bytes] | None = None) -> None:
        self._left = 0  # of the present chunk and its line end; 0 between chunks
        self._line = b""  # the beginning of a size or trailer line
        self._trailer = -1  # bytes of trailers so far; -1 before the last chunk
        self.payloads = payloads

    @property
    def between(self) -> bool:
        """Whether the bytes so far end with a whole chunk."""
        return not self._left and not self._line and self._trailer < 0

    def feed(self, data: bytes) -> int:
        """See BodyDecoder. Raises FramingError."""
        left = self._left
        size = len(data)
        if left > size:  # in the middle of a large chunk
            self._part(data, 0, size, left)
            return -1
        position = 0
        if left:
            self._finish_chunk(data, left)
            position, self._left = left, 0
        while position < size:
            if self._trailer >= 0:
                return self._walk_trailer(data, position)
            end = data.find(b"\r\n", position)
            if self._line or end < 0:
                position, line = self._join_line(data, position, end)
                if line is None:
                    return -1
            else:
                line = data[position:end]
                position = end + 2
            chunk = _SIZES.get(line)
            if chunk is None:
                chunk = _size_of(line)
            if not chunk:
                self._trailer = 0
                continue
            left = chunk + 2
            if position + left > size:
                self._part(data, position, size, left)
                return -1
            self._finish_chunk(data, position + left, position)
            position += left
        return -1

    def _finish_chunk(self, data: bytes, end: int, start: int = 0) -> None:
        """The present chunk and its line end are over at `end`."""
        if end - start >= 2:
            if data[end - 2 : end] != b"\r\n":
                raise FramingError("a chunk is longer than its size")
        elif data[end - 1] != 10:
            raise FramingError("a chunk is longer than its size")
        if self.payloads is not None and end - 2 > start:
            self.payloads.append(data[start : end - 2])

    def _part(self, data: bytes, start: int, end: int, left: int) -> None:
        """Part of a chunk of which `left` bytes, its line end among them, were still to come."""
        self._left = left - (end - start)
        if self._left == 1 and end > start and data[end - 1] != 13:
            raise FramingError("a chunk is longer than its size")
        if self.payloads is not None:
            cut = min(end, start + left - 2)
            if cut > start:
                self.payloads.append(data[start:cut])

    def _join_line(self, data: bytes, position: int, end: int) -> tuple[int, bytes | None]:
        """Return a line that is spread over several reads; None until it is whole."""
        if self._line.endswith(b"\r") and data[position : position + 1] == b"\n":
            line, self._line = self._line[:-1], b""
            return position + 1, line
        if end < 0:
            self._line += data[position:]
            if len(self._line) > MAX_SIZE_LINE + 1:  # a line, and half a line end
                raise FramingError("the line of a chunk's size, or a trailer, is too long")
            return len(data), None
        line, self._line = self._line + data[position:end], b""
        return end + 2, line

    def _walk_trailer(self, data: bytes, position: int) -> int:
        """Trailers are lines; an empty one ends the body."""
        while position < len(data):
            end = data.find(b"\r\n", position)
            after, line = (end + 2, data[position:end]) if end >= 0 else (len(data), None)
            if self._line or end < 0:
                after, line = self._join_line(data, position, end)
            self._trailer += after - position
            if self._trailer > MAX_TRAILER_BYTES:
                raise FramingError("the trailers are too long")
            position = after
            if line is None:
                return -1
            if not line:
                return position
            if len(line) > MAX_SIZE_LINE or not _TRAILER.fullmatch(line):
                raise FramingError("a trailer is malformed")
        return -1


def _size_of(line: bytes) -> int:
    digits, extended, extension = line.partition(b";")
    if extended and (len(line) > MAX_SIZE_LINE or not _TEXT.fullmatch(extension)):
        raise FramingError("the extension of a chunk is malformed")
    if not _HEX.fullmatch(digits):
        raise FramingError("the size of a chunk is malformed")
    size = int(digits, 16)
    if not extended and len(_SIZES) < _MAX_SIZES:
        _SIZES[line] = size
    return size


def one_chunk(data: bytes) -> bool:
    """Return whether `data` is exactly one whole chunk, not the last one: what one write of an engine looks like."""
    end = data.find(b"\r\n", 0, 20)
    if end <= 0:
        return False
    size = _SIZES.get(data[:end])
    if size is None:
        if not _HEX.fullmatch(data, 0, end):
            return False
        size = _size_of(data[:end])
    return bool(size) and end + size + 4 == len(data) and data.endswith(b"\r\n")


def chunk(payload: bytes) -> bytes:
    """`payload`, which must not be empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
