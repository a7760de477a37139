"""The API of a controller on another host, through SSH to the socket in its home: one SSH connection for each process."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from threading import Lock
from typing import Any

import paramiko

from provisioners.port.commands import HostConnection, Login
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_config import SshAccess
from skyserve_cli.controller.api import bridge
from skyserve_cli.controller.api.bridge_link import BridgeHttpConnection, BridgeLink
from skyserve_cli.controller.api.remote import Remote, SshPlace
from skyserve_cli.home import Home

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class SshChannel:
    """A session of SSH."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    @property
    def closed(self) -> bool:
        return bool(self._channel.closed or self._channel.eof_received)

    def __getattr__(self, name: str) -> Any:  # what it has in common with sockets
        return getattr(self._channel, name)

    def recv(self, size: int, /) -> bytes:
        return self._channel.recv(size)

    def settimeout(self, timeout_s: float, /) -> None:
        self._channel.settimeout(timeout_s)

    def printed_errors(self) -> bytes:
        return self._channel.recv_stderr(4096) if self._channel.recv_stderr_ready() else b""

    def close(self) -> None:
        self._channel.close()


class SshOpener:
    """The connection to the host of one controller."""

    def __init__(self, shell: HostConnection, home: str) -> None:
        self._shell = shell
        self._home = home

    @property
    def is_open(self) -> bool:
        return self._shell.is_open

    def start_bridge(self) -> SshChannel:
        source = shlex.quote(Path(bridge.__file__).read_text(encoding="utf-8"))
        return SshChannel(self._shell.start(f"exec python3 -c {source} {shlex.quote(self._home)}"))

    def close(self) -> None:
        self._shell.close()


_LINKS: dict[Remote, BridgeLink] = {}
_LINKS_LOCK = Lock()


def connection_to(remote: Remote, home: Home, timeout_s: float) -> BridgeHttpConnection:
    """Return a connection that is not open yet, by the one link of this process to that controller."""

    def dial() -> SshOpener:
        return SshOpener(connect(login_of(remote, home)), remote.home)

    with _LINKS_LOCK:
        link = _LINKS.setdefault(remote, BridgeLink(dial))
    return BridgeHttpConnection(link, timeout_s)


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
