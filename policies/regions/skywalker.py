"""SkyWalker's rule between regions (EuroSys 2026, algorithm 1).

A request stays if any replica of its region is available. Otherwise it goes to the available peer to which most of its
prompt was forwarded before; with no such peer it waits. A peer is available if it reports an available replica and at most
`max_queued` waiting requests. The paper names that bound tau and gives no value; the authors' code uses 10.

Not in the paper, and left out here: what a peer does with a forwarded request that it cannot serve. It queues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.regions.base import LocalCost, PeerView, RegionChoice, stay

MAX_QUEUED = 10
_TERMS = ("matched_bytes", "queued", "last_turn")


class SkyWalker:
    """Forwards only when the region has no available replica, to the longest forwarded prefix."""

    name: ClassVar[str] = "skywalker"
    needs_room: ClassVar[bool] = False
    knows_caches: ClassVar[bool] = False

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        if local.admits:
            return stay("a replica of this region is available")
        open_peers = [peer for peer in peers if peer.available and peer.queued <= self._max_queued]
        if not open_peers:
            return stay("no region has an available replica")
        best = max(open_peers, key=lambda peer: (peer.matched_bytes, -peer.last_turn))
        rows = tuple(
            (peer.region, -peer.matched_bytes, peer.matched_bytes, peer.queued, peer.last_turn)
            for peer in open_peers
        )
        return RegionChoice(best.region, "longest prefix forwarded to an available region", _TERMS, rows)
