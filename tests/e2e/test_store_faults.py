"""The state cannot be written for a while: the disk of the home is full, or the database is away.

Requests are served all the time. Commands say what is wrong in one sentence, and the replica that was lost meanwhile is
replaced as soon as the state can be written again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from tests.e2e.conftest import Serve, living_in
from tests.integration.delaying_relay import DelayingRelay
from tests.integration.postgres_server import PostgresServer, postgres_server

pytestmark = pytest.mark.long

#: How long the state is away: short in a test, longer when someone measures.
AWAY_S = float(os.environ.get("SKYSERVE_TEST_AWAY_S", "3"))
HOME_BYTES = 3 << 20

FILE = """
name: chat
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def kill_engine(serve: Any, replica: int) -> None:
    """End the replica's processes, as its machine's loss does."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get("SKYSERVE_REPLICA_ID") == str(replica) and str(serve.home) in environment.get(
                "PWD", ""
            ):
                process.kill()


def ids(serve: Any) -> dict[int, str]:
    return {one["id"]: one["state"] for one in serve.view("chat")["replicas"]}


def store_of(serve: Any) -> dict[str, Any]:
    health = serve.ok("controller", "status", "-o", "json").json()
    return dict(health["store"])


def insist_on_serving(endpoint: str) -> None:
    with urllib.request.urlopen(f"{endpoint}/v1/models", timeout=30) as response:
        assert response.status == 200


def insist_it_is_told(serve: Any, file: Path, take_away: Callable[[], None] = lambda: None) -> None:
    """What a user sees while the state cannot be written. `take_away` does so again, if it may have come back by itself."""
    seen: list[dict[str, Any]] = []

    def is_told() -> bool:
        take_away()
        seen.append(store_of(serve))
        return not seen[-1]["ok"]

    serve.eventually(is_told)
    assert seen[-1]["why"]
    assert seen[-1]["since"] > 0
    take_away()
    said = serve("update", "chat", file, "--env", "CHANGED=1", "-y", "--no-wait")
    assert said.code == 1
    assert "cannot read or write its state" in said.err
    assert not re.search(r"\b500\b", said.err)  # a port may contain these digits
    assert "Traceback" not in said.err


def insist_on_a_quiet_log(serve: Any) -> None:
    text = (serve.home / "logs" / "controller.log").read_text()
    lines = text.splitlines()
    assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:4000]
    assert 1 <= sum("cannot be read or written" in line for line in lines) <= 4


def insist_on_a_replacement(serve: Any) -> None:
    """Printed for measurements: how long it took from the return of the state."""
    began = time.monotonic()
    serve.eventually(lambda: sorted(ids(serve).values()) == ["READY", "READY"] and max(ids(serve)) >= 3)
    print(f"a lost replica was replaced {time.monotonic() - began:.1f} s after the state was back")
    assert store_of(serve)["ok"]


# --- a full disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Serve]:
    """A home on a file system of its own of 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    home = tmp_path / "home"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={HOME_BYTES},mode=700", "none", str(home)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.strip()}")
    try:
        with _no_new_folder(home):
            yield from living_in(tmp_path)
    finally:
        subprocess.run(["umount", "--lazy", str(home)], check=True)


@contextmanager
def _no_new_folder(home: Path) -> Iterator[None]:
    """`living_in` makes the folder of the home, which is there."""
    kept, Path.mkdir = (
        Path.mkdir,
        lambda path, *more, **named: kept(path, *more, **{**named, "exist_ok": True}),
    )
    try:
        yield
    finally:
        Path.mkdir = kept


def test_a_full_disk(small_home: Serve, tmp_path: Path) -> None:
    serve = small_home
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    endpoint = serve.ok("up", file, "-y").out.strip()
    junk = serve.home / "junk"

    def fill() -> None:
        """To the last page, and again: the programs of the home remove files of their own, too."""
        with suppress(OSError), junk.open("ab", buffering=0) as out:
            while True:
                out.write(b"x" * 4096)

    fill()
    try:
        kill_engine(serve, 1)
        insist_it_is_told(serve, file, fill)
        first = serve("status").err.splitlines()[0]
        assert "cannot read or write its state (database or disk is full)" in first
        time.sleep(AWAY_S)
        insist_on_serving(endpoint)
    finally:
        junk.unlink()
    insist_on_a_replacement(serve)
    insist_on_serving(endpoint)
    insist_on_a_quiet_log(serve)
    owner_of_rows = json.loads(serve.ok("status", "-o", "json").out)
    assert [one["name"] for one in owner_of_rows] == ["chat"]


