"""Bringing one machine up: log in, then one step after the other (`bootstrap_steps`), with patience where it is called for.

The process that drives may be killed at any instant, and the whole be started again, by it or another one: what was done
is marked on the host, what was cut short is started again, and of two that drive at a time the later one goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.model import Offer
from provisioners.port.commands import (
    CommandError,
    DiskFullError,
    HostKeyError,
    LoginRefusedError,
    ShellError,
    UnreachableError,
)
from provisioners.remote.archive import PackingError
from provisioners.remote.host import Host
from provisioners.remote.ssh import Shell
from provisioners.remote.step import Step

BOOT_TIMEOUT_S = 600.0
_AGAIN_S = 1.0
_REFUSED_AGAIN_S = 5.0  # at most: sshd 9.8 and later lock an address out for a while after each refused login
_USUAL_BOOT_S = 90.0
_TAIL_LINES = 20


def boot_timeout_factor(offer: Offer) -> float:
    """Return how many times the usual timeout a machine has to boot.

    Those of eight accelerators, or without a hypervisor, take 8 to 15 minutes until sshd responds.
    """
    return 2.0 if offer.accelerator_count >= 8 or "metal" in offer.instance_type else 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Step `number` of `total` is under way; the first is to log in."""

    number: int
    total: int
    doing: str

    def __str__(self) -> str:
        return f"{self.doing} ({self.number}/{self.total})"


class BootstrapError(Exception):
    """The machine cannot be brought up. `step` is what failed, `tail` the last lines it printed."""

    def __init__(self, step: str, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.message = message
        self.tail = tail


class HostKeyMismatchError(BootstrapError):
    """At the machine's address something responds that is not the machine."""


class BootstrapRunner:
    """`is_booting`: the machine is new.

    Then it may refuse our key for a while, or show the host key that its image came with, until it has run its user data:
    that is waited for, as is sshd itself. Nothing is sent to a host with a wrong key meanwhile. A host that is not new and
    does either is not the host, or not ours, and that is an error.

    Once it has let us in it is not new any more: one that shows another key later is not the machine that it was.

    `on_progress` gets each step, `met` of every connection. `pause` sleeps, and may raise to end it all.
    """

    def __init__(
        self,
        connect: Callable[[], Shell],
        folder: str,
        steps: Sequence[Step],
        *,
        now: Callable[[], float],
        pause: Callable[[float], object],
        on_progress: Callable[[Progress], object] = lambda progress: None,
        met: Callable[[Host], object] = lambda host: None,
        is_booting: bool = True,
        boot_timeout_s: float = BOOT_TIMEOUT_S,
    ) -> None:
        self._connect = connect
        self._folder = folder
        self._steps = tuple(steps)
        self._now = now
        self._pause = pause
        self._on_progress = on_progress
        self._met = met
        self._is_booting = is_booting
        self._boot_timeout_s = boot_timeout_s

    def drive(self) -> Host:
        """Carry out the steps. Returns the machine's agent, connected. Raises BootstrapError."""
        host = self._log_in(self._now() + self._boot_timeout_s)
        try:
            done = self._prepare(host)
            for number, step in enumerate(self._steps, start=2):
                if step.name not in done or step.always:
                    self._on_progress(Progress(number, 1 + len(self._steps), step.doing))
                    host = self._do(host, step)
        except BaseException:
            host.shell.close()
            raise
        return host

    def _log_in(self, until: float) -> Host:
        total = 1 + len(self._steps)
        self._on_progress(Progress(1, total, "waiting for ssh"))
        started, has_wondered = self._now(), False
        refused_again_s = _AGAIN_S
        while True:
            pause_s = _AGAIN_S
            try:
                host = Host(self._connect(), self._folder)
            except (UnreachableError, LoginRefusedError, HostKeyError) as error:
                if not self._is_booting and not isinstance(error, UnreachableError):
                    kind = HostKeyMismatchError if isinstance(error, HostKeyError) else BootstrapError
                    raise kind("ssh", error.message) from error
                if self._now() >= until:
                    raise BootstrapError("ssh", f"no login in time: {error.message}") from error
                if isinstance(error, LoginRefusedError):
                    pause_s, refused_again_s = refused_again_s, min(2 * refused_again_s, _REFUSED_AGAIN_S)
                if self._now() - started > _USUAL_BOOT_S and not has_wondered:
                    self._on_progress(Progress(1, total, f"still waiting for ssh: {error.message}"))
                    has_wondered = True
            else:
                self._is_booting = False
                self._met(host)
                return host
            self._pause(pause_s)

    def _prepare(self, host: Host) -> frozenset[str]:
        try:
            host.install()
            return host.done()
        except ShellError as error:
            raise _failed("agent", error) from error

    def _do(self, host: Host, step: Step) -> Host:
        """Return until it is done, it failed, or its time is up; through as many connections as it takes."""
        until = self._now() + step.timeout_s
        while True:
            left_s = until - self._now()
            try:
                host.do(step, max(left_s, 1.0))
                return host
            except UnreachableError as error:
                if left_s <= 0:
                    raise _failed(step.name, error) from error
                host.shell.close()
                host = self._log_in(until)
            except CommandError as error:
                # An attempt cut short by the end of the time would replace this error by its own timeout.
                if step.retry_every_s is None or isinstance(error, DiskFullError):
                    raise _failed(step.name, error) from error
                if until - self._now() <= step.retry_every_s:
                    raise _failed(step.name, error) from error
                self._pause(step.retry_every_s)
            except (ShellError, PackingError) as error:
                raise _failed(step.name, error) from error


def _failed(step: str, error: ShellError | PackingError) -> BootstrapError:
    said = error.output.said if isinstance(error, CommandError) else ""
    lines = said.splitlines()[-_TAIL_LINES:]
    why = str(error) if isinstance(error, DiskFullError) or not lines else lines[-1]
    return BootstrapError(step, f"step {step!r} failed: {why}", "\n".join(lines))
