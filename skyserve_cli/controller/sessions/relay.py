"""Commands and shells on machines: the controller logs in, and relays the streams over a WebSocket of its API.

The caller never gets a key, so who may not call any more has no session any more: a revoked token ends its sessions within two
seconds. Each session is in the event log of its service when it begins, or it does not begin, and when it ends; what was run is not, because
a command may have secrets in it.

From the caller     `{"script", "stdin", "term"}` first: a script, or null for a shell; whether its standard input follows; null or
                    [kind, columns, rows] of a terminal
                    0x00 and bytes of standard input, without bytes its end; at most WINDOW bytes ahead of what was taken
                    `{"size": [columns, rows]}` of the terminal
                    `{"stop": true}`: terminate the script, and send the rest of its output and its exit code
To the caller       0x01 or 0x02 and bytes of standard output or standard error
                    `{"taken": COUNT}` of bytes of standard input
                    `{"exit": CODE}` or `{"error": SENTENCE, "exit": CODE}`, the last

Nothing is read from the machine before the caller has taken what was sent, so a slow caller slows the program down and costs no
memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import asyncssh
from aiohttp import WSMsgType, web
from sqlalchemy.exc import SQLAlchemyError

from provisioners.port.commands import Commands, ShellError, UnreachableError, exec_line, lost
from provisioners.remote.async_ssh import AsyncCommands, connect_async
from provisioners.remote.host import AGENT, agent_command
from provisioners.remote.host_agent.bundle import agent_bundle
from skyserve_cli.controller.api.access import StillValid, calling, still_valid
from skyserve_cli.controller.api.route import refuse
from skyserve_cli.controller.sessions.place import NoAccessError, Place
from skyserve_cli.state.lease import LeaseLostError

log = logging.getLogger(__name__)

MOST = 128
MOST_PER_CALLER = 16
WINDOW = 262_144
CHUNK = 32_768
UNREACHABLE = 255  # the exit code that `ssh` has, too
CHECK_EVERY_S = 1.0
_FIRST_MESSAGE_S = 10.0
_RECORD_S = 0.5  # that the caller waits for the event of the end
_STOP_S = 8.0  # the agent's grace, and a slow network
_QUIET_S = 0.5  # without output, a program that has exited has written everything
_STDIN, _OUT, _ERR = b"\0", b"\1", b"\2"

#: Writes the event log: a place and a sentence. Called on a thread.
Record = Callable[[Place, str], None]


class Order(NamedTuple):
    """What the first message says."""

    script: str | None
    has_stdin: bool
    term: tuple[str, int, int] | None

    @classmethod
    def of(cls, text: str) -> Order:
        """Raise ValueError, TypeError, KeyError."""
        given = json.loads(text)
        script, term = given["script"], given.get("term")
        if script is not None and not isinstance(script, str):
            raise TypeError("script: it is no text")
        return cls(
            script, bool(given.get("stdin")), None if term is None else (str(term[0]), *_size(term[1:]))
        )


class Sessions:
    """All sessions of one controller."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._open: Counter[str] = Counter()

    async def serve(self, request: web.Request, place: Place) -> web.StreamResponse:
        """Raise NoAccessError before anything was started."""
        caller = calling().name
        if "Origin" in request.headers:  # a browser sends it, whichever page opens a WebSocket
            return refuse(403, "a page may not open a session")
        place.view()
        if self._open[caller] >= MOST_PER_CALLER or self._open.total() >= MOST:
            return refuse(429, f"too many sessions are open: {self._open[caller]} of {caller}")
        link = web.WebSocketResponse(compress=False, max_msg_size=4 * CHUNK)
        if not link.can_prepare(request):
            return refuse(426, "a session needs a WebSocket")
        self._open[caller] += 1
        try:
            await link.prepare(request)
            _watch_peer(request)
            await _Session(link, place, self._record, still_valid()).live()
        finally:
            self._open[caller] -= 1
            self._open += Counter()  # without those that have none
        return link


