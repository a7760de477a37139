"""The counters are exposed, under bounded labels."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from lb.config.options import Access, ApiKey, MetricsOptions
from lb.config.schema import Build, BuildKind, Readiness, Table, Target
from lb.core.admission import EngineLoad
from lb.core.targets import Blame, TargetTable
from lb.observe.counters import Counts, Histogram, TargetCounts
from lb.observe.key_usage import UsageSum
from lb.observe.label_slots import OTHER
from lb.observe.metrics import Metrics
from policies.routing.base import RequestView

REQUEST = RequestView("r", "POST", "/v1/completions")
AGENT = {"service": "chat", "region": "eu-1", "policy": "least_load"}


def target(name: str, zone: str = "a", state: Readiness = Readiness.READY) -> Target:
    return Target(name, f"http://{name}:1", "eu-2", zone, "spot", state=state)


def labels(zone: str = "a", policy: str = "least_load") -> dict[str, str]:
    return {
        "service": "chat", "region": "eu-2", "zone": zone, "capacity_type": "spot", "policy": policy,
    }  # fmt: skip


class Page:
    """A parsed exposition."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self.samples = [sample for family in self.families for sample in family.samples]

    def get(self, name: str, of: dict[str, str]) -> float:
        """Its value. Fails unless there is exactly one such sample."""
        (value,) = [
            one.value for one in self.samples if one.name == f"skyserve_lb_{name}" and one.labels == of
        ]
        return value

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


def metrics(policy: str = "least_load") -> Metrics:
    it = Metrics("chat", "eu-1")
    it.use_policy(policy)
    return it


def page(it: Metrics, table: TargetTable | None = None, queued: int = 0, **more: dict[str, float]) -> Page:
    return Page(it.expose(table or TargetTable(Table("chat", "1"), 0.0), queued, 1.0, **more))


def test_counting_is_plain_attributes_and_exposing_tells_them() -> None:
    it = metrics()
    it.counts.requests += 3
    it.counts.responses[2] += 2
    it.counts.responses[5] += 1
    it.counts.continue_refused["grammar"] += 1
    it.counts.ttft.observe(0.3)
    of = it.of(target("t"))
    of.attempts += 4
    of.failures["died"] += 2
    of.failures["unreachable"] += 1
    of.ttfb.observe(0.02)
    shown = page(it)
    assert shown.get("requests_total", AGENT) == 3
    assert shown.get("responses_2xx_total", AGENT) == 2
    assert shown.get("responses_5xx_total", AGENT) == 1
    assert shown.get("responses_1xx_total", AGENT) == 0
    assert shown.get("continuation_refusals_total", {**AGENT, "reason": "grammar"}) == 1
    assert shown.get("time_to_first_token_seconds_count", AGENT) == 1
    assert shown.get("attempts_total", labels()) == 4
    assert shown.get("failures_total", {**labels(), "kind": "died"}) == 2
    assert shown.get("failures_total", {**labels(), "kind": "unreachable"}) == 1
    assert shown.get("time_to_first_byte_seconds_bucket", {**labels(), "le": "0.025"}) == 1


@pytest.mark.parametrize("kind", [Counts, TargetCounts])
def test_nothing_that_is_counted_is_forgotten_on_the_page(kind: type) -> None:
    """Every counter is set to a number of its own, and every number is found again."""
    it = metrics()
    counts = it.counts if kind is Counts else it.of(target("t"))
    expected: set[float] = set()
    for number, field in enumerate(dataclasses.fields(kind), start=1001):
        value = getattr(counts, field.name)
        if isinstance(value, Histogram):
            value.sum = number
        elif isinstance(value, defaultdict):
            value["some kind"] = number
        elif isinstance(value, list):
            value[2] = number
        else:
            setattr(counts, field.name, number)
        expected.add(number)
    assert expected <= {sample.value for sample in page(it).samples}


def test_families_appear_with_zeros_before_anything_happens() -> None:
    names = page(metrics()).names()
    for name in (
        "requests_total", "rejected_requests_total", "client_gone_requests_total", "cut_streams_total", "retries_total",
        "moves_total", "held_requests", "holds_total", "continuations_total", "bookings", "limited_requests_total",
    ):  # fmt: skip
        assert f"skyserve_lb_{name}" in names


def test_labels_are_bounded_and_histograms_are_whole() -> None:
    it = metrics()
    it.of(target("t")).inter_token.observe(0.01)
    allowed = {"service", "region", "zone", "capacity_type", "policy", "le", "kind", "reason", "standing"}
    table = TargetTable(Table("chat", "1", (target("t"),)), 0.0)
    for sample in page(it, table).samples:
        if sample.name.startswith("skyserve_lb_"):
            assert set(sample.labels) <= allowed
            assert "t" not in sample.labels.values()
            assert "http://t:1" not in sample.labels.values()


