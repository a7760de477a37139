"""Looks after one machine: brings it up, then follows what its agent reports.

*Bringing up* has a thread for as long as it takes (`bootstrap_runner`). *Following* has none: one connection per machine, all of
them in one thread (`async_ssh`), on which the agent writes a line when something changes and at every heartbeat
(`host_agent.follow`). The first line of a connection is the whole status, so what happened while there was no connection
is not missed. A machine that has been silent for longer than `SILENT_BEATS` heartbeats is connected to again.

*Back to bringing up*, in a thread: when the agent is not there any more, or its daemon is not (the machine has been
rebooted, and has lost its secrets). To bring up a machine that is up does nothing.

*Polling.* A machine whose agent does not know `follow` is polled in that thread every few seconds.

A machine that falls silent once it was up keeps its last report; whether it is gone, its cloud knows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from itertools import count

from policies.backoff import delay_s
from provisioners.port.base import InstanceState
from provisioners.port.commands import HostKeyError, ShellError, UnreachableError
from provisioners.port.errors import ProvisionError
from provisioners.port.host_port import HostReport
from provisioners.port.lease import Lease
from provisioners.remote.async_ssh import AsyncCommands, AsyncConnection, Report, ssh_loop
from provisioners.remote.bootstrap_runner import (
    BootstrapError,
    BootstrapRunner,
    HostKeyMismatchError,
    Progress,
)
from provisioners.remote.bootstrap_steps import ReplicaNode
from provisioners.remote.host import Host, HostStatus, NoAgentError, agent_command, status_of
from provisioners.remote.host_agent.follow import SILENT_BEATS
from provisioners.remote.ssh import Shell
from provisioners.remote.step import Step

log = logging.getLogger(__name__)

POLL_S = 2.0
HEARTBEAT_S = 60.0
_FINAL = (InstanceState.SETUP_FAILED, InstanceState.RUN_EXITED)
_FIRST_LINE_S = 30.0
_LOGINS = 32  # at once: a network that comes back has a thousand machines waiting
_MOST_DELAY_S = 30.0


class _LeftError(Exception):
    """The machine is to be left alone."""


class _NotUpError(Exception):
    """The machine is to be brought up again."""


class _CannotFollowError(Exception):
    """The machine's agent, just installed, does not follow."""


