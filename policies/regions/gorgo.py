"""GORGO's rule between regions (Toniolo et al. 2026, section 3.4), distributed form.

A request stays if a replica of its region has capacity, without comparison. Otherwise the cost of each peer that has
capacity is its round trip plus the prefill of what was not forwarded there before, and the cost here the local queue and
prefill. The cheapest wins. The paper's formula adds the queue of the local region to a peer's cost and its text that of
the peer; its code has neither, and neither is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.regions.base import LocalCost, PeerView, RegionChoice, stay

_TERMS = ("rtt_s", "wait_s", "prefill_s", "decode_s")


class Gorgo:
    """Forwards when the region has no capacity and a peer's round trip and prefill are cheaper than waiting."""

    name: ClassVar[str] = "gorgo"
    needs_room: ClassVar[bool] = False
    knows_caches: ClassVar[bool] = False

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        if local.admits:
            return stay("a replica of this region has capacity")
        here_s = local.network_s + local.wait_s + local.prefill_s + local.decode_s
        rows = [("", here_s, local.network_s, local.wait_s, local.prefill_s, local.decode_s)]
        for peer in peers:
            if peer.available:
                prefill_s = (prompt_bytes - peer.matched_bytes) * peer.s_per_byte
                rows.append((peer.region, peer.rtt_s + prefill_s, peer.rtt_s, 0.0, prefill_s, 0.0))
        best = min(rows, key=lambda row: row[1])
        return RegionChoice(best[0], "lowest round trip and prefill", _TERMS, tuple(rows))
