"""Region policies as truth tables."""

from __future__ import annotations

import pytest

from policies.regions.base import LocalCost, PeerView
from policies.regions.names import REGION_NAMES
from policies.regions.one_cost import OneCost
from policies.regions.registry import REGION_POLICIES, UnknownRegionPolicyError, make_region_policy

FREE = LocalCost(True, 0.001, 0.0, 0.1, 0.0)
FULL = LocalCost(False, 0.001, 2.0, 0.1, 0.0)
EU = PeerView("eu", 0.09, 2, 0, 0.0, 25e-6, 0.0, credit=4)
ASIA = PeerView("asia", 0.15, 2, 0, 0.0, 25e-6, 0.0, credit=4)
BYTES = 4000  # 0.1 s of prefill


def chosen(policy: str, local: LocalCost, *peers: PeerView, left_s: float = 60.0) -> str:
    return make_region_policy(policy).choose(BYTES, local, peers, left_s).region


@pytest.mark.parametrize("policy", sorted(REGION_POLICIES))
def test_without_peers_a_request_stays(policy: str) -> None:
    assert chosen(policy, FULL) == ""


@pytest.mark.parametrize("policy", sorted(REGION_POLICIES))
def test_a_request_that_is_served_at_once_stays(policy: str) -> None:
    assert chosen(policy, FREE, EU, ASIA) == ""


@pytest.mark.parametrize(
    ("policy", "region"), [("local", ""), ("skywalker", "eu"), ("gorgo", "eu"), ("one_cost", "eu")]
)
def test_a_full_region_forwards_to_the_nearest_free_one(policy: str, region: str) -> None:
    assert chosen(policy, FULL, ASIA._replace(last_turn=1), EU) == region


@pytest.mark.parametrize("policy", ["skywalker", "gorgo", "one_cost"])
def test_a_prefix_outweighs_distance(policy: str) -> None:
    long = 40_000  # 1 s of prefill
    peers = (EU, ASIA._replace(matched_bytes=40_000))
    local = FULL._replace(prefill_s=1.0)
    assert make_region_policy(policy).choose(long, local, peers, 60.0).region == "asia"


@pytest.mark.parametrize("policy", ["skywalker", "gorgo", "one_cost"])
def test_a_peer_without_an_available_replica_gets_nothing(policy: str) -> None:
    assert chosen(policy, FULL, EU._replace(available=0)) == ""


def test_skywalker_leaves_out_peers_with_a_long_queue() -> None:
    assert chosen("skywalker", FULL, EU._replace(queued=10)) == "eu"
    assert chosen("skywalker", FULL, EU._replace(queued=11)) == ""


