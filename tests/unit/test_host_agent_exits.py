"""How a script ended: the sentence, and what the program that watches it sees of the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from provisioners.remote.host_agent.exits import FOREGROUND, exit_sentence
from provisioners.remote.host_agent.processes import descendants
from provisioners.remote.host_agent.scripts import exit_code, exit_message, is_watched

RUN, SETUP = "`run` ended", "`setup` failed"
BACKGROUND = "runs on in the background, but `run` must stay in the foreground: start the server with `exec`, or end `run` with `wait`"


@pytest.mark.parametrize(
    ("what", "code", "left", "oom", "sentence"),
    [
        pytest.param(RUN, 7, (), False, "`run` ended with exit code 7: bye", id="an error"),
        pytest.param(RUN, 127, (), False, "`run` ended with exit code 127: bye", id="no such command"),
        pytest.param(RUN, -11, (), False, "`run` ended by signal SIGSEGV: bye", id="a signal"),
        pytest.param(RUN, 137, (), False, "`run` ended with exit code 137: bye", id="killed, by anyone"),
        pytest.param(RUN, 137, (), True, "`run` ended with exit code 137 (out of memory?): bye", id="killed, and no memory"),
        pytest.param(RUN, -9, (), True, "`run` ended by signal SIGKILL (out of memory?): bye", id="the same without a shell"),
        pytest.param(RUN, 1, (), True, "`run` ended with exit code 1: bye", id="something else was killed"),
        pytest.param(RUN, 0, (), False, f"`run` ended with exit code 0: {FOREGROUND}; it printed last: bye", id="done"),
        pytest.param(
            RUN, 0, ("python3", "python3", "tee"), False,
            f"`run` ended with exit code 0: `python3`, `tee` {BACKGROUND}; it printed last: bye", id="in the background",
        ),
        pytest.param(RUN, 3, ("python3",), False, "`run` ended with exit code 3: bye", id="failed, and left something"),
        pytest.param(SETUP, 3, (), False, "`setup` failed with exit code 3: bye", id="setup"),
        pytest.param("`s3://x` could not be fetched", 0, (), False, "`s3://x` could not be fetched with exit code 0: bye", id="other"),
    ],
)  # fmt: skip
def test_the_sentence(what: str, code: int, left: tuple[str, ...], oom: bool, sentence: str) -> None:
    assert exit_sentence(what, code, "bye", left, oom=oom) == sentence
    assert exit_sentence(what, code, "", left, oom=oom) == sentence.removesuffix("bye").removesuffix(
        ": "
    ).removesuffix("; it printed last")


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        pytest.param("exit 0", f"`run` ended with exit code 0: {FOREGROUND}", id="nothing is left"),
        pytest.param("(sleep 0.1 &)", f"`run` ended with exit code 0: {FOREGROUND}", id="it ends at the same time"),
        pytest.param("nohup sleep 600 & sleep 0.1", f"`run` ended with exit code 0: `sleep` {BACKGROUND}", id="nohup"),
        pytest.param("setsid -f sleep 600", f"`run` ended with exit code 0: `sleep` {BACKGROUND}", id="a session of its own"),
        pytest.param("nohup sleep 600 & exit 3", "`run` ended with exit code 3", id="an error"),
    ],
)  # fmt: skip
def test_what_a_script_leaves_is_seen_on_the_machine(tmp_path: Path, run: str, sentence: str) -> None:
    (tmp_path / "work").mkdir()
    order = {
        "token": "t", "image": None, "run": run, "env": {}, "secrets_path": str(tmp_path / "secrets"),
        "claim_path": str(tmp_path / "claim"), "has_port": True,
    }  # fmt: skip
    (tmp_path / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-m", "provisioners.remote.host_agent", "script", str(tmp_path), "run"]
    watcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while exit_code(tmp_path, "run") is None and watcher.poll() is None:
            threading.Event().wait(0.01)
        assert exit_message(tmp_path, "run") == sentence
        assert is_watched(tmp_path, "run") or "sleep 600" not in run
    finally:
        for pid in descendants(watcher.pid):
            os.kill(pid, signal.SIGKILL)
        watcher.wait(timeout=30)


DOCKER = """#!/bin/sh
case "$1" in
inspect) echo true ;;
top) printf 'PID COMMAND\\n1 sleep\\n7 vllm\\n' ;;
esac
"""


def test_what_runs_on_in_a_container_is_seen_too(tmp_path: Path) -> None:
    docker = tmp_path / "bin" / "docker"
    for folder in (tmp_path / "work", docker.parent):
        folder.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    order = {
        "token": "t", "image": "vllm", "run": "serve &", "env": {}, "secrets_path": str(tmp_path / "secrets"),
        "claim_path": str(tmp_path / "claim"), "has_port": True,
    }  # fmt: skip
    (tmp_path / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-m", "provisioners.remote.host_agent", "script", str(tmp_path), "run"]
    path = f"{docker.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PATH": path})
    assert exit_message(tmp_path, "run") == f"`run` ended with exit code 0: `vllm` {BACKGROUND}"


def test_an_agent_of_an_earlier_release_left_only_the_code(tmp_path: Path) -> None:
    (tmp_path / "run.exit").write_text("0")
    assert exit_message(tmp_path, "run") == f"`run` ended with exit code 0: {FOREGROUND}"