def by_target(*names: str) -> Table:
    return Table("chat", "1", tuple(map(target, names)), metrics=MetricsOptions(target_label=True))


def test_each_target_has_its_series_if_that_is_wanted() -> None:
    it = metrics()
    table = by_target("a", "b")
    it.use_table(table)
    it.of(table.targets[0]).attempts += 1
    it.of(table.targets[1]).attempts += 2
    it.of(table.targets[1]).duration.observe(0.2)
    shown = page(it, TargetTable(table, 0.0))
    assert shown.get("attempts_total", {**labels(), "target": "a"}) == 1
    assert shown.get("attempts_total", {**labels(), "target": "b"}) == 2
    assert shown.get("attempt_duration_seconds_count", {**labels(), "target": "b"}) == 1
    assert shown.get("targets", {**labels(), "target": "a"}) == 1
    assert shown.get("targets_by_standing", {**labels(), "target": "b", "standing": "good"}) == 1


def test_the_flag_can_be_changed_while_the_agent_runs() -> None:
    it = metrics()
    tables = ((by_target("a"), {"target": "a"}), (Table("chat", "2", (target("a"),)), {}))
    for attempts, (table, more) in enumerate(tables, 1):
        it.use_table(table)
        it.of(table.targets[0]).attempts += 1
        assert page(it, TargetTable(table, 0.0)).get("attempts_total", {**labels(), **more}) == attempts


def test_beyond_a_hundred_targets_the_rest_is_one_series() -> None:
    it = metrics()
    table = by_target(*(f"t{number}" for number in range(103)))
    it.use_table(table)
    for one in table.targets:
        it.of(one).attempts += 1
    shown = page(it, TargetTable(table, 0.0))
    rows = {
        one.labels["target"]: one.value for one in shown.samples if one.name == "skyserve_lb_attempts_total"
    }
    assert len(rows) == 101
    assert rows.pop(OTHER) == 3
    assert set(rows.values()) == {1}
    assert shown.get("targets", {**labels(), "target": OTHER}) == 3


def test_the_series_of_a_target_that_is_gone_stays_until_its_place_is_needed() -> None:
    it = metrics()
    many = [f"t{number}" for number in range(100)]
    it.use_table(by_target(*many))
    for name in many:
        it.of(target(name)).attempts += 1
    it.use_table(by_target(*many[1:]))
    assert page(it).get("attempts_total", {**labels(), "target": "t0"}) == 1
    it.use_table(by_target(*many[1:], "new"))
    it.of(target("new")).attempts += 5
    shown = page(it)
    told = {one.labels.get("target") for one in shown.samples if one.name == "skyserve_lb_attempts_total"}
    assert told == {*many[1:], "new"}
    assert shown.get("attempts_total", {**labels(), "target": "new"}) == 5


def one_request(key: str, model: str) -> UsageSum:
    return UsageSum(key, model, 1, 3, 4)


def test_beyond_a_hundred_keys_the_rest_is_one_series() -> None:
    it = metrics()
    keys = tuple(ApiKey(f"owner {number}", f"{number:064x}") for number in range(102))
    it.use_table(Table("chat", "1", access=Access(keys)))
    for number in range(102):
        it.used(one_request(f"owner {number}", "m"))
    shown = page(it)
    rows = {
        one.labels["key"]: one.value for one in shown.samples if one.name == "skyserve_lb_key_requests_total"
    }
    assert (len(rows), rows[OTHER], rows["owner 99"]) == (101, 2, 1)


def test_beyond_twenty_models_the_rest_is_one_series() -> None:
    it = metrics()
    for number in range(25):
        it.used(one_request("", f"model {number}"))
    shown = page(it)
    rows = {one.labels["model"]: one for one in shown.samples if one.name == "skyserve_lb_key_requests_total"}
    assert (len(rows), rows[OTHER].value, rows["model 19"].value) == (21, 5, 1)
    assert rows["model 0"].labels["key"] == ""
    assert shown.get("key_input_tokens_total", {**rows["model 0"].labels}) == 3


def test_the_process_tells_its_memory_and_cpu_time() -> None:
    names = page(metrics()).names()
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= names


def test_another_policy_counts_under_its_own_name_and_goes_on_when_it_returns() -> None:
    it = metrics()
    it.counts.requests += 1
    it.of(target("t")).attempts += 1
    it.use_policy("round_robin")
    it.counts.requests += 10
    it.of(target("t")).attempts += 10
    it.use_policy("least_load")
    it.counts.requests += 1
    shown = page(it)
    assert shown.get("requests_total", AGENT) == 2
    assert shown.get("requests_total", {**AGENT, "policy": "round_robin"}) == 10
    assert shown.get("attempts_total", labels(policy="round_robin")) == 10


