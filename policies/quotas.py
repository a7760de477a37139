"""What may be launched within the quota and the budget of a team. Pure.

All services of a team share its limits: GPUs, replicas, USD per hour, and USD per calendar month. Nothing that runs is terminated
for them. As long as a launch of one service would take what another one is due, it waits.

What is due follows Dominant Resource Fairness (Ghodsi et al., NSDI 2011): replicas that services are short of are granted one at
a time, to the service that uses the smallest part of the limit of which it uses most, until none fits. Deviation: what runs counts
as granted, because it is not taken away, and a replica that does not fit does not stop smaller ones.

A service whose target has just grown is short of replicas that the others do not know of yet. It launches one replica beyond what is
due to it per tick; by the next tick its target is stored, and counts. So the order in which services are decided about does
not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policies.goals import Amounts, Quota, TeamRoom
from policies.placement.base import PlannedLaunch

NOTHING = Amounts()
_SLACK = 1e-9  # sums of prices


class Claim(NamedTuple):
    """What a service uses, and how many replicas it is short of; each would use about `unit`."""

    used: Amounts
    short: int = 0
    unit: Amounts = NOTHING


def plus(one: Amounts, other: Amounts, times: float = 1.0) -> Amounts:
    """Return `one` and `times` the `other`."""
    return Amounts(*(mine + times * theirs for mine, theirs in zip(one, other, strict=True)))


def limits(quota: Quota) -> Amounts:
    """Return the limits; infinite where there is none."""
    most = (quota.max_gpus, quota.max_replicas, quota.max_usd_hour)
    return Amounts(*(math.inf if limit is None else limit for limit in most))


def due(quota: Quota, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Return by service how many replicas are due to it."""
    most, granted = limits(quota), dict.fromkeys(claims, 0)
    used = NOTHING
    for claim in claims.values():
        used = plus(used, claim.used)

    def turn(name: str) -> tuple[float, float, str]:
        mine = plus(claims[name].used, claims[name].unit, granted[name])
        return _dominant_share(mine, most), mine.replicas, name

    waiting = [turn(name) for name, claim in claims.items() if claim.short > 0]
    heapq.heapify(waiting)
    while waiting:
        name = heapq.heappop(waiting)[-1]
        after = plus(used, claims[name].unit)
        if not _fits(after, most):
            continue
        used = after
        granted[name] += 1
        if granted[name] < claims[name].short:
            heapq.heappush(waiting, turn(name))
    return granted


def room(
    team: str,
    name: str,
    quota: Quota,
    claims: Mapping[str, Claim],
    granted: Mapping[str, int],
    month_usd: float = 0.0,
) -> TeamRoom:
    """Return what the service may launch; `granted` is what `due` returned, less what has been launched since."""
    used = reserved = NOTHING
    for other, claim in claims.items():
        used = plus(used, claim.used)
        if other != name:
            reserved = plus(reserved, claim.unit, granted[other])
    left = plus(plus(limits(quota), used, -1.0), reserved, -1.0)
    return TeamRoom(team, quota, used, left, granted[name], month_usd)


def permitted(places: list[PlannedLaunch], team: TeamRoom | None) -> tuple[list[PlannedLaunch], str]:
    """Return the places that the team's limits admit now, in their order, and a sentence, empty unless some are refused."""
    if team is None or not places:
        return places, ""
    kept, used, refused = list[PlannedLaunch](), NOTHING, ""
    count = 0
    for place in places:
        after = plus(used, cost_of(place, team.num_nodes))
        why = _spent(team) or _exceeded(after, team)
        if why:
            count += 1
            refused = refused or why
        elif len(kept) < max(1, team.due):
            kept.append(place)
            used = after
    if not refused:
        return kept, ""
    return kept, f"{'1 replica is' if count == 1 else f'{count} replicas are'} {refused}"


def cost_of(place: PlannedLaunch, num_nodes: int) -> Amounts:
    """Return what a replica there would use; the offer's price is of all its nodes."""
    return Amounts(place.offer.accelerator_count * num_nodes, 1.0, place.offer.price_usd_hour)


def too_large(quota: Quota, needed: Amounts) -> Iterable[tuple[str, float, float]]:
    """Yield key, need and limit where a service alone needs more than the quota."""
    for key, need, limit in zip(_KEYS, needed, limits(quota), strict=True):
        if need > limit + _SLACK:
            yield key, need, limit


_KEYS = ("max_gpus", "max_replicas", "max_usd_hour")


def _exceeded(added: Amounts, team: TeamRoom) -> str:
    """Return why this cannot be added; "" if it can."""
    most = limits(team.quota)
    for key, more, left, used, limit in zip(_KEYS, added, team.left, team.used, most, strict=True):
        if more > left + _SLACK:
            kind = "budget" if key == "max_usd_hour" else "quota"
            rest = "; the rest is due to its other services" if used + more <= limit + _SLACK else ""
            return f"not launched for the {kind} of the team {team.team} ({key}, {limit:g}): {used:g} in use{rest}"
    return ""


def _spent(team: TeamRoom) -> str:
    limit = team.quota.max_usd_month
    if limit is None or team.month_usd < limit:
        return ""
    return (
        f"not launched for the budget of the team {team.team} (max_usd_month, {limit:g}): its services have cost {limit:g} USD "
        "or more since the month began"
    )


def _dominant_share(used: Amounts, most: Amounts) -> float:
    """Return the largest part of a limit that is used."""
    return max(mine / limit if limit > 0.0 else math.inf for mine, limit in zip(used, most, strict=True))


def _fits(used: Amounts, most: Amounts) -> bool:
    return all(mine <= limit + _SLACK for mine, limit in zip(used, most, strict=True))
