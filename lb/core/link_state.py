"""The state of the link between two agents: freshness, round trip, and whether it is half open. Pure.

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

ECHO_TIMEOUT_S = 1.5
_SENT = 64  # beats whose instants are kept


class LinkState:
    """The link of this agent, of the process `boot`, to one peer. It is silent since `now`, until a beat comes."""

    __slots__ = (
        "_distance",
        "_echoed",
        "_received_boot",
        "_received_seq",
        "_sent",
        "_seq",
        "beats_received",
        "boot",
        "received_at",
        "rtt_s",
    )

    def __init__(self, boot: int, now: float = -inf) -> None:
        self.boot = boot
        self.received_at = now
        self.rtt_s: float | None = None
        self.beats_received = 0
        self._seq = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_SENT)  # on this connection, without an echo
        self._echoed = 0  # the newest of our beats that has come back
        self._received_boot = self._received_seq = 0
        self._distance = Distance()

    @property
    def deviation_s(self) -> float:
        """Return how far round trips usually are above the shortest one."""
        return self._distance.deviation_s

    @property
    def peer_boot(self) -> int:
        """Return the process of the peer of which the newest beat was; 0 before the first one."""
        return self._received_boot

    def connected(self) -> None:
        """A new connection is open, on which beats go out."""
        self._sent.clear()

    def was_away(self, away_s: float, now: float) -> None:
        """This agent has listened to nothing for `away_s`: that is no silence of the peer, and measures no round trip."""
        self.received_at = min(now, self.received_at + away_s)
        self._sent.clear()

    def next_beat(self, report: RegionReport, every_s: float, epoch: int, now: float) -> Beat:
        """Return the beat to send now."""
        self._seq += 1
        self._sent.append((self._seq, now))
        held_s = max(0.0, now - self.received_at) if self._received_seq else 0.0
        return Beat(
            self.boot, self._seq, every_s, report, self._received_boot, self._received_seq, held_s, epoch
        )

    def receive(self, beat: Beat, now: float) -> bool:
        """Take a beat into account. Returns False if it is older than one that came before it, or of an earlier process."""
        if beat.boot == self._received_boot and beat.seq <= self._received_seq:
            return False
        self._received_boot, self._received_seq, self.received_at = beat.boot, beat.seq, now
        self.beats_received += 1
        if beat.echo_boot == self.boot and beat.echo > self._echoed:
            self._echoed = beat.echo
            sent_at = None
            while self._sent and self._sent[0][0] <= beat.echo:
                seq, at = self._sent.popleft()
                sent_at = at if seq == beat.echo else None
            if sent_at is not None:
                self.rtt_s = self._distance.observe(max(0.0, now - sent_at - beat.held_s), now, beat.every_s)
        return True

    def is_restart(self, beat: Beat) -> bool:
        """Return whether the peer has been restarted since the last beat: what was known of its replicas is not valid."""
        return self._received_boot not in (0, beat.boot)

    def is_half_open(self, now: float) -> bool:
        """Return whether beats have gone out on the present connection for too long without an echo."""
        if not self._sent:
            return False
        return now - self._sent[0][1] > ECHO_TIMEOUT_S + 2.0 * (self.rtt_s or 0.0)

    def silent_s(self, now: float) -> float:
        """Return for how long no beat has come."""
        return now - self.received_at
