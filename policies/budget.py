"""What may be launched within a limit of USD per hour. Pure.

The limits are the service's (`replica_policy.max_usd_hour`) and the home's (`controller.max_usd_hour`); those of a team are in
`quotas`. Launches are let through in their order, and those that do not fit are left out. Nothing that runs is terminated for a
budget, since requests are worth more than the rest of an hour. A replica's price is that of the offer by which it was launched: of
its machines, without traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from policies.model import Offer, Replica
from policies.placement.base import PlannedLaunch

WARN_SHARE = 0.8
LOOK_AGAIN_S = 60.0  # another service may have made room
_REFUSED = "not launched for the budget"
_REFUSALS = (_REFUSED, "not launched for the quota")


@dataclass(frozen=True, slots=True)
class Budget:
    """`most` is the limit of the service (None: none), `spent` what its replicas cost, `room` the rest of the home's budget."""

    most: float | None
    spent: float
    room: float = math.inf

    @property
    def left(self) -> float:
        """USD per hour that launches may cost together."""
        own = math.inf if self.most is None else self.most - self.spent
        return max(0.0, min(own, self.room))


def usd_hour(replicas: Iterable[Replica]) -> float:
    """Return the USD per hour of replicas that have, or may have, instances."""
    return sum(replica.offer.price_usd_hour for replica in replicas)


def affordable(places: Sequence[PlannedLaunch], budget: Budget) -> tuple[list[PlannedLaunch], str]:
    """Return the places that fit into the budget, in their order, and a sentence.

    The sentence is empty unless some do not fit, or most of the service's budget is in use.
    """
    left, kept, first = budget.left, list[PlannedLaunch](), None
    for place in places:
        if place.offer.price_usd_hour <= left:
            left -= place.offer.price_usd_hour
            kept.append(place)
        elif first is None:
            first = place.offer
    if first is not None:
        return kept, _refusal(len(places) - len(kept), first, budget)
    spent = budget.spent + usd_hour_of(kept)
    if budget.most is not None and spent > WARN_SHARE * budget.most:
        return kept, f"more than {WARN_SHARE:.0%} of max_usd_hour ({budget.most:g} USD per hour) is in use"
    return kept, ""


def is_refusal(notes: str) -> bool:
    """Return whether the notes of a service report that a replica is not launched for a budget or a quota."""
    return any(refused in notes for refused in _REFUSALS)


def usd_hour_of(places: Iterable[PlannedLaunch]) -> float:
    """Return the USD per hour of replicas that are only planned."""
    return sum(place.offer.price_usd_hour for place in places)


def _refusal(count: int, offer: Offer, budget: Budget) -> str:
    what = "1 replica is" if count == 1 else f"{count} replicas are"
    is_own = budget.most is not None and budget.most - budget.spent <= budget.room
    limit = (
        f"replica_policy.max_usd_hour, {budget.most:g}"
        if is_own
        else "controller.max_usd_hour in config.yaml"
    )
    market = offer.capacity_type.value.replace("_", "-")
    return f"{what} {_REFUSED} ({limit}): {market} {offer.instance_type} at {offer.price_usd_hour:g} USD per hour"
