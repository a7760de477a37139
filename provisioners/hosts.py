"""What runs on machines, over SSH: `fleet.Hosts` for every cloud.

Each machine that is attended has a thread of its own, which brings it up and then asks its agent every few seconds; it
sleeps nearly all the time. Whatever breaks the connection, the thread logs in again and goes on: to bring up a machine
that is up does nothing. A machine that falls silent once it was up keeps its last report; whether it is gone, its cloud
knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from provisioners.base import InstanceState, LaunchOrder
from provisioners.bootstrap import Node, Step, steps_for
from provisioners.bringup import BOOT_TIMEOUT_S, BringUp, BringUpError, Progress, StrangerError
from provisioners.clock import unix_now
from provisioners.errors import ProvisionError
from provisioners.fleet import HostReport, replica_token
from provisioners.host import Host, HostStatus
from provisioners.machines import Machine
from provisioners.shell import Login, Shell, ShellError, connect

T = TypeVar("T")

DEFAULT_PORT = 8000  # $SKYSERVE_REPLICA_PORT on a machine that has nothing else to do
_POLL_S = 2.0
_FINAL = (InstanceState.SETUP_FAILED, InstanceState.RUN_EXITED)


class SshHosts:
    """`login` says how to get into a machine. `is_booting`: machines are new, and need time to let us in."""

    def __init__(
        self,
        login: Callable[[Machine], Login],
        *,
        is_booting: bool = True,
        boot_timeout_s: float = BOOT_TIMEOUT_S,
        poll_s: float = _POLL_S,
        now: Callable[[], float] = unix_now,
        dial: Callable[[Login], Shell] = connect,
    ) -> None:
        self._login = login
        self._is_booting = is_booting
        self._boot_timeout_s = boot_timeout_s
        self._poll_s = poll_s
        self._now = now
        self._dial = dial
        self._attendants: dict[str, Attendant] = {}
        self._prepared: dict[str, set[int]] = {}  # by the replica's token: the ranks whose `setup` is done
        self._changed: Callable[[], None] = _ignore
        self._lock = threading.Lock()

    def attend(self, machine: Machine, order: LaunchOrder, node_ips: Sequence[str]) -> None:
        with self._lock:
            if machine.token in self._attendants:
                return
            port = DEFAULT_PORT if order.port is None else order.port
            node = Node(machine.token, machine.rank, tuple(node_ips), port, order.docker_image)
            attendant = Attendant(
                replica_token(machine),
                node,
                steps_for(order, node),
                num_nodes=order.num_nodes,
                connect=lambda: self._dial(self._login(machine)),
                is_booting=self._is_booting,
                boot_timeout_s=self._boot_timeout_s,
                poll_s=self._poll_s,
                now=self._now,
                gather=self._gather,
                changed=self._tell_change,
            )
            self._attendants[machine.token] = attendant
        attendant.start()

    def report(self, machine: Machine) -> HostReport | None:
        with self._lock:
            attendant = self._attendants.get(machine.token)
        return None if attendant is None else attendant.report

    def on_report(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def _tell_change(self) -> None:
        self._changed()  # the callback of now, not of when the machine was first attended

    def leave(self, token: str) -> None:
        with self._lock:
            attendant = self._attendants.pop(token, None)
            if attendant is not None:
                self._prepared.get(attendant.replica, set()).discard(attendant.node.rank)
                if not self._prepared.get(attendant.replica):
                    self._prepared.pop(attendant.replica, None)
        if attendant is not None:
            attendant.leave()

    def read_log(self, machine: Machine, offset: int, max_bytes: int) -> bytes:
        said = self._with_host(machine, lambda host: host.read_log(offset, max_bytes), b"")
        return said or self._last_words(machine)[offset : offset + max_bytes]

    def log_window(self, machine: Machine) -> tuple[int, int]:
        window = self._with_host(machine, lambda host: host.status(renew=False).log, (0, 0))
        return window if window[1] else (0, len(self._last_words(machine)))

    def _last_words(self, machine: Machine) -> bytes:
        """Of a step that failed where no log could be written."""
        with self._lock:
            attendant = self._attendants.get(machine.token)
        return b"" if attendant is None else attendant.last_words

    def log_in(self, machine: Machine) -> Shell:
        return self._dial(self._login(machine))

    def _gather(self, replica: str, rank: int, num_nodes: int) -> bool:
        """The node is prepared; whether all of them are."""
        with self._lock:
            ranks = self._prepared.setdefault(replica, set())
            ranks.add(rank)
            return len(ranks) == num_nodes

    def _with_host(self, machine: Machine, ask: Callable[[Host], T], otherwise: T) -> T:
        """Over the attendant's connection, or one of our own; a machine that does not answer has nothing to say."""
        with self._lock:
            attendant = self._attendants.get(machine.token)
        host = None if attendant is None else attendant.host
        try:
            if host is not None and host.shell.is_open:
                return ask(host)
            with self._dial(self._login(machine)) as shell:
                return ask(Host(shell, Node(machine.token, machine.rank, (), 0).folder))
        except ShellError:
            return otherwise


