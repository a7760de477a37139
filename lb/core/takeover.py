"""Which regions this agent serves in place of their dead agents. Pure; `now` is an argument.

An agent's table has the targets of the regions that it would take over, as standby. It takes them over, without a
controller, when all agents of a region are dead: they have been silent for DEAD_AFTER_S, and at least half of the other
agents that it can reach report the same (`policies.regions.ownership.is_alive`). So one broken link moves nothing where a third
agent reaches both, and in a partition each side serves by itself.

It hands a region back once it has received beats of an agent there for BACK_AFTER_S without a break, because a process that starts
again and again must not move replicas. For a process that goes on (it was stopped, or cut off) it waits WENT_ON_AFTER_S only, unless its
agent was dead within FLAPS_S before. The agent there serves the targets from its start; here they drain for RETURNING_S, so that no
request under way is moved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from lb.config.schema import Readiness, Table
from policies.regions.ownership import BACK_AFTER_S, DEAD_AFTER_S, AgentLiveness, is_alive

RETURNING_S = 60.0
WENT_ON_AFTER_S = 1.0
FLAPS_S = 300.0


class PeerLiveness(NamedTuple):
    """An agent of another region: for how long it has been silent.

    `others` is how many other agents can be reached, and `others_silent` how many of them report that it is silent. `boot`
    identifies the process that sent the last beat; 0: it is not known.
    """

    id: str
    region: str
    silent_s: float
    others: int = 0
    others_silent: int = 0
    boot: int = 0


class _Death(NamedTuple):
    """When an agent died, as which process, and whether it had been dead not long before."""

    at: float
    boot: int
    again: bool


class Takeovers:
    """The regions that are served in place of their agents."""

    def __init__(self) -> None:
        self._dead: dict[str, _Death] = {}
        self._died_at: dict[str, float] = {}  # the last time, of agents that may be alive
        self._back_since: dict[str, float] = {}  # of dead agents whose beats have come again
        self.regions: frozenset[str] = frozenset()
        self._returned_at: dict[str, float] = {}

    @property
    def is_watching(self) -> bool:
        """Return whether `observe` has something to watch although no peer is silent."""
        return bool(self._dead or self.regions or self._returned_at)

    def is_dead(self, agent: str) -> bool:
        """Return whether that agent is dead, as far as can be known here."""
        return agent in self._dead

    def observe(self, peers: Iterable[PeerLiveness], now: float) -> bool:
        """Decide by the silences of all peers which regions are served. Returns whether `extended` returns another table now."""
        regions: dict[str, bool] = {}  # whether an agent of it is alive
        known = set()
        for peer in peers:
            known.add(peer.id)
            alive = self._is_alive(peer, now)
            regions[peer.region] = regions.get(peer.region, False) or alive
        for gone in (self._dead.keys() | self._died_at.keys()) - known:
            self._dead.pop(gone, None)
            self._died_at.pop(gone, None)
        taken = frozenset(region for region, alive in regions.items() if not alive)
        before, self.regions = self.regions, taken
        for region in before - taken:
            self._returned_at[region] = now
        over = [
            region for region, at in self._returned_at.items() if region in taken or now - at >= RETURNING_S
        ]
        for region in over:
            del self._returned_at[region]
        return before != taken or bool(over)

    def extended(self, table: Table) -> Table:
        """Return the table with the standby targets that are served here, and those that drain for being returned."""
        known = {target.id for target in table.targets}
        more = []
        for standby in table.standby:
            served = standby.owner in self.regions
            if served or standby.owner in self._returned_at:
                more += [
                    target if served else replace(target, state=Readiness.DRAINING)
                    for target in standby.targets
                    if target.id not in known
                ]
        return replace(table, targets=(*table.targets, *more)) if more else table

    def _is_alive(self, peer: PeerLiveness, now: float) -> bool:
        death = self._dead.get(peer.id)
        if peer.silent_s >= DEAD_AFTER_S:
            self._back_since.pop(peer.id, None)
        elif death is not None:
            self._back_since.setdefault(peer.id, now)
        ready_s = now - self._back_since.get(peer.id, now)
        if (
            death is not None
            and ready_s >= WENT_ON_AFTER_S
            and not death.again
            and death.boot == peer.boot != 0
        ):
            ready_s = BACK_AFTER_S
        alive = is_alive(
            death is None, AgentLiveness(peer.silent_s, ready_s, peer.others, peer.others_silent)
        )
        if alive:
            self._dead.pop(peer.id, None)
            self._back_since.pop(peer.id, None)
        elif death is None:
            again = now - self._died_at.get(peer.id, -inf) < FLAPS_S
            self._dead[peer.id] = _Death(now, peer.boot, again)
            self._died_at[peer.id] = now
        return alive
