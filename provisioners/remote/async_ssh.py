"""SSH connections to machines that are followed: all of them in one thread, which runs an event loop.

Paramiko has a thread for each connection, so a thousand machines would cost a thousand threads; asyncssh has none. The
rules are those of `ssh`: host keys are checked before anything is sent and no unknown key is accepted, no agent is
forwarded, nor used unless the login says so, no file of the user's is read, and secrets go in by standard input only.

The kernel notices a dead peer (TCP keep-alives and TCP_USER_TIMEOUT), so an idle connection costs this process nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any, cast
from weakref import WeakKeyDictionary

import asyncssh

from provisioners.port.commands import (
    CONNECT_TIMEOUT_S,
    MOST_OUTPUT_BYTES,
    CommandOutput,
    Commands,
    Feed,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
    checked,
    exec_line,
    lost,
    script_of,
    timed_out,
    why,
)
from provisioners.remote.proxy_command import ProxyCommand
from provisioners.remote.ssh import (
    DEAD_PEER_S,
    KEEP_ALIVE_S,
    SESSION_AGAIN_S,
    SESSIONS,
    UNREADABLE_KEY,
    Bastion,
    behind,
    host_key_mismatch,
    place_of,
    same_bastion,
)

_HAND_BACK_S = 5.0
_PROBES = 3
_LONGEST_LINE = 65536
_PROCESS_WINDOW = 262_144  # bytes of output that a program may be ahead of its reader


_making = threading.Lock()


def ssh_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all lines of this process, in its thread."""
    with _making:  # a cache alone lets two threads that come at once make two
        return _ssh_loop()


@cache
def _ssh_loop() -> asyncio.AbstractEventLoop:
    logging.getLogger("asyncssh").setLevel(logging.WARNING)  # it logs every connection and every command
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ssh-lines", daemon=True).start()
    return loop


class AsyncConnection:
    """A connection. To be used in the thread of its event loop only."""

    def __init__(self, connection: asyncssh.SSHClientConnection, login: Login) -> None:
        self.login = login
        self._connection = connection
        self._sessions = asyncio.Semaphore(SESSIONS - 1)  # one is the report's

    async def run(
        self, command: str | Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, check: bool = True
    ) -> CommandOutput:
        """Run a program (arguments, or a script for sh) until its output ends.

        With `check` raises CommandError if it fails.
        """
        script = script_of(command)
        try:
            async with asyncio.timeout(timeout_s), self._sessions:
                output = await self._run(exec_line(script), stdin)
        except TimeoutError as error:
            raise timed_out(self.login, script, timeout_s) from error
        except (OSError, EOFError, asyncssh.Error) as error:
            raise lost(self.login, error) from error
        return checked(self.login, script, output, check)

    async def _run(self, command: str, stdin: bytes) -> CommandOutput:
        process = await self._start(command)
        try:
            out, err = await process.communicate(stdin)
        finally:
            process.close()
        if process.returncode is None:
            raise EOFError("it hung up")
        return CommandOutput(
            process.returncode,
            (out or b"")[-MOST_OUTPUT_BYTES:],
            (err or b"")[-MOST_OUTPUT_BYTES:],
        )

    async def _start(self, command: str) -> asyncssh.SSHClientProcess[bytes]:
        """Return until the caller's time is up: an sshd has ten sessions for each connection, and is slow to forget one."""
        while True:
            try:
                return await self._connection.create_process(command, encoding=None)
            except asyncssh.ChannelOpenError:
                if not self.is_open:
                    raise
                await asyncio.sleep(SESSION_AGAIN_S)

    async def open(self, command: str | Sequence[str]) -> Report:
        """Start a program that writes lines for as long as it runs. Raises UnreachableError."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, report = await self._connection.create_session(
                    Report, exec_line(script_of(command)), encoding=None
                )
        except (TimeoutError, OSError, asyncssh.Error) as error:
            raise lost(self.login, error) from error
        return cast(Report, report)

    async def process(
        self, command: str, term: tuple[str, int, int] | None = None
    ) -> asyncssh.SSHClientProcess[bytes]:
        """Start a program whose streams the caller reads and writes as they come; what is not read waits on the host.

        `term` is the kind of a terminal, its columns and rows. Raises UnreachableError.
        """
        kind, size = (None, ()) if term is None else (term[0], term[1:])
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._connection.create_process(
                    command, term_type=kind, term_size=size, encoding=None, window=_PROCESS_WINDOW
                )
        except (TimeoutError, OSError, asyncssh.Error) as error:
            raise lost(self.login, error) from error

    @property
    def is_open(self) -> bool:
        return not self._connection.is_closed()

    def close(self) -> None:
        """At once: a peer that is dead cannot be waited for."""
        self._connection.abort()


class Report(asyncssh.SSHClientSession[bytes]):
    """The output of a program, by lines.

    `exit_code` is None unless the program is known to have exited; `has_spoken`: a line has come.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.has_spoken = False
        self._rest = b""
        self._items: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None

    async def next(self) -> bytes:
        """Return the next line; an empty one after `nudge`. Raises EOFError at the end."""
        item = await self._items.get()
        if item is None:
            raise EOFError("no more lines")
        return item

    def nudge(self) -> None:
        """Make `next` return without a line."""
        self._items.put_nowait(b"")

    def respond(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.write(b"\n")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    # --- called by asyncssh

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = chan

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None:
            return  # standard error
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_LONGEST_LINE]
        for line in filter(None, lines):
            self.has_spoken = True
            self._items.put_nowait(line)

    def exit_status_received(self, status: int) -> None:
        self.exit_code = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.exit_code = -1

    def connection_lost(self, exc: Exception | None) -> None:
        self._items.put_nowait(None)


