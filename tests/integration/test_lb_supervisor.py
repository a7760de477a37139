"""The supervisor of an agent on a machine of its own: real processes, in a folder as it is deployed."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.regions.identity import BEATS, Identity
from provisioners.port.commands import CommandOutput, HostConnection
from provisioners.remote.certificates import Authority
from skyserve_cli.controller.agent_files import package_folder, supervisor_file
from skyserve_cli.controller.balancers.bundle import Bundle, agent_bundle, bundle_of
from skyserve_cli.controller.balancers.deploy import Release, arguments_of, deploy
from skyserve_cli.controller.balancers.native_modules import NativeSet, is_helper, own_set

POLLS, POLL_S = 600, 0.05


class Backend(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Machine:
    """A folder with a supervisor in it."""

    def __init__(self, folder: Path, backend: int) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        table = Table("chat", "1", (Target("1", f"http://127.0.0.1:{backend}"),))
        (folder / "table.json").write_text(json.dumps(table.to_json()))
        self.supervisor = subprocess.Popen(
            [sys.executable, supervisor_file()],
            cwd=folder,
            env={**os.environ, "SKYSERVE_LB_TOKEN": "secret"},
            stderr=(folder / "log").open("wb"),
        )

    def release(self, bundle: Bundle, *more: str) -> Release:
        arguments = arguments_of("chat", "west", self.port, has_tls=False)
        return Release(bundle, (*arguments, *more))

    def bring(self, bundle: Bundle) -> None:
        place = self.folder / "bundles" / bundle.version
        place.mkdir(parents=True, exist_ok=True)
        # As the controller unpacks it on a machine; `extractall(filter=)` is missing before Python 3.11.4.
        subprocess.run(["tar", "-xzf", "-", "-C", place], input=bundle.data, check=True)
        (place / "interpreter").write_text(sys.executable + "\n")

    def set_order(self, release: Release) -> None:
        draft = self.folder / "wanted.new"
        draft.write_bytes(release.wanted)
        draft.replace(self.folder / "wanted.json")

    def serving(self) -> dict[str, Any]:
        try:
            told: dict[str, Any] = json.loads((self.folder / "serving.json").read_text())
        except FileNotFoundError:
            return {}
        return told

    def asks(self) -> bytes:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=10) as answer:
                body: bytes = answer.read()
                return body
        except OSError:
            return b""

    def agents(self) -> list[psutil.Process]:
        found = psutil.Process(self.supervisor.pid).children() if self.supervisor.poll() is None else []
        return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        agents = self.agents()
        self.supervisor.send_signal(signal.SIGTERM)
        self.supervisor.wait(30)
        for agent in agents:
            with suppress(psutil.Error):
                agent.kill()


def until(holds: Callable[[], object]) -> None:
    for _ in range(POLLS):
        if holds():
            return
        time.sleep(POLL_S)
    raise AssertionError("it never came true")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = Machine(tmp_path, server.server_port)
    try:
        made.bring(agent_bundle())
        yield made
    finally:
        if made.supervisor.poll() is None:
            made.end()
        server.shutdown()
        server.server_close()


def other_code(folder: Path, line: str) -> Bundle:
    """The bundle of a program in which one file of `lb` is another."""
    changed = folder / "lb"
    shutil.copytree(package_folder("lb"), changed, ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "stream" / "token_usage.py").open("a") as code:
        code.write(f"\n{line}\n")
    return bundle_of([("lb", changed), ("policies", package_folder("policies"))])


@pytest.mark.long
def test_an_agent_is_kept_alive_and_brought_up_to_date_without_a_refused_connection(
    machine: Machine, tmp_path: Path
) -> None:
    first = machine.release(agent_bundle())
    machine.set_order(first)
    until(lambda: machine.serving().get("release") == first.name and machine.asks() == b"ok")

    # It exits: it is started again, with the table that it had.
    pid = machine.serving()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: machine.serving()["pid"] != pid and machine.asks() == b"ok")
    assert (machine.serving()["starts"], machine.serving()["release"]) == (2, first.name)

    # Other code takes over, while someone sends requests all the time.
    refused: list[int] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            if machine.asks() != b"ok":
                refused.append(1)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    bundle = other_code(tmp_path / "other", "# another release")
    machine.bring(bundle)
    second = machine.release(bundle)
    machine.set_order(second)
    until(lambda: machine.serving()["release"] == second.name)
    until(lambda: [one.pid for one in machine.agents()] == [machine.serving()["pid"]])
    over.set()
    client.join()
    assert refused == []
    assert machine.serving()["bundle"] == bundle.version != first.bundle.version

    # Code that does not come up is refused, and what runs goes on.
    broken = other_code(tmp_path / "broken", "raise RuntimeError('broken')")
    machine.bring(broken)
    third = machine.release(broken)
    machine.set_order(third)
    until(lambda: machine.serving()["refused"] == third.name)
    assert (machine.serving()["release"], machine.asks()) == (second.name, b"ok")

    # What runs is started again even then: the code that was refused would serve nothing.
    pid = machine.serving()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: machine.serving()["pid"] not in (pid, None) and machine.asks() == b"ok")
    assert machine.serving()["release"] == second.name

    # And when it is asked to, everything ends.
    until(lambda: machine.serving()["refused"] == third.name)
    agents = machine.agents()
    machine.end()
    assert not any(one.is_running() for one in agents)


def test_a_hangup_is_passed_on_and_has_the_agent_read_its_table_again(machine: Machine) -> None:
    machine.set_order(machine.release(agent_bundle()))
    until(lambda: machine.asks() == b"ok" and "pid" in machine.serving())
    before = machine.serving()["pid"]
    table = json.loads((machine.folder / "table.json").read_text())
    # With no target and no time to wait for one, a request is refused at once.
    (machine.folder / "table.json").write_text(
        json.dumps({**table, "revision": "2", "targets": [], "limits": {"hold_s": 0}})
    )
    machine.supervisor.send_signal(signal.SIGHUP)
    until(lambda: machine.asks() == b"")
    assert machine.supervisor.poll() is None
    assert [one.pid for one in machine.agents()] == [machine.serving()["pid"]] == [before]


def test_no_secret_is_in_a_command_line(machine: Machine) -> None:
    machine.set_order(machine.release(agent_bundle()))
    until(machine.asks)
    (agent,) = machine.agents()
    words = " ".join([*agent.cmdline(), *psutil.Process(machine.supervisor.pid).cmdline()])
    assert "secret" not in words
    assert "--table-file" in words


def test_there_is_no_agent_before_one_is_wanted(machine: Machine) -> None:
    until(lambda: machine.supervisor.poll() is None and not machine.agents())
    assert machine.serving() == {}


def test_the_same_code_is_the_same_bundle_and_other_code_is_not(tmp_path: Path) -> None:
    again = bundle_of((name, package_folder(name)) for name in ("lb", "policies"))
    assert again == agent_bundle()
    assert other_code(tmp_path / "other", "# other").version != agent_bundle().version


def test_a_bundle_has_the_sources_and_names_the_libraries() -> None:
    with tarfile.open(fileobj=io.BytesIO(agent_bundle().data)) as archive:
        names = archive.getnames()
        requirements = archive.extractfile("requirements.txt")
        assert requirements is not None
        lines = requirements.read().decode().splitlines()
    assert {"lb/__main__.py", "policies/routing/gorgo.py"} <= set(names)
    assert all(name.endswith((".py", "requirements.txt")) for name in names)
    assert [line.partition("==")[0] for line in lines] == sorted(
        ["aiohttp", "httptools", "msgspec", "orjson", "prometheus-client", "pyzmq", "uvloop"]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(Release(agent_bundle(), ("a",)), Release(agent_bundle(), ("b",)), id="other arguments"),
        pytest.param(
            Release(agent_bundle(), ("a",), (b"cert", b"key")),
            Release(agent_bundle(), ("a",), (b"cert2", b"key")),
            id="a renewed certificate",
        ),
        pytest.param(
            Release(agent_bundle(), ("a",), None, (b"ca", b"own")),
            Release(agent_bundle(), ("a",), None, (b"ca", b"own2")),
            id="a renewed certificate for peers",
        ),
        pytest.param(Release(agent_bundle(), ("a",)), Release(Bundle("x", b""), ("a",)), id="other code"),
    ],
)
def test_what_makes_a_release(one: Release, other: Release) -> None:
    assert one.name != other.name
    assert one.name == Release(one.bundle, one.arguments, one.tls, one.peers).name
    assert Release(one.bundle, ("a",)).name == Release(one.bundle, ("a",), None, None).name


class _Shell:
    """A machine's shell and files, in a folder here."""

    def put(self, path: str, content: bytes) -> None:
        Path(path).write_bytes(content)

    def run(
        self, script: str, stdin: bytes = b"", timeout_s: float = 60.0, check: bool = True
    ) -> CommandOutput:
        made = subprocess.run(["bash", "-c", script], input=stdin, capture_output=True, timeout=timeout_s)
        assert made.returncode == 0 or not check, made.stderr
        return CommandOutput(made.returncode, made.stdout, made.stderr)


