"""Databases that two controllers share, and what can be done to them: a server of our own that is restarted, and a
connection to it that carries nothing any more."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

MOST_CONNECTIONS = 40


class SqliteFile:
    """One file. It cannot be cut off."""

    is_server = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / "shared.db"

    def url(self, _controller: str) -> str:
        return f"sqlite:///{self._path}"

    def rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        return _rows(sa.create_engine(self.url("")), query, values)

    def close(self) -> None:
        """The file goes with its folder."""


class PostgresServer:
    """A server of our own on loopback, which each controller reaches through a relay of its own. Needs root, as it runs as
    the user `postgres`, and Debian's package `postgresql`."""

    is_server = True

    def __init__(self, controllers: Sequence[str]) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
        if not found or os.geteuid() != 0:
            raise SystemExit("PostgreSQL's initdb is not there, or this is not root; try --database sqlite")
        self._bin = found[-1].parent
        self._home = Path(tempfile.mkdtemp(prefix="skyserve-postgres-"))
        self._home.chmod(0o755)
        self._user = pwd.getpwnam("postgres")
        os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
        self._port = _free_port()
        self._run("initdb", "-D", "data", "-A", "trust", "-E", "UTF8", "--no-locale")
        self._control("start")
        self.relays = {name: Relay(self._port) for name in controllers}

    def url(self, controller: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.relays[controller].port}/postgres"

    def rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        return _rows(sa.create_engine(self.own_url), query.replace("?", "%s"), values)

    def restart(self) -> None:
        """As after a crash."""
        self._control("restart", "-m", "immediate")

    def stop(self) -> None:
        self._control("stop", "-m", "immediate")

    def start(self) -> None:
        self._control("start")

    def execute(self, statement: str) -> None:
        """As the superuser, and not through a relay."""
        engine = sa.create_engine(self.own_url, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()

    @property
    def own_url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/postgres"

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()
        self._control("stop", "-m", "immediate")
        subprocess.run(["rm", "-rf", str(self._home)], check=True)

    def _control(self, *what: str) -> None:
        options = (
            f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._home} "
            f"-c max_connections={MOST_CONNECTIONS}"
        )
        self._run("pg_ctl", "-D", "data", "-l", "log", "-w", "-o", options, *what)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self._home,
            env={"HOME": str(self._home), "PATH": os.environ["PATH"]},
            user=self._user.pw_uid,
            group=self._user.pw_gid,
            extra_groups=[],
            stdout=subprocess.DEVNULL,
            check=True,
        )


class Relay:
    """A port that carries everything to another one, until it is cut: then open connections carry nothing, and new ones
    are accepted and carry nothing either. A partition closes no connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._cut = threading.Event()
        self.delay_s = 0.0  # of each message towards the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def heal(self) -> None:
        """New connections carry again. What was open stays silent: the query that was lost is never repeated."""
        self._cut.clear()

    def close(self) -> None:
        for one in self._sockets:
            _end(one)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if self._cut.is_set():
                    continue
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                if self._listener.fileno() == -1:
                    return
                near.close()
                continue
            self._sockets.append(far)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink, sink is far), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, delays: bool) -> None:
        try:
            while data := source.recv(65536):
                if self._cut.is_set():
                    return  # and leave both open: the data is lost
                if delays and self.delay_s:
                    time.sleep(self.delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                _end(one)


def _rows(engine: sa.Engine, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(query, tuple(values))]
    finally:
        engine.dispose()


def _end(one: socket.socket) -> None:
    """Also if another thread waits for it to say something."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
