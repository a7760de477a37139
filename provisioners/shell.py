"""One machine over SSH: log in with a pinned host key, run programs, bring files.

What can go wrong, by what the caller does next:

* ShellError                 the message is a sentence that names the host
  x UnreachableError         nobody answers, or the connection broke: later, again; while it boots that is normal
  x LoginRefusedError        the host does not know our key: later, again while it boots; else the user's to mend
  x HostKeyError             something answers that is not the host that we know: nothing is sent to it
  x CommandTimeoutError      the program took too long; it may still run
  x CommandError             it failed: exit code and last output
    x DiskFullError          because the host's disk is full

Host keys are checked before anything is sent, and no unknown key is ever accepted. A peer that is dead without a word
is noticed within seconds (TCP_USER_TIMEOUT, RFC 5482; keep-alives), and no call waits longer than its time-out. Nothing
that is secret may be in a command: commands can be seen by every user of a machine. It goes in by standard input.
"""

from __future__ import annotations

import io
import os
import select
import shlex
import socket
import time
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Lock
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import paramiko

from provisioners.clock import unix_now
from provisioners.program_link import ProgramLink

CONNECT_TIMEOUT_S = 10.0
DEAD_PEER_S = 20.0
KEEP_ALIVE_S = 10
MOST_OUTPUT_BYTES = 4 * 1024 * 1024
_TAIL_CHARS = 2000
_QUIET_S = 0.5
SESSIONS = 8  # at once; an sshd refuses the eleventh
SESSION_AGAIN_S = 0.05
UNREADABLE_KEY = (
    "the private key for {name} cannot be read: it must be Ed25519, ECDSA or RSA, with the passphrase in `passphrase_file` if it "
    "has one, and with a certificate of its own"
)
_FULL = b"No space left on device"


@dataclass(frozen=True, slots=True)
class Login:
    """How to get into a host. `host_keys` are the public keys one of which it must have ("ssh-ed25519 AAAA…"),
    `private_key` the text of a private key file (of any kind), `certificate` that of its certificate. `name` is what people call
    the host. `agent`: the keys of the SSH agent at $SSH_AUTH_SOCK are offered, too.

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

    @staticmethod
    def of(values: Mapping[str, Any]) -> Login:
        """From what `dataclasses.asdict` and JSON made of one."""
        bastion = values.get("bastion")
        lists = {key: tuple(values.get(key) or ()) for key in ("host_keys", "program")}
        return Login(**{**values, **lists, "bastion": None if bastion is None else Login.of(bastion)})


@dataclass(frozen=True, slots=True)
class Output:
    """What a program left: its exit code, and what it wrote, of very much only the end."""

    code: int
    out: bytes
    err: bytes

    @property
    def said(self) -> str:
        """Its last words, errors first, for people."""
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
    def __init__(self, message: str, output: Output) -> None:
        super().__init__(message)
        self.output = output


class DiskFullError(CommandError):
    pass


Feed = Callable[[BinaryIO], None]
"""Writes a program's standard input."""


def script_of(command: str | Sequence[str]) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def exec_line(script: str) -> str:
    """What sshd is sent, so that a script means the same whatever the user's shell is."""
    return f"exec env LC_ALL=C /bin/sh -c {shlex.quote(script)}"


