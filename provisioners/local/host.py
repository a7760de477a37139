"""The host process of one node of a local instance: what a virtual machine is to a cloud's instance.

    python -m provisioners.local.host DIR      (the launcher does this; the order comes on standard input)

It boots (a cold start), runs `setup`, waits until that is done on every node of the replica, runs `run`, both in
the node's work directory, and stays until it is stopped or the spot market takes it, even if `run` has exited:
like a machine, it is there, and paid for, until it is terminated. It needs no other process: the controller may
die and come back and will find it by its folder.

Its life is `HostProcess.live`, read top to bottom. All waiting happens in `_turn`, which keeps the log flowing, reaps,
and raises the end of the instance (`_InstanceEnd`) wherever that finds us. One thread; asleep, it wakes four times per
second for a few stats.

It inherits, locked, a descriptor of DIR/alive and never closes it: that lock shows that the host process is alive.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from policies.model import CapacityType
from provisioners.clock import unix_now
from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.log import LogWriter
from provisioners.local.spot_market import MarketReader
from provisioners.local.store import InstanceFolder, LaunchRecord, LocalStore, Status
from provisioners.port.base import InstanceState, is_url
from provisioners.remote.bootstrap_steps import bucket_script
from provisioners.remote.host_agent.exits import exit_sentence, oom_kills
from provisioners.remote.host_agent.processes import names_of

_LOOK_EVERY_S = 0.25
_END_TOGETHER_S = 0.5
_KILL_FOR_S = 5.0  # processes the kernel does not let die within this are beyond us


@dataclass(frozen=True, slots=True)
class HostOrder:
    """What the host gets once, on standard input: secrets are in it, so it is never written down."""

    home: str
    setup: str | None
    run: str
    env: Mapping[str, str]
    workdir: str | None
    file_mounts: Mapping[str, str]
    cold_start_s: float
    preemption_notice_s: float


class _InstanceEnd(Exception):
    """The instance terminates now. `grace_s` is what its processes get between SIGTERM and SIGKILL."""

    def __init__(self, state: InstanceState, message: str, grace_s: float) -> None:
        super().__init__(message)
        self.state = state
        self.message = message
        self.grace_s = grace_s


class HostProcess:
    def __init__(
        self, folder: InstanceFolder, record: LaunchRecord, order: HostOrder, now: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._record = record
        self._order = order
        self._now = now
        self._status = Status(InstanceState.PENDING, now())
        self._log = LogWriter(folder.path)
        self._spot = SpotPlace(LocalStore(Path(order.home)), record)
        self._main_pid: int | None = None
        self._main_code: int | None = None
        self._stop_requested = False
        self._next_look_at = 0.0
        # The output of every process of the instance comes through one pipe, so that the log can be bounded.
        self._output, self._child_output = os.pipe()
        self._wake, wake_writer = os.pipe()
        for fd in (self._output, self._wake, wake_writer):
            os.set_blocking(fd, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        signal.signal(signal.SIGTERM, self._on_stop_signal)
        local_process.become_subreaper()

    def live(self) -> None:
        """Run the instance from boot to its end."""
        try:
            self._enter(InstanceState.PENDING)
            self._sleep(self._order.cold_start_s)
            self._bootstrap_and_run()
            self._sleep(float("inf"))
        except _InstanceEnd as end:
            self._finish(end)
        except Exception as error:
            self._finish(
                _InstanceEnd(InstanceState.TERMINATED, f"the host process failed: {error}", grace_s=0.0)
            )
            raise

    def _bootstrap_and_run(self) -> None:
        self._enter(InstanceState.SETUP)
        try:
            self._copy_files()
        except (OSError, shutil.Error) as error:
            self._enter(InstanceState.SETUP_FAILED, f"the work directory could not be copied: {error}")
            return
        for target, source in self._order.file_mounts.items():
            if is_url(source):
                code = self._shell(bucket_script(source, target, self._order.env), isolated=False)
                if code != 0:
                    self._enter(
                        InstanceState.SETUP_FAILED, self._exit_message(source, "could not be fetched", code)
                    )
                    return
        if self._order.setup:
            code = self._shell(self._order.setup, isolated=False)  # downloads need a network
            if code != 0:
                self._enter(InstanceState.SETUP_FAILED, self._exit_message("setup", "failed", code))
                return
        self._folder.mark_prepared()
        while not self._folder.is_prepared():
            self._turn(_LOOK_EVERY_S)
        self._enter(InstanceState.RUNNING)
        killed_before = oom_kills()
        code = self._shell(self._order.run, isolated=True)
        left = self._left_behind() if code == 0 else []
        oom = oom_kills() > killed_before
        self._enter(
            InstanceState.RUN_EXITED, exit_sentence("`run` ended", code, self._log.last_line, left, oom=oom)
        )

    def _left_behind(self) -> list[str]:
        """Return the names of programs that `run` has left, other than those that only end a little later."""
        if local_process.descendants(os.getpid()):
            self._sleep(_END_TOGETHER_S)
        return names_of(local_process.descendants(os.getpid()))

    def _exit_message(self, script: str, verb: str, code: int) -> str:
        return exit_sentence(f"`{script}` {verb}", code, self._log.last_line)

    def _copy_files(self) -> None:
        work = self._folder.work_path
        if self._order.workdir:
            self._copy(Path(self._order.workdir), work)
        for target, source in self._order.file_mounts.items():
            if not is_url(source):
                self._copy(Path(source), work / target)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            self._copy_file(str(source), str(target))
            return
        home = Path(self._order.home).resolve()

        def unwanted(folder: str, names: list[str]) -> list[str]:
            # Our own home may be inside the work directory; sockets and pipes cannot be copied.
            paths = {name: Path(folder, name) for name in names}
            return [
                name
                for name, path in paths.items()
                if name == ".git"
                or path.resolve() == home
                or not (path.is_symlink() or path.is_file() or path.is_dir())
            ]

        shutil.copytree(
            source, target, symlinks=True, ignore=unwanted, copy_function=self._copy_file, dirs_exist_ok=True
        )

    def _copy_file(self, source: str, target: str) -> None:
        self._turn(0.0)  # a long copy is no reason to be deaf
        shutil.copy2(source, target, follow_symlinks=False)

    def _shell(self, script: str, *, isolated: bool) -> int:
        """Run a script to its end; its exit code, or minus the signal that killed it."""
        command = [shutil.which("bash") or "/bin/sh", "-c", script]
        if isolated and self._record.namespace is not None:
            command = local_net.entering(self._record.namespace, command)
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                command,
                cwd=self._folder.work_path,
                env=dict(self._order.env),
                stdin=subprocess.DEVNULL,
                stdout=self._child_output,
                stderr=self._child_output,
                start_new_session=True,
                preexec_fn=lambda: local_process.die_with_parent(parent),  # noqa: PLW1509 - no threads here
            )
        except OSError as error:
            self._keep(f"{command[0]}: {error}\n".encode())
            return 127
        self._main_pid, self._main_code = process.pid, None
        process.returncode = self._await_main()  # reaped by us, not by Popen
        self._drain_output()
        return process.returncode

    def _await_main(self) -> int:
        while self._main_code is None:
            self._turn(_LOOK_EVERY_S)
        return self._main_code

    def _sleep(self, duration_s: float) -> None:
        until = self._now() + duration_s
        while (left_s := until - self._now()) > 0:
            self._turn(min(left_s, _LOOK_EVERY_S))

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen, at most `timeout_s`; see to it. Raises _End when the end has come."""
        self._supervise(timeout_s)
        if self._stop_requested:
            raise _InstanceEnd(InstanceState.TERMINATED, "", self._record.stop_grace_s)
        now = self._now()
        if now >= self._next_look_at:
            self._next_look_at = now + _LOOK_EVERY_S
            self._check(now)

    def _supervise(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._output:
                self._keep(os.read(self._output, 65536))
            else:
                os.read(self._wake, 4096)
        self._reap()

    def _check(self, now: float) -> None:
        """The marks others left, and the market."""
        if not self._folder.alive_path.exists():
            raise _InstanceEnd(InstanceState.TERMINATED, "its folder was removed", grace_s=0.0)
        if self._folder.is_stop_requested():
            raise _InstanceEnd(InstanceState.TERMINATED, "", self._record.stop_grace_s)
        preempt_at = self._folder.preempt_at()
        if (
            preempt_at is None
            and self._status.preempt_at is None
            and self._record.capacity_type is CapacityType.SPOT
        ):
            notice_s = self._spot.lost_with_notice(self._order.preemption_notice_s, now)
            preempt_at = None if notice_s is None else now + notice_s
        if preempt_at is not None and (
            self._status.preempt_at is None or preempt_at < self._status.preempt_at
        ):
            if preempt_at > now:  # else there is no notice to report
                self._write_status(
                    Status(self._status.state, self._status.since, self._status.message, preempt_at)
                )
        else:
            preempt_at = self._status.preempt_at
        if preempt_at is not None and now >= preempt_at:
            raise _InstanceEnd(InstanceState.PREEMPTED, "the spot market took it", grace_s=0.0)

    def _enter(self, state: InstanceState, message: str = "") -> None:
        self._write_status(Status(state, self._now(), message, self._status.preempt_at))

    def _write_status(self, status: Status) -> None:
        self._status = status
        self._folder.write_status(status)

    def _finish(self, end: _InstanceEnd) -> None:
        """Nothing is left but the log and the records: no process, port, namespace or file of the replica."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        me = os.getpid()
        if end.grace_s > 0:
            local_process.signal_all(local_process.descendants(me), signal.SIGTERM)
            self._await_descendants(end.grace_s)
        until = self._now() + _KILL_FOR_S
        while (pids := local_process.descendants(me)) and self._now() < until:
            local_process.signal_all(pids, signal.SIGKILL)
            self._supervise(0.01)
        self._drain_output()
        if self._record.namespace is not None:
            local_net.remove_namespace(self._record.namespace)
        shutil.rmtree(self._folder.work_path, ignore_errors=True)
        with suppress(FileNotFoundError):  # the folder itself may have been removed
            self._write_status(Status(end.state, self._now(), end.message))

    def _await_descendants(self, duration_s: float) -> None:
        until = self._now() + duration_s
        while local_process.descendants(os.getpid()) and (left_s := until - self._now()) > 0:
            self._supervise(min(left_s, 0.05))

    def _reap(self) -> None:
        """All dead children, adopted ones too."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._main_pid:
                    self._main_code = os.waitstatus_to_exitcode(status)

    def _drain_output(self) -> None:
        """The bytes in the pipe now; the process at its other end may go on writing."""
        with suppress(BlockingIOError):
            for _ in range(64):
                self._keep(os.read(self._output, 65536))

    def _keep(self, output: bytes) -> None:
        with suppress(OSError):  # a full disk costs log lines, not the replica
            self._log.write(output)

    def _on_stop_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop_requested = True


class SpotPlace:
    """The place of one spot node in the queue for its zone's room: older ones are served first.

    Later ones do not matter, so the elders are counted once and only ever get fewer.
    """

    def __init__(self, store: LocalStore, record: LaunchRecord) -> None:
        self._store = store
        self._record = record
        self._market = MarketReader(store.market_path)
        self._elders: list[InstanceFolder] | None = None

    def lost_with_notice(self, default_notice_s: float, now: float) -> float | None:
        """The notice in seconds if the zone has no room for us any more, else None."""
        limit = self._market.read().limit(self._record.zone, CapacityType.SPOT, now)
        if limit is None or limit.capacity is None or not self._elders_fill(limit.capacity):
            return None
        return default_notice_s if limit.notice_s is None else limit.notice_s

    def _elders_fill(self, capacity: int) -> bool:
        if self._elders is None:
            self._elders = [node for node in self._store.nodes() if self._is_elder(node.record())]
        if len(self._elders) >= capacity:
            self._elders = [node for node in self._elders if node.is_live()]
        return len(self._elders) >= capacity

    def _is_elder(self, other: LaunchRecord | None) -> bool:
        return (
            other is not None
            and other.zone == self._record.zone
            and other.capacity_type is CapacityType.SPOT
            and other.sequence < self._record.sequence
        )


def _ignore_signal(_signal: int, _frame: FrameType | None) -> None:
    """SIGCHLD only has to wake the selector, which a handler of any kind makes it do."""


def main() -> int:
    folder = InstanceFolder(Path(sys.argv[1]))
    try:
        order = HostOrder(**json.load(sys.stdin))
    except ValueError:
        return 1  # the launcher died in the middle of the order: this launch never happened
    record = folder.record()
    if record is None:
        return 1
    os.chdir(folder.path)
    HostProcess(folder, record, order, unix_now).live()
    return 0


if __name__ == "__main__":
    sys.exit(main())
