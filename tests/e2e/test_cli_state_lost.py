"""The database is deleted, or an older one put in its place, under a controller that serves: nothing is launched, forgotten or lost."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.e2e.conftest import Serve

STATE_LOST = 4
FILE = """
name: chat
service:
  readiness_probe: /health
  replica_policy: {min_replicas: REPLICAS}
resources: {infra: local, use_spot: true}
run: exec serve engine --profile a100-7b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def up(serve: Serve, folder: Path, verb: str, replicas: int) -> str:
    file = folder / "chat.yaml"
    file.write_text(FILE.replace("REPLICAS", str(replicas)))
    serve.ok(verb, *(("chat",) if verb == "update" else ()), file, "-y")
    return str(serve.view("chat")["endpoint"])


def ready(serve: Serve) -> list[int]:
    return sorted(one["id"] for one in serve.view("chat")["replicas"] if one["state"] == "READY")


def delete(home: Path) -> None:
    for end in ("", "-wal", "-shm"):
        (home / f"state.db{end}").unlink(missing_ok=True)


def test_a_deleted_database_is_noticed_saved_and_restored(serve: Serve, tmp_path: Path) -> None:
    endpoint = up(serve, tmp_path, "up", 2)
    delete(serve.home)
    serve.eventually(lambda: serve("status").code == STATE_LOST)
    looked = serve("status")
    assert looked.err.startswith("this controller must not lead: ")
    assert "state.db was deleted while the controller ran" in looked.err.splitlines()[0]
    assert "chat" in looked.out  # what it knew
    serve.ok("local", "preempt", "chat/1")
    assert "must not lead" in serve("down", "chat", "-y").err

    serve.ok("controller", "stop")
    (saved,) = (serve.home / "backups").glob("rescued-*.db")
    refused = serve("controller", "start")
    assert refused.code == STATE_LOST
    assert f"serve controller restore {saved} --force` restores the state as it was last" in refused.err
    assert serve("status").code == STATE_LOST
    assert not (serve.home / "state.db").exists()
    with urlopen(f"{endpoint}/v1/models", timeout=10.0) as response:
        assert response.status == 200

    serve.ok("controller", "restore", saved, "--force")
    serve.ok("controller", "start")
    serve.eventually(lambda: len(ready(serve)) == 2 and 2 in ready(serve))  # 1 was preempted
    assert "nothing is left over" in serve.ok("gc", "--dry-run").err


def test_machines_of_a_database_that_is_given_up_are_listed(serve: Serve, tmp_path: Path) -> None:
    up(serve, tmp_path, "up", 2)
    serve.ok("controller", "stop")
    delete(serve.home)
    assert serve("controller", "start").code == STATE_LOST
    adopted = serve.ok("controller", "adopt")
    assert "`serve gc` lists them" in adopted.err
    serve.ok("controller", "start")
    found = serve.ok("gc", "--dry-run", "-o", "json").json()["found"]
    assert [(one["part"], one["service"]) for one in found] == [("instance", "chat")] * 2
    serve.ok("gc", "-y")
    assert serve.ok("gc", "--dry-run", "-o", "json").json()["found"] == []
    # The controller ends the load balancer of the service that it does not have.
    serve.eventually(lambda: not any("lb" in words for words in serve.commands().values()))


def test_an_older_copy_is_refused_and_adopts_what_was_launched_since(serve: Serve, tmp_path: Path) -> None:
    up(serve, tmp_path, "up", 1)
    older = tmp_path / "older.db"
    with closing(sqlite3.connect(serve.home / "state.db")) as now, closing(sqlite3.connect(older)) as copy:
        now.backup(copy)
    serve.ok("down", "chat", "--replica-id", "1", "-y")
    serve.eventually(lambda: ready(serve) == [2])
    engine = engines(serve)
    serve.ok("controller", "stop")
    delete(serve.home)
    older.rename(serve.home / "state.db")
    refused = serve("controller", "start")
    assert refused.code == STATE_LOST
    assert "the database is older than the one that this home had" in refused.err
    serve.ok("controller", "adopt")
    serve.ok("controller", "start")
    serve.eventually(lambda: ready(serve) == [2])
    assert engines(serve) == engine
    assert json.loads((serve.home / "known_state.json").read_text())["former"] == []


def engines(serve: Serve) -> list[Any]:
    return [one["endpoint"] for one in serve.view("chat")["replicas"] if one["state"] == "READY"]