def checked(login: Login, script: str, output: Output, check: bool = True) -> Output:
    """The output, if the program did not fail. Raises DiskFullError, or CommandError with `check`."""
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
    ) -> Output:
        """Run a program (arguments, or a script for sh) to its end. With `check` raises CommandError if it fails."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """As far as we know: a dead peer may look alive for a while."""

    @abstractmethod
    def close(self) -> None: ...

    def put(self, path: str, data: bytes, *, mode: int = 0o600, timeout_s: float = 60.0) -> None:
        """Write a file of the host, whole or not at all. A relative path starts at the user's home."""
        # The length tells a file from the first part of one whose sender has died; two may send the same one at once.
        script = (
            f'umask 077; new={_q(path)}.new.$$; mkdir -p "$(dirname {_q(path)})" && cat >"$new" '
            f'&& [ "$(wc -c <"$new")" -eq {len(data)} ] && chmod {mode:o} "$new" && mv -f "$new" {_q(path)} '
            f'|| {{ rm -f "$new"; exit 1; }}'
        )
        self.run(script, stdin=data, timeout_s=timeout_s)

    def read(self, path: str, offset: int = 0, max_bytes: int = 65536, timeout_s: float = 30.0) -> bytes:
        """A part of a file. Empty at its end, and if there is no such file."""
        script = f"[ ! -f {_q(path)} ] || tail -c +{offset + 1} {_q(path)} | head -c {min(max_bytes, MOST_OUTPUT_BYTES)}"
        return self.run(script, timeout_s=timeout_s).out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Shell(Commands):
    """A connection with paramiko, which has a thread of its own. Each command has a channel of its own."""

    def __init__(self, client: paramiko.SSHClient, login: Login, now: Callable[[], float] = unix_now) -> None:
        self._client = client
        self._now = now
        self._sessions = BoundedSemaphore(SESSIONS)
        self.login = login

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | Feed = b"",
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> Output:
        script = script_of(command)
        ends_at = self._now() + timeout_s
        try:
            with self._session(timeout_s), self._open(timeout_s) as channel:
                channel.exec_command(exec_line(script))
                broken = self._feed(channel, stdin)
                output = self._gather(channel, ends_at)
        except TimeoutError as error:
            raise timed_out(self.login, script, timeout_s) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise lost(self.login, error) from error
        if broken is not None and output.code == 0:
            raise lost(self.login, broken) from broken
        return checked(self.login, script, output, check)

    def start(self, command: str | Sequence[str]) -> paramiko.Channel:
        """The channel of a program that has been started: the caller reads it and closes it. Raises UnreachableError."""
        try:
            channel = self._open(CONNECT_TIMEOUT_S)
            channel.exec_command(exec_line(script_of(command)))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise lost(self.login, error) from error
        return channel

    def dial(
        self, port: int, address: str = "127.0.0.1", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> paramiko.Channel:
        """A connection to a port of the host's own loopback, or of an address that it can reach. Raises UnreachableError."""
        try:
            transport = self._client.get_transport()
            if transport is None:
                raise EOFError("closed")
            origin = ("127.0.0.1", port)
            return transport.open_channel("direct-tcpip", (address, port), origin, timeout=timeout_s)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise UnreachableError(
                f"{self.login.name}: port {port} cannot be reached ({why(error)})"
            ) from error

    @property
    def is_open(self) -> bool:
        transport = self._client.get_transport()
        return transport is not None and transport.is_active()

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _session(self, timeout_s: float) -> Iterator[None]:
        if not self._sessions.acquire(timeout=timeout_s):
            raise TimeoutError
        try:
            yield
        finally:
            self._sessions.release()

    def _open(self, timeout_s: float) -> paramiko.Channel:
        transport = self._client.get_transport()
        if transport is None:
            raise EOFError("closed")
        patience_s = min(timeout_s, CONNECT_TIMEOUT_S)
        until = self._now() + patience_s
        while True:
            try:
                channel = transport.open_session(timeout=patience_s)
            except paramiko.SSHException:
                # The connection may be well: an sshd has ten sessions for each, and is slow to forget one. Of several
                # that are refused at once paramiko tells only one why.
                if self._now() >= until or not transport.is_active():
                    raise
                time.sleep(SESSION_AGAIN_S)
            else:
                channel.settimeout(timeout_s)
                return channel

    def _feed(self, channel: paramiko.Channel, stdin: bytes | Feed) -> OSError | None:
        """Write the standard input; the error if the program did not want all of it, which is its right."""
        try:
            pipe = _Stdin(channel)
            if callable(stdin):
                stdin(cast(BinaryIO, pipe))
            elif stdin:
                pipe.write(stdin)
        except TimeoutError:
            raise
        except OSError as error:
            if not channel.closed:
                raise  # it is our source that cannot be read
            return error
        finally:
            with suppress(OSError):
                channel.shutdown_write()
        return None

    def _gather(self, channel: paramiko.Channel, ends_at: float) -> Output:
        out, err = bytearray(), bytearray()
        quiet_since = self._now()
        while True:
            # The exit status may overtake the last output, so the end is when the host has closed the channel. It does
            # not while something that the program left running has it open: then silence is the end.
            # All three are looked at before what has come, and in this order: none is true too early.
            is_closed = channel.closed
            is_whole = channel.eof_received
            ended = channel.exit_status_ready()
            before = len(out) + len(err)
            while channel.recv_ready():
                out += channel.recv(65536)
            while channel.recv_stderr_ready():
                err += channel.recv_stderr(65536)
            now = self._now()
            if len(out) + len(err) > before or not ended:
                quiet_since = now
            del out[:-MOST_OUTPUT_BYTES], err[:-MOST_OUTPUT_BYTES]
            if is_closed or (ended and (is_whole or now - quiet_since > _QUIET_S)):
                break
            if now >= ends_at:
                raise TimeoutError
            left_s = min(ends_at - now, _QUIET_S)
            if channel.eof_received:
                channel.status_event.wait(left_s)
            else:
                select.select([channel], [], [], left_s)
        code = channel.recv_exit_status() if channel.exit_status_ready() else -1
        if code == -1 and not self.is_open:
            raise EOFError("it hung up")
        return Output(code, bytes(out), bytes(err))


class _Stdin:
    """The standard input of a program. Has no buffer of its own, so nothing is left in it if the program ends."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def write(self, data: bytes) -> int:
        self._channel.sendall(data)
        return len(data)

    def flush(self) -> None:
        pass


def connect(login: Login, timeout_s: float = CONNECT_TIMEOUT_S) -> Shell:
    """Log in. Raises UnreachableError, LoginRefusedError or HostKeyError; whatever is wrong with a bastion makes the host
    behind it unreachable, no more."""
    key = _private_key(login)
    where = place_of(login)
    client = paramiko.SSHClient()
    program: ProgramLink | None = None
    client.set_missing_host_key_policy(_Refuse())
    entry = login.address if login.port == 22 else f"[{login.address}]:{login.port}"
    for line in login.host_keys:
        kind, blob = line.split()[:2]
        client.get_host_keys().add(entry, kind, paramiko.PKey.from_type_string(kind, b64decode(blob)))
    try:
        if login.program:
            program = ProgramLink(login.program)
        client.connect(
            login.address,
            port=login.port,
            username=login.user,
            pkey=key,
            sock=link_to(login, timeout_s) if program is None else program.socket,
            timeout=timeout_s,
            banner_timeout=timeout_s,
            auth_timeout=timeout_s,
            channel_timeout=timeout_s,
            look_for_keys=False,
            allow_agent=login.agent,
        )
    except (paramiko.BadHostKeyException, _UnknownHostKeyError) as error:
        client.close()
        raise stranger(login, error.key.fingerprint) from error
    except paramiko.AuthenticationException as error:
        client.close()
        raise LoginRefusedError(f"{where} refuses the login of {login.user!r}") from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        client.close()
        said = "" if program is None else program.said()
        raise UnreachableError(f"{where} cannot be reached: {said or why(error)}") from error
    transport = client.get_transport()
    if transport is not None:
        transport.set_keepalive(KEEP_ALIVE_S)
    return Shell(client, login)


def link_to(login: Login, timeout_s: float) -> socket.socket | paramiko.Channel:
    """The bytes of the host's sshd. Raises OSError or UnreachableError."""
    if login.bastion is not None:
        return _BASTIONS.channel(login.bastion, login, timeout_s)
    if login.program:
        return ProgramLink(login.program).socket
    link = socket.create_connection((login.address, login.port), timeout=timeout_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_PEER_S * 1000))
    return link


