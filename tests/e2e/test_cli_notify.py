"""Notifications of a real controller: its receiver and itself are killed, none is lost, and no secret is written anywhere."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from standardwebhooks.webhooks import Webhook

KEY = base64.b64encode(b"a key that nobody may read 123456").decode()
PATH = "hook-that-is-a-secret"

#: Appends every request to a file, and responds once it is there.
RECEIVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps([self.path, headers, body]) + "\\n")
            file.flush()
            os.fsync(file.fileno())
        self.send_response(204)
        self.end_headers()

    do_GET = lambda self: self.send_error(404)
    log_message = lambda *rest: None

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

FAILING = "name: {name}\nservice: {{readiness_probe: /health, replicas: 1}}\nresources: {{infra: local}}\nrun: exit 1\n"


class Receiver:
    """A receiver on one port, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.file = folder / "received"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", RECEIVER, str(self.port), str(self.file)])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def messages(self) -> list[dict[str, Any]]:
        """What has arrived, in order; each has a good signature."""
        found = []
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            path, headers, body = json.loads(line)
            assert path == f"/{PATH}"
            found.append(Webhook(KEY).verify(body, headers))
        return found

    def has(self, service: str, status: str) -> bool:
        return any((m["service"], m["status"]) == (service, status) for m in self.messages())


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path)
    yield receiver
    receiver.kill()


def waiting(home: Path) -> list[str]:
    """The services whose notifications are in the outbox."""
    with sqlite3.connect(f"file:{home / 'state.db'}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT message FROM outbox ORDER BY seq").fetchall()
    return [json.loads(row[0])["service"] for row in rows]


def kill_controller(serve: Any) -> None:
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        process = psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"])
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_notification_is_lost_when_receiver_and_controller_are_killed(
    serve: Any, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "address").write_text(f"http://127.0.0.1:{receiver.port}/{PATH}\n")
    (tmp_path / "key").write_text(f"whsec_{KEY}\n")
    heard = tmp_path / "heard"
    with (serve.home / "config.yaml").open("a") as config:
        config.write(
            f"notify:\n- {{name: ops, webhook_file: {tmp_path}/address, secret_file: {tmp_path}/key, kinds: [version_given_up]}}\n"
            f"- {{name: script, command: 'echo $SKYSERVE_SERVICE $SKYSERVE_STATUS >> {heard}', kinds: [version_given_up]}}\n"
        )
    refused = serve("notify", "test", "ops")
    assert refused.code == 1
    assert "ops: Connection refused" in refused.err

    for name in ("first", "second"):  # the receiver is away
        (tmp_path / f"{name}.yaml").write_text(FAILING.format(name=name))
        assert serve("up", tmp_path / f"{name}.yaml", "-y").code == 1
        serve.eventually(lambda name=name: name in waiting(serve.home))
    serve.eventually(
        lambda: waiting(serve.home) == ["first", "second"]
    )  # the commands have run, the receiver's wait
    kill_controller(serve)
    assert waiting(serve.home) == ["first", "second"]
    receiver.start()  # the supervisor starts the controller again
    serve.eventually(lambda: receiver.has("first", "begins") and receiver.has("second", "begins"))
    serve.eventually(lambda: not waiting(serve.home))

    receiver.kill()
    serve.ok("down", "first", "--purge", "-y")
    serve.eventually(lambda: waiting(serve.home) == ["first"])
    receiver.start()
    kill_controller(serve)
    serve.eventually(lambda: receiver.has("first", "over"))
    serve.eventually(lambda: not waiting(serve.home))

    by_id = {message["id"]: message for message in receiver.messages()}
    assert sorted((m["service"], m["kind"], m["status"]) for m in by_id.values()) == [
        ("first", "version_given_up", "begins"),
        ("first", "version_given_up", "over"),
        ("second", "version_given_up", "begins"),
    ]
    assert set(heard.read_text().splitlines()) == {"first begins", "second begins", "first over"}
    assert "confirmed" in serve.ok("notify", "test").err
    written = [path for path in serve.home.rglob("*") if path.is_file() and path.suffix != ".sock"]
    assert any(path.name == "controller.log" for path in written)
    for path in written:
        content = path.read_bytes()
        assert PATH.encode() not in content, path
        assert KEY.encode() not in content, path


def test_wrong_destinations_are_named(serve: Any) -> None:
    assert "no destination" in serve("notify", "test").err
    with (serve.home / "config.yaml").open("a") as config:
        config.write("notify: [{name: ops, command: 'echo no room; exit 3'}]\n")
    said = serve("notify", "test", "oops")
    assert (said.code, said.err) == (2, "notify: there is no destination oops, only ops\n")
    said = serve("notify", "test")
    assert said.code == 1
    assert "ops: exit code 3: no room" in said.err
