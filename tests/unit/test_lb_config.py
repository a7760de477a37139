"""What the controller sends an agent: options, sizes, and when a drain is over."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lb.config.cors import Cors
from lb.config.schema import Readiness, Table
from lb.core.targets import TargetTable
from policies.goals import AcceleratorQps, Goal, ScalingGoal
from policies.lifecycle import NOTICE_MARGIN_S, apply
from policies.model import (
    CapacityType,
    Drain,
    EndReason,
    Offer,
    PreemptionNotice,
    Replica,
    ReplicaState,
    Zone,
)
from policies.routing.base import RequestView
from skyserve_cli.controller.reconcile.lb_config import KnownTargets, table_of
from skyserve_cli.spec.codec import spec_from_json, spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.model import ServiceSpec

NOW = 1.7e9  # as UNIX time goes
DRAIN_S = 60.0
OFFER = Offer(Zone("c", "r", "z"), "m", "L4", 1.0, CapacityType.SPOT, 0.3, 1.0)
SPEC = ServiceSpec("chat", "serve-it")
GOAL = Goal(1, ScalingGoal(), drain_timeout_s=DRAIN_S)
REQUEST = RequestView("1", "POST", "/v1/completions")


def a_replica(replica_id: int = 1, offer: Offer = OFFER) -> Replica:
    address = f"http://10.0.0.{replica_id}:8080"
    return Replica(replica_id, 1, offer, ReplicaState.READY, NOW, NOW, endpoint=address)


def draining(replica: Replica, at: float = NOW) -> Replica:
    return apply(replica, Drain(replica.id, EndReason.REPLACED, "", at + DRAIN_S), at, DRAIN_S)


def a_table(*replicas: Replica, spec: ServiceSpec = SPEC, goal: Goal = GOAL, now: float = NOW) -> Table:
    return table_of("chat", spec, replicas, goal, {}, now)


# --- options ---------------------------------------------------------------------------------------------------


def test_an_agent_is_told_what_the_file_says() -> None:
    spec = load_text(
        """
        service:
          load_balancing_policy: cache_aware
          load_balancer:
            stall_timeout_seconds: 7
            max_body_mb: 3
            min_upload_bytes_per_second: 17
            pushing: fixed_cap
            max_concurrency_per_replica: 5
            queue: {size: 11, timeout_seconds: 13}
            retries: {max_worker_retries: 1, max_total_retries: 4, budget_percent: 50}
            circuit_breaker: {failure_threshold: 3, error_threshold: 6, timeout_seconds: 2, max_timeout_seconds: 9}
            continuation: off
            allow_policy_override: true
            api_key_in_query: true
            trusted_proxies: [10.0.0.0/8, "::1"]
            session: {cookie: auto, fields: [metadata.session_id]}
            keepalive_seconds: 9
            metrics: {target_label: true}
            warming: {seconds: 4}
            cors: {origins: ["https://*.example.org"], max_age_seconds: 5, credentials: true}
        run: serve
        """
    ).spec
    told = a_table(spec=spec).to_json()
    assert told["policy"] == "cache_aware"
    assert told["limits"]["stall_timeout_s"] == 7.0
    assert told["warming"] == {"seconds": 4.0}
    assert told["limits"]["max_body_bytes"] == 3 * 1024 * 1024
    assert told["limits"]["min_upload_bytes_per_s"] == 17
    assert (told["limits"]["max_held"], told["limits"]["hold_s"]) == (11, 13.0)
    assert (told["pushing"]["mode"], told["pushing"]["cap"]) == ("fixed_cap", 5)
    assert (told["retries"]["max_worker_retries"], told["retries"]["max_total_retries"]) == (1, 4)
    assert told["retries"]["budget_ratio"] == 0.5
    assert [told["breaker"][name] for name in ("failures", "errors_in_row", "first_s", "longest_s")] == [
        3, 6, 2.0, 9.0,
    ]  # fmt: skip
    assert told["continuation"]["mode"] == "off"
    assert told["access"] == {"keys": [], "overrides": True, "keys_in_query": True}
    assert told["trusted_proxies"] == ["10.0.0.0/8", "::1"]
    assert told["session"] == {"cookie": "auto", "fields": ["metadata.session_id"]}
    assert told["limits"]["stream_keepalive_s"] == 9.0
    assert told["metrics"] == {"target_label": True}
    assert told["cors"] == {
        **Cors().to_json(), "origins": ["https://*.example.org"], "max_age_s": 5, "credentials": True,
    }  # fmt: skip


def test_a_file_that_says_nothing_changes_only_the_policy_of_an_agent() -> None:
    alone, told = Table("chat", "-"), a_table(spec=load_text("service: {}\nrun: serve").spec)
    assert replace(told, revision="-") == replace(alone, policy="gorgo")


@pytest.mark.parametrize(("stored", "routed"), [("preserve", "gorgo"), ("of_a_newer_release", "least_load")])
def test_a_stored_service_whose_policy_is_not_there_is_routed(stored: str, routed: str) -> None:
    spec = spec_from_json(spec_to_json(SPEC) | {"load_balancing_policy": stored})
    assert a_table(spec=spec).policy == routed


def test_other_options_are_another_table() -> None:
    quick = load_text("service: {load_balancer: {queue: {timeout_seconds: 1}}}\nrun: serve").spec
    assert a_table(spec=quick).revision != a_table().revision


# --- sizes and prices ------------------------------------------------------------------------------------------

RATES = (AcceleratorQps("L4", None, 2.0), AcceleratorQps("L4", 2.0, 5.0), AcceleratorQps("A100", None, 9.0))


@pytest.mark.parametrize(
    ("accelerator", "count", "rates", "capacity"),
    [
        pytest.param("L4", 1.0, RATES, 2.0, id="by name"),
        pytest.param("L4", 2.0, RATES, 5.0, id="by name and number"),
        pytest.param("A100", 8.0, RATES, 9.0, id="any number of them"),
        pytest.param("H100", 1.0, RATES, 2.0, id="one the file does not name: the smallest"),
        pytest.param("L4", 1.0, (), 1.0, id="without rates all are alike"),
        pytest.param("L4", 1.0, (AcceleratorQps("L4", None, 1e-9),), 1e-6, id="as small as an agent takes"),
    ],
)
def test_a_target_is_as_large_as_its_accelerator_is_meant_for(
    accelerator: str, count: float, rates: tuple[AcceleratorQps, ...], capacity: float
) -> None:
    offer = replace(OFFER, accelerator=accelerator, accelerator_count=count)
    goal = replace(GOAL, scaling=ScalingGoal(target_qps_by_accelerator=rates))
    (target,) = a_table(a_replica(offer=offer), goal=goal).targets
    assert (target.capacity, target.price_usd_hour) == (capacity, 0.3)


# --- drains ----------------------------------------------------------------------------------------------------


def test_the_time_left_goes_by_without_a_new_revision() -> None:
    replica = draining(a_replica())
    first, later = a_table(replica), a_table(replica, now=NOW + 20.0)
    assert first.revision == later.revision
    assert first.targets[0].drain_deadline_s == DRAIN_S
    assert later.targets[0].drain_deadline_s == DRAIN_S - 20.0
    assert Table.from_json(later.to_json()) == later


def test_a_drain_that_is_overdue_has_no_time_left() -> None:
    assert a_table(draining(a_replica()), now=NOW + 2 * DRAIN_S).targets[0].drain_deadline_s == 0.0


def test_only_a_replica_that_drains_has_a_deadline() -> None:
    assert a_table(a_replica()).targets[0].drain_deadline_s is None


def test_a_notice_in_the_midst_of_a_drain_is_a_new_table_with_less_time() -> None:
    replica = draining(a_replica())
    before = a_table(replica, now=NOW + 10.0)
    noticed = apply(replica, PreemptionNotice(1, NOW + 30.0), NOW + 10.0, DRAIN_S)
    after = a_table(noticed, now=NOW + 10.0)
    assert after.revision != before.revision
    assert after.targets[0].drain_deadline_s == 20.0 - NOTICE_MARGIN_S


def test_an_agent_hands_over_at_the_same_instant_however_often_it_is_told() -> None:
    leaving, staying = draining(a_replica(1)), a_replica(2)
    table = TargetTable(a_table(a_replica(1), staying), 0.0)
    booking = table.book(REQUEST, "1", 0.0)
    table.apply(a_table(leaving, staying), 0.0)
    # Something else changes half way, so the whole table is pushed again.
    table.apply(a_table(leaving, staying, a_replica(3), now=NOW + 30.0), 30.0)
    handover_s = 5.0
    assert table.handovers(DRAIN_S - handover_s - 0.1, handover_s) == []
    assert table.handovers(DRAIN_S - handover_s, handover_s) == [booking]
    assert table.table.targets[0].state is Readiness.DRAINING


# --- the targets of the last table ------------------------------------------------------------------------------


def _tls_name(replica: Replica) -> str:
    return "one" if (replica.endpoint or "").startswith("https:") else ""


def test_a_table_made_with_the_last_targets_is_the_one_made_without() -> None:
    """Whatever becomes of replicas, and of what a target is made of."""
    rng, known = random.Random(3), KnownTargets()
    fleet = {number: a_replica(number) for number in range(1, 9)}
    spec, goal, loaded = SPEC, GOAL, frozenset[int]()
    reused = 0
    for _ in range(300):
        number = rng.randint(1, 8)
        match rng.choice(["same", "drain", "new", "gone", "loaded", "spec", "rates"]):
            case "drain" if number in fleet and fleet[number].state is ReplicaState.READY:
                fleet[number] = draining(fleet[number])
            case "new":
                offer = replace(OFFER, accelerator=rng.choice(["L4", "H100"]), price_usd_hour=rng.random())
                fleet[number] = replace(
                    a_replica(number, offer), endpoint=rng.choice(["http://a:1", "https://b:1"])
                )
            case "gone":
                fleet.pop(number, None)
            case "loaded":
                loaded = frozenset(rng.sample(range(1, 9), 3))
            case "spec":
                spec = replace(SPEC, probe=replace(SPEC.probe, path=rng.choice(["/a", "/b"])))
            case "rates":
                rates = (AcceleratorQps("L4", 1.0, 1.0), AcceleratorQps("H100", 1.0, rng.choice([2.0, 4.0])))
                goal = replace(GOAL, scaling=replace(GOAL.scaling, target_qps_by_accelerator=rates))
            case _:
                pass
        last = {one.target.id: one.target for one in known._made.values()}
        given = ("chat", spec, list(fleet.values()), goal, {}, NOW, 3, "CA", _tls_name, loaded)
        table = table_of(*given, known)
        assert table == table_of(*given)
        assert bool(table.targets_ca) is any(target.tls_name for target in table.targets)
        reused += sum(last.get(one.target.id) is one.target for one in known._made.values())
    assert reused > 1000
