"""`serve usage`: what keys have used is counted once, whatever is killed in between."""

from __future__ import annotations

import csv
import io
import json
import signal
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
    serve.eventually(lambda: urllib.request.urlopen(f"{endpoint}/-/ready", timeout=5).status == 200)
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


def tokens_in(serve: Any) -> int:
    """Return the prompt tokens of one request."""
    (row,) = serve.ok("usage", "shared", "--by", "model", "-o", "json").json()["rows"]
    assert row["tokens_in"] % row["requests"] == 0
    return int(row["tokens_in"] // row["requests"])
