"""`controller.listen`, and who may call there: a proxy that logs people in, and what each of them may do."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from skyserve_cli.config_section import Strict
from skyserve_cli.config_teams import TeamName

OWNER_NAME = "owner"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}")


class TrustedProxyConfig(Strict):
    """A proxy that authenticates people and sends their names in a header."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, populate_by_name=True)

    header: HeaderName = Field(
        default="X-Forwarded-User",
        description="header with the name of the user whom the proxy has authenticated",
    )
    groups_header: HeaderName | None = Field(
        default=None, description="header with the user's groups, separated by commas. null: users only"
    )
    sources: tuple[str, ...] = Field(
        alias="from", min_length=1, description="addresses of the proxy, as CIDR blocks"
    )
    secret_file: str | None = Field(
        default=None, description="file with a secret that the proxy sends in secret_header"
    )
    secret_header: HeaderName = Field(
        default="X-Skyserve-Proxy-Secret", description="header with the secret of secret_file"
    )
    client_ca_file: str | None = Field(
        default=None,
        description="certificate authority (PEM) of the proxy's client certificate; it must have issued no other",
    )

    @field_validator("sources")
    @classmethod
    def _blocks(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        for source in sources:
            try:
                ipaddress.ip_network(source)
            except ValueError as error:
                raise ValueError(f"{source!r} is no block like 10.0.0.7/32: {error}") from None
        return sources

    @model_validator(mode="after")
    def _proven(self) -> TrustedProxyConfig:
        if self.secret_file is None and self.client_ca_file is None:
            raise ValueError(
                "secret_file or client_ca_file is needed: an address alone does not show that it is the proxy"
            )
        names = [name.lower() for name in (self.header, self.secret_header, self.groups_header) if name]
        if len(set(names)) < len(names) or "authorization" in names:
            raise ValueError(
                "header, groups_header and secret_header must differ, and none may be Authorization"
            )
        return self


class ListenConfig(Strict):
    """The port of the controller's API for commands on other hosts. Callers need a token of `serve token create`."""

    host: str = Field(
        default="127.0.0.1", description="address to listen on; others than loopback need a certificate"
    )
    port: int = Field(ge=1024, le=65535, description="port to listen on")
    certfile: str | None = Field(default=None, description="certificate chain (PEM) for HTTPS")
    keyfile: str | None = Field(default=None, description="private key (PEM) of the certificate")
    trusted_proxy: TrustedProxyConfig | None = Field(
        default=None,
        description="proxy whose header names a user of `users` or `groups`. null: tokens only",
    )

    @model_validator(mode="after")
    def _encrypted(self) -> ListenConfig:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile belong together")
        if self.certfile is None and self.host not in LOOPBACK:
            raise ValueError("a host other than 127.0.0.1 needs certfile and keyfile")
        if self.trusted_proxy is not None and self.trusted_proxy.client_ca_file and self.certfile is None:
            raise ValueError("trusted_proxy.client_ca_file needs certfile and keyfile")
        return self


class MemberConfig(Strict):
    """What a user, or the members of a group, may do."""

    name: str = Field(min_length=1, max_length=200, description="as the proxy sends it")
    role: Literal["viewer", "operator", "admin"] = Field(
        default="viewer", description="viewer, operator or admin"
    )
    services: tuple[str, ...] | None = Field(
        default=None, min_length=1, max_length=1000, description="services that are covered. null: all"
    )
    team: TeamName | None = Field(
        default=None, description="team of the services that they start. null: none"
    )

    @model_validator(mode="after")
    def _covers(self) -> MemberConfig:
        if self.role == "admin" and self.services is not None:
            raise ValueError("an admin covers all services; leave services out, or choose the role operator")
        return self


def is_user_name(name: str) -> bool:
    return _USER.fullmatch(name) is not None and name != OWNER_NAME


def check_users(users: Sequence[MemberConfig]) -> None:
    """Raise ValueError for a name that no user can have."""
    for index, one in enumerate(users):
        if not is_user_name(one.name):
            raise ValueError(
                f"users[{index}].name: {one.name!r} is no name of a user: letters, digits and . _ @ + -, at most 63, "
                f"and not {OWNER_NAME!r}"
            )


def check_members(key: str, members: Sequence[MemberConfig], teams: Collection[str]) -> None:
    """Raise ValueError for a name that is there twice, and for a team that is not configured."""
    names = [one.name for one in members]
    for one in members:
        if names.count(one.name) > 1:
            raise ValueError(f"{key}: {one.name} is there twice")
        if one.team is not None and one.team not in teams:
            known = ", ".join(sorted(teams)) or "none"
            raise ValueError(f"{key}: {one.name}: there is no team {one.team} (teams: {known})")
