"""One cost for staying and for leaving: the time to the first token, wherever it is computed. The default.

    here = network + wait + prefill of uncached tokens + decode share + copy
    peer = round trip + wait there + what was forwarded since its report + prefill + decode share + copy + money

The request goes to the cheapest peer if that is cheaper than here by more than the margin, or if only there its first token is
expected within the time that the request has left, which the way's money must not exceed, and never if it is not expected in time there either. Unlike SkyWalker and
GORGO, a request may leave although a replica here admits it (a warm prefix elsewhere, a long wait here), and stay although none
does (a short wait).

The margin is the hysteresis: what one side knows of the other was true a round trip and the age of a report ago, and a
gain below what changes meanwhile is noise. It is MARGIN_SHARE of the cost here, and at least STALE_SHARE of that time, of which
no more than LONGEST_STALE_S counts. So a near region helps for a gain for which a distant one does not.

The decode share is `DECODE_WEIGHT` of the delay by the sequences that run beside the request. Without it a region with few replicas
keeps its requests until they have to wait, and every stream there is slow. With all of it, regions that are alike exchange requests for
nothing.

The copy is COPY_WEIGHT times the prefill of what another region has in its cache and this one has not, as in
`policies.routing.gorgo`: to compute it again takes memory from other prompts, which must then be computed again themselves. So a
conversation that has been forwarded stays where it is, and is drawn back only where it gains several times that prefill.

Against herds, a peer takes no more than the credit of its report (see `lb.core.peers`), and everything forwarded since
counts as wait there.

Money is the price of the request's traffic to the peer and back, in the seconds of waiting that it is worth to the owner of the
service; without such a rate it is nothing. Money and copy count against the gain, and not against the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.regions.base import LocalCost, PeerView, RegionChoice, stay

COPY_WEIGHT = 4.0
DECODE_WEIGHT = 0.5
MARGIN_SHARE = 0.1
STALE_SHARE = 0.2
LONGEST_STALE_S = 1.0
_TERMS = ("network_s", "wait_s", "prefill_s", "decode_s", "copy_s", "money_s")

_Row = tuple[str, float, float, float, float, float, float, float]


class OneCost:
    """Compares the expected time to the first token here and at each peer."""

    name: ClassVar[str] = "one_cost"
    needs_room: ClassVar[bool] = True
    knows_caches: ClassVar[bool] = True

    def __init__(
        self,
        copy_weight: float = COPY_WEIGHT,
        decode_weight: float = DECODE_WEIGHT,
        margin_share: float = MARGIN_SHARE,
        stale_share: float = STALE_SHARE,
    ) -> None:
        self._copy_weight = copy_weight
        self._decode_weight = decode_weight
        self._margin_share = margin_share
        self._stale_share = stale_share

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        free = [peer for peer in peers if peer.available and peer.forwarded < peer.credit]
        if not free:
            return stay("no peer has room")
        longest = max([local.matched_bytes, *[peer.matched_bytes for peer in free]])
        here = self._row(
            "",
            local.network_s,
            local.wait_s,
            local.prefill_s,
            local.decode_s,
            (longest - local.matched_bytes) * local.s_per_byte,
            0.0,
        )
        rows = [
            self._row(
                peer.region,
                peer.rtt_s,
                peer.wait_s + peer.forwarded_s,
                (prompt_bytes - peer.matched_bytes) * peer.s_per_byte,
                peer.decode_s,
                (longest - peer.matched_bytes) * peer.s_per_byte,
                peer.money_s,
            )
            for peer in free
        ]
        at = min(range(len(rows)), key=lambda index: rows[index][1])
        best, peer, scored = rows[at], free[at], (here, *rows)
        stale_s = self._stale_share * min(peer.rtt_s + peer.age_s, LONGEST_STALE_S)
        there_s = best[1] - best[6] - best[7]
        # In time there, and not here; and the way costs no more than the time that is left is worth.
        keeps = there_s < left_s < here[2] + here[3] + here[4] and peer.money_s <= left_s
        if not keeps and best[1] + max(stale_s, self._margin_share * here[1]) >= here[1]:
            return RegionChoice("", "no peer is cheaper by more than the margin", _TERMS, scored)
        if there_s >= left_s:
            return RegionChoice("", "no peer would respond in time", _TERMS, scored)
        return RegionChoice(best[0], "first token expected sooner there", _TERMS, scored)

    def _row(
        self,
        region: str,
        network_s: float,
        wait_s: float,
        prefill_s: float,
        decode_s: float,
        copied_s: float,
        money_s: float,
    ) -> _Row:
        decode_s *= self._decode_weight
        copy_s = self._copy_weight * copied_s
        cost_s = network_s + wait_s + prefill_s + decode_s + copy_s + money_s
        return region, cost_s, network_s, wait_s, prefill_s, decode_s, copy_s, money_s
