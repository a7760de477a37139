"""A spec that another program sends is refused where a file that says the same is refused, by the path of the JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from skyserve_cli.spec import SpecError, reference_text, sent_spec, spec_to_json
from skyserve_cli.spec.json_text import MAX_VALUES, read_json
from skyserve_cli.spec.load import load_file, load_text

ROOT = Path(__file__).resolve().parents[2]
BASE: dict[str, Any] = {"name": "alpha", "run": "x", "resources": [{"cloud": "local"}]}
LOCAL, SPOT = {"cloud": "local"}, {"cloud": "gcp", "use_spot": True}
KEY = {"name": "ada", "sha256": "0" * 64}


def problem(document: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        sent_spec(document)
    return str(caught.value)


def balancer(**keys: Any) -> dict[str, Any]:
    return {"load_balancer": keys}


def policy(**keys: Any) -> dict[str, Any]:
    return {"replica_policy": keys}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"drain_timeout_s": math.nan}, "drain_timeout_s: must be a finite number (got NaN)"),
    "infinity": ({"probe": {"interval_s": math.inf}}, "probe.interval_s: must be a finite number"),
    "NaN as text": ({"drain_timeout_s": "nan"}, "drain_timeout_s: cannot be kept as it is"),
    "a number as text": ({"num_nodes": "2"}, "num_nodes: cannot be kept as it is"),
    "below zero": ({"drain_timeout_s": -1}, "drain_timeout_s: must be at least 0 (got -1"),
    "a budget that is no number": (
        policy(max_usd_hour=math.nan),
        "replica_policy.max_usd_hour: must be a finite",
    ),
    "a budget below zero": (policy(max_usd_hour=-5), "replica_policy.max_usd_hour: must be above 0"),
    "many replicas": (
        policy(min_replicas=10**9, max_replicas=10**9),
        "replica_policy.min_replicas: must be at most 10000 (got 1000000000)",
    ),
    "fewer at most than at least": (
        policy(min_replicas=5, max_replicas=2),
        "replica_policy.max_replicas: must be >= min_replicas (got 2 < 5)",
    ),
    "many replicas to hedge": (
        policy(min_replicas=1001, max_replicas=1001, spot_placer="risk_hedge", dynamic_ondemand_fallback=True)
        | {"resources": [SPOT]},
        "replica_policy.min_replicas: must be at most 1000 for risk_hedge (got 1001)",
    ),
    "no target": (policy(max_replicas=2), "replica_policy.target_qps_per_replica: is needed to choose"),
    "no node": ({"num_nodes": 0}, "num_nodes: must be at least 1"),
    "nodes below zero": ({"num_nodes": -1000}, "num_nodes: must be at least 1 (got -1000)"),
    "many nodes": ({"num_nodes": 10**9}, "num_nodes: must be at most 10000"),
    "a port below zero": ({"port": -5, "ports": [-5]}, "port: must be at least 1"),
    "a port too high": ({"ports": [70_000]}, "ports[0]: must lie between 1 and 65535"),
    "a port of the endpoint": (balancer(port=70_000), "load_balancer.port: must be at most 65535"),
    "a surge below zero": ({"update": {"max_surge": -3}}, "update.max_surge: must be at least 0"),
    "no way to update": ({"update": {"max_surge": 0}}, "update.max_surge: must be above 0 when"),
    "a path with a second header": (
        {"probe": {"path": "/x HTTP/1.1\r\nA: b"}},
        "probe.path: must not hold spaces or control characters",
    ),
    "a header with a line break": (
        {"probe": {"headers": [["A", "b\r\nC: d"]]}},
        "probe.headers.A: must be one line of printable ASCII",
    ),
    "a probe without a pause": ({"probe": {"interval_s": 0}}, "probe.interval_s: must be at least 0.1"),
    "no cron": (
        policy(schedule=[{"cron": "x", "timezone": "UTC", "duration_s": 60}]),
        "replica_policy.schedule[0].cron: ",
    ),
    "no such policy": ({"load_balancing_policy": "x"}, "load_balancing_policy: must be one of cache_aware"),
    "no such mode": ({"update": {"mode": "x"}}, "update.mode: must be one of rolling, blue_green"),
    "a queue below zero": (balancer(queue_size=-1), "load_balancer.queue_size: must be at least 0"),
    "a body of less than nothing": (
        balancer(max_body_bytes=-1),
        "load_balancer.max_body_bytes: in MiB, must be",
    ),
    "what no file can set": (
        balancer(retries={"backoff_s": 5}),
        "load_balancer.retries.backoff_s: cannot be kept",
    ),
    "a key that is no digest": (
        balancer(access={"keys": [{"name": "ada", "sha256": "x"}]}),
        "load_balancer.access.keys[0].sha256: must be 64 hexadecimal digits",
    ),
    "the same key twice": (
        balancer(access={"keys": [KEY, KEY]}),
        "load_balancer.access.keys[1]: is the same key",
    ),
    "a service without a machine": ({"resources": []}, "resources: names no alternative"),
    "alternatives without end": (
        {"resources": [{"cloud": "gcp", "region": f"r{n}"} for n in range(1001)]},
        "resources: names 1,001 alternatives; 1,000 are the most",
    ),
    "an accelerator that is owed": (
        {"resources": [{"cloud": "gcp", "accelerator": "L4", "accelerator_count": -8}]},
        "resources[0].accelerator.L4: the count must be a number above 0",
    ),
    "spot that the policy needs": (
        policy(spot_placer="risk_hedge") | {"resources": [LOCAL, SPOT]},
        "resources[0].use_spot: must not be false: service.replica_policy",
    ),
    "agents nowhere": ({"regional": {"count": 3}}, "regional.count: cannot be kept as it is"),
    "a region twice": (
        {"regional": {"places": [["aws", "x"], ["aws", "x"]]}},
        "regional.places[1]: is there twice",
    ),
    "a certificate without a key": ({"tls": {"certfile": "x"}}, "tls.keyfile: is required here"),
    "a mount of nothing": ({"file_mounts": [{"path": "/x"}]}, "file_mounts[0]: has neither a source nor"),
    "a variable that is none": ({"envs": [["A B", "c"]]}, 'envs["A B"]: is not a name for a variable'),
    "a variable of ours": ({"envs": [["SKYSERVE_X", "c"]]}, "envs.SKYSERVE_X: names that start with"),
    "a variable twice": ({"envs": [["A", "1"], ["A", "2"]]}, "envs: cannot be kept as it is"),
    "no name": ({"name": "al pha"}, "name: must be letters, digits and dashes"),
    "half a character": ({"run": "\ud800"}, "run: holds a character that cannot be passed on"),
    "NUL in a key": ({"a\0": 1}, "has a key with a character that cannot be passed on"),
    "a key that is none": (
        {"drain_timeout": 5},
        "drain_timeout: unknown key; a newer program may have sent it",
    ),
    "a number without end": ({"num_nodes": 10**30}, "num_nodes: must be a whole number of a reasonable size"),
    "a deep document": ({"envs": json.loads("[" * 30 + "]" * 30)}, "is nested more than 20 levels deep"),
    "a long document": ({"envs": [0] * MAX_VALUES}, "has more than 100,000 values"),
    "a section that is none": ({"probe": 5}, "probe: must be a mapping"),
}


@pytest.mark.parametrize(("keys", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_file_may_not_say_is_refused_by_its_path(keys: dict[str, Any], says: str) -> None:
    assert says in problem({**BASE, **keys})


def test_every_problem_is_said_at_once() -> None:
    said = problem({**BASE, "num_nodes": 0, "drain_timeout_s": -1}).splitlines()
    assert [line.partition(":")[0] for line in said] == ["drain_timeout_s", "num_nodes"]


def test_a_secret_is_not_quoted() -> None:
    assert "hunter2" not in problem({**BASE, "probe": {"headers": [["Authorization", "hunter2\n"]]}})


def test_defaults_may_be_left_out() -> None:
    assert sent_spec(BASE) == load_text("name: alpha\nservice: {}\nresources: {infra: local}\nrun: x").spec


FILES = [*sorted((ROOT / "examples").rglob("*.yaml")), ROOT / "skyserve_cli/spec/reference.yaml"]


def test_every_example_is_taken_as_it_is() -> None:
    taken = 0
    for file in FILES:
        if "service:" not in file.read_text():
            continue
        try:
            spec = load_file(file, needs_values=False).spec
        except SpecError:  # of another kind, or with a variable where a number is needed
            continue
        assert sent_spec(json.loads(json.dumps(spec_to_json(spec)))) == spec, file
        taken += 1
    assert taken > 15


def test_every_key_that_differs_from_its_default_is_taken() -> None:
    text = (
        reference_text()
        .replace("budget_percent: 20", "budget_percent: 7.3")
        .replace("max_body_mb: 64", "max_body_mb: 65")
    )
    spec = load_text(text).spec
    assert sent_spec(json.loads(json.dumps(spec_to_json(spec)))) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": {"b": 1, "b": 2}}', "a.b: appears twice"),
        ('{"a": [1, NaN]}', "a[1]: must be a finite number (got NaN)"),
        ('{"a": -Infinity}', "a: must be a finite number"),
        ('{"a": 1e999}', "a: must be a finite number"),
        ("[" * 100_000, "nested more than 20 levels deep"),
        ("{", "not valid JSON"),
        ("\xff", "not valid JSON"),
    ],
)
def test_json_that_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_json(text.encode("latin-1"))
    assert says in str(caught.value)
