"""A PostgreSQL server of a test's own, which the test can stop and start."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class PostgresServer:
    """`url` is the database `postgres` of it. It runs as the user `postgres` if we are root, which it refuses to run as."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.port: int = self._port
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/postgres"

    def make(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres")
        self._run(
            "initdb",
            "--no-sync",
            "-D",
            str(self._folder / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
        )

    def start(self) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder} -c fsync=off"
        self._control("start", "-l", str(self._folder / "log"), "-o", options)

    def stop(self) -> None:
        """Stop it as a crash does: connections break."""
        self._control("stop", "-m", "immediate")

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        # Not a pipe: the server inherits it, so reading it would end with the server.
        with (self._folder.parent / f"{program}.out").open("ab") as out:
            subprocess.run(
                command,
                check=True,
                stdout=out,
                stderr=out,
                cwd="/",
                env={**os.environ, "HOME": str(self._folder)},
            )


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """A running one. Skips the test where PostgreSQL is not installed. `folder` must be one that all users can enter."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed")
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("there is no user postgres")
    server = PostgresServer(found[-1].parent, folder)
    server.make()
    server.start()
    try:
        yield server
    finally:
        server.stop()
