"""`serve usage`: what keys have used is counted once, whatever is killed in between."""

from __future__ import annotations

import csv
import io
import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

FILE = """
name: shared
service:
  readiness_probe: /health
  replicas: 1
  load_balancer:
    api_keys:
      - {name: ada, key_env: ADA_KEY}
      - {name: bob, key_env: BOB_KEY}
resources: {infra: local}
secrets: {ADA_KEY: null, BOB_KEY: null}
run: serve engine --speed 50 --model small --port $SKYSERVE_REPLICA_PORT
"""
KEYS = {"ada": "of-ada-0123456789", "bob": "of-bob-0123456789"}


def call(endpoint: str, who: str, times: int, model: str = "small") -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
        "ignore_eos": True,
    }
    for _ in range(times):
        request = urllib.request.Request(
            f"{endpoint}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[who]}"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 5


def used(serve: Any) -> dict[str, tuple[int, int]]:
    found = serve.ok("usage", "shared", "--by", "key", "-o", "json").json()
    return {row["key"]: (row["requests"], row["tokens_out"]) for row in found["rows"]}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            ["shared", "--since", "lately"], "--since takes a day such as 2026-11-27 or 7d", id="since when"
        ),
        pytest.param(["shared", "--until", "7d"], "--until takes a day such as 2026-11-27", id="until when"),
        pytest.param(
            ["shared", "--since", "2026-02-02", "--until", "2026-02-01"], "is after --until", id="backwards"
        ),
        pytest.param(["shared", "--by", "zone"], "Invalid value for '--by'", id="by what"),
    ],
)
def test_wrong_usage_is_2(serve: Any, arguments: list[str], sentence: str) -> None:
    said = serve("usage", *arguments)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err


def test_requests_of_keys_are_counted_once_whatever_is_killed(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    secrets = [f"--secret={who.upper()}_KEY={key}" for who, key in KEYS.items()]
    serve.ok("up", file, "-y", *secrets)
    endpoint = serve.view("shared")["endpoint"]
    call(endpoint, "ada", 3)
    call(endpoint, "bob", 2)
    serve.eventually(lambda: used(serve) == {"ada": (3, 15), "bob": (2, 10)})

    agent = json.loads((serve.home / "lb" / "shared" / "agent.json").read_text())
    psutil.Process(agent["pid"]).send_signal(signal.SIGKILL)
    serve.eventually(lambda: serve.view("shared")["load_balancer"]["restarts"] == 1)
    serve.eventually(lambda: is_ready(endpoint))
    call(endpoint, "ada", 1)
    serve.eventually(lambda: used(serve)["ada"] == (4, 20))
    psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"]).kill()
    call(endpoint, "bob", 1)  # while there is no controller
    serve.eventually(lambda: used(serve) == {"ada": (4, 20), "bob": (3, 15)})

    call(endpoint, "ada", 1)
    serve.ok("down", "shared", "-y")  # at once: the agent has reported nothing of it
    serve.eventually(lambda: used(serve) == {"ada": (5, 25), "bob": (3, 15)})

    table = serve.ok("usage", "shared")
    assert [line.split()[:3] for line in table.out.splitlines()] == [
        ["KEY", "MODEL", "REQUESTS"],
        ["ada", "small", "5"],
        ["bob", "small", "3"],
        ["total", "8", f"{(5 + 3) * tokens_in(serve):,}"],
    ]
    text = serve.ok("usage", "shared", "--by", "day", "--by", "key", "--since", "1d", "-o", "csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["key"], row["requests"]) for row in rows] == [("ada", "5"), ("bob", "3")]
    top = serve.ok("usage", "shared", "--top", "1", "-o", "json").json()
    assert ([row["key"] for row in top["rows"]], top["total"]["requests"]) == (["ada"], 8)
    assert serve("usage", "shard").code == 1


BUDGETS = """
name: budgets
service:
  readiness_probe: /health
  replicas: 1
  load_balancer:
    prices: {small: {input: 0, output: 1_000_000}, "*": {input: 0, output: 0}}
    api_keys:
      - {name: ada, key_env: ADA_KEY, output_tokens_per_day: 15}
      - {name: bob, key_env: BOB_KEY, usd_per_month: 12}
resources: {infra: local}
secrets: {ADA_KEY: null, BOB_KEY: null}
run: serve engine --speed 50 --model small --port $SKYSERVE_REPLICA_PORT
"""


def refusal(endpoint: str, who: str) -> tuple[str, float] | None:
    """Return the code of the response and after how many hours to come back; None if the request was let in."""
    try:
        call(endpoint, who, 1)
    except urllib.error.HTTPError as refused:
        error = refused
    else:
        return None
    assert (error.code, error.headers["X-Should-Retry"]) == (429, "false")
    return json.load(error)["error"]["code"], int(error.headers["Retry-After"]) / 3600


def test_budgets_of_days_and_months_outlive_the_load_balancer(serve: Any, tmp_path: Path) -> None:
    left_s = 86_400 - time.time() % 86_400
    if left_s < 90:
        time.sleep(left_s)  # all of it is to be on one day
    file = tmp_path / "service.yaml"
    file.write_text(BUDGETS)
    serve.ok("up", file, "-y", *(f"--secret={who.upper()}_KEY={key}" for who, key in KEYS.items()))
    endpoint = serve.view("budgets")["endpoint"]
    for who, code, most_h in (("ada", "rate_limit_exceeded", 24), ("bob", "insufficient_quota", 31 * 24)):
        call(endpoint, who, 3)
        refused = refusal(endpoint, who)
        assert refused is not None
        assert refused[0] == code
        assert 0 < refused[1] <= most_h
    costs = [("ada", 15.0), ("bob", 15.0)]
    serve.eventually(lambda: dollars(serve) == costs)

    serve.ok("controller", "stop")
    folder = serve.home / "lb" / "budgets"
    agent = psutil.Process(json.loads((folder / "agent.json").read_text())["pid"])
    agent.kill()
    psutil.wait_procs([agent], 10)
    for lost in folder.glob("table.json.*"):  # as with a machine: what it has used, and what it has counted
        lost.unlink()
    serve.ok("controller", "start")
    serve.eventually(lambda: is_ready(endpoint))
    for who in ("ada", "bob"):  # until the controller has sent the totals, it begins at 0
        serve.eventually(lambda who=who: refusal(endpoint, who) is not None)


def is_ready(endpoint: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{endpoint}/-/ready", timeout=5).status == 200)
    except OSError:
        return False


def dollars(serve: Any) -> list[tuple[str, float]]:
    rows = serve.ok("usage", "budgets", "--by", "key", "-o", "json").json()["rows"]
    return [(row["key"], row["usd"]) for row in rows]


def tokens_in(serve: Any) -> int:
    """Return the prompt tokens of one request."""
    (row,) = serve.ok("usage", "shared", "--by", "model", "-o", "json").json()["rows"]
    assert row["tokens_in"] % row["requests"] == 0
    return int(row["tokens_in"] // row["requests"])
