"""What spreading costs, as a truth table, and the sentence of `serve plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.goals import AcceleratorQps
from policies.model import Offer
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.prices import spreading_cost
from skyserve_cli.config import Config
from skyserve_cli.controller.reconcile.planning import Spreading, first_plan, spreading
from skyserve_cli.home import Home
from skyserve_cli.spec.load import load_text
from tests.unit.placement_world import ON_DEMAND, an_offer

A, B = an_offer("c/r/a", 0.70, ON_DEMAND), an_offer("c/r/b", 0.76, ON_DEMAND)
SPOT, DEAR_SPOT = an_offer("c/r/a", 0.20), an_offer("c/r/b", 0.30)
HOST = replace(an_offer("ssh/box/box", 0.0, ON_DEMAND), places=1)
ON_HOST = replace(HOST, places=None)  # as launched
SECOND = replace(an_offer("c/r/c", 0.10, ON_DEMAND), preference=1)
BIG = replace(an_offer("c/r/c", 2.10, ON_DEMAND), accelerator="A100")
FOUR_TIMES = (AcceleratorQps("L4", None, 1.0), AcceleratorQps("A100", None, 4.0))


@pytest.mark.parametrize(
    ("launched", "offers", "work", "cost"),
    [
        pytest.param((A, B), (A, B), (), Spreading(0.06, 1.4, 2), id="one of two in a dearer zone"),
        pytest.param((A, A), (A, B), (), None, id="all in the cheapest"),
        pytest.param((), (A, B), (), None, id="nothing is launched"),
        pytest.param((SPOT, DEAR_SPOT), (SPOT, DEAR_SPOT, A), (), Spreading(0.1, 0.4, 2), id="spot"),
        pytest.param((SPOT, A), (SPOT, A, B), (), None, id="kinds of capacity are not compared"),
        pytest.param((ON_HOST, A, B), (HOST, A, B), (), Spreading(0.06, 1.4, 2), id="beside an own host"),
        pytest.param((ON_HOST, A), (HOST, A, B), (), None, id="an own host is no cheaper zone"),
        pytest.param((A, A), (A, SECOND), (), None, id="what the user wants less is not compared"),
        pytest.param((B,), (A, B), (), Spreading(0.06, 0.7, 1), id="one replica in a dearer zone"),
        pytest.param((BIG,), (A, BIG), FOUR_TIMES, None, id="for its work the big machine is the cheapest"),
        pytest.param((A,), (A, BIG), FOUR_TIMES, Spreading(0.175, 0.525, 1), id="and the small one is not"),
    ],
)
def test_the_cost_of_spreading(
    launched: tuple[Offer, ...],
    offers: tuple[Offer, ...],
    work: tuple[AcceleratorQps, ...],
    cost: Spreading | None,
) -> None:
    assert spreading(launched, offers, work) == cost


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        pytest.param(
            (A, B),
            "Spreading over 2 zones costs $0.0600 per hour: in the cheapest zone alone these replicas would cost $1.40.",
            id="a sentence",
        ),
        pytest.param((A, replace(B, price_usd_hour=0.70)), "", id="nothing where it costs nothing"),
        pytest.param((A, replace(B, price_usd_hour=0.80)), "", id="beyond the price band nothing is spread"),
    ],
)
def test_a_plan_says_what_spreading_costs(offers: tuple[Offer, ...], said: str, tmp_path: Path) -> None:
    spec = load_text("service: {replicas: 2}\nrun: serve\nresources: {accelerators: L4}").spec
    plan = first_plan(spec, offers, Clouds(Home(tmp_path, "sqlite://"), Config()), 0.0)
    assert spreading_cost(plan) == said
    assert (plan["spreading"] is not None) == bool(said)
