"""How many lines a log gets of what strangers can cause as often as they like. Pure; `now` is an argument."""

from __future__ import annotations

EVERY_S = 10.0


class LogLimit:
    """Allows one line of each kind every `every_s` seconds, and counts those left out. Kinds must be few: none is forgotten."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._logged_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def left_out(self, kind: str, now: float) -> int | None:
        """Return how many lines of this kind were left out since the last one; None if this one is to be left out."""
        logged_at = self._logged_at.get(kind)
        if logged_at is not None and now - logged_at < self._every_s:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._logged_at[kind] = now
        return self._left_out.pop(kind, 0)
