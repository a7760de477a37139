"""One budget of bytes for everything that waits in memory: bodies that are kept, and the JSON parsed from them. Pure."""

from __future__ import annotations

# What a value of parsed JSON costs in CPython: an empty dict and its place in a list, an empty list, a small object.
_OBJECT_BYTES = 72
_LIST_BYTES = 64
_ITEM_BYTES = 16
SMALL_BYTES = 16 * 1024
SMALL_FACTOR = 4  # of a body that is not worth counting in


class ByteBudget:
    """Counts bytes that are kept against a limit. `taken` is the sum, `refused` how often there was no room."""

    __slots__ = ("limit", "refused", "taken")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.refused = 0

    def take(self, size: int) -> bool:
        """Take `size` bytes.

        Returns False, and takes nothing, if that is more than is left; one taker may always have what it wants while
        nothing is taken.
        """
        if self.taken and self.taken + size > self.limit:
            self.refused += 1
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        self.taken -= size


def parsed_bytes(body: bytes) -> int:
    """Return about how many bytes the objects need that a JSON parser makes of `body`, beyond the text itself."""
    if len(body) <= SMALL_BYTES:
        return SMALL_FACTOR * len(body)
    structure = (
        _OBJECT_BYTES * body.count(b"{") + _LIST_BYTES * body.count(b"[") + _ITEM_BYTES * body.count(b",")
    )
    return len(body) + structure
