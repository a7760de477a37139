"""Which peers are silent to this agent, and which regions it takes over for that. Pure; `now` is an argument.

Silence counts only while this agent listens. One that was away itself (stopped, on a host that was migrated or suspended, without
CPU) has heard no other one, and that says nothing about them: of the time between two looks at most MOST_GAP_S counts. So an agent that
goes on after a minute finds its peers as it left them, and each of them has DEAD_AFTER_S to be heard before it is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lb.core.link_state import LinkState
from lb.core.takeover import PeerLiveness, Takeovers

SILENT_AFTER_S = 5.0
MOST_GAP_S = 0.5  # five ticks of an agent (`lb.agent.ticker`)

Agrees = Callable[[str, str], bool]
"""Whether an agent, the first, reports that another one is silent to it, too."""


class Link(NamedTuple):
    """The link to an agent of another region."""

    region: str
    state: LinkState


class RegionWatch:
    """The watch of one agent over its peers."""

    def __init__(self, now: float) -> None:
        self.takeovers = Takeovers()
        self.silent: tuple[str, ...] = ()  # agents of which no beat has come lately
        self.away_s = 0.0  # for how long this agent has been away in all
        self._silent_at = float("-inf")  # when another peer may be silent, at the earliest
        self._looked_at = now

    def attend(self, links: Mapping[str, Link], now: float) -> float:
        """Note that this agent listens. Returns for how long it was away before, which does not count as silence of its peers.

        Called at each tick, and before a beat is taken: what waited in a socket is read before the tick that was late.
        """
        away_s, self._looked_at = max(0.0, now - self._looked_at - MOST_GAP_S), now
        if away_s:
            self.away_s += away_s
            for link in links.values():
                link.state.was_away(away_s, now)
        return away_s

    def look(self, links: Mapping[str, Link], agrees: Agrees, now: float) -> bool:
        """Look for silent peers. Returns whether `takeovers.extended` returns another table for it."""
        self.renew(links, now)
        if not self.silent and not self.takeovers.is_watching:
            return False
        return self.takeovers.observe(self._liveness(links, agrees, now), now)

    def renew(self, links: Mapping[str, Link], now: float) -> None:
        """Determine which peers are silent, as links have changed or time has passed."""
        if not self.silent and now <= self._silent_at:
            return
        self._silent_at = (
            min((link.state.received_at for link in links.values()), default=now) + SILENT_AFTER_S
        )
        self.silent = tuple(name for name, link in links.items() if link.state.silent_s(now) > SILENT_AFTER_S)

    def _liveness(self, links: Mapping[str, Link], agrees: Agrees, now: float) -> list[PeerLiveness]:
        found = []
        for name, (region, state) in links.items():
            others = [
                other for other, link in links.items() if other not in self.silent and link.region != region
            ]
            agreeing = sum(agrees(other, name) for other in others)
            found.append(
                PeerLiveness(name, region, state.silent_s(now), len(others), agreeing, state.peer_boot)
            )
        return found
