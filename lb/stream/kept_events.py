"""What a stream has sent, kept as bytes until it has to be read.

`PlainEvents` keeps the bytes as they came, about 260 a token. The C helper has `PackedEvents` with the same methods, which
keeps each event as its difference from the one before, about 15 bytes a token (`lb/proxy/_event_delta.h`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

_OBJECT_BYTES = 33  # of a `bytes` object beside its content


class KeptEvents(Protocol):
    """The bytes of one stream, in their order."""

    @property
    def raw_bytes(self) -> int:
        """How many bytes are kept, as they came."""
        ...

    @property
    def held_bytes(self) -> int:
        """How many bytes of memory that takes."""
        ...

    def add(self, data: bytes, /) -> None:
        """Keep the next bytes of the stream."""
        ...

    def join(self, other: Any, /) -> None:
        """Keep what another one of the same type has kept, which has nothing afterwards."""
        ...

    def pop(self) -> bytes:
        """Return the oldest bytes as they came, and drop them; empty if nothing is kept."""
        ...

    def tail(self, size: int, /) -> bytes:
        """Return so many of the last bytes as they came, or all if there are fewer."""
        ...

    def clear(self) -> None:
        """Drop everything."""
        ...


class PlainEvents:
    """Keeps bytes as they came."""

    __slots__ = ("_parts", "raw_bytes")

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self.raw_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.raw_bytes + _OBJECT_BYTES * len(self._parts)

    def add(self, data: bytes, /) -> None:
        if data:
            self._parts.append(data)
            self.raw_bytes += len(data)

    def join(self, other: Any, /) -> None:
        while part := other.pop():
            self.add(part)

    def pop(self) -> bytes:
        if not self._parts:
            return b""
        part = self._parts.popleft()
        self.raw_bytes -= len(part)
        return part

    def tail(self, size: int, /) -> bytes:
        found, count = 0, 0
        while found < size and count < len(self._parts):
            count += 1
            found += len(self._parts[-count])
        last = [self._parts[-number] for number in range(count, 0, -1)]
        return b"".join(last)[max(0, found - size) :]

    def clear(self) -> None:
        self._parts.clear()
        self.raw_bytes = 0
