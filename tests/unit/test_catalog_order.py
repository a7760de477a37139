"""Offers of several clouds in one order: by price, by the price of work, or as the user prefers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from policies.goals import AcceleratorQps
from policies.model import CapacityType, Offer, Zone
from provisioners.offers.matching import in_order
from provisioners.port.base import Candidate, Requirements

PRICES = {("aws", "L4"): 0.4, ("gcp", "L4"): 0.3, ("aws", "H100"): 3.0, ("gcp", "H100"): 2.0}


def ask(need: Requirements) -> Iterable[Offer]:
    """The clouds one after the other, each in an order of its own."""
    for cloud in ("aws", "gcp"):
        for one in need.candidates:
            if one.cloud in (None, cloud):
                price = PRICES[cloud, str(one.accelerator)]
                yield Offer(Zone(cloud, "r", "z"), "m", one.accelerator, 1.0, CapacityType.SPOT, price)


def wish(accelerator: str, preference: int = 0, cloud: str | None = None) -> Candidate:
    return Candidate(cloud, accelerator=accelerator, preference=preference)


L4, H100 = wish("L4"), wish("H100")


@pytest.mark.parametrize(
    ("need", "order"),
    [
        pytest.param(
            Requirements((H100, L4)), ["gcp L4", "aws L4", "gcp H100", "aws H100"], id="cheapest first"
        ),
        pytest.param(Requirements((L4, L4)), ["gcp L4", "aws L4"], id="each once"),
        pytest.param(
            Requirements(
                (H100, L4), work=(AcceleratorQps("L4", None, 1.0), AcceleratorQps("H100", None, 7.0))
            ),
            ["gcp H100", "gcp L4", "aws L4", "aws H100"],
            id="cheapest for the work",
        ),
        pytest.param(
            Requirements((wish("H100", 0), wish("L4", 1)), ordered=True),
            ["gcp H100", "aws H100", "gcp L4", "aws L4"],
            id="in the user's order, each over all clouds",
        ),
        pytest.param(
            Requirements((wish("L4", 0, "aws"), wish("L4", 1, "gcp")), ordered=True),
            ["aws L4", "gcp L4"],
            id="an order of clouds",
        ),
    ],
)
def test_offers_of_several_clouds(need: Requirements, order: list[str]) -> None:
    found = in_order(need, ask)
    assert [f"{offer.zone.cloud} {offer.accelerator}" for offer in found] == order
    assert [offer.preference for offer in found] == sorted(offer.preference for offer in found)
    assert need.ordered or not any(offer.preference for offer in found)
