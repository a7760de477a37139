"""The API of a controller on another host, through SSH to the socket in its home.

A process has one SSH connection to each controller, and a session in it for each HTTP connection: a small program there
(`bridge`) joins the session to the socket and passes on the home's token, which is kept in memory only. HTTP connections are
kept open between calls, so that a command that polls does not start a program for each call.
"""

from __future__ import annotations

import atexit
import http.client
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import paramiko

from provisioners.port.commands import HostConnection, Login, ShellError
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_config import SshAccess
from skyserve_cli.controller.api import bridge
from skyserve_cli.controller.api.remote import Remote, SshPlace
from skyserve_cli.home import Home

_MARK = b"skyserve-bridge "
_LONGEST_GREETING_BYTES = 65536
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class BridgeSession(NamedTuple):
    """A session that leads to the socket, and the token of the home."""

    channel: paramiko.Channel
    token: str


class SshLink:
    """The connection to the host of one controller, made on first use and again when it was lost. Thread-safe."""

    def __init__(self, remote: Remote, home: Home, dial: Callable[[Login], HostConnection] = connect) -> None:
        self._remote = remote
        self._home = home
        self._dial = dial
        self._lock = Lock()
        self._shell: HostConnection | None = None
        self._idle: list[BridgeSession] = []

    def session(self, timeout_s: float) -> BridgeSession:
        """Return a session that no other call uses. Raises OSError, whose text is a sentence."""
        while True:
            try:
                session = self._idle.pop()
            except IndexError:
                break
            if not (session.channel.closed or session.channel.eof_received):
                session.channel.settimeout(timeout_s)
                return session
            session.channel.close()
        try:
            return self._open(timeout_s)
        except ShellError as error:
            raise ConnectionError(error.message) from error

    def give_back(self, session: BridgeSession) -> None:
        """Keep a session whose last response was read to its end."""
        self._idle.append(session)

    def _open(self, timeout_s: float) -> BridgeSession:
        with self._lock:
            if self._shell is None or not self._shell.is_open:
                self._shell = self._dial(login_of(self._remote, self._home))
                atexit.register(self._shell.close)
            shell = self._shell
        source = shlex.quote(Path(bridge.__file__).read_text(encoding="utf-8"))
        channel = shell.start(f"exec python3 -c {source} {shlex.quote(self._remote.home)}")
        channel.settimeout(timeout_s)
        try:
            return BridgeSession(channel, _greeting(channel))
        except BaseException:
            channel.close()
            raise


def _greeting(channel: paramiko.Channel) -> str:
    """Return the token from the bridge's first line. Raises ConnectionError with the bridge's reason, or the shell's."""
    line, count = b"", 0
    while not (line.startswith(_MARK) and line.endswith(b"\n")):
        line = b"" if line.endswith(b"\n") else line
        byte = channel.recv(1)  # no more: what follows belongs to HTTP
        count += 1
        if not byte or count > _LONGEST_GREETING_BYTES:
            said = channel.recv_stderr(4096) if channel.recv_stderr_ready() else line
            lines = said.decode(errors="replace").strip().splitlines()
            raise ConnectionError(lines[-1] if lines else "the session there ended at once")
        line += byte
    kind, _, rest = line[len(_MARK) :].decode(errors="replace").strip().partition(" ")
    if kind != "ok":
        raise ConnectionRefusedError(rest)
    return rest


class SshHttpConnection(http.client.HTTPConnection):
    """An HTTP connection through a session. `close` keeps the session where the response was read whole.

    `token` is that of the home, once the connection is open.
    """

    def __init__(self, link: SshLink, timeout_s: float) -> None:
        super().__init__("controller", timeout=timeout_s)
        self._link = link
        self._timeout_s = timeout_s
        self.token = ""
        self._session: BridgeSession | None = None
        self._response: http.client.HTTPResponse | None = None

    def connect(self) -> None:
        self._session = self._link.session(self._timeout_s)
        self.token = self._session.token
        self.sock: Any = self._session.channel

    def getresponse(self) -> http.client.HTTPResponse:
        self._response = super().getresponse()
        return self._response

    def close(self) -> None:
        session, response = self._session, self._response
        self._session = self._response = None
        is_whole = response is not None and response.isclosed() and not response.will_close
        if is_whole:
            self.sock = None  # the base class would close it
        super().close()
        if session is not None and is_whole:
            self._link.give_back(session)
        elif session is not None:
            session.channel.close()


_LINKS: dict[Remote, SshLink] = {}
_LINKS_LOCK = Lock()


def connection_to(remote: Remote, home: Home, timeout_s: float) -> SshHttpConnection:
    """Return a connection that is not open yet, by the one link of this process to that controller."""
    with _LINKS_LOCK:
        link = _LINKS.setdefault(remote, SshLink(remote, home))
    return SshHttpConnection(link, timeout_s)


def login_of(remote: Remote, home: Home) -> Login:
    """Return how to log in on the host of the controller. Raises OSError with a sentence."""
    if remote.pool_host:
        return _pool_login(remote.pool_host, home)
    place = SshPlace.of(remote.url)
    identity = Path(remote.identity) if remote.identity else _default_key()
    known_hosts = Path(remote.known_hosts or "~/.ssh/known_hosts").expanduser()
    access = SshAccess(place.user, identity, known_hosts, place.port, ssh_agent=identity is None)
    try:
        return access.login(place.host, place.host)
    except OSError as error:
        raise ConnectionError(f"{error.filename} cannot be read: {error.strerror}") from None


def _pool_login(name: str, home: Home) -> Login:
    from provisioners.ssh.pool import load_pools
    from skyserve_cli.config import load_config

    section = load_config(home.config).clouds.get("ssh")
    host = None if section is None else load_pools(getattr(section, "pools", {})).host(name)
    if host is None:
        raise ConnectionError(
            f"{home.config}: clouds.ssh.pools has no host {name} any more; add the context again"
        )
    try:
        return host.access.login(host.name, host.address)
    except OSError as error:
        raise ConnectionError(f"{error.filename} cannot be read: {error.strerror}") from None


def _default_key() -> Path | None:
    """Return the first of the user's own keys; None where an SSH agent has keys. Raises ConnectionError."""
    if os.environ.get("SSH_AUTH_SOCK"):
        return None
    for name in _DEFAULT_KEYS:
        path = Path.home() / ".ssh" / name
        if path.is_file():
            return path
    raise ConnectionError("there is no SSH key; name one with --identity, or start an SSH agent")
