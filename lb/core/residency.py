"""Residency: which targets and which agents may have a request. Pure.

A request has the zones of the agent that it entered and of its API key. It may be sent only where all of them are served, so
the stricter of both holds. The controller lists for each target and each peer the zones it serves; what it does not list
serves none, so a mistake keeps requests waiting and sends none away. A request that finds no place waits like any other and is
refused with 503 `residency`.

Targets are barred by their epochs, as those are that have failed a request or serve another model
(`lb.core.models`): so every path of a request obeys, whether it is placed, retried, moved, continued or let in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lb.core.target_state import TargetState

Zones = frozenset[str]
ANYWHERE: Zones = frozenset()


def may_have(served: Collection[str], zones: Zones) -> bool:
    """Return whether what serves those zones may have a request of `zones`."""
    return zones.issubset(served)


class Residency:
    """The targets that requests of zones may not have, by their epochs."""

    __slots__ = ("_barred", "_entries")

    def __init__(self) -> None:
        self._entries: list[TargetState] = []
        self._barred: dict[Zones, frozenset[int]] = {}

    def barred(self, zones: Zones) -> frozenset[int]:
        """Return the epochs of the targets that may not have a request of `zones`."""
        found = self._barred.get(zones)
        if found is None:
            found = frozenset(one.epoch for one in self._entries if not may_have(one.target.zones, zones))
            self._barred[zones] = found
        return found

    def changed(self, entries: Iterable[TargetState] | None = None) -> None:
        """The epoch of a target has changed; or these are the targets from now on."""
        if entries is not None:
            self._entries = list(entries)
        self._barred.clear()
