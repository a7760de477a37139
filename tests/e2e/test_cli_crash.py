"""A program that is ready and then ends, again and again: what `serve up`, `status` and `events` make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SERVICE = """
name: chat
service: {readiness_probe: /, replicas: 1}
resources: {infra: local}
run: |
"""
IN_BACKGROUND = """
  nohup python3 -m http.server $SKYSERVE_REPLICA_PORT > engine.log 2>&1 &
  until curl --silent --output /dev/null http://127.0.0.1:$SKYSERVE_REPLICA_PORT/; do sleep 0.1; done
  sleep SECONDS
  echo started
"""
ONE_PROBE = IN_BACKGROUND.replace("SECONDS", "1")  # `serve up` calls 2 s a success
LONGER = IN_BACKGROUND.replace("SECONDS", "4")  # each life is one that was ready, on a busy machine, too
IN_FOREGROUND = """
  exec python3 -m http.server $SKYSERVE_REPLICA_PORT
"""
SENTENCE = (
    "`python3` runs on in the background, but `run` must stay in the foreground: start the server with `exec`, or end `run` "
    "with `wait`"
)


def write(folder: Path, run: str) -> Path:
    file = folder / "service.yaml"
    file.write_text(SERVICE + run.strip("\n") + "\n")
    return file


def count(serve: Any, kind: str) -> int:
    lines = serve.ok("events", "chat", "-o", "json").out.splitlines()
    return sum(json.loads(line)["kind"] == kind for line in lines)


@pytest.mark.timeout(300)
def test_a_server_in_the_background_is_no_success_and_is_named(serve: Any, tmp_path: Path) -> None:
    up = serve("up", write(tmp_path, ONE_PROBE), "-y", "--timeout", "20")
    assert (up.code, up.out) == (124, ""), up
    assert SENTENCE in up.err

    def is_named() -> bool:
        lines = [line for line in serve.ok("status", "chat").out.splitlines() if line.startswith("chat: ")]
        first = " ".join(lines[:1])
        return first.startswith("chat: version 1 crashes: ") and SENTENCE in first

    serve.eventually(is_named)
    assert count(serve, "Launch") <= 4
    assert serve.view("chat")["trial"]["version"] == 1

    serve.ok("update", "chat", write(tmp_path, IN_FOREGROUND), "-y")
    view = serve.view("chat")
    assert (view["status"], view["notes"], view["trial"]) == ("READY", "", None)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_is_given_up_after_five(serve: Any, tmp_path: Path) -> None:
    serve("up", write(tmp_path, LONGER), "-y", "--no-wait")
    serve.eventually(lambda: serve.view("chat")["status"] == "FAILED")
    status = serve.ok("status", "chat").out
    assert (
        "chat: version 1 has failed: 5 lives in a row shorter than 60 s; the last: `run` ended with exit code 0"
        in status
    )
    assert "update the service" in status
    assert count(serve, "ProbePassed") == count(serve, "Launch") == 5
