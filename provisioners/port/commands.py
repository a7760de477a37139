"""Commands on a host: how to log in, what a command returns, and the errors, over any kind of connection.

The errors, by what the caller does next:

* ShellError                 the message is a sentence that names the host
  x UnreachableError         the host does not respond, or the connection broke: retry later; normal while it boots
  x LoginRefusedError        the host does not know our key: retry later while it boots; else the user has to fix it
  x HostKeyError             another host responds than the one we know: nothing is sent to it
  x CommandTimeoutError      the program took too long; it may still run
  x CommandError             the program failed: exit code and last output
    x DiskFullError          because the host's disk is full

No secret may be in a command, because every user of a machine can see commands. Secrets go in by standard input.
"""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    import paramiko  # slow to import

CONNECT_TIMEOUT_S = 10.0
MOST_OUTPUT_BYTES = 4 * 1024 * 1024
_TAIL_CHARS = 2000
_FULL = b"No space left on device"


@dataclass(frozen=True, slots=True)
class Login:
    """How to get into a host.

    `host_keys` are the public keys one of which it must have ("ssh-ed25519 AAAA…"), `private_key` the text of a private key
    file (of any kind), `certificate` that of its certificate. `name` is what people call the host. `agent`: the keys of the
    SSH agent at $SSH_AUTH_SOCK are offered, too.

    It is reached at `address`, or by way of a `bastion`, or by the standard streams of a `program` (its arguments).
    """

    name: str
    address: str
    user: str
    private_key: str = field(repr=False)
    host_keys: tuple[str, ...]
    port: int = 22
    passphrase: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    agent: bool = False
    bastion: Login | None = None
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a program left: its exit code, and what it wrote, of very much only the end."""

    code: int
    out: bytes
    err: bytes

    @property
    def said(self) -> str:
        """Its last lines, errors first, for people."""
        return (self.err.strip() or self.out.strip()).decode(errors="replace")[-_TAIL_CHARS:]


class ShellError(Exception):
    """Base of all. The message is a sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UnreachableError(ShellError):
    pass


class LoginRefusedError(ShellError):
    pass


class HostKeyError(ShellError):
    pass


class CommandTimeoutError(ShellError):
    pass


class CommandError(ShellError):
    def __init__(self, message: str, output: CommandOutput) -> None:
        super().__init__(message)
        self.output = output


class DiskFullError(CommandError):
    pass


Feed = Callable[[BinaryIO], None]
"""Writes a program's standard input."""


def script_of(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def exec_line(script: str) -> str:
    """Return what sshd is sent, so that a script means the same in any login shell."""
    return f"exec env LC_ALL=C /bin/sh -c {shlex.quote(script)}"


def checked(login: Login, script: str, output: CommandOutput, check: bool = True) -> CommandOutput:
    """Return the output, if the program did not fail. Raises DiskFullError, or CommandError with `check`."""
    if output.code != 0 and _FULL in output.err + output.out:
        raise DiskFullError(f"{login.name}: the disk is full", output)
    if check and output.code != 0:
        said = f": {output.said.splitlines()[-1]}" if output.said else ""
        raise CommandError(
            f"{login.name}: `{_brief(script)}` failed with exit code {output.code}{said}", output
        )
    return output


def timed_out(login: Login, script: str, timeout_s: float) -> CommandTimeoutError:
    return CommandTimeoutError(f"{login.name}: no end of `{_brief(script)}` in {timeout_s:g} s")


def lost(login: Login, error: BaseException) -> UnreachableError:
    return UnreachableError(f"{login.name}: the connection was lost ({why(error)})")


class Commands(ABC):
    """Commands on one host, over one connection. Thread-safe: commands run side by side."""

    login: Login

    @abstractmethod
    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | Feed = b"",
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> CommandOutput:
        """Run a program (arguments, or a script for sh) to its end. With `check` raises CommandError if it fails."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """As far as we know: a dead peer may look alive for a while."""

    @abstractmethod
    def close(self) -> None: ...

    def put(self, path: str, data: bytes, *, mode: int = 0o600, timeout_s: float = 60.0) -> None:
        """Write a file of the host, whole or not at all. A relative path starts at the user's home."""
        # The length distinguishes a file from the first part of one whose sender has died; two may send the same one at once.
        script = (
            f'umask 077; new={_q(path)}.new.$$; mkdir -p "$(dirname {_q(path)})" && cat >"$new" '
            f'&& [ "$(wc -c <"$new")" -eq {len(data)} ] && chmod {mode:o} "$new" && mv -f "$new" {_q(path)} '
            f'|| {{ rm -f "$new"; exit 1; }}'
        )
        self.run(script, stdin=data, timeout_s=timeout_s)

    def read(self, path: str, offset: int = 0, max_bytes: int = 65536, timeout_s: float = 30.0) -> bytes:
        """Return a part of a file. Empty at its end, and if there is no such file."""
        script = f"[ ! -f {_q(path)} ] || tail -c +{offset + 1} {_q(path)} | head -c {min(max_bytes, MOST_OUTPUT_BYTES)}"
        return self.run(script, timeout_s=timeout_s).out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HostConnection(Commands):
    """A connection to one host that also reaches the host's ports. Thread-safe."""

    @abstractmethod
    def start(self, command: str | Sequence[str]) -> paramiko.Channel:
        """Start a program and return its channel, which the caller reads and closes. Raises UnreachableError."""

    @abstractmethod
    def dial(
        self, port: int, address: str = "127.0.0.1", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> paramiko.Channel:
        """Connect to a port of the host's loopback, or of an address that the host reaches. Raises UnreachableError."""


def why(error: BaseException) -> str:
    """Return the reason in one line.

    An event loop's own words for a failed connection are longer than the kernel's, and say less.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        text = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return text.splitlines()[0]


def _brief(script: str) -> str:
    line = script.strip().splitlines()[0] if script.strip() else ""
    return line if len(line) <= 60 else line[:57] + "…"


def _q(path: str) -> str:
    return shlex.quote(path)
