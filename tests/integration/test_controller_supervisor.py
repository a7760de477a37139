"""The supervisor with small commands in the daemon's place, and with the daemon itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.controller.supervisor import keep
from skyserve_cli.home import Home


def runs(tmp_path: Path) -> list[str]:
    return (tmp_path / "runs").read_text().split() if (tmp_path / "runs").exists() else []


def command(tmp_path: Path, *ends: str) -> list[str]:
    """A program that ends the n-th time it is run with the n-th of `ends`: an exit code, or KILL."""
    code = f"""
import os, pathlib, signal, sys
seen = pathlib.Path({str(tmp_path / "runs")!r})
before = seen.read_text().split() if seen.exists() else []
end = {list(ends)!r}[len(before)]
seen.write_text(" ".join([*before, end]))
os.kill(os.getpid(), signal.SIGKILL) if end == "KILL" else sys.exit(int(end))
"""
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param(["0"], 0, id="stopped as asked"),
        pytest.param(["1"], 1, id="cannot start"),
        pytest.param(["3"], 3, id="another is running"),
        pytest.param(["KILL", "0"], 0, id="killed, then stopped as asked"),
        pytest.param(["KILL", "1", "KILL", "0"], 0, id="whatever ends it later"),
        pytest.param(["KILL", "2"], 2, id="the configuration has become wrong"),
    ],
)
def test_when_it_is_started_again(tmp_path: Path, ends: list[str], code: int) -> None:
    assert keep(command(tmp_path, *ends), Event(), []) == code
    assert runs(tmp_path) == ends


@pytest.mark.long
def test_a_controller_that_is_killed_comes_back_and_one_that_is_stopped_does_not(tmp_path: Path) -> None:
    root = tmp_path / "home"
    environment = {**os.environ, "SKYSERVE_HOME": str(root)}
    environment.pop("SKYSERVE_DB", None)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "skyserve_cli.controller.supervisor"], env=environment
    )
    try:
        client = ControllerClient(Home(root, f"sqlite:///{root / 'state.db'}"))
        first = _pid(client, other_than=0)
        os.kill(first, signal.SIGKILL)
        second = _pid(client, other_than=first)
        assert second != first
        os.kill(second, signal.SIGKILL)  # a call made while it is away waits for the next one
        third = int(client.health()["pid"])
        os.kill(third, signal.SIGKILL)
        assert client.services() == []
        third = int(client.health()["pid"])
        assert client.stop() == third
        assert supervisor.wait(timeout=30) == 0
        with pytest.raises(ControllerDownError):
            client.health()
    finally:
        supervisor.terminate()
        supervisor.wait(timeout=30)


def _pid(client: ControllerClient, *, other_than: int) -> int:
    for _ in range(600):
        try:
            pid = int(client.health()["pid"])
        except ControllerDownError:
            pid = other_than
        if pid != other_than:
            return pid
        time.sleep(0.05)
    raise AssertionError("no controller responded")
