"""Quotas of teams: what is due to whom, what is permitted, and that limits hold whatever services want."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.budget import is_refusal
from policies.goals import Amounts, Quota, TeamRoom
from policies.model import CapacityType, Offer, Zone
from policies.placement.base import PlannedLaunch
from policies.quotas import NOTHING, Claim, cost_of, due, limits, permitted, plus, room

ONE = Amounts(1.0, 1.0, 1.0)


def place(gpus: float = 1.0, usd_hour: float = 1.0) -> PlannedLaunch:
    offer = Offer(
        zone=Zone("sim", "r", "a"),
        instance_type="g6.xlarge",
        accelerator="L4",
        accelerator_count=gpus,
        capacity_type=CapacityType.SPOT,
        price_usd_hour=usd_hour,
        on_demand_usd_hour=usd_hour,
    )
    return PlannedLaunch(offer, "why")


def uses(replicas: int, unit: Amounts = ONE) -> Amounts:
    return plus(NOTHING, unit, replicas)


@pytest.mark.parametrize(
    ("quota", "claims", "expected"),
    [
        pytest.param(
            Quota(max_replicas=8),
            {"a": Claim(NOTHING, 8, ONE), "b": Claim(NOTHING, 8, ONE)},
            {"a": 4, "b": 4},
            id="two that want all get half each",
        ),
        pytest.param(
            Quota(max_replicas=8),
            {"a": Claim(NOTHING, 2, ONE), "b": Claim(NOTHING, 8, ONE)},
            {"a": 2, "b": 6},
            id="what one does not want the other gets",
        ),
        pytest.param(
            Quota(max_replicas=8),
            {"a": Claim(uses(6), 0), "b": Claim(NOTHING, 4, ONE), "c": Claim(NOTHING, 4, ONE)},
            {"a": 0, "b": 1, "c": 1},
            id="what runs is not taken away, and the rest is shared",
        ),
        pytest.param(
            Quota(max_replicas=3),
            {"b": Claim(NOTHING, 2, ONE), "a": Claim(NOTHING, 2, ONE)},
            {"a": 2, "b": 1},
            id="an odd one goes by name, in whatever order they are",
        ),
        pytest.param(
            Quota(max_gpus=8),
            {"big": Claim(NOTHING, 1, Amounts(8, 1, 9)), "small": Claim(NOTHING, 8, ONE)},
            {"big": 1, "small": 0},
            id="a large replica is granted before small ones have taken its place",
        ),
        pytest.param(
            Quota(max_gpus=6),
            {"big": Claim(NOTHING, 1, Amounts(8, 1, 9)), "small": Claim(NOTHING, 8, ONE)},
            {"big": 0, "small": 6},
            id="one that can never fit holds up nobody else",
        ),
        pytest.param(
            Quota(max_gpus=8, max_usd_hour=10),
            {"gpus": Claim(NOTHING, 9, Amounts(2, 1, 1)), "usd": Claim(NOTHING, 9, Amounts(1, 1, 2.5))},
            {"gpus": 3, "usd": 2},
            id="shares are of the limit that is used most",
        ),
        pytest.param(
            Quota(max_replicas=2),
            {"a": Claim(uses(5), 3, ONE), "b": Claim(NOTHING, 1, ONE)},
            {"a": 0, "b": 0},
            id="nothing beyond a limit that was lowered",
        ),
        pytest.param(Quota(), {"a": Claim(uses(5), 3, ONE)}, {"a": 3}, id="no limit"),
        pytest.param(Quota(max_replicas=0), {"a": Claim(NOTHING, 3, ONE)}, {"a": 0}, id="nothing at all"),
    ],
)
def test_what_is_due(quota: Quota, claims: dict[str, Claim], expected: dict[str, int]) -> None:
    assert due(quota, claims) == expected


def room_of(
    quota: Quota, used: Amounts = NOTHING, due: int = 9, reserved: Amounts = NOTHING, **more: float
) -> TeamRoom:
    left = plus(plus(limits(quota), used, -1.0), reserved, -1.0)
    return TeamRoom("research", quota, used, left, due, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("team", "places", "kept", "sentence"),
    [
        (None, [place()] * 3, 3, ""),
        (room_of(Quota()), [place()] * 3, 3, ""),
        (room_of(Quota(max_replicas=2)), [], 0, ""),
        (room_of(Quota(max_replicas=3)), [place()] * 3, 3, ""),
        (
            room_of(Quota(max_replicas=8), uses(7)),
            [place()] * 3,
            1,
            "2 replicas are not launched for the quota of the team research (max_replicas, 8): 7 in use",
        ),
        (
            room_of(Quota(max_gpus=8), Amounts(6, 3, 9)),
            [place(4.0), place(2.0)],
            1,
            "1 replica is not launched for the quota of the team research (max_gpus, 8): 6 in use",
        ),
        (
            room_of(Quota(max_usd_hour=40), Amounts(0, 9, 39.5)),
            [place()],
            0,
            "1 replica is not launched for the budget of the team research (max_usd_hour, 40): 39.5 in use",
        ),
        (
            room_of(Quota(max_replicas=8), uses(4), reserved=uses(4)),
            [place()],
            0,
            "(max_replicas, 8): 4 in use; the rest is due to its other services",
        ),
        (room_of(Quota(max_replicas=2), uses(5)), [place()], 0, "(max_replicas, 2): 5 in use"),
        (
            room_of(Quota(max_usd_month=100), month_usd=100.0),
            [place()] * 2,
            0,
            "2 replicas are not launched for the budget of the team research (max_usd_month, 100)",
        ),
        (room_of(Quota(max_usd_month=100), month_usd=99.9), [place()] * 2, 2, ""),
        (room_of(Quota(max_gpus=8), num_nodes=4), [place(2.0)] * 2, 1, "(max_gpus, 8): 0 in use"),
        (room_of(Quota(max_replicas=8), due=2), [place()] * 5, 2, ""),
        (room_of(Quota(max_replicas=8), due=0), [place()] * 5, 1, ""),
    ],
)
def test_what_is_permitted(
    team: TeamRoom | None, places: list[PlannedLaunch], kept: int, sentence: str
) -> None:
    found, note = permitted(places, team)
    assert (len(found), sentence in note, bool(note)) == (kept, True, bool(sentence)), note
    assert is_refusal(note) == bool(sentence)


UNIT = st.builds(
    Amounts, st.sampled_from([0.0, 1.0, 2.0, 8.0]), st.just(1.0), st.sampled_from([0.1, 0.3, 1.7, 9.0])
)
LIMIT = st.none() | st.integers(0, 20)


@given(
    quota=st.builds(Quota, LIMIT, LIMIT, st.none() | st.floats(0.1, 30.0)),
    services=st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(UNIT, st.integers(0, 6), st.integers(0, 12)), max_size=5
    ),
    order=st.randoms(use_true_random=False),
)
def test_limits_hold_in_every_order_and_all_that_is_due_is_launched(
    quota: Quota, services: dict[str, tuple[Amounts, int, int]], order: object
) -> None:
    """Services decide one after another, as in a tick, and want more than their stored target says."""
    claims = {name: Claim(uses(live, unit), short, unit) for name, (unit, live, short) in services.items()}
    before = total(claims)
    granted = due(quota, claims)
    assert granted == due(quota, dict(reversed(claims.items())))
    names = sorted(claims)
    order.shuffle(names)  # type: ignore[attr-defined]
    launched = {}
    for name in names:
        unit, _, short = services[name]
        mine = room("t", name, quota, claims, granted)
        kept, _ = permitted([place(unit.gpus, unit.usd_hour)] * (short + 1), mine)
        launched[name] = len(kept)
        for one in kept:
            claims[name] = claims[name]._replace(used=plus(claims[name].used, cost_of(one, 1)))
        granted[name] = max(0, granted[name] - len(kept))
    after = total(claims)
    for most, was, now in zip(limits(quota), before, after, strict=True):
        assert now <= max(most, was) + 1e-6
    first = due(
        quota, {name: Claim(uses(live, unit), short, unit) for name, (unit, live, short) in services.items()}
    )
    assert all(launched[name] >= first[name] for name in names)


def total(claims: dict[str, Claim]) -> Amounts:
    found = NOTHING
    for claim in claims.values():
        found = plus(found, claim.used)
    return found


def test_without_a_limit_everything_fits() -> None:
    assert limits(Quota()) == Amounts(math.inf, math.inf, math.inf)