class AsyncCommands(Commands):
    """A line for other threads: each call waits for the event loop's thread, so not to be used in that one."""

    def __init__(self, line: AsyncConnection, loop: asyncio.AbstractEventLoop) -> None:
        self.login = line.login
        self._line = line
        self._loop = loop

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | Feed = b"",
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> CommandOutput:
        data = _fed(stdin) if callable(stdin) else stdin
        work = self._line.run(command, stdin=data, timeout_s=timeout_s, check=check)
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result(timeout_s + _HAND_BACK_S)
        except TimeoutError as error:
            done.cancel()
            raise timed_out(self.login, script_of(command), timeout_s) from error

    @property
    def is_open(self) -> bool:
        return self._line.is_open

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._line.close)


async def connect_async(login: Login, timeout_s: float = CONNECT_TIMEOUT_S) -> AsyncConnection:
    """Log in.

    Raises UnreachableError, LoginRefusedError or HostKeyError; a fault of a bastion makes the host behind it
    unreachable, no more.
    """
    return AsyncConnection(await _connection(login, timeout_s), login)


async def _connection(login: Login, timeout_s: float) -> asyncssh.SSHClientConnection:
    client = _KeyCheckingClient()
    where = place_of(login)
    program: ProxyCommand | None = None
    try:
        keys = _client_keys(login)  # before there is anything to close
        known = [asyncssh.import_public_key(" ".join(line.split()[:2])) for line in login.host_keys]
        way: dict[str, Any] = {"host": login.address, "port": login.port}
        if login.bastion is not None:
            way["tunnel"] = await _tunnel(login.bastion, login, timeout_s)
        elif login.program:
            program = ProxyCommand(login.program)
            way["sock"] = program.socket
        connection, _ = await asyncssh.create_connection(
            lambda: client,
            **way,
            username=login.user,
            client_keys=keys,
            known_hosts=(known, [], []),  # never None, which would accept any key
            config=None,
            agent_path=os.environ.get("SSH_AUTH_SOCK") if login.agent else None,
            agent_forwarding=False,
            preferred_auth="publickey",
            gss_host=None,
            x11_forwarding=False,
            connect_timeout=timeout_s,
            login_timeout=timeout_s,
            keepalive_interval=0 if login.bastion is None and not login.program else KEEP_ALIVE_S,
        )
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise LoginRefusedError(UNREADABLE_KEY.format(name=login.name)) from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise host_key_mismatch(login, client.shown) from error
    except asyncssh.PermissionDenied as error:
        raise LoginRefusedError(f"{where} refuses the login of {login.user!r}") from error
    except asyncssh.ChannelOpenError as error:
        raise behind(login, why(error)) from error
    except (TimeoutError, OSError, asyncssh.Error) as error:
        said = "" if program is None else await asyncio.to_thread(program.said)
        raise UnreachableError(f"{where} cannot be reached: {said or why(error)}") from error
    link = connection.get_extra_info("socket")
    if login.bastion is None and not login.program:
        _watch_peer(link)
    return connection


def _client_keys(login: Login) -> list[Any]:
    if login.agent and not login.private_key:
        return []
    key = asyncssh.import_private_key(login.private_key, login.passphrase or None)
    return [(key, asyncssh.import_certificate(login.certificate))] if login.certificate else [key]


#: Connections to bastions, each for all hosts behind it, by event loop.
_tunnels: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[Bastion, asyncio.Task[asyncssh.SSHClientConnection]]
] = WeakKeyDictionary()


async def _tunnel(bastion: Login, login: Login, timeout_s: float) -> asyncssh.SSHClientConnection:
    tunnels = _tunnels.setdefault(asyncio.get_running_loop(), {})
    same = same_bastion(bastion)
    task = tunnels.get(same)
    if task is None or (task.done() and (task.exception() is not None or task.result().is_closed())):
        task = tunnels[same] = asyncio.ensure_future(_connection(bastion, timeout_s))
    try:
        return await asyncio.shield(task)
    except ShellError as error:
        raise behind(login, error.message) from error


def connect_commands(login: Login, timeout_s: float = CONNECT_TIMEOUT_S) -> AsyncCommands:
    """Log in from another thread. Raises as `connect_async`."""
    work = connect_async(login, timeout_s)
    line = asyncio.run_coroutine_threadsafe(work, ssh_loop()).result()
    return AsyncCommands(line, ssh_loop())


class _KeyCheckingClient(asyncssh.SSHClient):
    """Notes the key of a host that is not the one we know."""

    shown = "?"

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = key.get_fingerprint()
        return False


def _watch_peer(link: Any) -> None:
    for option, value in (
        (socket.TCP_USER_TIMEOUT, int(DEAD_PEER_S * 1000)),
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.TCP_KEEPINTVL, KEEP_ALIVE_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _fed(feed: Feed) -> bytes:
    buffer = BytesIO()
    feed(buffer)
    return buffer.getvalue()
