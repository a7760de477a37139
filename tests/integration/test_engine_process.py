"""The engine as the process that a `run:` script starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "skyserve_cli.engine", *arguments]


@contextmanager
def engine(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running engine and its address."""
    process = subprocess.Popen(
        command("--port", "0", *arguments), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://\S+", said)
        assert found, said + process.stderr.read()
        yield process, found.group()
    finally:
        process.kill()
        process.communicate()


def post(url: str, body: dict[str, object]) -> urllib.request.Request:
    return urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())


def test_it_answers_and_says_the_same_again_after_a_restart() -> None:
    answers = []
    for _ in range(2):
        with (
            engine("--speed", "500", "--model", "mine") as (_, url),
            urllib.request.urlopen(post(url, {"model": "mine", "prompt": "Hi"}), timeout=20) as response,
        ):
            answers.append(json.load(response)["choices"][0]["text"])
    assert answers[0] == answers[1] != ""


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler for the signal (SigCgt on Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_streams_end(signum: signal.Signals) -> None:
    # 300 tokens at 67 ms, 20 times faster: still streaming when the signal comes.
    with engine("--speed", "20") as (process, url):
        body = {
            "prompt": "Hi",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        with urllib.request.urlopen(post(url, body), timeout=20) as response:
            first = response.readline()
            process.send_signal(signum)
            lines = (first + response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
        # A slow machine may put several tokens into one chunk: count tokens.
        assert sum(len(choice["token_ids"]) for choice in choices) == 300
        assert choices[-1]["finish_reason"] == "length"
        assert process.wait(20) == 0


def test_a_signal_during_the_cold_start_ends_it() -> None:
    process = subprocess.Popen(command("--port", "0", "--cold-start", "600"), env=ENVIRONMENT)
    try:
        assert any(catches(process.pid, signal.SIGTERM) or time.sleep(0.02) for _ in range(500))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        pytest.param(["--list-profiles"], 0, "vidur", id="list profiles"),
        pytest.param(["--profile", "b200"], 2, "l4-8b, a100-7b, h100-70b", id="unknown profile"),
        pytest.param(["--speed", "0"], 2, "must be above 0", id="speed 0"),
        pytest.param(["--cold-start", "-1"], 2, "must not be negative", id="negative cold start"),
        pytest.param(["--cors", "a.org"], 2, "--cors: origins[0]: expected", id="an origin without scheme"),
    ],
)
def test_usage(arguments: list[str], code: int, sentence: str) -> None:
    ended = subprocess.run(command(*arguments), capture_output=True, text=True, env=ENVIRONMENT, timeout=30)
    assert ended.returncode == code
    assert sentence in ended.stdout + ended.stderr


def test_a_taken_port_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            command("--port", port), capture_output=True, text=True, env=ENVIRONMENT, timeout=30
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in ended.stderr


def test_starting_imports_nothing_heavy() -> None:
    code = "import sys, skyserve_cli.engine.server as s; print(*sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=30
    )
    loaded = set(ended.stdout.split())
    assert "aiohttp" in loaded
    assert not loaded & {"pydantic", "sqlalchemy", "typer", "rich", "numpy", "provisioners"}
    of_the_balancer = {name for name in loaded if name.startswith("lb.")}
    shared = {"lb.config", "lb.config.cors", "lb.config.decode", "lb.http", "lb.http.cors"}
    assert of_the_balancer == shared, "the rules of CORS, and nothing else"
