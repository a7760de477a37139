"""Who owns the replicas of a region: the truth table, and what holds for any fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.regions.ownership import BACK_AFTER_S, AgentLiveness, Ownership, is_alive, ownership

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


def test_the_backup_owns_the_region_after_its_agents_died() -> None:
    now = ownership(ALL, ALL, rtt_s)
    assert now.backups == {"us": "eu", "eu": "us", "asia": "us"}
    assert now.standby("us") == ("asia", "eu")
    for dead in ALL:
        after = ownership(ALL, set(ALL) - {dead}, rtt_s)
        assert after.owners[dead] == now.backups[dead]


def test_one_region_owns_everything_and_has_no_peer() -> None:
    alone = ownership(ALL, ("eu",), rtt_s)
    assert alone.owned("eu") == ("eu", "asia", "us")
    assert alone.peers("eu") == ()
    assert alone.standby("eu") == ()


@pytest.mark.parametrize(
    ("us_ms", "eu_ms", "owner"),
    [
        pytest.param(100.0, 100.0, "us", id="equal"),
        pytest.param(100.0, 81.0, "us", id="hardly nearer"),
        pytest.param(100.0, 79.0, "eu", id="a fifth nearer"),
        pytest.param(12.0, 3.0, "us", id="by milliseconds"),
        pytest.param(100.0, None, "us", id="the other is not known"),
        pytest.param(None, 100.0, "eu", id="only the other is known"),
        pytest.param(None, None, "us", id="nothing is known"),
    ],
)
@pytest.mark.parametrize("kept", ["us", "eu"])
def test_a_region_stays_with_its_owner_until_another_is_clearly_nearer(
    us_ms: float | None, eu_ms: float | None, owner: str, kept: str
) -> None:
    """The same with both names: it is not the order of names that decides."""
    other = "eu" if kept == "us" else "us"
    rtts_s = {kept: us_ms, other: eu_ms}

    def measured(region: str, one: str) -> float | None:
        ms = rtts_s[one] if region == "mars" else 90.0
        return None if ms is None else ms / 1000

    before = Ownership(3, {"mars": kept, "us": "us", "eu": "eu"}, {"mars": other, "us": "eu", "eu": "us"})
    found = ownership(("mars",), ("us", "eu"), measured, before=before)
    expected = kept if owner == "us" else other
    assert found.owners["mars"] == expected
    assert found.epoch == 3 + (expected != kept)
    assert ownership(("mars",), ("us", "eu"), measured, before=found) == found, "and then stands"
    assert ownership(("mars",), (other,), measured, before=before).owners["mars"] == other, "no other is left"


def test_owners_within_the_zone_come_before_nearer_ones() -> None:
    def allowed(region: str, owner: str) -> bool:
        return region != "us" or owner in ("us", "asia")

    assert ownership(ALL, ALL, rtt_s, allowed).backups == {"us": "asia", "eu": "us", "asia": "us"}
    assert ownership(ALL, ("eu",), rtt_s, allowed).owners["us"] == "eu", "no other is left"


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
    assert all(backup != found.owners[region] for region, backup in found.backups.items())


@pytest.mark.parametrize(
    ("was_alive", "signs", "alive"),
    [
        (True, AgentLiveness(0.5), True),
        (True, AgentLiveness(6.0, peers=2, peers_silent=2), False),
        (True, AgentLiveness(6.0, peers=2, peers_silent=1), False),  # half of its peers
        (True, AgentLiveness(6.0, peers=3, peers_silent=1), True),  # only the controller is cut off
        (True, AgentLiveness(6.0), False),  # no other agent could reach it
        (True, AgentLiveness(1.0, peers=2, peers_silent=2), True),
        (False, AgentLiveness(0.1, ready_s=BACK_AFTER_S - 1), False),
        (False, AgentLiveness(0.1, ready_s=BACK_AFTER_S), True),
    ],
)
def test_death_needs_two_witnesses_and_a_return_patience(
    was_alive: bool, signs: AgentLiveness, alive: bool
) -> None:
    assert is_alive(was_alive, signs) is alive
