"""The ways to install and to deploy, each as its page says: a `serve` with a home of its own, or a load balancer without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import yaml
from packaging.requirements import Requirement

from benchmarks.router.machine import ask, compiled, free_port
from benchmarks.router.systems import CHECKOUT
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.controller.balancers.bundle import LIBRARIES
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.clouds.vms.wheels import wheelhouse

_READY_S = 300.0
_LOOK_S = 0.5
_TOKEN = "installs"
_Found = TypeVar("_Found")
_LOGIN = Keys(bytes(range(32)), "the user").login("installs")
_SERVICE = """
service:
  readiness_probe: {path: /health, initial_delay_seconds: 120}
  replicas: 1
resources: {}
run: exec ./engine --at $SKYSERVE_REPLICA_PORT
"""


@dataclass(frozen=True)
class Started:
    """A load balancer that responds. `build` is its own report of how it runs (`lb.config.stats.Build`)."""

    address: str
    port: int
    agents: list[int]  # the pids of its processes
    engines: list[int]
    build: Mapping[str, Any]
    has_tls: bool  # to its replicas


@dataclass
class Serve:
    """An installed `serve`, and a home."""

    program: Path
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"  # where local load balancers listen

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        first = free_port()
        listen = {"host": self.host, "first_port": first, "last_port": first + 9}
        self.config["load_balancer"] = listen
        (self.home / "config.yaml").write_text(yaml.safe_dump(self.config))

    def __call__(self, *words: str | Path) -> str:
        done = subprocess.run(
            [self.program, *words],
            env={**os.environ, "SKYSERVE_HOME": str(self.home), "NO_COLOR": "1"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"serve {' '.join(map(str, words))}: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    @contextmanager
    def serving(self, **changes: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """A service whose replica is the mock engine: its endpoint, and the view of its load balancer."""
        body = yaml.safe_load(_SERVICE)
        body["resources"] |= changes.pop("resources", {"infra": "local"})
        body["service"] |= changes
        place = self.folder / "service"
        place.mkdir(exist_ok=True)
        body["workdir"] = str(place)
        shutil.copy(compiled("backend"), place / "engine")
        (place / "service.yaml").write_text(yaml.safe_dump(body))
        try:
            endpoint = self("up", place / "service.yaml", "-y", "--name", "measured").strip().splitlines()[-1]
            yield endpoint, self._balancer()
        finally:
            with suppress(RuntimeError):
                self("down", "--all", "--purge", "-y", "--timeout", "60")
            with suppress(RuntimeError):
                self("controller", "stop")

    def _balancer(self) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            (view,) = json.loads(self("status", "measured", "-o", "json"))
            one: dict[str, Any] | None = (view["load_balancers"] or [view["load_balancer"]])[0]
            return one if one and one.get("build") else None

        return until(look)


def until(look: Callable[[], _Found | None]) -> _Found:
    """Return what it finds. Raises TimeoutError."""
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(_LOOK_S)
    raise TimeoutError(f"nothing after {_READY_S:.0f} s")


# --- installations


def checkout_copy(folder: Path) -> Path:
    """The files of the last commit and what has changed since, as after `git clone`."""
    names = subprocess.run(
        ["git", "-C", CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = CHECKOUT / os.fsdecode(name), folder / os.fsdecode(name)
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def installed(folder: Path, *words: str, native: bool = True) -> Path:
    """`pip install` of a copy of this checkout into a virtual environment of its own; return its `serve`."""
    copy = checkout_copy(folder / "checkout")
    python = os.environ.get("PYTHON", "python3")
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    environment = {**os.environ, **({} if native else {"SKYSERVE_NATIVE": "0"})}
    pip: list[str | Path] = [
        folder / "venv/bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, *words], cwd=copy, env=environment, check=True, stderr=subprocess.DEVNULL)
    return folder / "venv/bin/serve"


def quickstart(folder: Path) -> Path:
    """`quickstart.sh` of a copy of this checkout, whose own service is ended; return its `serve`."""
    copy = checkout_copy(folder / "checkout")
    home = folder / "quickstart-home"
    environment = {**os.environ, "SKYSERVE_HOME": str(home)}
    subprocess.run(["./quickstart.sh"], cwd=copy, env=environment, check=True, capture_output=True)
    program = copy / ".venv/bin/serve"
    for words in (["down", "--all", "-y"], ["controller", "stop"]):
        subprocess.run([program, *words], cwd=copy, env=environment, check=True, capture_output=True)
    return program


# --- starts


@contextmanager
def local(program: Path, folder: Path) -> Iterator[Started]:
    """`serve up` on this machine."""
    serve = Serve(program, folder)
    with serve.serving() as (endpoint, balancer):
        agents = [
            one.pid for one in psutil.process_iter() if _is_agent(one) and str(serve.home) in _words(one)
        ]
        yield _started(endpoint, agents, _engines(folder), balancer, has_tls=False)


@contextmanager
def alone(program: Path, folder: Path) -> Iterator[Started]:
    """`python -m lb` with a target, as in a container without a controller."""
    folder.mkdir()
    token, port = folder / "token", free_port()
    token.write_text(_TOKEN)
    engine = subprocess.Popen([compiled("backend"), "1"], stdout=subprocess.PIPE, cwd=folder)
    assert engine.stdout is not None
    target = json.loads(engine.stdout.readline())["ports"][0]
    words = ["--port", str(port), "--target", f"http://127.0.0.1:{target}", "--admin-token-file", str(token)]
    log = (folder / "log").open("wb")
    agent = subprocess.Popen(
        [program.with_name("python"), "-m", "lb", *words], stdout=log, stderr=log, cwd=folder
    )
    try:
        build = until(lambda: _own_report(folder / "log"))
        yield _started(f"http://127.0.0.1:{port}", [agent.pid], [engine.pid], {"build": build}, has_tls=False)
    finally:
        for one in (agent, engine):
            one.terminate()
            one.wait(30)


@contextmanager
def host(**image: Any) -> Iterator[tuple[Vm, Path]]:
    """A machine of one's own with sshd and a Python, and a folder with what `ssh` needs to come in."""
    with VmWorld() as world:
        folder = Path(tempfile.mkdtemp(prefix="installs-host-"))
        wheels = wheelhouse(folder / "wheels", image.pop("libraries", LIBRARIES))
        vm = world.boot("h1", logins={"me": _LOGIN.public}, wheels=wheels, **image)
        until(lambda: "Server listening" in vm.console())
        kind, key, *_ = vm.run("cat /etc/ssh/ssh_host_ed25519_key.pub").split()
        (folder / "known_hosts").write_text(f"{vm.address} {kind} {key}\n")
        (folder / "id").write_text(_LOGIN.private)
        (folder / "id").chmod(0o600)
        try:
            yield vm, folder
        finally:
            shutil.rmtree(folder)


