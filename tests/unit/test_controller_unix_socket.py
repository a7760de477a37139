"""The controller's socket: found whatever the length of its path, and of its owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from skyserve_cli.controller.api import unix_socket


@pytest.mark.parametrize("depth", [1, 40], ids=["a short path", "a path longer than an address may be"])
def test_both_ends_find_each_other(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["folder"] * depth)
    folder.mkdir(parents=True)
    path = folder / "controller.sock"
    with unix_socket.bound(path) as listener:
        listener.listen()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with unix_socket.connected(path, 5.0) as one:
            other, _ = listener.accept()
            one.sendall(b"hello")
            with other:
                assert other.recv(5) == b"hello"


def test_a_socket_that_a_dead_controller_left_refuses_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    with pytest.raises(FileNotFoundError):
        unix_socket.connected(path, 1.0)
    unix_socket.bound(path).close()
    with pytest.raises(ConnectionRefusedError):
        unix_socket.connected(path, 1.0)
    with unix_socket.bound(path) as listener:
        listener.listen()
        unix_socket.connected(path, 1.0).close()
