"""Which agents own which replicas: those of the replica's region, or else the nearest ones. Pure.

An agent pushes requests to the replicas that it owns, polls only these, and reaches the replicas of other regions
through the agents there ("peers"). So no replica is polled from the whole world, and each region knows its own exactly.

*Who owns.* The replicas of a region are owned by all living agents of the region. A region without a living agent belongs to
the nearest region that has one and may serve its data (`allowed`). Several agents of a region share its replicas, as agents
that share a port do.

*Heirs.* The heir of a region is the region that would own it if its agents died. An heir has the replicas of the region in its
table as standby, so that it can take over without a controller.

*Epoch.* It grows whenever an owner changes. An agent ignores an ownership that is older than the one it has: in a
partition two sides may both push to a replica, which costs balance and no correctness, and the newer one wins afterwards.

*Death and return.* An agent is dead if both the controller and at least half of its peers have not heard it for
DEAD_AFTER_S. One that the controller alone cannot reach still serves, and so does one that is cut off from a few peers.
It owns replicas again once it has been ready for BACK_AFTER_S: a process that restarts again and again must not move them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import NamedTuple

DEAD_AFTER_S = 5.0
BACK_AFTER_S = 30.0


class AgentSigns(NamedTuple):
    """What is known of the life of an agent, in seconds.

    `silent_s` since the controller has heard it (infinity: never). Of its `peers`, `deaf_peers` have not heard it for
    DEAD_AFTER_S. `ready_s` for how long it has passed its probe without a break, 0 if it does not pass now.
    """

    silent_s: float
    ready_s: float = 0.0
    peers: int = 0
    deaf_peers: int = 0


class Ownership(NamedTuple):
    """Owners and heirs by region of replicas; a region that no agent may own is in neither. `epoch` grows with `owners`."""

    epoch: int = 0
    owners: Mapping[str, str] = {}
    heirs: Mapping[str, str] = {}

    def owned(self, region: str) -> tuple[str, ...]:
        """Return the regions whose replicas the agents of `region` own, their own first."""
        return _sorted(self.owners, region)

    def standby(self, region: str) -> tuple[str, ...]:
        """Return the regions whose replicas the agents of `region` would inherit."""
        return _sorted(self.heirs, region)

    def peers(self, region: str) -> tuple[str, ...]:
        """Return the other regions whose agents own replicas."""
        return tuple(sorted(set(self.owners.values()) - {region}))


def ownership(
    replica_regions: Iterable[str],
    agent_regions: Collection[str],
    rtt_s: Callable[[str, str], float | None],
    allowed: Callable[[str, str], bool] = lambda region, owner: True,
    before: Ownership | None = None,
) -> Ownership:
    """Return who owns the replicas of each region, and who would inherit them.

    `agent_regions` have a living agent. `rtt_s` is the round trip between two regions in seconds, None if unknown (such a pair
    comes last); equal distances are decided by name, so that all who compute this agree. `allowed` says whether the agents
    of `owner` may handle the requests that replicas of `region` serve. `before` is the ownership so far.
    """
    living = set(agent_regions)
    owners: dict[str, str] = {}
    heirs: dict[str, str] = {}
    for region in sorted({*replica_regions, *living}):
        owner = _nearest(region, living, rtt_s, allowed)
        if owner is None:
            continue
        owners[region] = owner
        heir = _nearest(region, living - {owner}, rtt_s, allowed)
        if heir is not None:
            heirs[region] = heir
    epoch = 0 if before is None else before.epoch + (dict(before.owners) != owners)
    return Ownership(epoch, owners, heirs)


def is_alive(was_alive: bool, signs: AgentSigns) -> bool:
    """Return whether an agent owns replicas, given whether it did so far."""
    if not was_alive:
        return signs.ready_s >= BACK_AFTER_S
    return signs.silent_s < DEAD_AFTER_S or 2 * signs.deaf_peers < signs.peers


def _nearest(
    region: str,
    candidates: Collection[str],
    rtt_s: Callable[[str, str], float | None],
    allowed: Callable[[str, str], bool],
) -> str | None:
    if region in candidates:
        return region

    def distance(owner: str) -> tuple[float, str]:
        known = rtt_s(region, owner)
        return (inf if known is None else known), owner

    return min((one for one in candidates if allowed(region, one)), key=distance, default=None)


def _sorted(by_region: Mapping[str, str], owner: str) -> tuple[str, ...]:
    return tuple(
        sorted((one for one, its in by_region.items() if its == owner), key=lambda one: (one != owner, one))
    )