def build_of(machine: Machine) -> Any:
    """Return how the agent runs, by its admin port."""
    port = machine.serving()["admin_port"]
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/-/stats?build=1", headers={"Authorization": "Bearer secret"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)["build"]


NO_MODULES = "there are no native modules for CPython 3.10 on aarch64"


@pytest.mark.parametrize(
    ("helper", "why", "fast_path", "said"),
    [
        pytest.param(None, "", True, "", id="it loads"),
        pytest.param(None, NO_MODULES, True, NO_MODULES, id="the modules do not fit"),
        pytest.param(
            b"not a library", "", False, "the C helper cannot be loaded there: ImportError", id="broken"
        ),
    ],
)
def test_native_files_run_where_they_load_and_else_the_agent_runs_without(
    machine: Machine, helper: bytes | None, why: str, fast_path: bool, said: str
) -> None:
    own = own_set()
    path = next((path for path in own.files if is_helper(path)), None) if own else None
    if own is None or path is None or own.has_modules:
        pytest.skip("this checkout has no helper in C, or more")
    files = {path: own.files[path] if helper is None else helper}
    bundle = replace(
        agent_bundle(NativeSet(own.suffix, files, own.glibc), why), pythons=("no-such-python", sys.executable)
    )
    release = machine.release(bundle)
    deploy(cast("HostConnection", _Shell()), str(machine.folder), release, {})
    until(lambda: machine.serving().get("release") == release.name and machine.asks() == b"ok")
    build = build_of(machine)
    assert (build["kind"], build["fast_path"]) == ("interpreted", fast_path)
    assert build["not_compiled"].startswith(said)
    assert bool(said) == bool(build["not_compiled"])

    # A controller that was killed comes again: what is complete stays as it is, and what is not is made from the beginning.
    place = machine.folder / "bundles" / bundle.version
    again = place / "interpreter"
    before = again.stat().st_ino
    deploy(cast("HostConnection", _Shell()), str(machine.folder), release, {})
    assert again.stat().st_ino == before
    again.unlink()
    (place / "lb" / "half.py").write_text("")
    deploy(cast("HostConnection", _Shell()), str(machine.folder), release, {})
    assert again.read_text() == f"{sys.executable}\n"
    assert not (place / "lb" / "half.py").exists()


