"""The whole way on one machine: up, ask, lose a replica, update, down."""

from __future__ import annotations

import hashlib
import json
import textwrap
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import only_long

HELLO = Path("examples/01-hello-engine/service.yaml")
SERVICE_FIELDS = {"name", "version", "status", "endpoint", "endpoints", "replicas", "target", "cost"}
REPLICA_FIELDS = {
    *("id", "version", "state", "cloud", "region", "zone", "capacity_type", "instance_type", "accelerator"),
    *("price_usd_hour", "endpoint", "since", "ready_at", "end_reason"),
}
COST_FIELDS = {"usd_per_hour", "usd_total", "usd_on_demand_equivalent"}


def ask(url: str, **extra: Any) -> bytes:
    body = {
        "model": "llama-3.1-8b",
        "max_tokens": 6,
        "messages": [{"role": "user", "content": "hi"}],
        **extra,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: bytes = answer.read()
    return content


def agent_of(serve: Any, name: str) -> int:
    """Return the process of the load balancer. Its port says nothing after its end: another test may have it then."""
    return int(json.loads((serve.home / "lb" / name / "agent.json").read_text())["pid"])


def lives(pid: int) -> bool:
    """Whether the process runs; one that was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def write(folder: Path, run: str, *, extra: str = "") -> Path:
    file = folder / "service.yaml"
    file.write_text(
        "name: small\nservice:\n  readiness_probe: {path: /health, endpoint_probe_interval_seconds: 1}\n"
        + textwrap.indent(extra, "  ")
        + "resources: {infra: local, use_spot: true}\n"
        + f"run: {run}\n"
    )
    return file


ENGINE = "serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT"


def test_three_replicas_come_up_answer_survive_a_preemption_and_go(serve: Any) -> None:
    up = serve.ok("up", HELLO, "-y")
    url = up.out.strip()
    assert up.out == f"{url}\n", "stdout is the endpoint and nothing else"
    assert serve.ok("status", "--endpoint", "hello").out == up.out
    assert b"[DONE]" in ask(url, stream=True)

    view = serve.view("hello")
    assert view.keys() >= SERVICE_FIELDS
    assert view["cost"].keys() >= COST_FIELDS
    assert all(replica.keys() >= REPLICA_FIELDS for replica in view["replicas"])
    assert {replica["region"] for replica in view["replicas"]} == {"us", "eu", "asia"}
    assert (view["ready"], view["load_balancer"]["restarts"]) == (3, 0)
    assert 0 < view["cost"]["usd_per_hour"] < view["cost"]["usd_per_hour_on_demand"]

    again = serve("up", HELLO, "-y")
    assert (again.code, again.out) == (1, "")
    assert "serve update hello" in again.err

    assert "hello-2" in serve.ok("local", "preempt", "hello/2").err
    serve.eventually(lambda: {r["id"] for r in serve.view("hello")["replicas"]} == {1, 3, 4})
    serve.eventually(lambda: serve.view("hello")["ready"] == 3)
    (lost,) = [r for r in serve.view("hello", "--all")["replicas"] if r["id"] == 2]
    assert (lost["state"], lost["end_reason"]) == ("GONE", "PREEMPTED")
    assert "hello/2" not in serve.ok("status").out
    assert "PREEMPTED" in serve.ok("status", "--all").out
    story = [json.loads(line) for line in serve.ok("events", "hello", "-o", "json").out.splitlines()]
    told = [e["kind"] for e in story if e["replica_id"] == 2]
    assert told[-1] == "Preempted", "without a notice it is not told of one"
    assert "PreemptionNotice" not in told
    assert "preempted" in serve.ok("events", "hello").out

    assert "serves llama-3.1-8b" in serve.ok("logs", "hello", "1").out
    logged = serve.ok("logs", "hello").out.splitlines()
    assert {line.partition(" | ")[0] for line in logged if "serves llama-3.1-8b" in line} == {"1", "3", "4"}
    assert serve.ok("logs", "hello", "--replica-id", "1", "--tail", "0").out == ""
    assert "apply" in serve.ok("logs", "hello", "--load-balancer").out
    assert "controller is up" in serve.ok("logs", "--controller").out

    ended = serve.ok("down", "hello", "--replica-id", "3", "-y")
    assert "replica 3 of hello has ended" in ended.err
    assert 3 not in {replica["id"] for replica in serve.view("hello")["replicas"]}

    agent = agent_of(serve, "hello")
    assert lives(agent)
    down = serve.ok("down", "hel*", "-y")
    assert down.out == ""
    assert serve.ok("status", "-o", "json").json() == []
    assert serve.view("hello", "--all")["status"] == "DOWN"
    assert not lives(agent)
    assert serve.ok("down", "--all", "-y").err == "no service is up\n"


@pytest.mark.long
def test_an_update_keeps_replaces_or_gives_up_and_goes_on_serving(serve: Any, tmp_path: Path) -> None:
    url = serve.ok("up", write(tmp_path, ENGINE), "-y").out.strip()
    kept = serve.ok("update", "small", tmp_path / "service.yaml", "--set", "replicas=2", "-y")
    assert "its replicas are kept" in kept.err
    assert kept.out == f"{url}\n"
    assert [r["id"] for r in serve.view("small")["replicas"]] == [1, 2]

    blue_green = ("update", "small", tmp_path / "service.yaml", "--env", "A=1", "--mode", "blue_green", "-y")
    assert "its replicas are replaced (blue-green)" in serve.ok(*blue_green).err
    view = serve.view("small")
    assert {r["version"] for r in view["replicas"]} == {view["version"]} == {3}

    same = serve.ok("update", "small", tmp_path / "service.yaml", "--env", "A=1", "-y")
    assert same.err == "nothing changes: small stays at version 3\n"
    bad = serve("update", "small", write(tmp_path, "echo out of luck; exit 3"), "-y")
    assert (bad.code, bad.out) == (1, "")
    assert "small: version 4 was given up; an earlier one serves" in bad.err
    assert "| out of luck" in bad.err
    assert "usage" in json.loads(ask(url))
    shown = serve.ok("status", "small").out
    assert "3 (4 failed)" in shown
    assert "version 4 was given up" in shown
    assert "only this machine can reach it" in shown
    assert serve.ok("logs", "small", "--previous").out == "out of luck\n"
    assert serve.ok("logs", "small", "--previous", "--since", "1h").out == "out of luck\n"
    assert serve.ok("logs", "small", "--previous", "--since", "2100-01-01").out == ""
    serving = [replica["id"] for replica in serve.view("small")["replicas"]]
    back = serve.ok("update", "small", write(tmp_path, ENGINE), "--env", "A=1", "-y", "--timeout", "60")
    assert back.out.strip() == url
    assert [replica["id"] for replica in serve.view("small")["replicas"]] == serving
    unknown = serve("update", "smal", tmp_path / "service.yaml", "-y").err
    assert unknown.endswith("there is no service smal; did you mean small?\n")


@pytest.mark.long
def test_a_service_that_cannot_live_fails_with_its_reason_and_can_be_mended(
    serve: Any, tmp_path: Path
) -> None:
    failed = serve("up", write(tmp_path, "echo no such model >&2; exit 7"), "-y")
    assert (failed.code, failed.out) == (1, "")
    assert "RUN_EXITED" in failed.err
    assert "| no such model" in failed.err
    assert "serve update small FILE" in failed.err
    assert serve.view("small")["status"] == "FAILED"
    mended = serve.ok("update", "small", write(tmp_path, ENGINE), "-y")
    assert json.loads(ask(mended.out.strip()))["choices"]


@pytest.mark.long
def test_secrets_reach_the_replica_and_nothing_else(serve: Any, tmp_path: Path) -> None:
    # By its digest, for `run` is no secret: the service runs only if the replica was given the right word.
    digest = hashlib.sha256(b"swordfish").hexdigest()
    given = 'test "$(printf %s "$PASSWORD" | sha256sum | cut -d" " -f1)" = '
    file = write(tmp_path, f"'{given}{digest} && test $WORD = hello && {ENGINE}'")
    file.write_text(file.read_text() + "secrets: {PASSWORD: null}\nenvs: {WORD: null}\n")
    missing = serve("up", file, "-y", "--env", "WORD=hello")
    assert missing.code == 2
    assert "secrets.PASSWORD: has no value" in missing.err
    words = tmp_path / "words.env"
    words.write_text("# what is said\nexport WORD='hello'\n")
    options = ("--secret", "PASSWORD", "--env-file", words, "-y")
    up = serve.ok("up", file, *options, env={"PASSWORD": "swordfish"})
    told = [up.err, serve.ok("status", "-o", "json").out, serve.ok("events", "-o", "json").out]
    told.append(serve.ok("logs", "--controller").out)
    validated = serve.ok("validate", file, *options[:-1], "-o", "json", env={"PASSWORD": "swordfish"})
    told += [validated.out, validated.err]
    assert not any("swordfish" in text for text in told)
    assert b"swordfish" not in b"".join(path.read_bytes() for path in serve.home.glob("state.db*"))


@only_long  # a quarter of a minute for a flag
def test_without_waiting_the_endpoint_comes_at_once_and_follows_later(serve: Any, tmp_path: Path) -> None:
    up = serve.ok("up", write(tmp_path, ENGINE), "-y", "--no-wait", "-o", "json")
    assert up.json()["name"] == "small"
    assert serve("up", tmp_path / "service.yaml", "-y", "-n", "other", "--timeout", "0").code == 1
    serve.eventually(lambda: serve.view("other")["ready"] == 1)
    assert serve("status", "--endpoint").code == 2
    serve.ok("down", "--all", "-y", "--no-wait")
    serve.eventually(lambda: serve.ok("status", "-o", "json").json() == [])


@pytest.mark.long
def test_the_controller_comes_and_goes_without_the_service_noticing(serve: Any, tmp_path: Path) -> None:
    url = serve.ok("up", write(tmp_path, ENGINE), "-y").out.strip()
    before = [replica["id"] for replica in serve.view("small")["replicas"]]
    assert "services go on serving" in serve.ok("controller", "stop").err
    assert serve("controller", "status", "-o", "json").json() == {"running": False}
    unknown = serve("status", "-o", "json")
    assert (unknown.code, unknown.out) == (1, "")
    assert "serve controller start" in unknown.err
    assert "controller stops" in serve.ok("logs", "--controller", "--tail", "3").out
    assert json.loads(ask(url))["choices"]
    assert serve.ok("controller", "start").err == "controller started\n"
    assert serve.ok("controller", "start").err == "the controller is running already\n"
    assert serve.ok("controller", "status", "-o", "json").json()["running"] is True
    serve.eventually(lambda: serve.view("small")["load_balancer"]["synced"])
    assert [replica["id"] for replica in serve.view("small")["replicas"]] == before
