"""Keeps an agent running on a machine without another supervisor: `python3 keeper.py`, in a folder of its own.

It needs nothing but the standard library, and is the one file of an agent that is not part of a bundle. The controller
deploys it over SSH, and writes into the folder:

    bundles/HASH/   `lb` and `policies`, and `interpreter`, one line: the Python that can import them
    table.json      the table an agent begins with; the agent writes each later one itself
    wanted.json     {"release": NAME, "bundle": HASH, "arguments": [...]}: the agent that should run

and reads `serving.json`: {"release", "bundle", "pid", "admin_port", "starts", "refused"}. Files are replaced whole.

An agent that fails is started again. When another release is wanted, its agent takes the listening sockets over from the
one that runs (`lb.agent.socket_handover`), so that no connection is refused, and that one ends when its requests have. A release whose
agent does not come up is refused: the one that runs goes on, and is started again if it fails. The admin token comes by
$SKYSERVE_LB_TOKEN, and is handed on by the environment, which other users cannot see. SIGTERM terminates all agents; SIGHUP is for
them: they read their table and certificate again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 0.1
START_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_AFTER_S = 10.0  # an agent that has lived for so long did not die of being started
STOP_TIMEOUT_S = 10.0
HANDOVER = "handover.sock"


class AgentProcess:
    """One process of an agent. `listening` is the content of its ready file; empty until it listens."""

    def __init__(self, folder: Path, wanted: dict[str, Any], number: int) -> None:
        bundle = folder / "bundles" / wanted["bundle"]
        self.wanted = wanted
        self.began_at = uptime_s()
        self.listening: dict[str, Any] = {}
        self._ready = folder / f"ready.{number}.json"
        self._ready.unlink(missing_ok=True)
        interpreter = (bundle / "interpreter").read_text().strip()
        files = ["--table-file", "table.json", "--ready-file", self._ready.name]
        self.process = subprocess.Popen(
            [interpreter, "-m", "lb", *wanted["arguments"], *files, "--handover-socket", HANDOVER],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(bundle)},
            stdin=subprocess.DEVNULL,
        )

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def listens(self) -> bool:
        """Return whether it has reported that it serves."""
        if not self.listening:
            self.listening = read_json(self._ready) or {}
        return bool(self.listening)

    def stop(self) -> None:
        if self.is_alive:
            self.process.terminate()

    def reload(self) -> None:
        """Have it read its files again. One that does not listen yet reads them anyway, and would die of the signal."""
        if self.listens() and self.is_alive:
            self.process.send_signal(signal.SIGHUP)

    def discard(self) -> None:
        self._ready.unlink(missing_ok=True)


class Supervisor:
    """The processes of the agent, one of which should serve: `check` is called again and again to see to that.

    `_agent` serves, `_successor` is starting and will replace it, those in `_leaving` finish the requests that they have.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._agent: AgentProcess | None = None
        self._successor: AgentProcess | None = None
        self._leaving: list[AgentProcess] = []
        self._refused: dict[str, Any] | None = None
        self._served: dict[str, Any] | None = None  # the last release whose agent came up
        self._starts = 0
        self._failures = 0  # in a row
        self._not_before = 0.0
        self._is_stale = False  # the status file

    def check(self) -> None:
        """Start, await or replace an agent, as far as that is due. Raises OSError."""
        wanted = read_json(self._folder / "wanted.json")
        for agent in [one for one in self._leaving if not one.is_alive]:
            agent.discard()
            self._leaving.remove(agent)
        if self._agent is not None and not self._agent.is_alive:
            self._lost(self._agent)
        if self._successor is not None:
            self._await(self._successor)
        elif wanted is not None and uptime_s() >= self._not_before:
            self._start_release(wanted)
        if self._is_stale:
            self._write_status()
            self._is_stale = False

    def reload(self) -> None:
        """Have all agents read their files again."""
        for agent in self._agents():
            agent.reload()

    def stop(self) -> None:
        """Terminate all agents. Requests under way have STOP_TIMEOUT_S."""
        agents = self._agents()
        for agent in agents:
            agent.stop()
        until = uptime_s() + STOP_TIMEOUT_S
        while any(agent.is_alive for agent in agents) and uptime_s() < until:
            time.sleep(LOOK_EVERY_S)
        for agent in agents:
            if agent.is_alive:
                agent.process.kill()

    def _agents(self) -> list[AgentProcess]:
        return [one for one in (self._agent, self._successor, *self._leaving) if one is not None]

    def _start_release(self, wanted: dict[str, Any]) -> None:
        """Start the wanted release, unless it runs or was refused. If it was refused and none runs, start the last one that served."""
        if self._agent is not None and wanted in (self._agent.wanted, self._refused):
            return
        if wanted == self._refused and self._served is not None:
            wanted = self._served
        self._starts += 1
        try:
            self._successor = AgentProcess(self._folder, wanted, self._starts)
        except (OSError, KeyError, TypeError) as error:
            log_line(f"cannot start release {wanted.get('release')}: {type(error).__name__}: {error}")
            self._refuse(wanted)

    def _await(self, successor: AgentProcess) -> None:
        if successor.listens() and successor.is_alive:
            if self._agent is not None:
                self._leaving.append(self._agent)
            self._agent, self._successor, self._refused = successor, None, None
            self._served = successor.wanted
            self._is_stale = True
        elif not successor.is_alive or uptime_s() - successor.began_at > START_TIMEOUT_S:
            log_line(f"the agent of release {successor.wanted['release']} did not come up")
            if successor.is_alive:
                successor.process.kill()
            successor.discard()
            self._successor = None
            self._refuse(successor.wanted)

    def _refuse(self, wanted: dict[str, Any]) -> None:
        self._refused = wanted
        self._pause()
        self._is_stale = True

    def _lost(self, agent: AgentProcess) -> None:
        log_line(f"the agent exited with {agent.process.returncode}")
        if uptime_s() - agent.began_at > STEADY_AFTER_S:
            self._failures = 0
        agent.discard()
        self._agent = None
        self._pause()

    def _pause(self) -> None:
        # As `policies.backoff`, which this file cannot import: it is sent to a machine by itself.
        self._not_before = uptime_s() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1

    def _write_status(self) -> None:
        agent = self._agent
        state = {
            "release": agent.wanted["release"] if agent else None,
            "bundle": agent.wanted["bundle"] if agent else None,
            "pid": agent.listening["pid"] if agent else None,
            "admin_port": agent.listening["admin_port"] if agent else None,
            "starts": self._starts,
            "refused": self._refused.get("release") if self._refused else None,
        }
        draft = self._folder / "serving.json.new"
        draft.write_text(json.dumps(state) + "\n")
        draft.replace(self._folder / "serving.json")


def read_json(path: Path) -> Any:
    """Return the document in a file; None if there is no such file, or it is incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def log_line(sentence: str) -> None:
    print(f"supervisor: {sentence}", file=sys.stderr, flush=True)


def uptime_s() -> float:
    return time.monotonic()  # noqa: TID251 (a process of its own: the clock enters here)


def main() -> int:
    supervisor = Supervisor(Path.cwd())
    stopping: list[int] = []
    reloading: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGHUP, lambda number, frame: reloading.append(number))
    while not stopping:
        if reloading:
            reloading.clear()
            supervisor.reload()
        with suppress(OSError):  # a full disk may have room again later
            supervisor.check()
        time.sleep(LOOK_EVERY_S)
    supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
