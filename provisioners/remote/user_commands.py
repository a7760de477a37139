"""Commands where a replica runs on a machine: over SSH, by the agent that is there (`host_agent.user_commands`).

Standard input of the agent stays open for as long as the command may run. Once `stopped`, or if the connection is lost, it
ends, and the agent terminates the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

import paramiko

from provisioners.clock import unix_now
from provisioners.port.commands import Commands, HostConnection, ShellError, lost
from provisioners.remote.host import AGENT, agent_command
from provisioners.remote.host_agent.bundle import agent_bundle
from provisioners.remote.ssh import wait_readable

_POLL_S = 0.2
_QUIET_S = 0.5  # without output, a program that has exited has written everything
_STOP_TIMEOUT_S = 8.0  # the agent's grace, and a slow network

Write = Callable[[bytes], None]


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


def interactive_command(folder: str) -> str:
    """Return what `ssh -t` is to run there."""
    return shlex.join(agent_command("shell", folder))


def run_there(
    shell: HostConnection, folder: str, script: str, out: Write, err: Write, stopped: Callable[[], bool]
) -> int:
    """Run a script for the replica; its output goes to `out` and `err` as it comes.

    Returns its exit code. Raises UnreachableError.
    """
    channel = shell.start(agent_command("exec", folder, script))
    try:
        code = _copy_output(channel, out, err, stopped)
    except (OSError, EOFError, paramiko.SSHException) as error:
        if shell.is_open:
            raise  # it is our own output that cannot be written
        raise lost(shell.login, error) from error
    finally:
        channel.close()
    if code is None:
        raise lost(shell.login, EOFError("no exit code came"))
    return code


def _copy_output(
    channel: paramiko.Channel, out: Write, err: Write, stopped: Callable[[], bool]
) -> int | None:
    """Return the exit code; None if there is none."""
    quiet_since, until = unix_now(), None
    while True:
        is_closed, ended = channel.closed, channel.exit_status_ready()  # before what has come is read
        has_read = False
        while channel.recv_ready():
            out(channel.recv(65536))
            has_read = True
        while channel.recv_stderr_ready():
            err(channel.recv_stderr(65536))
            has_read = True
        now = unix_now()
        if has_read or not ended:
            quiet_since = now
        # A program that was left in the background may have the output open.
        if is_closed or (ended and (channel.eof_received or now - quiet_since > _QUIET_S)):
            break
        if stopped() and until is None:
            channel.shutdown_write()
            until = now + _STOP_TIMEOUT_S
        if until is not None and now >= until:
            break
        if channel.eof_received:
            channel.status_event.wait(_POLL_S)
        else:
            wait_readable(channel, _POLL_S)
    code = channel.recv_exit_status() if channel.exit_status_ready() else -1
    return None if code == -1 else code
