"""`serve` as a user runs it: a process, a home of its own, and nothing left behind afterwards."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.home import Home
from tests.e2e.warm_commands import WarmCommands
from tests.integration.sshd import Sshd, serve_script
from tests.kit.forks import COLD
from tests.kit.own_number import own_number

ROOT = Path(__file__).parents[2]
COMMAND_PATIENCE_S = 90
POLL_S = 0.2
POLLS = 1000
_FIRST_PORT = 31000 + 20 * own_number(80)


@dataclass(frozen=True)
class Said:
    """The result of a command. What it waited for depends on how busy the machine is, so those lines are apart: `waits`."""

    code: int
    out: str
    err: str
    waits: tuple[str, ...] = ()

    def json(self) -> Any:
        return json.loads(self.out)


class Serve:
    """The program with its own `$SKYSERVE_HOME`."""

    _warm = WarmCommands({**os.environ, "NO_COLOR": "1"})

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            **{k: v for k, v in os.environ.items() if k == COLD or not k.startswith("SKYSERVE_")},
            "SKYSERVE_HOME": str(home),
            "NO_COLOR": "1",
        }

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "skyserve_cli"]

    def __call__(self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Said:
        words, environment = [*map(str, arguments)], {**self.environment, **(env or {})}
        if self._warm.fits(environment):
            done = self._warm.run(words, environment, cwd, COMMAND_PATIENCE_S)
        else:
            done = subprocess.run(
                [*self.command, *words],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_PATIENCE_S,
            )
        lines = done.stderr.splitlines(keepends=True)
        waits = tuple(line.strip() for line in lines if line.startswith("waiting for "))
        err = "".join(line for line in lines if not line.startswith("waiting for "))
        return Said(done.returncode, done.stdout, err, waits)

    def ok(self, *arguments: str | Path, **options: Any) -> Said:
        said = self(*arguments, **options)
        assert said.code == 0, said
        return said

    def configure(self, **sections: Any) -> None:
        """Put these sections into `config.yaml`, in place of those of their names."""
        path = self.home / "config.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))

    def view(self, name: str, *flags: str) -> dict[str, Any]:
        """The service in `status -o json`. That is the controller's own response: to ask for it here costs a hundredth of
        a command, and this is asked again and again."""
        if flags in ((), ("--all",)):
            with suppress(ControllerDownError):
                client = ControllerClient(Home.from_environment(self.environment))
                found = client.services(down=bool(flags), ended=bool(flags))
                (view,) = [each for each in found if each["name"] == name]
                return view
        (view,) = self.ok("status", name, "-o", "json", *flags).json()
        assert isinstance(view, dict)
        return view

    def eventually(self, holds: Callable[[], object]) -> None:
        for _ in range(POLLS):
            if holds():
                return
            time.sleep(POLL_S)
        raise AssertionError("it never came true")

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to this home: by its environment, its arguments or its folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                ours = process.environ().get("SKYSERVE_HOME") == str(self.home)
                ours = ours or any(str(self.home) in word for word in process.cmdline())
                if ours or process.cwd().startswith(str(self.home)):
                    found.append(process)
        return found

    def commands(self) -> dict[int, list[str]]:
        """Return the command line of each of these processes that still runs, by its pid."""
        found = {}
        for process in self.processes():
            with suppress(psutil.Error):
                found[process.pid] = process.cmdline()
        return found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    yield from living_in(tmp_path)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """Another host, which is this one by another way."""
    host = Sshd(tmp_path / "sshd")
    host.start()
    yield host
    host.stop()


@pytest.fixture
def engine(serve: Serve) -> Iterator[str]:
    """The URL of a simulated engine, as a process of its own."""
    process = subprocess.Popen(
        [*serve.command, "engine", "--speed", "100", "--port", "0"],
        env=serve.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
    yield url.rstrip(".,")
    process.terminate()
    process.communicate()


def elsewhere(sshd: Sshd, home: Path, program: Path) -> list[str]:
    """Arguments of `serve controller deploy` and `move` for a home behind that sshd; `program` runs this checkout there."""
    return [
        f"ssh/{sshd.url.removeprefix('ssh://')}",
        *("--home", str(home), "--serve", str(serve_script(program, ROOT))),
        *("--identity", str(sshd.identity), "--known-hosts", str(sshd.known_hosts)),
        *("--context", "prod"),
    ]


def living_in(folder: Path) -> Iterator[Serve]:
    """A home with quick prices of time: nothing is up. Afterwards nothing may be left of what a test brought up."""
    home = folder / "home"
    home.mkdir()
    first = _FIRST_PORT
    (home / "config.yaml").write_text(f"load_balancer: {{first_port: {first}, last_port: {first + 19}}}\n")
    program = Serve(home)
    namespaces = _namespaces()
    yield program
    if not (home / "state.db").exists():
        assert program.processes() == [], "no controller ever ran"
        return
    ended = []
    if _has_services(home):
        program("controller", "start")
        ended.append(program("down", "--all", "--purge", "-y", "--timeout", "60"))
    if program.processes():
        ended.append(program("controller", "stop"))
    left = program.commands()
    for process in program.processes():
        process.kill()
    assert [one for one in ended if one.code != 0] == []
    assert left == {}
    assert [pin for pin in _pins(home) if pin in _namespaces() - namespaces] == []


def _has_services(home: Path) -> bool:
    """Return whether a test has brought anything up. What was down before may have left something."""
    with closing(sqlite3.connect(home / "state.db")) as database:
        ((count,),) = database.execute(
            "SELECT (SELECT count(*) FROM services) + (SELECT count(*) FROM replicas)"
        )
    return bool(count)


def _namespaces() -> frozenset[str]:
    folder = Path("/run/netns")
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


def _pins(home: Path) -> list[str]:
    """The namespaces that instances of this home ever had."""
    records = home.glob("local/instances/**/record.json")
    return [name for record in records if (name := json.loads(record.read_text())["namespace"])]
