"""The body of a request on its way in: collected up to a size, passed on beyond it, bounded in bytes and in time."""

from __future__ import annotations

from lb.core.byte_budget import ByteBudget
from lb.http.body_framing import ChunkedDecoder, FramingError
from lb.proxy.rejections import MALFORMED_BODY, TINY_CHUNKS, Rejection

_LEAST_CHUNK_BYTES = 2  # on average, once `_CHUNKS_TO_JUDGE` have come
_CHUNKS_TO_JUDGE = 4096


class TinyChunksError(Exception):
    """The body comes in chunks that cost more to take apart than they carry."""


class Upload:
    """One body. `kept` is what has been collected and not taken yet, `size` all that has come."""

    __slots__ = ("_budget", "_chunks", "_decoder", "_parts", "_reserved", "kept", "length", "size")

    def __init__(self, length: int, chunked: bool, budget: ByteBudget) -> None:
        self.length = length
        self.size = 0
        self.kept = bytearray()  # one object, however small its pieces
        self._parts: list[bytes] = []  # where the decoder leaves what it finds
        self._decoder = ChunkedDecoder(self._parts) if chunked else None
        self._budget = budget
        self._reserved = 0
        self._chunks = 0

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Return the next bytes of the body, and the index in `data` one past its end (-1 while it goes on).

        Raises FramingError or TinyChunksError.
        """
        if self._decoder is None:
            left = self.length - self.size
            end = -1 if len(data) < left else left
            part = data if end < 0 else data[:end]
        else:
            end = self._decoder.feed(data)
            self._chunks += len(self._parts)
            part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
        self.size += len(part)
        if self._chunks > _CHUNKS_TO_JUDGE and self.size < self._chunks * _LEAST_CHUNK_BYTES:
            raise TinyChunksError
        return part, end

    def keep(self, part: bytes) -> bool:
        """Collect a part. Returns False if the agent has no room for it."""
        if not self._budget.take(len(part)):
            return False
        self._reserved += len(part)
        self.kept += part
        return True

    def take(self) -> bytes:
        """Return what was collected; its bytes stay reserved until `release`."""
        kept, self.kept = bytes(self.kept), bytearray()
        return kept

    def release(self) -> None:
        """Give the reserved bytes back, once."""
        if self._reserved:
            self._budget.give_back(self._reserved)
            self._reserved = 0


def refusal_of(error: FramingError | TinyChunksError) -> Rejection:
    """Return what the client of a body that cannot be taken gets."""
    return TINY_CHUNKS if isinstance(error, TinyChunksError) else MALFORMED_BODY