Bastion = tuple[str, int, str, tuple[str, ...]]


def same_bastion(login: Login) -> Bastion:
    """Equal for logins that can share a connection. Keys and certificates do not count: they are renewed while it is open."""
    return login.address, login.port, login.user, login.host_keys


class _Bastions:
    """One connection to each, for all hosts behind it. Thread-safe."""

    def __init__(self) -> None:
        self._clients: dict[Bastion, Shell] = {}
        self._dialling: dict[Bastion, Lock] = {}
        self._lock = Lock()

    def channel(self, bastion: Login, login: Login, timeout_s: float) -> paramiko.Channel:
        """To the host's sshd. Raises UnreachableError."""
        same = same_bastion(bastion)
        with self._lock:
            dialling = self._dialling.setdefault(same, Lock())
        with dialling:
            shell = self._clients.get(same)
            if shell is None or not shell.is_open:
                try:
                    shell = self._clients[same] = connect(bastion, timeout_s)
                except ShellError as error:
                    raise behind(login, error.message) from error
        try:
            return shell.dial(login.port, login.address, timeout_s)
        except ShellError as error:
            raise behind(login, error.message) from error


def behind(login: Login, said: str) -> UnreachableError:
    return UnreachableError(f"{place_of(login)} cannot be reached through the bastion: {said}")


class _UnknownHostKeyError(paramiko.SSHException):
    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("unknown host key")
        self.key = key


class _Refuse(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise _UnknownHostKeyError(key)


def stranger(login: Login, shown: str) -> HostKeyError:
    """The host shows a key with the fingerprint `shown`, which is not one that we know."""
    where = place_of(login)
    if not login.host_keys:
        return HostKeyError(
            f"no host key is known for {where}, which shows {shown}: add it to known_hosts if it is the right one"
        )
    known = ", ".join(
        paramiko.PKey.from_type_string(line.split()[0], b64decode(line.split()[1])).fingerprint
        for line in login.host_keys
    )
    return HostKeyError(
        f"{where} shows another host key than the one we know ({shown} instead of {known}): nothing was sent to it"
    )


def place_of(login: Login) -> str:
    return f"{login.name} ({login.address}:{login.port})"


def _private_key(login: Login) -> paramiko.PKey | None:
    if login.agent and not login.private_key:
        return None
    kinds: list[type[paramiko.PKey]] = [paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey]
    for kind in kinds:
        with suppress(paramiko.SSHException, ValueError):
            key = kind.from_private_key(io.StringIO(login.private_key), login.passphrase or None)
            if login.certificate:
                key.load_certificate(login.certificate)
            return key
    raise LoginRefusedError(UNREADABLE_KEY.format(name=login.name))


def why(error: BaseException) -> str:
    """The reason in one line. An event loop's own words for a failed connection are longer than the kernel's, and say less."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        text = f"[Errno {error.errno}] {os.strerror(error.errno)}"
    return text.splitlines()[0]


def _brief(script: str) -> str:
    line = script.strip().splitlines()[0] if script.strip() else ""
    return line if len(line) <= 60 else line[:57] + "…"


def _q(path: str) -> str:
    return shlex.quote(path)


_BASTIONS = _Bastions()
