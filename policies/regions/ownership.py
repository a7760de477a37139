"""Which agents own which replicas: those of the replica's region, or else the nearest ones. Pure.

An agent pushes requests to the replicas that it owns, polls only these, and reaches the replicas of other regions
through the agents there ("peers"). So no replica is polled from the whole world, and each region knows its own exactly.

*Who owns.* The replicas of a region are owned by all live agents of the region. A region without a live agent belongs to
the nearest region that has one, if possible one that is `allowed`, as by the residency zones of the region. Several agents of a region share its replicas, as agents
that share a port do.

*Backups.* The backup of a region is the region that would own it if its agents died. A backup has the replicas of the region in its
table as standby, so that it can take over without a controller.

*Hysteresis.* Distances are measured and vary. A region stays with its owner, and its backup is the same, until another one is nearer
by more than max(NEARER_S, NEARER_SHARE): moving replicas costs the caches and the queue that their owner has for them.

*Epoch.* It grows whenever an owner changes. An agent ignores an ownership that is older than the one it has: in a
partition two sides may both push to a replica, which costs balance and no correctness, and the newer one wins afterwards.

*Death and return.* An agent is dead if both the controller and at least half of its peers have received nothing from it for
DEAD_AFTER_S. One that the controller alone cannot reach still serves, and so does one that is cut off from a few peers.
It owns replicas again once it has been ready for BACK_AFTER_S: a process that restarts again and again must not move them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import NamedTuple

DEAD_AFTER_S = 5.0
BACK_AFTER_S = 30.0
NEARER_S = 0.01
NEARER_SHARE = 0.2


class AgentLiveness(NamedTuple):
    """The history of an agent, in seconds.

    `silent_s` since the controller has reached it (infinity: never). To `peers_silent` of its `peers` it has been silent for
    DEAD_AFTER_S. `ready_s` for how long it has passed its probe without a break, 0 if it does not pass now.
    """

    silent_s: float
    ready_s: float = 0.0
    peers: int = 0
    peers_silent: int = 0


class Ownership(NamedTuple):
    """Owners and backups by region of replicas. `epoch` grows with `owners`."""

    epoch: int = 0
    owners: Mapping[str, str] = {}
    backups: Mapping[str, str] = {}

    def owned(self, region: str) -> tuple[str, ...]:
        """Return the regions whose replicas the agents of `region` own, their own first."""
        return _sorted(self.owners, region)

    def standby(self, region: str) -> tuple[str, ...]:
        """Return the regions whose replicas the agents of `region` would take over."""
        return _sorted(self.backups, region)

    def peers(self, region: str) -> tuple[str, ...]:
        """Return the other regions whose agents own replicas."""
        return tuple(sorted(set(self.owners.values()) - {region}))


class Distances(NamedTuple):
    """What the agents of a service report: round trips in seconds by (region of the agent, other region), and whom they own.

    `owners` are by region of replicas, without those that agents of two regions own at present.
    """

    rtts_s: Mapping[tuple[str, str], float] = {}
    owners: Mapping[str, str] = {}

    def rtt_s(self, one: str, other: str) -> float | None:
        """Return the round trip between two regions; None: it is not known."""
        return self.rtts_s.get((other, one), self.rtts_s.get((one, other)))


NO_DISTANCES = Distances()


def ownership(
    replica_regions: Iterable[str],
    agent_regions: Collection[str],
    rtt_s: Callable[[str, str], float | None],
    allowed: Callable[[str, str], bool] = lambda region, owner: True,
    before: Ownership | None = None,
) -> Ownership:
    """Return who owns the replicas of each region, and who would take them over.

    `agent_regions` have a live agent. `rtt_s` is the round trip between two regions in seconds, None if unknown (such a pair
    comes last); equal distances are decided by name, so that all who compute this agree. Owners that are `allowed` (region,
    owner) come before others: their requests may be sent to all that the region serves. `before` is the ownership so far.
    """
    live = set(agent_regions)
    kept = Ownership() if before is None else before
    owners: dict[str, str] = {}
    backups: dict[str, str] = {}
    for region in sorted({*replica_regions, *live}):
        owner = _nearest(region, live, rtt_s, allowed, kept.owners.get(region))
        if owner is None:
            continue
        owners[region] = owner
        backup = _nearest(region, live - {owner}, rtt_s, allowed, kept.backups.get(region))
        if backup is not None:
            backups[region] = backup
    epoch = 0 if before is None else before.epoch + (dict(before.owners) != owners)
    return Ownership(epoch, owners, backups)


def is_alive(was_alive: bool, liveness: AgentLiveness) -> bool:
    """Return whether an agent owns replicas, given whether it did so far."""
    if not was_alive:
        return liveness.ready_s >= BACK_AFTER_S
    return liveness.silent_s < DEAD_AFTER_S or 2 * liveness.peers_silent < liveness.peers


def _nearest(
    region: str,
    candidates: Collection[str],
    rtt_s: Callable[[str, str], float | None],
    allowed: Callable[[str, str], bool],
    kept: str | None,
) -> str | None:
    """Return the nearest candidate; the one that it is so far, `kept`, if that is hardly farther away."""
    if region in candidates:
        return region

    def distance(owner: str) -> tuple[bool, float, str]:
        known = rtt_s(region, owner)
        return not allowed(region, owner), (inf if known is None else known), owner

    best = min(candidates, key=distance, default=None)
    if (
        best is None
        or kept is None
        or kept not in candidates
        or allowed(region, kept) < allowed(region, best)
    ):
        return best
    before_s, best_s = rtt_s(region, kept), rtt_s(region, best)
    if best_s is None or (
        before_s is not None and best_s + max(NEARER_S, NEARER_SHARE * before_s) >= before_s
    ):
        return kept
    return best


def _sorted(by_region: Mapping[str, str], owner: str) -> tuple[str, ...]:
    return tuple(
        sorted((one for one, its in by_region.items() if its == owner), key=lambda one: (one != owner, one))
    )
