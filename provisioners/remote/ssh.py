"""SSH to one machine with paramiko: log in with a pinned host key, run programs, write files.

Host keys are checked before anything is sent, and no unknown key is ever accepted. A peer that is dead without a word
is noticed within seconds (TCP_USER_TIMEOUT, RFC 5482; keep-alives), and no call waits longer than its timeout.
"""

from __future__ import annotations

import io
import select
import socket
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore, Lock
from typing import BinaryIO, cast

import paramiko

from provisioners.clock import unix_now
from provisioners.port.commands import (
    CONNECT_TIMEOUT_S,
    MOST_OUTPUT_BYTES,
    CommandOutput,
    Feed,
    HostConnection,
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
    checked,
    exec_line,
    lost,
    script_of,
    timed_out,
    why,
)
from provisioners.remote.proxy_command import ProxyCommand

DEAD_PEER_S = 20.0
KEEP_ALIVE_S = 10
_QUIET_S = 0.5
SESSIONS = 8  # at once; an sshd refuses the eleventh
SESSION_AGAIN_S = 0.05
UNREADABLE_KEY = (
    "the private key for {name} cannot be read: it must be Ed25519, ECDSA or RSA, with the passphrase in `passphrase_file` if it "
    "has one, and with a certificate of its own"
)


def wait_readable(channel: paramiko.Channel, timeout_s: float) -> None:
    """Wait until there is something to read, at most `timeout_s`.

    By poll: select refuses descriptors from 1024 on, which a controller with many connections has.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.poll(1000.0 * timeout_s)


class Shell(HostConnection):
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
    ) -> CommandOutput:
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
        """Return the channel of a program that has been started: the caller reads it and closes it.

        Raises UnreachableError.
        """
        try:
            channel = self._open(CONNECT_TIMEOUT_S)
            channel.exec_command(exec_line(script_of(command)))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise lost(self.login, error) from error
        return channel

    def dial(
        self, port: int, address: str = "127.0.0.1", timeout_s: float = CONNECT_TIMEOUT_S
    ) -> paramiko.Channel:
        """Return a connection to a port of the host's own loopback, or of an address that it can reach.

        Raises UnreachableError.
        """
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
                # that are refused at once paramiko reports only one reason.
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

    def _gather(self, channel: paramiko.Channel, ends_at: float) -> CommandOutput:
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
                wait_readable(channel, left_s)
        code = channel.recv_exit_status() if channel.exit_status_ready() else -1
        if code == -1 and not self.is_open:
            raise EOFError("it hung up")
        return CommandOutput(code, bytes(out), bytes(err))


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
    """Log in.

    Raises UnreachableError, LoginRefusedError or HostKeyError; a fault of a bastion makes the host behind it
    unreachable, no more.
    """
    key = _private_key(login)
    where = place_of(login)
    client = paramiko.SSHClient()
    program: ProxyCommand | None = None
    client.set_missing_host_key_policy(_Refuse())
    entry = login.address if login.port == 22 else f"[{login.address}]:{login.port}"
    for line in login.host_keys:
        kind, blob = line.split()[:2]
        client.get_host_keys().add(entry, kind, paramiko.PKey.from_type_string(kind, b64decode(blob)))
    try:
        if login.program:
            program = ProxyCommand(login.program)
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
        raise host_key_mismatch(login, error.key.fingerprint) from error
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
    """Return the bytes of the host's sshd. Raises OSError or UnreachableError."""
    if login.bastion is not None:
        return _BASTIONS.channel(login.bastion, login, timeout_s)
    if login.program:
        return ProxyCommand(login.program).socket
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


def host_key_mismatch(login: Login, shown: str) -> HostKeyError:
    """Return the error for a host that shows a key with the fingerprint `shown`, which is not one that we know."""
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


_BASTIONS = _Bastions()
