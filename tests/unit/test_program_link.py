"""A program as a connection: it carries bytes, reports its last line, and does not outlive the connection."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from provisioners.remote.proxy_command import ProxyCommand

PATIENCE_S = 30.0


def test_bytes_go_through_the_program() -> None:
    link = ProxyCommand(("cat",))
    link.socket.sendall(b"there and back")
    assert link.socket.recv(100) == b"there and back"
    link.socket.close()


def test_the_last_line_of_a_program_that_failed_is_kept() -> None:
    link = ProxyCommand(("sh", "-c", "echo one >&2; echo 'no such host' >&2; exit 3"))
    assert link.socket.recv(1) == b""
    link.socket.close()
    assert link.said() == "no such host"


@pytest.mark.parametrize("before", ["", "trap '' HUP; "], ids=["as usual", "below nohup"])
def test_closing_ends_a_program_and_its_children_that_ignore_the_end_of_their_input(before: str) -> None:
    link = ProxyCommand(("sh", "-c", f"{before}sleep 600 & echo $!; wait"))
    child = int(link.socket.makefile("rb").readline())
    link.socket.close()
    deadline = time.monotonic() + PATIENCE_S
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_missing_program_is_an_error() -> None:
    with pytest.raises(OSError, match="No such file"):
        ProxyCommand(("/nowhere/tunnel",))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b") ", 1)[1][:1] != b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
