"""`serve ssh`: a shell where a replica runs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import typer

from provisioners.clock import unix_now
from provisioners.local.user_commands import Inside
from provisioners.port.commands import Login, ShellError, UnreachableError
from provisioners.remote.ssh import connect
from provisioners.remote.user_commands import bring_agent, interactive_command
from skyserve_cli.commands.options import ServiceName, controller, home
from skyserve_cli.commands.reach import UNREACHABLE, Node, OverSsh, ReplicaId, chosen, place_of
from skyserve_cli.output import CommandFailed

NO_SSH = (
    "there is no program `ssh` here: install OpenSSH's client (Debian, Ubuntu: apt install openssh-client; "
    "Fedora: dnf install openssh-clients), or use `serve exec`"
)


_PREFIX = ".ssh-"
_LEFT_OVER_S = 3600.0


def ssh(name: ServiceName, replica: ReplicaId = None, node: Node = 0) -> None:
    """Open a shell where a replica runs.

    It starts in the replica's work directory with its environment; on machines that is without the secrets. The machine
    must show the host key that skyserve knows. On the local cloud it is your $SHELL.

    \b
    serve ssh chat
    serve ssh chat --replica 3
    """
    client = controller()
    place = place_of(client, name, chosen(client, name, replica), node)
    if isinstance(place, Inside):
        shell = os.environ.get("SHELL") or "/bin/sh"
        raise typer.Exit(_wait_for(place.command([shell]), cwd=place.work, env=place.env))
    raise typer.Exit(_over_ssh(place))


def _over_ssh(place: OverSsh) -> int:
    """Return the exit code of `ssh`. The private key is in a file only while it runs."""
    program = shutil.which("ssh")
    if program is None:
        raise CommandFailed(NO_SSH)
    try:
        with connect(place.login) as shell:
            bring_agent(shell, place.folder)
    except ShellError as error:
        raise CommandFailed(
            error.message, UNREACHABLE if isinstance(error, UnreachableError) else 1
        ) from error
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    remove_leftovers(home().root, unix_now())
    with TemporaryDirectory(prefix=_PREFIX, dir=home().root) as folder:  # for its owner alone
        return _wait_for(ssh_command(program, place, Path(folder)))


def remove_leftovers(root: Path, now: float) -> None:
    """Remove the keys of earlier calls that were killed: `ssh` reads them when it connects, and not an hour later."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if now - folder.lstat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(folder, ignore_errors=True)


def ssh_command(program: str, place: OverSsh, folder: Path) -> list[str]:
    """Return the arguments of `ssh`.

    Nothing of the user's own configuration counts: the connection is the controller's. Keys are written to `folder`.
    """
    login = place.login
    words = ["-t", "-p", str(login.port), "-l", login.user, "--", login.address]
    return [
        program,
        "-F",
        "none",
        *_options(program, login, folder, "host"),
        *words,
        interactive_command(place.folder),
    ]


def _options(program: str, login: Login, folder: Path, prefix: str) -> list[str]:
    known_hosts = folder / f"{prefix}-known_hosts"
    write_private(known_hosts, known_hosts_of(login))
    options = {
        "IdentitiesOnly": "no" if login.agent else "yes",
        "IdentityAgent": "SSH_AUTH_SOCK" if login.agent else "none",
        "UserKnownHostsFile": _quoted(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "PreferredAuthentications": "publickey",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "10",
        "LogLevel": "ERROR",
    }
    for key, text in (("IdentityFile", login.private_key), ("CertificateFile", login.certificate)):
        if text:
            path = folder / f"{prefix}-{key}"
            write_private(path, text.rstrip() + "\n")
            options[key] = _quoted(path)
    if login.bastion is not None:
        # Its own ssh, and not ProxyJump: that takes no files of keys for the bastion but those of a configuration.
        through = login.bastion
        way = [program, "-F", "none", *_options(program, through, folder, f"{prefix}-bastion")]
        way += [
            "-p",
            str(through.port),
            "-l",
            through.user,
            "-W",
            f"[{login.address}]:{login.port}",
            "--",
            through.address,
        ]
        options["ProxyCommand"] = shlex.join(way).replace("%", "%%")
    elif login.program:
        options["ProxyCommand"] = shlex.join(login.program).replace("%", "%%")
    return [word for key, value in options.items() for word in ("-o", f"{key}={value}")]


def known_hosts_of(login: Login) -> str:
    """Return the lines that pin the host's keys."""
    entry = login.address if login.port == 22 else f"[{login.address}]:{login.port}"
    return "".join(f"{entry} {' '.join(key.split()[:2])}\n" for key in login.host_keys)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read from its first instant."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _quoted(path: Path) -> str:
    """As `ssh` reads the name of a file in an option: it expands % and splits at blanks."""
    return '"' + str(path).replace("%", "%%") + '"'


def _wait_for(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> int:
    """Return the exit code of a program that has the terminal: Ctrl-C is its own business, and does not end us before it."""
    process = subprocess.Popen(command, cwd=cwd, env=None if env is None else dict(env))
    try:
        while True:
            with suppress(KeyboardInterrupt):
                code = process.wait()
                return code if code >= 0 else 128 - code
    finally:
        if process.poll() is None:  # we are being terminated
            process.terminate()


def _leave(number: int, _frame: FrameType | None) -> None:
    """End by way of the clean-up."""
    sys.exit(128 + number)
