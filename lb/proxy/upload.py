"""The body of a request on its way in: collected up to a size, passed on beyond it, bounded in bytes and in time."""

from __future__ import annotations

from lb.core.byte_budget import Holding, structure_bytes
from lb.http.body_framing import ChunkedDecoder, FramingError
from lb.proxy.rejections import MALFORMED_BODY, TINY_CHUNKS, Rejection

UPLOAD_WINDOW_S = 30.0  # over which a body must keep up its rate: a lost packet or a slow start is no reason
_LEAST_CHUNK_BYTES = 2  # on average, once `_CHUNKS_TO_JUDGE` have come
_CHUNKS_TO_JUDGE = 4096


class TinyChunksError(Exception):
    """The body comes in chunks that cost more to take apart than they carry."""


class Upload:
    """One body. `kept` is what has been collected and not taken yet, `size` all that has come.

    `structure` is what the objects of the collected part would take (see `lb.core.byte_budget`). They are counted as it
    arrives, so that the loop is not stopped for all of them at the end.
    """

    __slots__ = (
        "_chunks",
        "_counts",
        "_decoder",
        "_holding",
        "_parts",
        "_window_at",
        "_window_size",
        "kept",
        "length",
        "size",
        "structure",
    )

    def __init__(self, length: int, chunked: bool, holding: Holding, now: float, counts: bool) -> None:
        """`counts`: the body may be parsed."""
        self.length = length
        self.structure = 0
        self._counts = counts
        self.size = 0
        self.kept = bytearray()  # one object, however small its pieces
        self._parts: list[bytes] = []  # where the decoder leaves what it finds
        self._decoder = ChunkedDecoder(self._parts) if chunked else None
        self._holding = holding
        self._chunks = 0
        self._window_at = now
        self._window_size = 0  # what had come then

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

    def is_slow(self, now: float, bytes_per_s: float) -> bool:
        """Return whether less has come than that, on average over the last window. Each window is judged once.

        An average over the whole body would let a client send most of it at once, and then keep its memory for hours.
        """
        elapsed_s = now - self._window_at
        if elapsed_s < UPLOAD_WINDOW_S:
            return False
        arrived = self.size - self._window_size
        self.restart_window(now)
        return arrived < bytes_per_s * elapsed_s

    def restart_window(self, now: float) -> None:
        """Judge from now on: the client could not send."""
        self._window_at, self._window_size = now, self.size

    def keep(self, part: bytes) -> bool:
        """Collect a part. Returns False if the agent has no room for it."""
        if not self._holding.take(len(part)):
            return False
        self.kept += part
        if self._counts:
            self.structure += structure_bytes(part)
        return True

    def take(self) -> bytes:
        """Return what was collected; its bytes stay reserved until `release`."""
        kept, self.kept = bytes(self.kept), bytearray()
        return kept

    def release(self) -> None:
        """Give the reserved bytes back, once. From then on the upload is not refused for another tenant's."""
        self._holding.release()


def refusal_of(error: FramingError | TinyChunksError) -> Rejection:
    """Return what the client of a body that cannot be taken gets."""
    return TINY_CHUNKS if isinstance(error, TinyChunksError) else MALFORMED_BODY