class HostSupervisor:
    """One machine.

    `report` and `host` are replaced, never changed. `log_archive` are what the step printed that failed. `changed` is
    called after a report with another state, port or notice, `seen_from` with the address that the machine sees us at.
    """

    def __init__(
        self,
        replica: str,
        node: ReplicaNode,
        steps: Sequence[Step],
        *,
        num_nodes: int,
        connect: Callable[[], Shell],
        connect_async: Callable[[], Awaitable[AsyncConnection]],
        is_booting: bool,
        boot_timeout_s: float,
        poll_s: float,
        heartbeat_s: float,
        now: Callable[[], float],
        gather: Callable[[str, int, int], bool],
        changed: Callable[[], None],
        seen_from: Callable[[str], None] = lambda address: None,
    ) -> None:
        self.replica = replica
        self.node = node
        self.report = HostReport(InstanceState.SETUP, node.port, "waiting for ssh")
        self.host: Host | None = None
        self.log_archive = b""
        self._num_nodes = num_nodes
        self._connect_line = connect_async
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._gather = gather
        self._changed = changed
        self._seen_from = seen_from
        self._left = threading.Event()
        self._has_gone = False
        self._was_up = False
        self._had_front = 0  # its port: while the front is started again the replica is where it was
        self._can_follow = True
        self._following: Future[None] | None = None
        self._lines: Report | None = None  # of the connection that there is
        self._now = now
        self._lease: Lease | None = None  # as the machine last reported it
        self._visited_at = 0.0  # when it was last renewed
        self._bring_up = BootstrapRunner(
            connect,
            node.folder,
            steps,
            now=now,
            pause=self._pause,
            on_progress=self._report_progress,
            met=self._meet,
            is_booting=is_booting,
            boot_timeout_s=boot_timeout_s,
        )

    def start(self) -> None:
        threading.Thread(target=self._live, name=f"attend-{self.node.token}", daemon=True).start()

    def release(self) -> None:
        self._left.set()
        if self._following is not None:
            self._following.cancel()
        if self.host is not None:
            self.host.shell.close()

    def recheck(self) -> None:
        """Consider the last status again: something else has changed. From any thread."""
        ssh_loop().call_soon_threadsafe(self._nudge)

    # --- bringing up, and polling: in a thread

    def _live(self) -> None:
        try:
            while True:
                self._pause(0.0)
                try:
                    host = self._bring_up.drive()
                    self._was_up = True
                    if self._can_follow:
                        self._hand_over(host)
                        return
                    self._watch(host)
                except HostKeyMismatchError as error:
                    self._mark_foreign(error.message)
                    return
                except (BootstrapError, ProvisionError) as error:
                    if not self._was_up:
                        self.log_archive = error.tail.encode() if isinstance(error, BootstrapError) else b""
                        self._fail(error.message)
                        return
                except ShellError as error:
                    self._miss(f"ssh: {error.message}")
                    self._close()
                    self._can_follow = True  # as far as we know: it may have been too busy to start a program
                self._pause(self._poll_s)
        except _LeftError:
            self._close()
        except Exception as error:  # a bug of ours; the replica must not wait for this machine
            self._fail(f"bringing it up failed: {type(error).__name__}: {error}")
            raise

    def _hand_over(self, host: Host) -> None:
        """From the thread to the event loop."""
        host.shell.close()
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), ssh_loop())
        if self._left.is_set():  # meanwhile
            self._following.cancel()

    def _watch(self, host: Host) -> None:
        """Until the connection breaks, which raises."""
        while True:
            status = host.status()
            self._visit(status)
            if not status.alive and status.state not in _FINAL:
                host.start()
            if self._is_to_go(status):
                host.go()
                self._has_gone = True
            self._report(self._report_of(status))
            self._pause(self._poll_s)

    def _pause(self, duration_s: float) -> None:
        if self._left.wait(duration_s):
            raise _LeftError

    # --- following: in the event loop

    async def _follow(self) -> None:
        try:
            await self._stay_connected()
        except HostKeyError as error:
            self._mark_foreign(error.message)
        except _NotUpError:
            self.start()
        except _CannotFollowError:
            log.warning("%s: its agent cannot report by itself, so it is polled", self.node.token)
            self._can_follow = False
            self.start()
        except Exception as error:
            log.exception("following %s", self.node.token)
            self._fail(f"following it failed: {type(error).__name__}: {error}")

    async def _stay_connected(self) -> None:
        """For ever, through as many connections as it takes."""
        is_fresh = True  # just brought up
        delays = _delays(self._poll_s)
        while True:
            try:
                async with _logins():
                    line = await self._connect_line()
            except HostKeyError:
                raise
            except (ShellError, ProvisionError) as error:
                self._miss(f"ssh: {error.message}")
                await asyncio.sleep(next(delays))
                continue
            try:
                self.host = Host(AsyncCommands(line, ssh_loop()), self.node.folder)
                while True:
                    await self._read(line, is_fresh)
                    is_fresh, delays = False, _delays(self._poll_s)
                    await asyncio.sleep(self._poll_s)  # its agent was stopped, and is started again
            except ShellError as error:
                self._miss(f"ssh: {error.message}")
                if self._lines is not None and self._lines.has_spoken:
                    is_fresh, delays = False, _delays(self._poll_s)
            finally:
                self._lines = None
                line.close()
            await asyncio.sleep(next(delays))

    async def _read(self, line: AsyncConnection, is_fresh: bool) -> None:
        """Until the agent's command ends. Raises ShellError when the connection is lost or silent."""
        loop = asyncio.get_running_loop()
        lines = await line.open(agent_command("follow", self.node.folder, f"{self._heartbeat_s:g}"))
        self._lines = lines
        until = loop.time() + max(_FIRST_LINE_S, SILENT_BEATS * self._heartbeat_s)
        status: HostStatus | None = None
        try:
            while True:
                async with asyncio.timeout_at(until):
                    text = await lines.next()
                is_first = status is None
                if text:
                    until = loop.time() + SILENT_BEATS * self._heartbeat_s
                    status = _parse(line, text)
                    if status.seen_from:
                        self._seen_from(status.seen_from)
                    lines.respond()
                    self._visit(status)
                if status is not None:
                    if is_first and not is_fresh and _has_restarted(status):
                        raise _NotUpError
                    await self._act(line, status)
        except TimeoutError as error:
            raise UnreachableError(f"{line.login.name}: it has been silent for too long") from error
        except EOFError as error:
            if lines.exit_code is None:
                raise UnreachableError(f"{line.login.name}: the connection was lost") from error
            if status is None:
                raise (_CannotFollowError if is_fresh else _NotUpError) from error
        finally:
            lines.close()

    async def _act(self, line: AsyncConnection, status: HostStatus) -> None:
        """Do what the status calls for, and report it."""
        if not status.alive and status.state not in _FINAL:
            await line.run(agent_command("start", self.node.folder))
            asyncio.get_running_loop().call_later(self._poll_s, self._nudge)
        if self._is_to_go(status):
            await line.run(agent_command("go", self.node.folder))
            self._has_gone = True
        self._report(self._report_of(status))

    def _nudge(self) -> None:
        if self._lines is not None:
            self._lines.nudge()

    # --- both

    def _visit(self, status: HostStatus) -> None:
        """The machine's lease has just been renewed."""
        self._visited_at = self._now()
        if status.lease is not None:
            self._lease = status.lease

    def _miss(self, why: str) -> None:
        """The machine cannot be visited. The report has since when."""
        lease = self.report.lease
        if lease is not None and lease.visited_at is None:
            self.report = replace(self.report, lease=replace(lease, visited_at=self._visited_at, why=why))

    def _is_to_go(self, status: HostStatus) -> bool:
        if self._has_gone or not status.prepared:
            return False
        return self._gather(self.replica, self.node.rank, self._num_nodes)

    def _report(self, report: HostReport) -> None:
        before, self.report = self.report, report
        if _matters(before) != _matters(report):
            self._changed()

    def _fail(self, message: str) -> None:
        self._report(HostReport(InstanceState.SETUP_FAILED, self.node.port, message))

    def _mark_foreign(self, message: str) -> None:
        """What runs at that address is not the machine, so no request may go there."""
        self._report(HostReport(InstanceState.BROKEN, self.node.port, message))

    def _meet(self, host: Host) -> None:
        self.host = host  # its log can be read while it is brought up

    def _report_of(self, status: HostStatus) -> HostReport:
        state = InstanceState.SETUP if status.state is InstanceState.PENDING else status.state
        message = status.message
        if state is InstanceState.SETUP:
            message = self._doing(status)
        port, is_tls = status.port or self.node.port, status.front is not None
        if is_tls and state is InstanceState.RUNNING:
            self._had_front = port = status.front or self._had_front
            if not port:
                state, message = InstanceState.SETUP, "starting TLS in front of the replica"
            elif status.interpreted:
                message = f"TLS in front of it is interpreted, and slower: {status.interpreted}"
        return HostReport(state, port, message, status.preempt_at, status.retire_at, is_tls, self._lease)

    def _doing(self, status: HostStatus) -> str:
        if not status.prepared:
            return "running setup"
        return "starting run" if self._has_gone else "waiting for the other nodes"

    def _report_progress(self, progress: Progress) -> None:
        if not self._was_up:
            self._report(HostReport(InstanceState.SETUP, self.node.port, str(progress)))

    def _close(self) -> None:
        if self.host is not None:
            self.host.shell.close()


@cache
def _logins() -> asyncio.Semaphore:
    """Bounds the logins under way. Made in the one event loop that there is."""
    return asyncio.Semaphore(_LOGINS)


def _delays(first_s: float) -> Iterator[float]:
    """Return seconds between attempts to connect."""
    longest_s = max(first_s, min(16 * first_s, _MOST_DELAY_S))
    return (delay_s(failures, first_s, longest_s) for failures in count(1))


def _parse(line: AsyncConnection, text: bytes) -> HostStatus:
    try:
        return status_of(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise NoAgentError(f"{line.login.name}: the agent wrote {text[:200]!r}") from error


def _has_restarted(status: HostStatus) -> bool:
    """Return whether the machine has an order and nothing that carries it out. Without an order it has been released."""
    return not status.alive and status.state not in (*_FINAL, InstanceState.PENDING)


def _matters(report: HostReport) -> tuple[InstanceState, int, float | None, float | None]:
    """Return the part of a report that is worth waking for. Sentences about progress change every second; the next listing shows them."""
    return report.state, report.port, report.preempt_at, report.retire_at or None
