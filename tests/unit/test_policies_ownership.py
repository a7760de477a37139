"""Who owns the replicas of a region: the truth table, and what holds for any fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.regions.ownership import BACK_AFTER_S, AgentSigns, Ownership, is_alive, ownership

RTT_S = {("eu", "us"): 0.09, ("asia", "us"): 0.15, ("asia", "eu"): 0.22}
ALL = ("us", "eu", "asia")


def rtt_s(one: str, other: str) -> float | None:
    return RTT_S.get((min(one, other), max(one, other)))


@pytest.mark.parametrize(
    ("living", "us", "eu", "asia"),
    [
        (ALL, "us", "eu", "asia"),
        (("us", "asia"), "us", "us", "asia"),
        (("eu", "asia"), "eu", "eu", "asia"),
        (("us", "eu"), "us", "eu", "us"),
        (("asia",), "asia", "asia", "asia"),
    ],
)
def test_replicas_belong_to_their_region_or_else_to_the_nearest(
    living: tuple[str, ...], us: str, eu: str, asia: str
) -> None:
    assert ownership(ALL, living, rtt_s).owners == {"us": us, "eu": eu, "asia": asia}


def test_without_an_agent_nobody_owns_anything() -> None:
    assert ownership(ALL, (), rtt_s) == Ownership()


def test_the_heir_is_who_owns_after_a_death() -> None:
    now = ownership(ALL, ALL, rtt_s)
    assert now.heirs == {"us": "eu", "eu": "us", "asia": "us"}
    assert now.standby("us") == ("asia", "eu")
    for dead in ALL:
        after = ownership(ALL, set(ALL) - {dead}, rtt_s)
        assert after.owners[dead] == now.heirs[dead]


def test_one_region_owns_everything_and_has_no_peer() -> None:
    alone = ownership(ALL, ("eu",), rtt_s)
    assert alone.owned("eu") == ("eu", "asia", "us")
    assert alone.peers("eu") == ()
    assert alone.standby("eu") == ()


def test_residency_forbids_an_heir_and_an_owner() -> None:
    def allowed(region: str, owner: str) -> bool:
        return region != "eu" or owner == "eu"

    assert ownership(ALL, ALL, rtt_s, allowed).heirs == {"us": "eu", "asia": "us"}
    assert "eu" not in ownership(ALL, ("us", "asia"), rtt_s, allowed).owners


def test_unknown_distances_come_last_and_ties_go_by_name() -> None:
    assert ownership(("mars",), ("us", "eu"), rtt_s).owners["mars"] == "eu"
    near = {("mars", "us"): 0.5}
    assert (
        ownership(("mars",), ("us", "eu"), lambda one, other: near.get((one, other))).owners["mars"] == "us"
    )


def test_the_epoch_grows_when_an_owner_changes_and_only_then() -> None:
    first = ownership(ALL, ALL, rtt_s)
    same = ownership(ALL, ALL, rtt_s, before=first)
    dead = ownership(ALL, ("us", "asia"), rtt_s, before=same)
    back = ownership(ALL, ALL, rtt_s, before=dead)
    assert [one.epoch for one in (first, same, dead, back)] == [0, 0, 1, 2]


@given(
    st.sets(st.sampled_from("abcdef"), max_size=6),
    st.sets(st.sampled_from("abcdef"), max_size=6),
    st.dictionaries(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), st.floats(0, 1)),
)
def test_owners_live_and_each_region_has_exactly_one(
    replicas: set[str], living: set[str], table: dict[tuple[str, str], float]
) -> None:
    found = ownership(replicas, living, lambda one, other: table.get((min(one, other), max(one, other))))
    assert set(found.owners.values()) <= living
    assert set(found.owners) == (replicas | living if living else set())
    assert all(found.owners[region] == region for region in living)
    assert all(heir != found.owners[region] for region, heir in found.heirs.items())


@pytest.mark.parametrize(
    ("was_alive", "signs", "alive"),
    [
        (True, AgentSigns(0.5), True),
        (True, AgentSigns(6.0, peers=2, deaf_peers=2), False),
        (True, AgentSigns(6.0, peers=2, deaf_peers=1), False),  # half of its peers
        (True, AgentSigns(6.0, peers=3, deaf_peers=1), True),  # only the controller is cut off
        (True, AgentSigns(6.0), False),  # nobody else could hear it
        (True, AgentSigns(1.0, peers=2, deaf_peers=2), True),
        (False, AgentSigns(0.1, ready_s=BACK_AFTER_S - 1), False),
        (False, AgentSigns(0.1, ready_s=BACK_AFTER_S), True),
    ],
)
def test_death_needs_two_witnesses_and_a_return_patience(
    was_alive: bool, signs: AgentSigns, alive: bool
) -> None:
    assert is_alive(was_alive, signs) is alive
