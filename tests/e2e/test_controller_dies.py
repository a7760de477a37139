"""The controller is killed while a user waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

FILE = """
name: slow
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local, use_spot: true}
setup: sleep 3
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def test_up_goes_on_waiting_and_no_replica_is_launched_twice(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(FILE)
    waiting = subprocess.Popen(
        [*serve.command, "up", str(file), "-y"],
        env=serve.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    address = serve.home / "controller.json"
    serve.eventually(address.exists)
    serve.eventually(lambda: len(serve.ok("status", "-o", "json").json()) == 1)
    serve.eventually(lambda: len(serve.view("slow")["replicas"]) == 2)
    os.kill(json.loads(address.read_text())["pid"], signal.SIGKILL)

    out, _ = waiting.communicate(timeout=90)
    assert waiting.returncode == 0
    view = serve.view("slow")
    assert out == f"{view['endpoint']}\n"
    assert [(replica["id"], replica["state"]) for replica in view["replicas"]] == [(1, "READY"), (2, "READY")]


def test_a_controller_that_is_frozen_is_named_and_its_log_can_be_read(serve: Any) -> None:
    serve.ok("controller", "start")
    pid = json.loads((serve.home / "controller.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        for words in (["status"], ["events"], ["controller", "stop"], ["controller", "start"]):
            said = serve("--timeout", "3", *words)
            assert (said.code, said.out) == (124, ""), said
            (last,) = said.err.strip().splitlines()
            frozen = f"its process {pid} is stopped by a signal (state T)"
            assert said.waits == (f"waiting for the controller: {frozen}",)
            assert last.startswith("the controller has not done this within 3 s: its process")
            assert f"`kill -CONT {pid}`" in last
            assert ("it may still be carried out" in last) == (words[-1] == "stop")
        log = serve.ok("logs", "--controller")
        assert "is stopped by a signal" in log.err
        assert "controller is up" in log.out
    finally:
        os.kill(pid, signal.SIGCONT)
    serve.eventually(lambda: serve("controller", "status").code == 1)  # it had received the request to stop
