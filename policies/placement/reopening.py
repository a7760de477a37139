"""How a fleet returns to its zones after an outage in which all of them were shut.

Every zone that refused is left alone for a while (`zone_backoff`), and the waits end at different instants. The first zone
whose wait is over would take the whole fleet, and its next preemption would be an outage again. So the first zone
takes one replica, the probe. Once the probe is accepted the market is open: the other zones are tried at once, and
again every `ASK_AGAIN_S`, although their waits are not over. After `PATIENCE_S` the rest goes where there is room.

A zone that refused only once, as at the first launch of a service, is no outage. Nothing is remembered for this: the
blocks say when each zone refused, the replicas say when the probe was accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from policies.model import Json, Offer, Replica, Zone
from policies.placement import zone_backoff

_Place = TypeVar("_Place")

ASK_AGAIN_S = 15.0
PATIENCE_S = 60.0


class Return(NamedTuple):
    """Where to launch: at most `most` replicas among `usable`. `wake_at` is when this must be decided again."""

    usable: Sequence[Offer]
    most: int
    wake_at: float | None = None


def ask_again_at(refused_at: Mapping[_Place, float], began: float) -> dict[_Place, float]:
    """Return when to try each zone (or market) again, the probe having been accepted at `began`."""
    return {place: began if at <= began else at + ASK_AGAIN_S for place, at in refused_at.items()}


def accepted_at(replicas: Iterable[Replica]) -> float | None:
    """Return when a zone first accepted one of these; None if none did."""
    return min((each.launched_at for each in replicas if each.launched_at is not None), default=None)


def after_outage(
    offers: Sequence[Offer], usable: Sequence[Offer], replicas: Sequence[Replica], closed: Json, now: float
) -> Return | None:
    """Return where to launch while a fleet returns from an outage; None at all other times.

    `offers` are of rented machines, `usable` those of them that may be tried now. `replicas` are those of the service on
    such machines.
    """
    accepted = [replica for replica in replicas if replica.launched_at is not None]
    held = {replica.zone for replica in accepted}
    others = [offer for offer in offers if offer.zone not in held]
    if len(held) > 1 or not others or len({offer.zone for offer in offers}) < 2:
        return None
    refused_at = _refused_again(others, closed)
    if refused_at is None:
        return None
    asked = {replica.zone for replica in replicas if replica.launched_at is None}
    if not held:
        return Return(usable, 0 if asked else 1) if asked or usable else None
    began = accepted_at(accepted)
    if began is None or now >= began + PATIENCE_S:
        return None
    again = ask_again_at(refused_at, began)
    lifted = [offer for offer in others if again[offer.zone] <= now and offer.zone not in asked]
    allowed = [offer for offer in lifted if not zone_backoff.barred(offer, closed, now)]
    waits = [at for zone, at in again.items() if at > now and zone not in asked]
    return Return(allowed, len({offer.zone for offer in allowed}), min([*waits, began + PATIENCE_S]))


def _refused_again(offers: Iterable[Offer], closed: Json) -> dict[Zone, float] | None:
    """Return when each zone has refused; None if one of them has not, or only once."""
    refused = {offer.zone: zone_backoff.refusal(offer, closed) for offer in offers}
    again = {zone: each.at for zone, each in refused.items() if each is not None and each.times > 1}
    return again if len(again) == len(refused) else None