class TestOneCost:
    @pytest.mark.parametrize(
        ("wait_s", "region"),
        [
            pytest.param(0.10, "", id="a gain of 11 ms is below 18 ms and 10 %"),
            pytest.param(0.12, "eu", id="a gain of 31 ms is above it"),
        ],
    )
    def test_it_leaves_for_a_gain_above_the_margin(self, wait_s: float, region: str) -> None:
        assert chosen("one_cost", FULL._replace(wait_s=wait_s), EU) == region

    def test_it_stays_where_both_cost_the_same(self) -> None:
        policy, peer = OneCost(margin_share=0.0, stale_share=0.0), EU._replace(rtt_s=0.5)
        for wait_s, region in ((0.5, ""), (0.625, "eu")):
            assert policy.choose(0, LocalCost(False, 0.0, wait_s, 0.0, 0.0), [peer], 60.0).region == region

    def test_the_margin_grows_with_the_cost_here(self) -> None:
        local = FULL._replace(wait_s=10.0)
        far = EU._replace(rtt_s=0.15)
        assert chosen("one_cost", local, far._replace(wait_s=8.7)) == "eu"
        assert chosen("one_cost", local, far._replace(wait_s=8.9)) == ""

    @pytest.mark.parametrize(
        ("rtt_s", "age_s", "gain_s", "leaves"),
        [
            pytest.param(0.01, 0.0, 0.015, True, id="near and new"),
            pytest.param(0.20, 0.0, 0.015, False, id="distant"),
            pytest.param(0.20, 0.0, 0.05, True, id="distant, and worth it"),
            pytest.param(0.01, 0.5, 0.05, False, id="old"),
            pytest.param(0.01, 9.0, 0.25, True, id="very old: 200 ms are enough"),
        ],
    )
    def test_the_margin_grows_with_distance_and_age(
        self, rtt_s: float, age_s: float, gain_s: float, leaves: bool
    ) -> None:
        peer = EU._replace(rtt_s=rtt_s, age_s=age_s)  # and 0.1 s of prefill
        local = LocalCost(False, 0.0, rtt_s + gain_s, 0.1, 0.0)
        only = OneCost(margin_share=0.0)
        assert bool(only.choose(BYTES, local, (peer,), 60.0).region) is leaves

    @pytest.mark.parametrize(
        ("wait_s", "region"),
        [
            pytest.param(0.0, "eu", id="it stays where it was computed"),
            pytest.param(0.2, "eu", id="also for some time"),
            pytest.param(0.6, "", id="it is drawn back for more than its prefill four times"),
        ],
    )
    def test_a_conversation_is_drawn_back_for_what_it_gains(self, wait_s: float, region: str) -> None:
        local = FREE._replace(s_per_byte=25e-6)
        assert chosen("one_cost", local, EU._replace(matched_bytes=BYTES, wait_s=wait_s)) == region

    def test_a_prompt_that_is_cached_here_leaves_for_several_times_its_prefill(self) -> None:
        local = LocalCost(False, 0.0, 0.5, 0.0, 0.0, BYTES, 25e-6)
        assert chosen("one_cost", local, EU) == ""
        assert chosen("one_cost", local._replace(wait_s=0.8), EU) == "eu"

    def test_it_may_leave_although_a_replica_here_is_free(self) -> None:
        cold = FREE._replace(prefill_s=1.0)
        assert chosen("one_cost", cold, EU._replace(matched_bytes=BYTES)) == "eu"

    def test_what_was_forwarded_since_the_report_counts_as_wait(self) -> None:
        local = FULL._replace(wait_s=0.25)
        assert chosen("one_cost", local, EU) == "eu"
        assert chosen("one_cost", local, EU._replace(forwarded=1, forwarded_s=0.2)) == ""

    def test_a_peer_gets_no_more_than_its_credit(self) -> None:
        assert chosen("one_cost", FULL, EU._replace(forwarded=3)) == "eu"
        assert chosen("one_cost", FULL, EU._replace(forwarded=4)) == ""

    def test_it_does_not_leave_for_a_response_that_comes_too_late(self) -> None:
        assert chosen("one_cost", FULL, EU, left_s=0.15) == ""

    def test_money_counts_against_the_gain_and_not_against_the_deadline(self) -> None:
        local = FULL._replace(wait_s=1.0)  # 1.1 s here, 0.19 s at eu
        assert chosen("one_cost", local, EU._replace(money_s=0.6)) == "eu"
        assert chosen("one_cost", local, EU._replace(money_s=0.85)) == ""
        assert chosen("one_cost", local, EU._replace(money_s=0.6), ASIA) == "asia", (
            "0.25 s, and costs nothing"
        )
        assert chosen("one_cost", local, EU._replace(money_s=0.6), left_s=0.2) == "eu"

    def test_half_of_the_decode_delay_counts(self) -> None:
        assert chosen("one_cost", FULL._replace(wait_s=0.0, decode_s=0.3), EU) == "eu"
        assert chosen("one_cost", FULL._replace(wait_s=0.0, decode_s=0.2), EU) == ""

    def test_the_decision_explains_every_term(self) -> None:
        decision = OneCost().choose(BYTES, FULL, (EU, ASIA), 60.0)
        assert decision.terms == ("network_s", "wait_s", "prefill_s", "decode_s", "copy_s", "money_s")
        for row in decision.scored:
            assert row[1] == pytest.approx(sum(float(value) for value in row[2:]))
        assert [row[0] for row in decision.scored] == ["", "eu", "asia"]


def test_gorgo_compares_the_round_trip_with_the_queue_here() -> None:
    assert chosen("gorgo", FULL._replace(wait_s=0.05), EU) == ""
    assert chosen("gorgo", FULL._replace(wait_s=0.2), EU) == "eu"


def test_an_unknown_policy_is_named() -> None:
    assert sorted(REGION_POLICIES) == sorted(REGION_NAMES)
    with pytest.raises(UnknownRegionPolicyError, match="'nearest'; known: gorgo, local, one_cost, skywalker"):
        make_region_policy("nearest")
