"""A whole installation in a folder of its own, to be hurt: controller, load balancers, local cloud, engines.

Nothing here is a double. `Stack` starts the product as `serve up` does, finds the processes behind a replica so
that they can be killed or frozen, and, on the way out, takes everything down and proves that nothing is left:
no process, no listening port, no network namespace, no live row.

Waiting is polling with a bound: `until` raises `Stuck`, with the last state seen, rather than wait for ever.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.request import Request, urlopen

import psutil

from benchmarks.chaos.service_files import CLOUD_YAML
from policies.goals import UpdateMode
from provisioners.local import controls as local_controls
from provisioners.local import process_tree as local_process
from provisioners.local.store import InstanceFolder, LocalStore
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text

_T = TypeVar("_T")
_POLL_S = 0.05


class Stuck(AssertionError):
    """Something that must come about did not."""


class Leftovers(AssertionError):
    """The installation was taken down, and something of it is still there."""


def until(condition: Callable[[], _T | None], what: str, patience_s: float = 90.0) -> _T:
    """Poll until `condition` is truthy; its value. A controller that is down, or does not respond in time, is one to wait for."""
    for _ in range(int(patience_s / _POLL_S)):
        with suppress(ControllerDownError, DeadlineError):
            value = condition()
            if value:
                return value
        time.sleep(_POLL_S)
    raise Stuck(what)


class Stack:
    """One installation. A context manager; leaving it in peace raises Leftovers if anything is left."""

    def __init__(self, controller: str = "") -> None:
        """`controller` is a module to be run instead of the product's daemon, without a supervisor."""
        self._controller = controller
        root = Path(tempfile.mkdtemp(prefix="skyserve-chaos-"))
        self.home = Home(root, f"sqlite:///{root / 'state.db'}")
        self.client = ControllerClient(self.home)
        self.store = LocalStore(root)
        self._frozen: set[int] = set()
        self._made: set[tuple[str, str, int]] = set()  # instances seen: name of the folder, service, replica

    def __enter__(self) -> Stack:
        self.home.create()
        self._prepare()
        if self._controller:
            self._start_controller()
        self.client.ensure_running()
        return self

    def made(self) -> Counter[tuple[str, int]]:
        """Instances made so far by replica. The local cloud forgets those that have been dead for an hour, or that a clock
        which was set makes seem so: call this before."""
        for folder in self.store.folders():
            if record := folder.record():
                self._made.add((folder.path.name, record.service, record.replica_id))
        return Counter((service, replica_id) for _, service, replica_id in self._made)

    def _prepare(self) -> None:
        """The files of a home before its controller starts."""
        # Away from the local cloud's ports and from those the kernel gives to outgoing connections.
        first = random.Random(os.getpid()).randrange(10_000, 19_700)
        self.home.config.write_text(
            f"controller: {{tick_seconds: 0.5}}\n"
            f"load_balancer: {{first_port: {first}, last_port: {first + 250}}}\n"
            "clouds: {local: {poll_seconds: 0.25}}\n"
        )
        self.store.create()
        self.store.config_path.write_text(CLOUD_YAML)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.take_down()
        finally:
            left = self.leftovers()
            self._sweep()
            if not left:
                shutil.rmtree(self.home.root)
            elif kind is None:
                raise Leftovers(f"{'; '.join(left)} (see {self.home.root})")

    def _start_controller(self) -> None:
        environment = {**os.environ, "SKYSERVE_HOME": str(self.home.root)}
        with self.home.controller_log.open("ab") as out:
            subprocess.Popen(
                [sys.executable, "-m", self._controller],
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        until(self.client.health, "the controller does not start", 30.0)

    # --- goals

    def up(self, yaml: str) -> None:
        loaded = load_text(yaml)
        self.client.put(loaded.spec.name, spec_to_json(loaded.spec), {}, None)

    def update(self, yaml: str, mode: UpdateMode = UpdateMode.ROLLING) -> None:
        loaded = load_text(yaml)
        self.client.put(loaded.spec.name, spec_to_json(loaded.spec), {}, mode.value)

    def preempt(self, name: str, replica_id: int, notice_s: float = 0.0) -> None:
        local_controls.preempt(self.home.root, self.replica(name, replica_id)["instance_id"], notice_s)

    # --- state

    def view(self, name: str, *, down: bool = False) -> dict[str, Any] | None:
        services = self.client.services(down=down)
        return next((service for service in services if service["name"] == name), None)

    def endpoint(self, name: str) -> str:
        view = self.view(name)
        assert view is not None, f"{name} is not up"
        return str(view["endpoint"])

    def replicas(self, name: str, *states: str) -> list[dict[str, Any]]:
        """The live replicas, of these states if any are given, oldest first."""
        view = self.view(name)
        found = [] if view is None else view["replicas"]
        return [replica for replica in found if not states or replica["state"] in states]

    def replica(self, name: str, replica_id: int) -> dict[str, Any]:
        return next(replica for replica in self.replicas(name) if replica["id"] == replica_id)

    def settled(self, name: str, *, model: str | None = None, patience_s: float = 120.0) -> list[int]:
        """Wait until the fleet is what the spec says and the load balancer knows; the ids, oldest first.

        `model`: also wait until every replica is one that says so of itself.
        """

        def is_settled() -> list[int] | None:
            view = self.view(name)
            if view is None:
                return None
            live = view["replicas"]
            ready = [replica["id"] for replica in live if replica["state"] == "READY"]
            balancer = view["load_balancer"]
            whole = len(ready) == len(live) == view["target"] == balancer["ready_targets"]
            if not whole or not balancer["synced"] or view["notes"]:
                return None
            if model is not None and any(f"--model {model} " not in self.command(name, i) for i in ready):
                return None
            return ready

        try:
            return until(is_settled, "", patience_s)
        except Stuck:
            view = until(lambda: self.view(name), f"{name} is not there")
            states = Counter(replica["state"] for replica in view["replicas"])
            raise Stuck(f"{name} did not settle: {dict(states)}; {view}") from None

    def went_down(self, name: str) -> None:
        """Wait until no replica and no load balancer of the service is left."""
        until(lambda: self.view(name) is None, f"{name} did not go down")
        until(lambda: not (self.home.load_balancers / name / "agent.json").exists(), f"{name}: agent left")

    # --- processes

    def folder(self, name: str, replica_id: int) -> InstanceFolder:
        """The instance of a replica."""
        for folder in self.store.folders():
            record = folder.record()
            if record is not None and (record.service, record.replica_id) == (name, replica_id):
                return folder
        raise LookupError(f"{name} has no instance of replica {replica_id}")

    def host_pid(self, name: str, replica_id: int) -> int:
        """The process that is the instance: what a virtual machine would be."""
        pid = self.folder(name, replica_id).host_pid()
        assert pid is not None
        return pid

    def engine_pid(self, name: str, replica_id: int) -> int:
        """The process that responds."""
        (pid,) = local_process.descendants(self.host_pid(name, replica_id))
        return pid

    def command(self, name: str, replica_id: int) -> str:
        try:
            return " ".join(psutil.Process(self.engine_pid(name, replica_id)).cmdline())
        except (psutil.Error, LookupError, ValueError):
            return ""  # it has just gone

    def agent_pid(self, name: str) -> int:
        """The load balancer's process."""
        return int(self._told(name)["pid"])

    def controller_pid(self) -> int:
        return int(json.loads(self.home.controller_address.read_text())["pid"])

    def freeze(self, pid: int) -> None:
        """SIGSTOP: it keeps its connections, accepts new ones, and does nothing. `thaw` undoes it."""
        os.kill(pid, signal.SIGSTOP)
        self._frozen.add(pid)

    def thaw(self, pid: int) -> None:
        self._frozen.discard(pid)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # another process has replaced it meanwhile

    def controllers(self) -> list[int]:
        """The controller, also one that is still starting and has not published its address."""
        daemon = "skyserve_cli.controller.daemon"
        return [process.pid for process, command in self._processes() if daemon in command]

    def _supervisors(self) -> list[int]:
        supervisor = "skyserve_cli.controller.supervisor"
        return [process.pid for process, command in self._processes() if supervisor in command]

    # --- the load balancer's admin port

    def ask_agent(self, name: str, path: str) -> bytes:
        token = (self.home.load_balancers / name / "token").read_text()
        url = f"http://127.0.0.1:{self._told(name)['admin_port']}{path}"
        request = Request(url, headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=5.0) as answer:
            content: bytes = answer.read()
        return content

    def stats(self, name: str) -> dict[str, dict[str, Any]]:
        """What the load balancer counts, by target (a replica's id, as text)."""
        stats = json.loads(self.ask_agent(name, "/-/stats?window_s=60"))
        return {target["id"]: target for target in stats["targets"]}

    def listed(self, name: str) -> dict[str, str]:
        """The load balancer's table: target -> state."""
        table = json.loads(self.ask_agent(name, "/-/targets"))
        return {target["id"]: target["state"] for target in table["targets"]}

    def metric(self, name: str, family: str) -> float:
        """A counter of the load balancer, summed over its labels."""
        lines = self.ask_agent(name, "/-/metrics").decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"{family}{{", f"{family}_total{{"))
        )

    def _told(self, name: str) -> dict[str, Any]:
        written: dict[str, Any] = json.loads((self.home.load_balancers / name / "agent.json").read_text())
        return written

    # --- books

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the database behind the controller's back."""
        database = sqlite3.connect(f"file:{self.home.root / 'state.db'}?mode=ro", uri=True, timeout=10.0)
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()

    def live_instances(self) -> list[InstanceFolder]:
        return [folder for folder in self.store.folders() if folder.is_live()]

    # --- the end

    def take_down(self) -> None:
        """All services down, without drain; then the controller."""
        for pid in list(self._frozen):
            self.thaw(pid)
        self.client.ensure_running()
        for service in self.client.services():
            try:
                self.client.down(service["name"], purge=True)
            except (ControllerDownError, RefusedError):
                continue  # it is said below, in the rest
        try:
            until(lambda: not self.client.services(), "services do not go down", 60.0)
            folders = self.home.load_balancers
            until(lambda: not list(folders.glob("*/agent.json")), "load balancers do not end", 30.0)
        finally:
            pid = self.client.stop()
            until(lambda: not _lives(pid), "the controller does not stop", 30.0)
            until(lambda: not self._supervisors(), "the controller's supervisor does not stop", 30.0)

    def leftovers(self) -> list[str]:
        """Everything of this installation that is still there, as sentences."""
        left = [f"process {p.pid} lives: {' '.join(command)[:200]}" for p, command in self._processes()]
        left += [f"port {port} is open" for port in sorted(self._all_ports()) if _is_open(port)]
        namespaces = Path("/run/netns")
        mine = {record.namespace for f in self.store.folders() if (record := f.record()) and record.namespace}
        left += [f"namespace {name} is there" for name in sorted(mine) if (namespaces / name).exists()]
        left += [
            f"row of {service} replica {number} is {state}"
            for service, number, state in self.rows(
                "SELECT service, id, state FROM replicas WHERE state != 'GONE'"
            )
        ]
        left += [f"instance {folder.token} lives" for folder in self.live_instances()]
        return left

    def _all_ports(self) -> set[int]:
        records = [folder.record() for folder in self.store.folders()]
        endpoints = {port for (port,) in self.rows("SELECT lb_port FROM services")}
        return endpoints | {r.port for r in records if r is not None and r.namespace is None}

    def _processes(self) -> list[tuple[psutil.Process, list[str]]]:
        """Processes that carry this home, or one of its instances, in its arguments or its environment; with its
        arguments."""
        root = str(self.home.root)
        instances = {record.id for folder in self.store.folders() if (record := folder.record())}
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environment, command = process.environ(), process.cmdline()
                if (
                    any(root in word for word in command)
                    or environment.get("SKYSERVE_HOME") == root
                    or environment.get(local_process.INSTANCE_MARK) in instances
                ):
                    found.append((process, command))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _sweep(self) -> None:
        """After a failure, too, the machine is as it was."""
        for process, _ in self._processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def share(part: Collection[object] | int, whole: Collection[object] | int) -> str:
    """ "3 of 400 (0.8 %)"."""
    some = part if isinstance(part, int) else len(part)
    all_of_them = whole if isinstance(whole, int) else len(whole)
    return f"{some} of {all_of_them} ({100 * some / max(1, all_of_them):.1f} %)"