@contextmanager
def region(program: Path, folder: Path) -> Iterator[Started]:
    """A load balancer in a region that is a host of one's own, beside its replica."""
    with host(gpus=1) as (vm, keys):
        pool = {
            "user": "me",
            "identity_file": str(keys / "id"),
            "known_hosts": str(keys / "known_hosts"),
            "hosts": [{"name": vm.name, "address": vm.address, "accelerators": {"L4": 1}}],
        }
        serve = Serve(program, folder, {"clouds": {"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}}})
        place = {"infra": "ssh", "accelerators": "L4:1"}
        with serve.serving(resources=place, load_balancers={"regions": "ssh/rack"}) as (endpoint, balancer):
            yield _started(endpoint, *_of_machine(vm), balancer, has_tls=True)


@contextmanager
def deployed(program: Path, folder: Path, systemctl: str) -> Iterator[Started]:
    """`serve controller deploy` to another host, and a service on that host."""
    names = _requirements()
    with host(libraries=names, disk_mb=3000) as (vm, keys):
        vm.run("mkdir -p /run/systemd/system; ln -s /bin/true /usr/local/bin/loginctl")
        vm.run(f"cat >/usr/local/bin/systemctl <<'END'\n{systemctl}\nEND\nchmod +x /usr/local/bin/systemctl")
        serve = Serve(program, folder, host="0.0.0.0")
        login: list[str | Path] = ["--identity", keys / "id", "--known-hosts", keys / "known_hosts"]
        serve(
            "controller",
            "deploy",
            f"ssh/me@{vm.address}",
            *login,
            "--python",
            "/usr/bin/python3",
            "--context",
            "there",
        )
        serve("context", "use", "there")
        with serve.serving() as (endpoint, balancer):
            at = f"http://{vm.address}:{urlsplit(endpoint).port}"
            yield _started(at, *_of_machine(vm), balancer, has_tls=False)


# --- inside


def _started(
    endpoint: str, agents: list[int], engines: list[int], balancer: Mapping[str, Any], *, has_tls: bool
) -> Started:
    found = urlsplit(endpoint)
    if not agents or not engines or not found.hostname or not found.port:
        raise RuntimeError(f"{endpoint}: load balancers {agents}, engines {engines}")
    return Started(found.hostname, found.port, agents, engines, balancer["build"], has_tls)


def _own_report(log: Path) -> dict[str, Any] | None:
    """Return an agent's own build, once it has printed its ports."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{") and '"admin_port"' in line]
    if not lines:
        return None
    port = int(json.loads(lines[0])["admin_port"])
    _, text = ask(port, "GET", "/-/stats?window_s=60&build=1", headers={"Authorization": f"Bearer {_TOKEN}"})
    build: dict[str, Any] = json.loads(text)["build"]
    return build


def _requirements() -> list[str]:
    """The distributions that `serve` needs."""
    needs = map(Requirement, requires("skyserve") or ())
    return [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _is_agent(process: psutil.Process) -> bool:
    return " -m lb " in f"{_words(process)} "


def _engines(folder: Path) -> list[int]:
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.name() == "engine" and str(folder) in one.environ().get("SKYSERVE_HOME", one.cwd()):
                found.append(one.pid)
    return found


def _of_machine(vm: Vm) -> tuple[list[int], list[int]]:
    """The pids, here, of the load balancers and of the engines in the machine's network."""
    listed = subprocess.run(["ip", "netns", "pids", vm.namespace], capture_output=True, text=True, check=True)
    processes = [psutil.Process(int(pid)) for pid in listed.stdout.split() if psutil.pid_exists(int(pid))]
    return (
        [one.pid for one in processes if _is_agent(one)],
        [one.pid for one in processes if _words(one).startswith("./engine ")],
    )
