"""Controllers on other hosts: which one the commands call, and with which token.

`$SKYSERVE_CONTROLLER` (a URL) with `$SKYSERVE_TOKEN` or `$SKYSERVE_TOKEN_FILE` goes first, then the context that `serve context use`
has chosen. Without either, the commands call the controller of the home. A controller at ssh://USER@HOST needs no token here: who
can log in as the owner of its home is the owner. So it is at kubernetes://CONTEXT/NAMESPACE with who may run commands in its Pod.
"""

from __future__ import annotations

import getpass
import http.client
import json
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from skyserve_cli.home import Home, write_private

LOCAL = "local"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DEFAULT_HOME = ".skyserve"  # a relative path starts at the user's home directory there
POD_HOME = "/var/lib/skyserve/home"  # as the manifests have it


class RemoteError(Exception):
    """A remote controller is not described rightly; the text names what is wrong."""


class SshPlace(NamedTuple):
    """What ssh://USER@HOST:PORT names."""

    user: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> SshPlace:
        """Without a user in the URL it is the one who runs this. Raises ValueError."""
        found = urlsplit(url)
        if found.scheme != "ssh" or not found.hostname or found.path not in ("", "/") or found.port == 0:
            raise ValueError(url)
        if found.password is not None or found.query or found.fragment:
            raise ValueError(url)
        return cls(unquote(found.username or getpass.getuser()), found.hostname, found.port or 22)

    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{quote(self.user)}@{host}" + ("" if self.port == 22 else f":{self.port}")


class KubernetesPlace(NamedTuple):
    """What kubernetes://CONTEXT/NAMESPACE names. A name of a context may have any character."""

    context: str
    namespace: str

    @classmethod
    def of(cls, url: str) -> KubernetesPlace:
        """Raise ValueError."""
        found = urlsplit(url)
        namespace = found.path.strip("/")
        if found.scheme != "kubernetes" or not found.netloc or found.query or found.fragment:
            raise ValueError(url)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
            raise ValueError(url)
        return cls(unquote(found.netloc), namespace)

    def url(self) -> str:
        return f"kubernetes://{quote(self.context, safe='')}/{self.namespace}"


class Remote(NamedTuple):
    """`ca` is a file with the certificates to trust; empty: those of the system.

    Over SSH there is no `token`; `home` is that of the controller, `identity` the file of a private key (empty: those of the
    SSH agent, or the user's own), `known_hosts` the file with the host's key (empty: the user's own). A `pool_host` is reached
    as clouds.ssh.pools in config.yaml says.

    In Kubernetes there is no `token` either; `kubeconfig` is the file with the context (empty: $KUBECONFIG, then ~/.kube/config).
    """

    url: str
    token: str
    ca: str = ""
    home: str = ""
    identity: str = ""
    known_hosts: str = ""
    pool_host: str = ""
    kubeconfig: str = ""

    @property
    def is_ssh(self) -> bool:
        return self.url.startswith("ssh://")

    @property
    def is_kubernetes(self) -> bool:
        return self.url.startswith("kubernetes://")

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection by HTTP or HTTPS. Raises RemoteError where `ca` cannot be read."""
        found = urlsplit(self.url)
        host = found.hostname or ""
        if found.scheme == "http":
            return http.client.HTTPConnection(host, found.port or 80, timeout=timeout_s)
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise RemoteError(f"{self.ca}: no certificates can be read from it: {error.strerror}") from None
        return http.client.HTTPSConnection(host, found.port or 443, timeout=timeout_s, context=context)


class Contexts(NamedTuple):
    """The named remote controllers of a home, and which one is in use (LOCAL: that of the home)."""

    current: str
    remotes: Mapping[str, Remote]

    @classmethod
    def of(cls, home: Home) -> Contexts:
        """Raise RemoteError if the file cannot be read."""
        try:
            found = json.loads(home.contexts.read_text())
            return cls(
                str(found["current"]), {name: Remote(**each) for name, each in found["remotes"].items()}
            )
        except FileNotFoundError:
            return cls(LOCAL, {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{home.contexts}: cannot be read ({error}); remove it, and add the contexts again"
            ) from None

    def write(self, home: Home) -> None:
        home.create()
        content: dict[str, Any] = {
            "current": self.current,
            "remotes": {name: remote._asdict() for name, remote in self.remotes.items()},
        }
        write_private(home.contexts, json.dumps(content, indent=1).encode())


def remote_of(home: Home, environ: Mapping[str, str]) -> Remote | None:
    """Return the controller to call; None: that of the home. Raises RemoteError."""
    url = environ.get("SKYSERVE_CONTROLLER")
    if url:
        token = environ.get("SKYSERVE_TOKEN") or _token_in(environ.get("SKYSERVE_TOKEN_FILE"))
        return checked(Remote(url, token, environ.get("SKYSERVE_CA_FILE", "")), "SKYSERVE_CONTROLLER")
    contexts = Contexts.of(home)
    if contexts.current == LOCAL:
        return None
    if contexts.current not in contexts.remotes:
        raise RemoteError(f"there is no context {contexts.current}; choose one with `serve context use`")
    return contexts.remotes[contexts.current]


def checked(remote: Remote, what: str) -> Remote:
    """Return the controller. Raises RemoteError, which begins with `what`, if its URL or token cannot be right."""
    if remote.is_ssh:
        return _checked_ssh(remote, what)
    if remote.is_kubernetes:
        return _checked_kubernetes(remote, what)
    try:
        found = urlsplit(remote.url)
        is_url = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        is_url = False
    if not is_url or found.path not in ("", "/") or found.username is not None:
        raise RemoteError(
            f"{what}: {remote.url!r} is no address like https://HOST:PORT, ssh://USER@HOST or kubernetes://CONTEXT/NAMESPACE"
        )
    if found.scheme == "http" and found.hostname not in LOOPBACK:
        raise RemoteError(
            f"{what}: http:// would send the token in clear; use https://, or a tunnel to 127.0.0.1"
        )
    if not remote.token:
        raise RemoteError(f"{what}: a token is missing; set SKYSERVE_TOKEN or SKYSERVE_TOKEN_FILE")
    if not remote.token.isascii() or not remote.token.isprintable() or " " in remote.token:
        raise RemoteError(f"{what}: the token has characters that no token has")
    return remote


def _checked_ssh(remote: Remote, what: str) -> Remote:
    try:
        place = SshPlace.of(remote.url)
    except ValueError:
        raise RemoteError(f"{what}: {remote.url!r} is no address like ssh://USER@HOST:PORT") from None
    home = remote.home.removeprefix("~/") or DEFAULT_HOME
    return remote._replace(url=place.url(), token="", home=home)


def _checked_kubernetes(remote: Remote, what: str) -> Remote:
    try:
        place = KubernetesPlace.of(remote.url)
    except ValueError:
        raise RemoteError(
            f"{what}: {remote.url!r} is no address like kubernetes://CONTEXT/NAMESPACE"
        ) from None
    return remote._replace(url=place.url(), token="", home=remote.home or POD_HOME)


def _token_in(file: str | None) -> str:
    if not file:
        return ""
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RemoteError(f"SKYSERVE_TOKEN_FILE: {file} cannot be read: {error}") from None