def _ignore() -> None:
    """Nothing waits for reports yet."""


class _Left(Exception):
    """Nobody wants the machine any more."""


class Attendant:
    """One machine, and the thread that looks after it. `report` and `host` are replaced, never changed. `last_words` are
    what the step printed that failed. `changed` is called after a report with another state, port or notice."""

    def __init__(
        self,
        replica: str,
        node: Node,
        steps: Sequence[Step],
        *,
        num_nodes: int,
        connect: Callable[[], Shell],
        is_booting: bool,
        boot_timeout_s: float,
        poll_s: float,
        now: Callable[[], float],
        gather: Callable[[str, int, int], bool],
        changed: Callable[[], None] = _ignore,
    ) -> None:
        self.replica = replica
        self.node = node
        self.report = HostReport(InstanceState.SETUP, node.port, "waiting for ssh")
        self.host: Host | None = None
        self.last_words = b""
        self._num_nodes = num_nodes
        self._poll_s = poll_s
        self._gather = gather
        self._changed = changed
        self._left = threading.Event()
        self._has_gone = False
        self._was_up = False
        self._bring_up = BringUp(
            connect,
            node.folder,
            steps,
            now=now,
            pause=self._pause,
            tell=self._tell_progress,
            met=self._meet,
            is_booting=is_booting,
            boot_timeout_s=boot_timeout_s,
        )

    def start(self) -> None:
        threading.Thread(target=self._live, name=f"attend-{self.node.token}", daemon=True).start()

    def leave(self) -> None:
        self._left.set()
        if self.host is not None:
            self.host.shell.close()

    def _live(self) -> None:
        try:
            while True:
                try:
                    host = self._bring_up.drive()
                    self._was_up = True
                    self._watch(host)
                except StrangerError as error:
                    self._lose(error.message)
                    return
                except (BringUpError, ProvisionError) as error:
                    if not self._was_up:
                        self.last_words = error.tail.encode() if isinstance(error, BringUpError) else b""
                        self._fail(error.message)
                        return
                except ShellError:
                    self._close()
                self._pause(self._poll_s)
        except _Left:
            self._close()
        except Exception as error:  # a bug of ours; nobody shall wait for this machine
            self._fail(f"bringing it up failed: {type(error).__name__}: {error}")
            raise

    def _report(self, report: HostReport) -> None:
        before, self.report = self.report, report
        if _matters(before) != _matters(report):
            self._changed()

    def _fail(self, message: str) -> None:
        self._report(HostReport(InstanceState.SETUP_FAILED, self.node.port, message))

    def _lose(self, message: str) -> None:
        """Whatever runs at that address: it is not the machine, so no request shall go there."""
        self._report(HostReport(InstanceState.BROKEN, self.node.port, message))

    def _meet(self, host: Host) -> None:
        self.host = host  # its log can be read while it is brought up

    def _watch(self, host: Host) -> None:
        """Until the connection breaks, which raises."""
        while True:
            status = host.status()
            if not status.alive and status.state not in _FINAL:
                host.start()
            if (
                status.prepared
                and not self._has_gone
                and self._gather(self.replica, self.node.rank, self._num_nodes)
            ):
                host.go()
                self._has_gone = True
            self._report(self._told(status))
            self._pause(self._poll_s)

    def _told(self, status: HostStatus) -> HostReport:
        state = InstanceState.SETUP if status.state is InstanceState.PENDING else status.state
        message = status.message
        if state is InstanceState.SETUP:
            message = self._doing(status)
        return HostReport(state, status.port or self.node.port, message, status.preempt_at)

    def _doing(self, status: HostStatus) -> str:
        if not status.prepared:
            return "running setup"
        return "starting run" if self._has_gone else "waiting for the other nodes"

    def _tell_progress(self, progress: Progress) -> None:
        if not self._was_up:
            self._report(HostReport(InstanceState.SETUP, self.node.port, str(progress)))

    def _pause(self, duration_s: float) -> None:
        if self._left.wait(duration_s):
            raise _Left

    def _close(self) -> None:
        if self.host is not None:
            self.host.shell.close()


def _matters(report: HostReport) -> tuple[InstanceState, int, float | None]:
    """What is worth waking for. Sentences about progress change every second; the next listing shows them."""
    return report.state, report.port, report.preempt_at