# --- a database that is away -----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    outer = Path(tmp_path_factory.mktemp("postgres"))
    folder = Path("/tmp") / f"skyserve-postgres-{os.getpid()}"
    folder.mkdir(mode=0o755)
    (folder / "server").mkdir()
    try:
        with postgres_server(folder / "server") as running:
            yield running
    finally:
        shutil.rmtree(folder)
        outer.rmdir()


def test_a_database_that_is_away(server: PostgresServer, tmp_path: Path) -> None:
    life = living_in(tmp_path)
    serve = next(life)
    serve.environment["SKYSERVE_DB"] = server.url
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    endpoint = serve.ok("up", file, "-y").out.strip()
    server.stop()
    kill_engine(serve, 1)
    insist_it_is_told(serve, file)
    said = serve("status")
    assert (said.code, said.out) == (1, ""), "no state is claimed"
    assert len(said.err.strip().splitlines()) == 1
    time.sleep(AWAY_S)
    insist_on_serving(endpoint)
    server.start()
    insist_on_a_replacement(serve)
    insist_on_a_quiet_log(serve)
    serve.ok("down", "--all", "--purge", "-y")
    serve.ok("controller", "stop")
    assert serve.processes() == []
    assert next(life, None) is None


# --- a database that is slow -------------------------------------------------------------------------------------

DELAY_S = 2.0
SLOW = re.compile(
    r"its database postgresql\+psycopg://postgres@127\.0\.0\.1:\d+/postgres responds slowly or not at all, for \d+"
)


def insist_on_a_deadline(said: Any) -> None:
    """One line while it waits and one at the end, both with the reason, and no more."""
    assert (said.code, said.out) == (124, ""), said
    (end,) = said.err.strip().splitlines()
    assert [wait.startswith("waiting for the controller: ") for wait in said.waits] == [True]
    assert SLOW.search(said.waits[0])
    assert SLOW.search(end)
    assert "within 4 s" in end
    assert "services keep serving" in end


def test_a_slow_database(server: PostgresServer, tmp_path: Path) -> None:
    relay = DelayingRelay(server.port)
    life = living_in(tmp_path)
    serve = next(life)
    serve.environment["SKYSERVE_DB"] = server.url.replace(str(server.port), str(relay.port))
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    endpoint = serve.ok("up", file, "-y").out.strip()
    serve.ok("status")  # which the controller has in memory from now on
    relay.delay(DELAY_S)
    time.sleep(3 * DELAY_S)
    said = serve.ok("status")
    assert re.search(r"as of \d+s ago: " + SLOW.pattern, said.err)
    assert "2/2" in said.out
    insist_on_a_deadline(serve("--timeout", "4", "status", "--all"))
    insist_on_a_deadline(serve("events", env={"SKYSERVE_TIMEOUT": "4"}))
    insist_on_serving(endpoint)
    stopped = serve("controller", "stop")
    assert (stopped.code, stopped.out) == (0, "")
    stops = re.compile(r"its process \d+ has been stopping for \d+s: ")
    assert any(stops.search(wait) for wait in stopped.waits), stopped
    started = serve("--timeout", "4", "controller", "start")
    assert started.code == 124
    assert re.search(r"its process \d+ has been opening its database postgresql", started.err), started
    assert "within 4 s" in started.err
    insist_on_serving(endpoint)
    relay.delay(0.0)
    serve.eventually(lambda: serve("status", "chat").code == 0)
    assert [event for event in serve.ok("events", "-o", "json").out.splitlines() if "DOWN" in event] == []
    serve.ok("down", "--all", "--purge", "-y")
    serve.ok("controller", "stop")
    relay.close()
    assert serve.processes() == []
    assert next(life, None) is None


def test_a_change_is_given_up_whole_at_its_deadline(server: PostgresServer, tmp_path: Path) -> None:
    """A row that is locked, as by another program: the change waits for it until the deadline, and is not made afterwards."""
    life = living_in(tmp_path)
    serve = next(life)
    serve.environment["SKYSERVE_DB"] = server.url
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    serve.ok("up", file, "-y")
    engine = sa.create_engine(server.url)
    with engine.begin() as c:
        c.exec_driver_sql("lock table services in exclusive mode")  # which may be read
        said = serve("--timeout", "5", "down", "chat", "-y")
    engine.dispose()
    assert said.code == 124, said
    assert "chat: the controller has not done this within 5 s" in said.err
    assert "nothing was changed" in said.err
    time.sleep(2.0)  # what it waited for has been there since
    assert serve.view("chat")["status"] == "READY"
    serve.ok("down", "--all", "--purge", "-y")
    serve.ok("controller", "stop")
    assert serve.processes() == []
    assert next(life, None) is None