class _Session:
    def __init__(
        self, link: web.WebSocketResponse, place: Place, record: Record, is_valid: StillValid | None
    ) -> None:
        self._link = link
        self._place = place
        self._record = record
        self._is_valid = is_valid
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._untaken = 0
        self._stopping = asyncio.Event()
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self._ended = ""
        self._last: dict[str, Any] = {}

    async def live(self) -> None:
        try:
            async with asyncio.timeout(_FIRST_MESSAGE_S):
                order = Order.of(await self._link.receive_str())
        except (TimeoutError, ValueError, TypeError, KeyError, IndexError) as error:
            await self._say(error=f"the first message is wrong: {type(error).__name__}: {error}", exit=1)
            return
        what = "a shell" if order.script is None else "a command"
        where = f" on node {self._place.node}" if self._place.node else ""
        try:
            await asyncio.to_thread(self._record, self._place, f"{what}{where} begins")
        except (SQLAlchemyError, LeaseLostError) as error:
            log.warning("a session cannot be recorded: %s", error)
            await self._say(error="the controller cannot write its event log, so no session begins", exit=1)
            return
        try:
            await self._first_of(self._run(order), self._receive(), self._watch())
        finally:
            self._end("the controller has stopped, or the caller has gone")
            recording = asyncio.create_task(self._record_end(f"{what}{where} ends: {self._ended}"))
            await asyncio.wait({recording}, timeout=_RECORD_S)
        if self._last:
            await self._say(**self._last)
        await self._link.close()
        await recording

    async def _first_of(self, *works: Coroutine[Any, Any, None]) -> None:
        """Until whichever of these ends first. The others are cancelled."""
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except OSError:
            self._end("the caller has gone")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, order: Order) -> None:
        try:
            code = await self._exit_code(order)
        except (ShellError, NoAccessError) as error:
            code = UNREACHABLE if isinstance(error, UnreachableError) else 1
            self._end(str(error), error=str(error), exit=code)
        else:
            self._end(f"exit code {code}", exit=code)

    async def _exit_code(self, order: Order) -> int:
        """Raise ShellError, NoAccessError."""
        login, folder = await asyncio.to_thread(self._place.login)
        connection = await connect_async(login)
        try:
            shell = AsyncCommands(connection, asyncio.get_running_loop())
            await asyncio.to_thread(bring_agent, shell, folder)
            process = await connection.process(command_line(folder, order.script), order.term)
            self._process = process
            if not order.has_stdin:
                self._input.put_nowait(b"")
            feeding = asyncio.create_task(self._feed(process, is_framed=order.script is not None))
            try:
                await self._copy(process)
            finally:
                feeding.cancel()
            if process.exit_signal is not None:
                return 128 + abs(process.returncode or 0)
            if process.exit_status is None:
                raise lost(login, EOFError("no exit code came"))
            return process.exit_status
        finally:
            connection.close()  # whatever still runs on the machine is terminated there

    async def _copy(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        """Send the output until the program has exited and nothing more comes, or did not exit in time when it was to stop."""
        clock, busy, since = asyncio.get_running_loop(), 0, asyncio.get_running_loop().time()
        stop_at: float | None = None

        async def copy(source: asyncssh.SSHReader[bytes], mark: bytes) -> None:
            nonlocal busy, since
            while data := await source.read(CHUNK):
                busy += 1
                await self._link.send_bytes(mark + data)
                busy, since = busy - 1, clock.time()

        outputs = {
            asyncio.create_task(copy(process.stdout, _OUT)),
            asyncio.create_task(copy(process.stderr, _ERR)),
        }
        try:
            left: set[asyncio.Task[None]] = outputs
            while left:
                done, left = await asyncio.wait(left, timeout=_QUIET_S / 2)
                for task in done:
                    task.result()
                now = clock.time()
                if process.returncode is not None and not busy and now - since > _QUIET_S:
                    return  # a program that was left in the background may have the output open
                if self._stopping.is_set():
                    stop_at = stop_at or now + _STOP_S
                    process.stdin.write_eof()
                    if now > stop_at or self._untaken:
                        return  # the end of its input does not reach a program that does not read
            async with asyncio.timeout(_STOP_S):
                await process.wait_closed()
        except (TimeoutError, asyncssh.Error):
            pass  # the exit code says what became of it
        finally:
            for task in outputs:
                task.cancel()

    async def _feed(self, process: asyncssh.SSHClientProcess[bytes], *, is_framed: bool) -> None:
        """Pass standard input on. The end of a script's is a frame: that of the stream would terminate the script."""
        try:
            while data := await self._input.get():
                process.stdin.write(stdin_frame(data) if is_framed else data)
                await process.stdin.drain()
                self._untaken -= len(data)
                await self._link.send_json({"taken": len(data)})
            if is_framed:
                process.stdin.write(stdin_frame(b""))
            else:
                process.stdin.write_eof()
        except (OSError, asyncssh.Error):
            pass  # the program does not read any more, which is its right

    async def _receive(self) -> None:
        """Until the caller has gone, or does what no caller of ours does."""
        async for message in self._link:
            if message.type is WSMsgType.BINARY and message.data[:1] == _STDIN:
                self._untaken += len(message.data) - 1
                if self._untaken > WINDOW:
                    self._end("more input came than was to come")
                    return
                self._input.put_nowait(message.data[1:])
                continue
            try:
                self._obey(json.loads(message.data))
            except (ValueError, TypeError, AttributeError):
                self._end("a message came that is none")
                return
        self._end("the caller has gone")

    def _obey(self, wish: dict[str, Any]) -> None:
        """Raise ValueError, TypeError, AttributeError."""
        if wish.get("stop"):
            self._stopping.set()
        elif self._process is not None:
            self._process.change_terminal_size(*_size(wish.get("size", ())))

    async def _watch(self) -> None:
        """Until the caller may not call any more."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                if self._is_valid is not None and await self._is_valid() is None:
                    break
            except SQLAlchemyError:
                continue  # it is not known whether
        why = "the token was revoked, or the login is over"
        self._end(why, error=why, exit=1)

    def _end(self, why: str, **last: Any) -> None:
        """Note why the session ends, and what the caller is sent last. The first reason counts."""
        if not self._ended:
            self._ended, self._last = why, last

    async def _say(self, **content: Any) -> None:
        """To a caller who takes it at once, or not at all."""
        try:
            async with asyncio.timeout(CHECK_EVERY_S):
                await self._link.send_json(content)
        except (OSError, TimeoutError, RuntimeError):
            log.debug("the caller of a session does not take its end")

    async def _record_end(self, sentence: str) -> None:
        try:
            await asyncio.to_thread(self._record, self._place, sentence)
        except (SQLAlchemyError, LeaseLostError) as error:
            log.warning(
                "replica %s of %s: %s; not recorded: %s",
                self._place.replica_id,
                self._place.service,
                sentence,
                error,
            )


def _size(given: Any) -> tuple[int, int]:
    """Raise ValueError, TypeError."""
    columns, rows = (int(each) for each in given)
    if not (0 < columns < 10_000 and 0 < rows < 10_000):
        raise ValueError("the size of a terminal is wrong")
    return columns, rows


def _watch_peer(request: web.Request) -> None:
    """Have the kernel notice a caller whose host is gone."""
    link = None if request.transport is None else request.transport.get_extra_info("socket")
    if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


# Commands where a replica runs on a machine: over SSH, by the agent that is there (`host_agent.user_commands`).
#
# Standard input of the agent stays open for as long as the command may run: once it is closed, or the connection is lost, the agent
# terminates the command.


class NotPreparedError(ShellError):
    """The machine runs, and the replica is not on it yet, or not any more."""


def bring_agent(shell: Commands, folder: str) -> None:
    """Install the agent if the machine has only one of another release. Raises NotPreparedError where no replica is."""
    found = shell.run(
        f"cd {shlex.quote(folder)} 2>/dev/null && [ -f order.json ] && [ -d work ] || exit 3\n"
        f'[ -f "$HOME"/{AGENT} ] || exit 4',
        check=False,
    )
    if found.code == 4:
        shell.put(AGENT, agent_bundle())
    elif found.code != 0:
        raise NotPreparedError(f"{shell.login.name}: the replica is not set up there yet, or was removed")


def command_line(folder: str, script: str | None) -> str:
    """Return what sshd is to run for a script, or for a shell (None), which keeps the locale of the login."""
    if script is None:
        return shlex.join(agent_command("shell", folder))
    return exec_line(shlex.join(agent_command("exec", folder, script)))


def stdin_frame(data: bytes) -> bytes:
    """Return what the agent reads as a part of a script's standard input; without data, as its end."""
    return len(data).to_bytes(4, "big") + data
