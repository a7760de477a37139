"""What two agents know of the link between them: freshness, round trip, and whether it is half open. Pure.

A link may be dead in one direction only, and TCP does not notice for minutes. So a connection on which beats are sent, and
none of them is echoed for UNANSWERED_S, is given up and made again. The echo comes on the other agent's own connection,
which does the same.
"""

from __future__ import annotations

from collections import deque
from math import inf

from lb.core.beats import Beat
from lb.core.distances import Distance
from lb.core.peers import RegionReport

UNANSWERED_S = 1.5
_SENT = 64  # beats whose instants are kept


class LinkState:
    """The link of this agent, of the life `boot`, to one peer."""

    __slots__ = (
        "_connected_at",
        "_distance",
        "_echoed",
        "_heard_boot",
        "_heard_seq",
        "_sent",
        "_seq",
        "beats_heard",
        "boot",
        "heard_at",
        "rtt_s",
    )

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.heard_at = -inf
        self.rtt_s: float | None = None
        self.beats_heard = 0
        self._seq = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_SENT)
        self._echoed = 0  # the newest of our beats that has come back
        self._heard_boot = self._heard_seq = 0
        self._distance = Distance()
        self._connected_at = inf

    @property
    def deviation_s(self) -> float:
        """Return how far round trips usually are above the shortest one."""
        return self._distance.deviation_s

    def connected(self, now: float) -> None:
        """A new connection is open, on which beats go out."""
        self._connected_at = now

    def disconnected(self) -> None:
        """Beats do not go out."""
        self._connected_at = inf

    def next_beat(self, report: RegionReport, every_s: float, epoch: int, now: float) -> Beat:
        """Return the beat to send now."""
        self._seq += 1
        self._sent.append((self._seq, now))
        held_s = max(0.0, now - self.heard_at) if self._heard_seq else 0.0
        return Beat(self.boot, self._seq, every_s, report, self._heard_boot, self._heard_seq, held_s, epoch)

    def heard(self, beat: Beat, now: float) -> bool:
        """A beat has come. Returns False if it is older than one that came before it, or of an earlier life."""
        if beat.boot == self._heard_boot and beat.seq <= self._heard_seq:
            return False
        self._heard_boot, self._heard_seq, self.heard_at = beat.boot, beat.seq, now
        self.beats_heard += 1
        if beat.echo_boot == self.boot and beat.echo > self._echoed:
            self._echoed = beat.echo
            sent_at = next((at for seq, at in self._sent if seq == beat.echo), None)
            if sent_at is not None:
                self.rtt_s = self._distance.observe(max(0.0, now - sent_at - beat.held_s), now, beat.every_s)
        return True

    def is_other_life(self, beat: Beat) -> bool:
        """Return whether the peer has been restarted since the last beat: what was known of its replicas is not valid."""
        return self._heard_boot not in (0, beat.boot)

    def unanswered(self, now: float) -> bool:
        """Return whether beats have gone out on the present connection for too long without an echo."""
        oldest = next((at for seq, at in self._sent if seq > self._echoed and at >= self._connected_at), None)
        patience_s = UNANSWERED_S + 2.0 * (self.rtt_s or 0.0)
        return oldest is not None and now - oldest > patience_s

    def silent_s(self, now: float) -> float:
        """Return for how long no beat has come; infinity if none ever did."""
        return now - self.heard_at
