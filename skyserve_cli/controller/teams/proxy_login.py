"""Login through a proxy: who the user is that it names in a header, if it is the proxy that calls.

A header is only believed from the configured addresses, and only with the secret, or the client certificate, that the proxy
has. Headers of others have no meaning: such a caller needs a token. What is ambiguous is rejected, because a proxy that appends
to a header, where it should replace it, would pass on what its client has sent.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aiohttp import web

from skyserve_cli.config import Config, ConfigError
from skyserve_cli.config_listen import MemberConfig, TrustedProxyConfig, is_user_name
from skyserve_cli.controller.api.access import AccessRole, Caller
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.state.team import TOKEN_PREFIX

LEAST_SECRET = 16
#: A response that goes on ends after this time, so that the proxy is called again and can refuse.
LOGIN_S = 60.0
_READS = frozenset({"GET", "HEAD"})


class Headers(Protocol):
    """What this needs of the headers of a request."""

    def getall(self, key: str, default: list[str], /) -> list[str]: ...

    def get(self, key: str, default: str, /) -> str: ...


class LoginRefusedError(RejectedError):
    """The proxy's word is not accepted; `status` is that of the response, the text names the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, status)


class ProxyLogin:
    """One per daemon. `secret` is what the proxy sends, None: it has a client certificate. The first group that fits counts."""

    def __init__(
        self,
        settings: TrustedProxyConfig,
        secret: str | None,
        users: Sequence[MemberConfig],
        groups: Sequence[MemberConfig],
    ) -> None:
        self._settings = settings
        self._secret = None if secret is None else secret.encode()
        self._blocks = [ipaddress.ip_network(block) for block in settings.sources]
        self._users: Mapping[str, MemberConfig] = {user.name: user for user in users}
        self._groups = groups

    def of(self, request: web.Request) -> Caller | None:
        """Return the user that the proxy names in the request; None if it is not from the proxy. Raises LoginRefusedError."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        certificate = None if transport is None else transport.get_extra_info("peercert")
        caller = self.caller(request.headers, peer[0] if peer else None, has_certificate=bool(certificate))
        if caller is not None and cross_site(request.method, request.headers):
            raise LoginRefusedError(403, "only the page itself may send this request")
        return caller

    def caller(self, headers: Headers, peer: str | None, *, has_certificate: bool) -> Caller | None:
        """Return the user that the proxy at `peer` names; None if it is not the proxy, or names none.

        Raises LoginRefusedError.
        """
        names = headers.getall(self._settings.header, [])
        if not names or not self._is_proxy(peer):
            return None
        self._insist_on_proof(headers, has_certificate)
        if len(names) > 1:
            raise LoginRefusedError(400, f"the header {self._settings.header} is there more than once")
        if headers.get("Authorization", "").startswith(f"Bearer {TOKEN_PREFIX}"):
            raise LoginRefusedError(400, f"both a token and the header {self._settings.header} name a caller")
        name = names[0].strip()
        if not is_user_name(name):
            raise LoginRefusedError(
                403,
                f"the header {self._settings.header} has no name of a user: letters, digits and . _ @ + -",
            )
        member = self._member(name, self._groups_of(headers))
        if member is None:
            raise LoginRefusedError(
                403, f"the user {name} is not in users of config.yaml, and in no group of groups"
            )
        services = None if member.services is None else frozenset(member.services)
        return Caller(name, AccessRole(member.role), services, member.team or "", by_proxy=True)

    def _is_proxy(self, peer: str | None) -> bool:
        try:
            address = ipaddress.ip_address(peer or "")
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in block for block in self._blocks)

    def _insist_on_proof(self, headers: Headers, has_certificate: bool) -> None:
        settings = self._settings
        if self._secret is not None:
            given = headers.getall(settings.secret_header, [])
            sent = (given[0] if given else "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(sent, self._secret) or len(given) != 1:
                raise LoginRefusedError(
                    401, f"the secret of the proxy, {settings.secret_header}, is missing or wrong"
                )
        if settings.client_ca_file is not None and not has_certificate:
            raise LoginRefusedError(401, "the client certificate of the proxy is missing")

    def _groups_of(self, headers: Headers) -> frozenset[str]:
        key = self._settings.groups_header
        if key is None:
            return frozenset()
        given = headers.getall(key, [])
        if len(given) > 1:
            raise LoginRefusedError(400, f"the header {key} is there more than once")
        return frozenset(group.strip() for text in given for group in text.split(",") if group.strip())

    def _member(self, name: str, groups: frozenset[str]) -> MemberConfig | None:
        if name in self._users:
            return self._users[name]
        return next((group for group in self._groups if group.name in groups), None)


def cross_site(method: str, headers: Headers) -> bool:
    """Return whether a page of another site sends this request: the browser's login at the proxy is sent with it.

    Browsers report the origin of each request that is no read; other clients send neither header.
    """
    if method in _READS:
        return False
    site, origin = headers.get("Sec-Fetch-Site", ""), headers.get("Origin", "")
    if site:
        return site != "same-origin"
    return bool(origin) and origin.partition("://")[2].lower() != headers.get("Host", "").lower()


def login_of(config: Config) -> ProxyLogin | None:
    """Return None without a trusted proxy. Raises ConfigError if its secret cannot be read."""
    proxy = None if config.controller.listen is None else config.controller.listen.trusted_proxy
    return None if proxy is None else ProxyLogin(proxy, secret_of(proxy), config.users, config.groups)


def secret_of(settings: TrustedProxyConfig) -> str | None:
    """Return the content of `secret_file`. Raises ConfigError."""
    if settings.secret_file is None:
        return None
    at = f"controller.listen.trusted_proxy.secret_file: {settings.secret_file}"
    try:
        secret = Path(settings.secret_file).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{at}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{at}: must be ASCII") from None
    if len(secret) < LEAST_SECRET or not secret.isprintable():
        raise ConfigError(f"{at}: must be one line of at least {LEAST_SECRET} characters")
    return secret
