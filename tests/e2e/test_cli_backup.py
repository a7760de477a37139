"""Keys are rotated and a home is restored while its service goes on."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import only_long

pytestmark = pytest.mark.long

FILE = """
name: chat
service: {readiness_probe: /health, replicas: 1}
resources: {infra: local}
secrets: {TOKEN: hunter2}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def replicas(serve: Any) -> list[tuple[int, str]]:
    return [(one["id"], one["state"]) for one in serve.view("chat")["replicas"]]


def endpoint_of(serve: Any) -> str:
    (replica,) = serve.view("chat")["replicas"]
    return str(replica["endpoint"])


@only_long  # a minute; test_controller_adoption decides the same without processes
def test_a_replica_launched_after_the_backup_is_adopted(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("correct horse\n")
    sealed = ("--passphrase-file", passphrase)
    serve.ok("up", file, "-y")
    backup = tmp_path / "backup"
    said = serve.ok("controller", "backup", backup, *sealed)
    assert "rows" in said.err
    assert serve("controller", "backup", backup, *sealed).code == 1

    serve.ok("down", "chat", "--replica-id", "1", "-y")
    serve.eventually(lambda: replicas(serve) == [(2, "READY")])
    engine = endpoint_of(serve)
    running = serve("controller", "restore", backup, *sealed, "--force")
    assert (running.code, "serve controller stop" in running.err) == (1, True)

    serve.ok("controller", "stop")
    for name in ("state.db", "state.db-wal", "state.db-shm", "sealing.key", "machines.key", "config.yaml"):
        (serve.home / name).unlink(missing_ok=True)
    restored = serve.ok("controller", "restore", backup, *sealed)
    assert "1 services" in restored.err
    serve.ok("controller", "start")
    serve.eventually(lambda: (2, "READY") in replicas(serve) and len(replicas(serve)) == 1)
    assert endpoint_of(serve) == engine
    serve.eventually(lambda: not (serve.home / "restored.json").exists())
    assert "launched after the backup" in serve.ok("events", "chat").out

    serve.ok("down", "chat", "--replica-id", "2", "-y")
    serve.eventually(
        lambda: [state for _, state in replicas(serve)] == ["READY"] and replicas(serve)[0][0] != 2
    )
    assert replicas(serve)[0][0] > 1000


def test_keys_are_rotated_under_a_running_service(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(FILE)
    serve.ok("up", file, "-y")
    token, key = ((serve.home / name).read_bytes() for name in ("controller.token", "sealing.key"))
    said = serve.ok("controller", "rotate")
    assert "1 version sealed again" in said.err
    assert "controller started" in said.err
    assert token != (serve.home / "controller.token").read_bytes()
    assert key != (serve.home / "sealing.key").read_bytes()
    with urllib.request.urlopen(f"{serve.view('chat')['endpoint']}/v1/models", timeout=30) as response:
        assert response.status == 200
    # The same secrets under the new key are no change, so the replica stays.
    serve.ok("update", "chat", file, "-y")
    assert replicas(serve) == [(1, "READY")]


def test_files_of_the_home_are_private_and_those_of_replicas_as_the_user_wants(
    serve: Any, tmp_path: Path
) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(FILE.replace("run: serve", "run: touch made; umask; serve"))
    before = os.umask(0o022)
    try:
        serve.ok("up", file, "-y")
    finally:
        os.umask(before)
    assert "0022" in serve.ok("logs", "chat", "1").out
    users = serve.home / "local"
    loose = [
        path
        for path in serve.home.rglob("*")
        if not path.is_relative_to(users) and not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert [path.relative_to(serve.home).as_posix() for path in loose] == []
