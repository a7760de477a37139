"""One cost for staying and for leaving: the time to the first token, wherever it is computed. The default.

    here = network + wait + prefill of uncached tokens + decode share
    peer = round trip + wait there + what was forwarded since its report + prefill + decode share + money

The request goes to the cheapest peer if that is cheaper than here by more than max(MARGIN_S, MARGIN_SHARE of here), or if only there
its first token is expected within the time that the request has left, and never if it is not expected in time there either. The margin is the hysteresis: what both sides know
of each other is a report old, and a gain below it is noise. Unlike SkyWalker and GORGO, a request may leave although a
replica here admits it (a warm prefix elsewhere, a long wait here), and stay although none does (a short wait).

The decode share is `DECODE_WEIGHT` of the delay by the sequences that run beside the request: a user notices the first token
first. Against herds, a peer takes no more than the credit of its report (see `lb.core.peers`), and everything forwarded since
counts as wait there.

Money is the price of the request's traffic to the peer and back, in the seconds of waiting that it is worth to the owner of the
service; without such a rate it is nothing. It counts against the gain, and not against the deadline.

DECODE_WEIGHT, MARGIN_S and MARGIN_SHARE: a fourth, 100 ms and 20 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.regions.base import LocalCost, PeerView, RegionChoice, stay

DECODE_WEIGHT = 0.25
MARGIN_S = 0.1
MARGIN_SHARE = 0.2
_TERMS = ("network_s", "wait_s", "prefill_s", "decode_s", "money_s")


class OneCost:
    """Compares the expected time to the first token here and at each peer."""

    name: ClassVar[str] = "one_cost"
    needs_room: ClassVar[bool] = True

    def __init__(
        self,
        margin_s: float = MARGIN_S,
        margin_share: float = MARGIN_SHARE,
        decode_weight: float = DECODE_WEIGHT,
    ) -> None:
        self._margin_s = margin_s
        self._margin_share = margin_share
        self._decode_weight = decode_weight

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        decode_s = self._decode_weight * local.decode_s
        first_s = local.network_s + local.wait_s + local.prefill_s
        here_s = first_s + decode_s
        rows = [("", here_s, local.network_s, local.wait_s, local.prefill_s, decode_s, 0.0)]
        for peer in peers:
            if not peer.available or peer.forwarded >= peer.credit:
                continue
            prefill_s = (prompt_bytes - peer.matched_bytes) * peer.s_per_byte
            wait_s = peer.wait_s + peer.forwarded_s
            decode_s = self._decode_weight * peer.decode_s
            cost_s = peer.rtt_s + wait_s + prefill_s + decode_s + peer.money_s
            rows.append((peer.region, cost_s, peer.rtt_s, wait_s, prefill_s, decode_s, peer.money_s))
        if len(rows) == 1:
            return stay("no peer has room")
        best = min(rows[1:], key=lambda row: row[1])
        keeps = best[1] - best[-1] < left_s < first_s  # in time there, and not here
        if not keeps and best[1] + max(self._margin_s, self._margin_share * here_s) >= here_s:
            return RegionChoice("", "no peer is cheaper by more than the margin", _TERMS, tuple(rows))
        if best[1] - best[-1] >= left_s:
            return RegionChoice("", "no peer would respond in time", _TERMS, tuple(rows))
        return RegionChoice(best[0], "first token expected sooner there", _TERMS, tuple(rows))
