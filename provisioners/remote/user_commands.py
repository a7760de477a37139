"""Commands where a replica runs on a machine: over SSH, by the agent that is there (`host_agent.user_commands`).

Standard input of the agent stays open for as long as the command may run: once it is closed, or the connection is lost, the agent
terminates the command.
"""

from __future__ import annotations

import shlex

from provisioners.port.commands import Commands, ShellError, exec_line
from provisioners.remote.host import AGENT, agent_command
from provisioners.remote.host_agent.bundle import agent_bundle


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
