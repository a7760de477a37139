"""The wire: what goes out comes back, and faults are named with their path."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.schema import (
    Build,
    BuildKind,
    Limits,
    Readiness,
    Stats,
    Table,
    Target,
    TargetStats,
    WireError,
    url_problem,
)
from lb.config.stats import TargetHealth

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=40)
names = texts.filter(bool)
urls = st.builds(
    "{}://{}:{}{}".format,
    st.sampled_from(["http", "https"]),
    st.sampled_from(["10.0.0.1", "host.example", "[::1]", "localhost"]),
    st.integers(1, 65535),
    st.sampled_from(["", "/", "/base/path"]),
)
seconds = st.floats(0.001, 600.0)
targets = st.builds(
    Target, id=names, url=urls, region=texts, zone=texts, capacity_type=texts, accelerator=texts,
    state=st.sampled_from(Readiness), health_path=st.none() | st.sampled_from(["/", "/health?x=1"]),
    drain_deadline_s=st.none() | st.floats(0.0, 1e6),
)  # fmt: skip
limits = st.builds(
    Limits, time_to_first_byte_s=seconds, idle_timeout_s=seconds, connect_timeout_s=seconds,
    max_body_bytes=st.integers(0, 2**32), hold_s=st.floats(0.0, 600.0),
    max_held=st.integers(0, 1_000_000), suspect_after_s=seconds, probe_timeout_s=seconds,
)  # fmt: skip
tables = st.builds(
    Table, service=names, revision=names, policy=texts, limits=limits,
    targets=st.lists(targets, max_size=4, unique_by=lambda target: target.id).map(tuple),
)  # fmt: skip
counts = st.integers(0, 2**53)
stats = st.builds(
    Stats, service=texts, region=texts, revision=texts, uptime_s=st.floats(0, 1e9), window_s=st.floats(0, 600),
    requests=counts, in_flight=counts, queued=counts, rejected=counts, ongoing=st.floats(0, 1e9),
    targets=st.lists(st.builds(TargetStats, names, counts, counts, counts, st.booleans()), max_size=4).map(tuple),
)  # fmt: skip


@given(tables)
def test_a_table_survives_the_wire(table: Table) -> None:
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table


@given(stats)
def test_stats_survive_the_wire(value: Stats) -> None:
    assert Stats.from_json(json.loads(json.dumps(value.to_json()))) == value


@pytest.mark.parametrize(
    "build", [Build(BuildKind.NATIVE, True), Build(BuildKind.INTERPRETED, False, "no gcc")]
)
def test_how_an_agent_runs_survives_the_wire(build: Build) -> None:
    value = Stats("chat", "", "1", 1.0, 60.0, 9, 2, 3, 0, build=build)
    assert Stats.from_json(json.loads(json.dumps(value.to_json()))) == value


def test_statistics_without_a_build_have_no_key_that_an_earlier_controller_rejects() -> None:
    told = Stats("chat", "", "1", 1.0, 60.0, 9, 2, 3, 0).to_json()
    assert "build" not in told
    assert Stats.from_json(told).build is None


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        ({"kind": "jit", "fast_path": True}, "build.kind: expected one of native, interpreted"),
        ({"kind": "native"}, "build.fast_path: is missing"),
        ({"kind": "native", "fast_path": True, "more": 1}, "build.more: is not known"),
        ("native", "build: expected an object, got a text"),
    ],
    ids=str,
)
def test_a_build_that_is_wrong(build: object, problem: str) -> None:
    told = Stats("chat", "", "1", 1.0, 60.0, 9, 2, 3, 0).to_json() | {"build": build}
    with pytest.raises(WireError) as error:
        Stats.from_json(told)
    assert str(error.value) == problem


def test_an_agent_of_an_earlier_version_tells_no_mean() -> None:
    told = Stats("chat", "", "1", 1.0, 60.0, requests=9, in_flight=2, queued=3, rejected=0).to_json()
    del told["ongoing"]
    assert Stats.from_json(told).ongoing == 5.0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["service", "revision", "targets", "policy", "limits", "id", "url", "state", "hold_s", "x"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@given(json_values)
def test_any_json_is_a_table_or_a_wire_error(value: object) -> None:
    with suppress(WireError):  # any other exception is a bug
        table = Table.from_json(value)
        assert Table.from_json(table.to_json()) == table


TARGET = {"id": "a", "url": "http://a:1"}


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        pytest.param({"extra": 1}, "extra", "not known", id="unknown key"),
        pytest.param({"service": None}, "service", "got null", id="null"),
        pytest.param({"service": ""}, "service", "empty", id="empty"),
        pytest.param({"revision": 7}, "revision", "got a number", id="number for text"),
        pytest.param({"revision": "a\nb"}, "revision", "control", id="control character"),
        pytest.param({"revision": "x" * 513}, "revision", "longer than 512", id="too long"),
        pytest.param({"targets": {}}, "targets", "expected a list", id="no list"),
        pytest.param({"targets": [TARGET, TARGET]}, "targets", "two targets", id="same id twice"),
        pytest.param({"targets": [TARGET] * 10_001}, "targets", "more than", id="too many"),
        pytest.param({"targets": [{"id": "a"}]}, "targets[0].url", "missing", id="missing"),
        pytest.param({"targets": [{**TARGET, "state": "dead"}]}, "targets[0].state", "ready", id="unknown state"),
        pytest.param({"targets": [{**TARGET, "state": []}]}, "targets[0].state", "ready", id="state of another type"),
        pytest.param({"targets": [{**TARGET, "health_path": "x"}]}, "targets[0].health_path", "'/'", id="path"),
        pytest.param({"targets": [{**TARGET, "drain_deadline_s": -1}]}, "targets[0].drain_deadline_s", "between", id="negative"),
        pytest.param({"limits": {"hold_s": float("nan")}}, "limits.hold_s", "between", id="not a number"),
        pytest.param({"limits": {"hold_s": True}}, "limits.hold_s", "true or false", id="a flag for a number"),
        pytest.param({"limits": {"max_held": 1.5}}, "limits.max_held", "whole", id="a fraction"),
        pytest.param({"limits": {"max_held": -1}}, "limits.max_held", "between", id="out of bounds"),
        pytest.param({"limits": {"hold": 1}}, "limits.hold", "not known", id="unknown limit"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: dict[str, object], path: str, words: str) -> None:
    with pytest.raises(WireError) as wrong:
        Table.from_json({"service": "s", "revision": "1", **change})
    assert wrong.value.path == path
    assert words in str(wrong.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://a", None), ("https://[::1]:8/x", None), ("ftp://a", "http"), ("a:80", "http"), ("http://", "no host"),
        ("http://a:0", "port 0"), ("http://a:99999", "ort"), ("http://a:x", "ort"), ("http://a?x", "query"),
        ("http://a#", "fragment"), ("http://u:p@a", "credentials"), ("http://a b", "host"), ("http://[::1", "IPv6"),
        ("http://a/\ud800", "surrogate"), ("\ud800", "surrogate"), ("http://a/\n", "control"),
    ],
)  # fmt: skip
def test_the_url_of_a_target(url: str, words: str | None) -> None:
    problem = url_problem(url)
    assert (problem is None) == (words is None)
    assert words is None or words in (problem or "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": ""}, "targets[0].id: must not be empty"),
        ({"id": 513 * "x"}, "targets[0].id: longer than 512 characters"),
        ({"in_flight": -1}, "targets[0].in_flight: must be between 0 and 9007199254740992"),
        ({"requests": True}, "targets[0].requests: expected a whole number, got true or false"),
        ({"errors": 2**53 + 1}, "targets[0].errors: must be between 0 and 9007199254740992"),
        ({"ejected": 1}, "targets[0].ejected: expected true or false, got a number"),
        ({"heard_s": -1.0}, "targets[0].heard_s: must be between 0 and 1e+12"),
        ({"heard_s": float("nan")}, "targets[0].heard_s: must be between 0 and 1e+12"),
        ({"served_s": -1.0}, "targets[0].served_s: must be between 0 and 1e+12"),
        ({"served_s": True}, "targets[0].served_s: expected a number, got true or false"),
        ({"more": 1}, "targets[0].more: is not known"),
        ({"health": 1}, "targets[0].health: expected an object, got a number"),
        ({"health": {"worked_s": "x"}}, "targets[0].health.worked_s: expected a number, got a text"),
        ({"health": {"errors": -1}}, "targets[0].health.errors: must be between 0 and 9007199254740992"),
        ({"health": {"running": 1.5}}, "targets[0].health.running: expected a whole number, got a number"),
        ({"health": {"more": 1}}, "targets[0].health.more: is not known"),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_load_of_a_target(change: dict[str, Any], problem: str) -> None:
    """Valid messages are read by a shorter way, with the same result."""
    target = TargetStats("a", 1, 2, 3, ejected=False, heard_s=0.5)
    stats = Stats("chat", "eu", "r1", 1.0, 60.0, 1, 1, 0, 0, 0.0, (target,))
    assert Stats.from_json(stats.to_json()) == stats
    message = stats.to_json()
    message["targets"][0] |= change
    with pytest.raises(WireError) as error:
        Stats.from_json(message)
    assert str(error.value) == problem


def test_the_health_of_a_target_comes_through() -> None:
    for health in (TargetHealth(), TargetHealth(1.5, 7, 90.0, 0.5, 3), TargetHealth(running=0)):
        target = TargetStats("a", 1, 2, 3, ejected=False, heard_s=0.5, health=health)
        assert TargetStats.from_json(target.to_json()) == target


@pytest.mark.parametrize(
    "change", [{"id": "\u00e9\u200b"}, {"heard_s": None}, {"heard_s": 1}, {"served_s": 2.5}], ids=str
)
def test_the_load_of_a_target_that_is_unusual(change: dict[str, Any]) -> None:
    message = {**TargetStats("a", 1, 2, 3, ejected=False, heard_s=0.5).to_json(), **change}
    assert TargetStats.from_json(message).to_json() == message


def test_names_of_certificates_come_through_and_are_left_out_where_there_is_none() -> None:
    target = Target("1", "https://192.0.2.1:8443", tls_name="own-chat-1-0123456789")
    table = Table("chat", "1", (target,), targets_ca="AAAA")
    assert Table.from_json(table.to_json()) == table
    plain = Table("chat", "1", (Target("1", "http://192.0.2.1:8000"),)).to_json()
    assert "targets_ca" not in plain  # an older agent would refuse the key
    assert "tls_name" not in plain["targets"][0]
    with pytest.raises(WireError, match="base64"):
        Table.from_json(table.to_json() | {"targets_ca": "not base64!"})
