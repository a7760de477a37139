"""What `serve why` reads beside the status: where processes listen, the end of a log, the endpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from skyserve_cli.causes.facts import Address
from skyserve_cli.commands import why
from skyserve_cli.commands import why as where
from skyserve_cli.commands.sentences import why_hint
from skyserve_cli.commands.status_tables import tables
from skyserve_cli.commands.why import address_of, listening, listening_there, log_tail, parsed
from skyserve_cli.controller.api.client import ControllerDownError, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError, Waiting
from skyserve_cli.output import CommandFailed, WrongUsage
from tests.unit.test_cmd_status import replica, service, shown

LISTENER = """
import socket, sys
for port in range(21000, 30000):
    server = socket.socket()
    try:
        server.bind(("127.0.0.1", port))
        break
    except OSError:
        server.close()
server.listen()
print(port, flush=True)
sys.stdin.read()
"""


def test_a_service_or_one_of_its_replicas_is_named() -> None:
    assert (parsed("chat"), parsed("chat/3")) == (("chat", None), ("chat", 3))
    for wrong in ("chat/", "chat/x", "chat/-1", "chat/3/0"):
        with pytest.raises(WrongUsage, match="as in chat/3"):
            parsed(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_the_processes_of_a_replica_listen() -> None:
    name = f"chat-{os.getpid()}"  # no other on this machine
    own = {"SKYSERVE_SERVICE": name, "SKYSERVE_REPLICA_ID": "3", "SKYSERVE_REPLICA_PORT": "20001"}
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}
    ) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        port = int(one.stdout.readline())
        assert listening(name, 3, 20001) == [Address("127.0.0.1", port)]
        assert listening(name, 3, None) == [Address("127.0.0.1", port)]
        assert listening(name, 4, 20001) == listening("other", 3, 20001) == listening(name, 3, 20002) == []
        one.stdin.close()


class Sessions:
    """A client whose sessions run here, or are refused."""

    def __init__(self, refused: Exception | None = None) -> None:
        self.waiting = Waiting()
        self._refused = refused

    def session(self, service: str, replica_id: int, *, node: int = 0) -> None:
        if self._refused is not None:
            raise self._refused


def run_here(link: object, script: str, *, out: Callable[[bytes], object], **_: object) -> int:
    out(subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout)
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_a_replica_on_a_machine_listens_at_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, "relay", run_here)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)):
        port = server.getsockname()[1]
        there: Any = Sessions()
        assert listening_there(there, "chat", 3, port) == [Address("127.0.0.1", port)]
    assert listening_there(there, "chat", 3, port) == []


@pytest.mark.parametrize("refused", [RefusedError(403, "no"), ControllerDownError("gone"), DeadlineError("late"), CommandFailed("lost")])  # fmt: skip
def test_a_session_that_cannot_be_opened_shows_nothing(refused: Exception) -> None:
    there: Any = Sessions(refused)
    assert listening_there(there, "chat", 3, 8080) == []


@pytest.mark.parametrize(
    ("written", "address", "is_loopback"),
    [
        ("0100007F:1F90", "127.0.0.1:8080", True),
        ("00000000:1F90", "0.0.0.0:8080", False),
        ("00000000000000000000000001000000:0050", "[::1]:80", True),
        ("00000000000000000000000000000000:0050", "[::]:80", False),
        ("0000000000000000FFFF00000100007F:1F90", "127.0.0.1:8080", True),
    ],
)
def test_addresses_of_the_kernel(written: str, address: str, is_loopback: bool) -> None:
    found = address_of(written)
    assert (str(found), found.is_loopback) == (address, is_loopback)


class Client:
    """One whose log is `content`, or an error."""

    def __init__(self, content: bytes | Exception) -> None:
        self.waiting = Waiting()
        self._content = content
        self.asked: list[tuple[str, int, float]] = []

    def log(self, what: str, *, offset: int = 0) -> tuple[bytes, int]:
        self.asked.append((what, offset, self.waiting.allowance(30.0)))
        if isinstance(self._content, Exception):
            raise self._content
        return self._content, 0


@pytest.mark.parametrize(
    ("content", "read"),
    [
        pytest.param(b"a\n" * 10, b"a\n" * 10, id="a short one"),
        pytest.param(b"a" * 100_000, b"a" * 65536, id="of a controller that sends it from its beginning"),
        pytest.param(RefusedError(404, "no log"), b"", id="none is kept"),
        pytest.param(ControllerDownError("gone"), b"", id="no controller any more"),
        pytest.param(DeadlineError("not in time"), b"", id="its machine does not respond in time"),
    ],
)
def test_the_end_of_a_log_is_read_within_a_time(content: Any, read: bytes) -> None:
    client = Client(content)
    assert log_tail(client, "replica/chat/3") == read  # type: ignore[arg-type]
    ((what, offset, allowed_s),) = client.asked
    assert (what, offset) == ("replica/chat/3", -65536)
    assert allowed_s <= why.LOG_S + 1.0


@pytest.mark.parametrize(
    ("status", "state", "message", "is_hinted"),
    [
        ("REPLICA_INIT", "STARTING", "waiting for the readiness probe: Connection refused", True),
        ("REPLICA_INIT", "STARTING", "", False),
        ("READY", "READY", "maintenance of its machine is announced", False),
        ("SHUTTING_DOWN", "TERMINATING", "the service goes down", False),
    ],
)
def test_the_note_of_a_service_without_a_ready_replica(
    status: str, state: str, message: str, is_hinted: bool
) -> None:
    view = service(replica(1, "spot", state, message=message)) | {"status": status}
    assert tables([view], 0.0, wide=False)
    assert (f"chat: {why_hint('chat')}" in shown(view)) == is_hinted