def test_an_agent_with_peers_opens_their_port_and_knows_them_by_their_authority(machine: Machine) -> None:
    authority = Authority(bytes(32), "owner", "chat")
    now = datetime.now(UTC)
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    arguments = arguments_of("chat", "west", machine.port, has_tls=False, peers_port=number)
    release = Release(agent_bundle(), arguments, None, (authority.pem, authority.of_agent("west", now)))
    (machine.folder / "table.json").unlink()
    peer = PeerAgent("aws/east#1", "aws/east", "https://127.0.0.1:9", "east")
    table = Table("chat", "1", regions=Regions("aws/west#2", "aws/west", peers=(peer,)))
    deploy(cast("HostConnection", _Shell()), str(machine.folder), release, table.to_json())
    until(lambda: machine.serving().get("release") == release.name)
    own = machine.folder / "east.pem"
    own.write_bytes(authority.of_agent("east", now))
    tls = Identity(machine.folder / "peers-ca.pem", own, time.time).client(BEATS)
    with (
        socket.create_connection(("127.0.0.1", number), timeout=10) as raw,
        tls.wrap_socket(raw, server_hostname="west") as secure,
    ):
        assert secure.version() == "TLSv1.3"
        assert secure.selected_alpn_protocol() == BEATS
        secure.sendall(b"{}\n")
        assert secure.recv(1) == b""  # understood as a beat, and refused as none
