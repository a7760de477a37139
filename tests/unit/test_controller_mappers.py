"""From a spec to goals, requirements, tokens, orders and target tables."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.schema import Limits, Readiness, Table
from policies.goals import Goal, PlacementGoal, ScalingGoal, UpdateMode
from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from skyserve_cli.controller.api.views import endpoint_of, replica_view
from skyserve_cli.controller.reconcile.lb_config import table_of
from skyserve_cli.controller.reconcile.mappers import (
    goal_of,
    on_demand_price,
    order_of,
    requirements_of,
    token_of,
)
from skyserve_cli.spec.model import (
    LoadBalancerSpec,
    Probe,
    ResourceChoice,
    ServiceSpec,
    Tls,
    UpdateSpec,
)
from skyserve_cli.spec.placement import placement_of
from skyserve_cli.state.values import ServiceRow
from tests.kit import rows

S = ReplicaState
NOW = 1000.0
OFFER = Offer(Zone("c", "r", "z"), "m", "L4", 1.0, CapacityType.SPOT, 0.3, 1.0)
SPEC = ServiceSpec("chat", "serve-it")


def a_row(**more: Any) -> ServiceRow:
    killed, same = frozenset({9}), frozenset({1})
    plain = rows.a_row(
        version=3, same_replicas=same, update_mode=UpdateMode.BLUE_GREEN, wanted=2, target=2, killed=killed
    )
    return replace(plain, **more)


def a_replica(replica_id: int = 1, state: ReplicaState = S.READY, version: int = 3) -> Replica:
    return Replica(replica_id, version, OFFER, state, 0.0, 0.0, endpoint=f"http://10.0.0.{replica_id}:8080")


# --- goals and requirements ------------------------------------------------------------------------------------


def test_a_goal_says_what_row_and_spec_say() -> None:
    spec = replace(
        SPEC,
        scaling=ScalingGoal(2, 7, 1.5, 3.0, 4.0),
        placement=PlacementGoal(num_overprovision=1),
        max_usd_hour=8.0,
        probe=Probe(initial_delay_s=5.0, failure_threshold_s=6.0),
        update=UpdateSpec("rolling", 4, 2),
        drain_timeout_s=77.0,
        resources=(ResourceChoice(), ResourceChoice(use_spot=True)),
    )
    assert goal_of(a_row(), spec) == Goal(
        version=3,
        scaling=ScalingGoal(2, 7, 1.5, 3.0, 4.0),
        placement=PlacementGoal(num_overprovision=1, one_continent=True),
        same_replicas=frozenset({1}),
        update_mode=UpdateMode.BLUE_GREEN,
        max_surge=4,
        max_unavailable=2,
        initial_delay_s=5.0,
        probe_failure_threshold_s=6.0,
        drain_timeout_s=77.0,
        killed=frozenset({9}),
        max_usd_hour=8.0,
    )


def test_purge_leaves_no_time_to_drain() -> None:
    assert goal_of(a_row(down=True, purge=True), SPEC).drain_timeout_s == 0.0
    assert goal_of(a_row(down=True), SPEC).drain_timeout_s == SPEC.drain_timeout_s


def test_requirements_name_every_choice_in_order() -> None:
    choices = (
        ResourceChoice("c", "r", "z", "L4", 2.0, True, "m", "4+", "16", max_usd_hour=2.5),
        ResourceChoice(),
    )
    need = requirements_of(replace(SPEC, resources=choices, resources_ordered=True))
    assert need.ordered
    first, second = need.candidates
    assert (first.cloud, first.region, first.zone, first.accelerator) == ("c", "r", "z", "L4")
    assert (first.accelerator_count, first.use_spot, first.instance_type) == (2.0, True, "m")
    assert (first.cpus, first.memory, first.max_hourly_cost) == ("4+", "16", 2.5)
    assert (second.cloud, second.accelerator, second.use_spot) == (None, None, False)


# --- tokens ----------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,62}", fullmatch=True)


@given(names, st.integers(1, 10**9), st.text(max_size=40), st.sampled_from(CapacityType))
def test_a_token_fits_names_and_tags(name: str, replica_id: int, zone: str, kind: CapacityType) -> None:
    offer = replace(OFFER, zone=Zone("c", "r", zone), capacity_type=kind)
    token = token_of("0a1b2c3d", name, "abcd1234", replica_id, offer)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", token)
    assert f"-{replica_id}-" in token


def test_a_token_is_the_same_for_ever() -> None:
    """Written out: a changed token would orphan every machine of a running controller."""
    assert token_of("0a1b2c3d", "chat", "abcd1234", 7, OFFER) == "0a1b2c3d-chat-7-f7bcb3443f"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(("0a1b2c3e", "chat", "abcd", 7, OFFER), id="another owner"),
        pytest.param(("0a1b2c3d", "Chat", "abcd", 7, OFFER), id="another service, by case alone"),
        pytest.param(("0a1b2c3d", "chat", "abce", 7, OFFER), id="another life of the service"),
        pytest.param(("0a1b2c3d", "chat", "abcd", 8, OFFER), id="another replica"),
        pytest.param(("0a1b2c3d", "chat", "abcd", 7, replace(OFFER, instance_type="n")), id="another type"),
        pytest.param(
            ("0a1b2c3d", "chat", "abcd", 7, replace(OFFER, zone=Zone("c", "r", "y"))), id="another zone"
        ),
        pytest.param(
            ("0a1b2c3d", "chat", "abcd", 7, replace(OFFER, capacity_type=CapacityType.ON_DEMAND)),
            id="another capacity type",
        ),
    ],
)
def test_no_other_attempt_has_the_same_token(other: tuple[str, str, str, int, Offer]) -> None:
    assert token_of(*other) != token_of("0a1b2c3d", "chat", "abcd", 7, OFFER)


def test_a_price_that_moved_is_the_same_attempt() -> None:
    cheaper = replace(OFFER, price_usd_hour=0.1, on_demand_usd_hour=None)
    assert token_of("o", "chat", "abcd", 7, cheaper) == token_of("o", "chat", "abcd", 7, OFFER)


def test_long_names_that_agree_at_the_front_still_differ() -> None:
    left, right = (token_of("0a1b2c3d", "n" * 62 + end, "abcd", 1, OFFER) for end in "ab")
    assert left != right


def test_an_order_holds_everything_the_launch_needs() -> None:
    spec = replace(
        SPEC,
        setup="get-it",
        port=8000,
        envs=(("A", "1"),),
        secrets=("KEY",),
        workdir="/src",
    )
    order = order_of("0a1b2c3d", "chat", "abcd", a_replica(7), spec, {"KEY": "hidden"})
    assert order.token == token_of("0a1b2c3d", "chat", "abcd", 7, OFFER)
    assert (order.owner, order.service, order.replica_id, order.version) == ("0a1b2c3d", "chat", 7, 3)
    assert (order.setup, order.run, order.port, order.workdir) == ("get-it", "serve-it", 8000, "/src")
    assert (order.env, order.secrets) == ({"A": "1"}, {"KEY": "hidden"})
    assert "hidden" not in repr(order)


@pytest.mark.parametrize(
    ("offer", "price"),
    [
        pytest.param(OFFER, 1.0, id="spot"),
        pytest.param(replace(OFFER, on_demand_usd_hour=None), 0.3, id="spot, not known"),
        pytest.param(replace(OFFER, capacity_type=CapacityType.ON_DEMAND), 0.3, id="on demand"),
    ],
)
def test_the_price_on_demand(offer: Offer, price: float) -> None:
    assert on_demand_price(offer) == price


# --- target tables ---------------------------------------------------------------------------------------------


def a_table(spec: ServiceSpec = SPEC, *replicas: Replica, **goal: Any) -> Table:
    return table_of("chat", spec, replicas, Goal(3, ScalingGoal(), **goal), {}, NOW)


def test_targets_are_the_replicas_that_can_be_asked() -> None:
    table = a_table(SPEC, *[a_replica(i, state) for i, state in enumerate(S, 1)])
    assert [(target.id, target.state) for target in table.targets] == [
        ("4", Readiness.READY),
        ("5", Readiness.UNHEALTHY),
        ("6", Readiness.DRAINING),
    ]
    first = table.targets[0]
    assert (first.url, first.region, first.zone) == ("http://10.0.0.4:8080", "r", "z")
    assert (first.capacity_type, first.accelerator, first.health_path) == ("spot", "L4", "/")


@pytest.mark.parametrize(
    ("probe", "path"),
    [
        pytest.param(Probe("/health"), "/health", id="a plain path"),
        pytest.param(Probe("/v1/chat", post_data="{}"), "/health", id="a payload is work"),
        pytest.param(Probe("/h?key=$KEY"), "/health", id="a secret stays here"),
    ],
)
def test_what_an_agent_may_ask_a_silent_target(probe: Probe, path: str) -> None:
    assert a_table(replace(SPEC, probe=probe), a_replica()).targets[0].health_path == path


def test_equal_tables_have_equal_revisions_and_others_do_not() -> None:
    tables = [
        a_table(SPEC, a_replica()),
        a_table(SPEC, a_replica()),
        a_table(SPEC, a_replica(state=S.DRAINING)),
        a_table(SPEC),
        a_table(replace(SPEC, load_balancing_policy="round_robin"), a_replica()),
        a_table(SPEC, a_replica(), down=True),
    ]
    assert len({table.revision for table in tables}) == len(tables) - 1
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("goal", "hold_s"),
    [
        pytest.param(Goal(3, ScalingGoal(0, 2, 1.0), initial_delay_s=900.0), 930.0, id="may sleep"),
        pytest.param(Goal(3, ScalingGoal(1, 2, 1.0), initial_delay_s=900.0), 30.0, id="never sleeps"),
        pytest.param(Goal(3, ScalingGoal(0, 2, 1.0), initial_delay_s=900.0, down=True), 0.0, id="goes down"),
        pytest.param(Goal(3, ScalingGoal(0, 2, 1.0), initial_delay_s=1e7), 86_400.0, id="starts for months"),
    ],
)
def test_whoever_wakes_a_service_is_held_for_as_long_as_a_start_may_take(goal: Goal, hold_s: float) -> None:
    table = table_of("chat", SPEC, (), goal, {}, NOW)
    assert Table.from_json(table.to_json()).limits.hold_s == hold_s


def test_a_service_that_goes_down_holds_nobody() -> None:
    assert a_table(SPEC, down=True).limits.hold_s == 0.0
    assert a_table(SPEC).limits.hold_s > 0.0


@pytest.mark.parametrize("seconds", [1e-9, 0.5, 120.0, 30 * 86_400.0], ids=str)
def test_every_time_out_a_spec_may_have_is_one_an_agent_takes(seconds: float) -> None:
    limits = LoadBalancerSpec(Limits(idle_timeout_s=seconds, time_to_first_byte_s=seconds))
    table = a_table(replace(SPEC, load_balancer=limits), a_replica())
    assert Table.from_json(table.to_json()) == table


# --- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "tls", "shown"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:30001"),
        ("0.0.0.0", None, "http://127.0.0.1:30001"),
        ("::1", None, "http://[::1]:30001"),
        ("h.example", Tls("k", "c"), "https://h.example:30001"),
    ],
    ids=["loopback", "every address", "IPv6", "TLS"],
)
def test_the_endpoint(host: str, tls: Tls | None, shown: str) -> None:
    assert endpoint_of(a_row(), replace(SPEC, tls=tls), host) == shown


def test_a_replica_is_shown_with_every_promised_key() -> None:
    promised = (
        "id version state cloud region zone capacity_type instance_type accelerator price_usd_hour endpoint since"
        " ready_at end_reason"
    )
    shown = replica_view(a_replica())
    assert set(promised.split()) <= shown.keys()
    assert (shown["state"], shown["capacity_type"], shown["end_reason"]) == ("READY", "spot", None)


# --- who places ------------------------------------------------------------------------------------------------


def placed(use_spot: bool = True, **policy: Any) -> tuple[str, bool, frozenset[bool]]:
    """(placer, on-demand stand-ins, capacity types asked for: True is spot) of a file with this replica policy."""
    resources = (ResourceChoice(cloud="c", use_spot=use_spot),)
    wishes = {name: policy.pop(name, None) for name in ("spot_placer", "dynamic_ondemand_fallback")}
    goal = placement_of(PlacementGoal(**policy), resources, **wishes)
    again = {"spot_placer": goal.placer, "dynamic_ondemand_fallback": goal.dynamic_ondemand_fallback}
    assert placement_of(goal, resources, **again) == goal
    spec = replace(SPEC, placement=goal, resources=resources)
    markets = frozenset(candidate.use_spot for candidate in requirements_of(spec).candidates)
    return goal.placer, goal.dynamic_ondemand_fallback, markets


SPOT_ONLY, BOTH, ON_DEMAND_ONLY = frozenset({True}), frozenset({True, False}), frozenset({False})


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param({}, ("spread", False, SPOT_ONLY), id="no knob: spread plainly"),
        pytest.param({"num_overprovision": 1}, ("spread", False, SPOT_ONLY), id="more of the same"),
        pytest.param({"spot_placer": "auto"}, ("risk_hedge", True, BOTH), id="auto"),
        pytest.param({"availability_target": 0.99}, ("risk_hedge", True, BOTH), id="an aim asks for auto"),
        pytest.param(
            {"spot_placer": "auto", "num_overprovision": 1}, ("spothedge", True, BOTH), id="auto with N_extra"
        ),
        pytest.param({"spot_placer": "dynamic_fallback"}, ("spothedge", False, SPOT_ONLY), id="SpotHedge"),
        pytest.param(
            {"spot_placer": "dynamic_fallback", "dynamic_ondemand_fallback": True},
            ("spothedge", True, BOTH),
            id="SpotHedge with fallback",
        ),
        pytest.param({"dynamic_ondemand_fallback": True}, ("spothedge", True, BOTH), id="fallback alone"),
        pytest.param(
            {"base_ondemand_fallback_replicas": 1}, ("spothedge", False, BOTH), id="some on demand for good"
        ),
        pytest.param(
            {"spot_placer": "risk_hedge", "dynamic_ondemand_fallback": False},
            ("risk_hedge", False, SPOT_ONLY),
            id="RiskHedge on spot only",
        ),
        pytest.param({"spot_placer": "asg"}, ("asg", False, BOTH), id="a mixer needs both"),
        pytest.param({"spot_placer": "round_robin"}, ("round_robin", False, SPOT_ONLY), id="a baseline"),
    ],
)
def test_who_places(policy: dict[str, Any], expected: tuple[str, bool, frozenset[bool]]) -> None:
    assert placed(**policy) == expected


def test_without_spot_there_is_nothing_to_hedge() -> None:
    assert placed(use_spot=False, num_overprovision=1) == ("spread", False, ON_DEMAND_ONLY)