def test_targets_of_the_same_labels_share_their_counts() -> None:
    it = metrics()
    for name in "ab":
        it.of(target(name)).attempts += 1
        it.of(target(name)).ttfb.observe(0.3)
    assert page(it).get("attempts_total", labels()) == 2
    assert page(it).get("time_to_first_byte_seconds_count", labels()) == 2
    assert it.of(target("a")) is not it.of(target("a", zone="b"))


def test_gauges_are_read_off_the_table() -> None:
    table = TargetTable(
        Table("chat", "1", (target("a"), target("b"), target("c", "z", Readiness.UNHEALTHY))), 0.0
    )
    table.book(REQUEST, "a", 0.0)
    table.responded(table.book(REQUEST, "a", 0.0), 0.5)
    table.failed(table.book(REQUEST, "b", 0.0), Blame.EJECT, 0.5)
    shown = page(metrics(), table, queued=7, policy_gauges={"tree_nodes": 5.0})
    assert shown.get("held_requests", AGENT) == 7
    assert shown.get("bookings", AGENT) == 3
    assert shown.get("policy_tree_nodes", AGENT) == 5
    assert shown.get("in_flight_requests", labels()) == 3
    assert shown.get("waiting_requests", labels()) == 2
    assert shown.get("targets", labels()) == 2
    assert shown.get("good_targets", labels()) == 1
    assert shown.get("good_targets", labels("z")) == 0
    assert shown.get("targets_by_standing", {**labels(), "standing": "good"}) == 1
    assert shown.get("targets_by_standing", {**labels(), "standing": "ejected"}) == 1
    assert shown.get("targets_by_standing", {**labels("z"), "standing": "unhealthy"}) == 1


def test_engines_loads_are_added_up_and_cache_usage_is_the_mean_of_those_that_tell() -> None:
    table = TargetTable(
        Table("chat", "1", (target("a"), target("b"), target("silent"), target("c", "z"))), 0.0
    )
    for name, load in (("a", EngineLoad(4, 1, 0.5)), ("b", EngineLoad(6, 0, None)), ("silent", None)):
        (key,) = [key for key, one, _ in table.probe_list() if one.id == name]
        table.loaded(key, load, 0.1, 0.2)
    shown = page(metrics(), table)
    assert shown.get("engine_running_requests", labels()) == 10
    assert shown.get("engine_pending_requests", labels()) == 1
    assert shown.get("engine_kv_usage_ratio", labels()) == 0.5
    assert shown.get("telling_targets", labels()) == 2
    assert not [
        one
        for one in shown.samples
        if one.name.startswith("skyserve_lb_engine") and one.labels["zone"] == "z"
    ]


def test_how_the_process_runs_is_an_info() -> None:
    it = metrics()
    assert "skyserve_lb_build_info" not in page(it).names()
    it.build = Build(BuildKind.INTERPRETED, fast_path=True)
    of = {"service": "chat", "region": "eu-1", "kind": "interpreted", "fast_path": "true"}
    assert page(it).get("build_info", of) == 1
    it.build = Build(BuildKind.INTERPRETED, fast_path=True, slow_tls="OpenSSL is a part of this Python")
    assert page(it).get("build_info", of | {"fast_path": "plain"}) == 1


def test_gauges_of_targets_that_left_are_gone_and_their_counters_stay() -> None:
    it = metrics()
    it.of(target("a")).attempts += 1
    table = TargetTable(Table("chat", "1", (target("a"),)), 0.0)
    table.apply(Table("chat", "2"), 1.0)
    shown = page(it, table)
    assert shown.get("attempts_total", labels()) == 1
    assert "skyserve_lb_in_flight_requests" not in shown.names()


@given(
    bounds=st.lists(st.floats(0.001, 100.0), min_size=1, max_size=8, unique=True).map(sorted),
    values=st.lists(st.floats(0.0, 1000.0), max_size=50),
)
def test_a_histogram_counts_every_value_at_and_below_its_bound(
    bounds: list[float], values: list[float]
) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    rows = histogram.cumulative()
    assert [count for _, count in rows] == [*(sum(v <= b for v in values) for b in bounds), len(values)]
    assert [name for name, _ in rows] == [*map(str, bounds), "+Inf"]
    assert histogram.sum == pytest.approx(sum(values))


def test_a_value_at_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.counts == [1, 0, 0]
    assert bisect_left(histogram.bounds, 1.0) == 0
