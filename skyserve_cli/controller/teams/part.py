"""Tokens for the people who share a controller. Only admins may use these routes.

GET  /v1/tokens              -> {"tokens": [{"name", "role", "services", "team", "created_at", "created_by", "revoked_at"}]}
POST /v1/tokens              {"name", "role", "services": null or a list, "team": "" or of config.yaml} -> {"token"}, which is not
                             stored and not shown again
POST /v1/tokens/NAME/revoke
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import OWNER, AccessRole, Caller, StillValid, calling, valid_for
from skyserve_cli.controller.api.json_body import json_body
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.controller.teams.proxy_login import LOGIN_S, login_of
from skyserve_cli.state.team import TOKEN_PREFIX, NoSuchTokenError, TeamTokens, TokenExistsError, TokenRow

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_MOST_SERVICES = 1000


class TeamsPart(Part):
    """Knows the holders of tokens, and on the port the users whom a proxy names."""

    name = "teams"

    def __init__(self, kernel: Kernel) -> None:
        self._tokens = TeamTokens(kernel.store.database)
        self._clock = kernel.clock
        self._teams = kernel.config.teams
        self._login = login_of(kernel.config)

    def routes(self) -> Sequence[Route]:
        return [
            Route("GET", "/v1/tokens", self._list),
            Route("POST", "/v1/tokens", self._create, stores=True),
            Route("POST", "/v1/tokens/{token}/revoke", self._revoke, stores=True),
        ]

    async def caller_of(self, request: web.Request, is_remote: bool) -> tuple[Caller, StillValid] | None:
        user = self._login.of(request) if is_remote and self._login is not None else None
        if user is not None:
            return user, valid_for(LOGIN_S)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            return None
        look_up = partial(self._holder, digest=_digest(token))
        holder = await look_up()
        return None if holder is None else (holder, look_up)

    async def named(self, name: str) -> Caller | None:
        return await self._holder(name=name)

    def callers_revision(self) -> object:
        return self._tokens.token_changes()

    async def _holder(self, *, digest: str = "", name: str = "") -> Caller | None:
        """Return the caller with this token; None if it is unknown or revoked."""
        row = await asyncio.to_thread(lambda: self._tokens.token_with(digest=digest, name=name))
        if row is None:
            return None
        services = None if row.services is None else frozenset(row.services)
        return Caller(row.name, AccessRole(row.role), services, row.team)

    async def _list(self, request: web.Request) -> web.Response:
        rows = await asyncio.to_thread(self._tokens.tokens)
        return web.json_response({"tokens": [row._asdict() for row in rows]})

    async def _create(self, request: web.Request) -> web.Response:
        """Raise RejectedError, KeyError, TypeError, ValueError."""
        row, token = self._row(await json_body(request)), TOKEN_PREFIX + secrets.token_urlsafe(32)
        try:
            await asyncio.to_thread(self._tokens.add_token, row, _digest(token))
        except TokenExistsError as error:
            message = f"there is a token {error}; revoke it first, or choose another name"
            raise RejectedError(message, 409) from error
        return web.json_response({"token": token}, headers={"Cache-Control": "no-store"})

    async def _revoke(self, request: web.Request) -> web.Response:
        """Raise RejectedError."""
        name = request.match_info["token"]
        try:
            await asyncio.to_thread(self._tokens.revoke_token, name, self._clock.now())
        except NoSuchTokenError as error:
            raise RejectedError(f"there is no token {error} that is in use", 404) from error
        return web.json_response({})

    def _row(self, body: dict[str, Any]) -> TokenRow:
        name, role, services = str(body["name"]), AccessRole(body["role"]), body.get("services")
        if not _NAME.fullmatch(name) or name == OWNER.name:
            raise ValueError(
                f"{name[:80]!r} is no name of a token: letters, digits and . _ @ -, at most 63, and not {OWNER.name!r}"
            )
        if services is not None:
            services = tuple(sorted({str(service) for service in services}))
            if role is AccessRole.ADMIN:
                raise ValueError(
                    "an admin covers all services; leave services out, or choose the role operator"
                )
            if not services or len(services) > _MOST_SERVICES:
                raise ValueError(f"services must be 1 to {_MOST_SERVICES} names")
        team = str(body.get("team") or "")
        if team and team not in self._teams:
            known = ", ".join(sorted(self._teams)) or "none"
            raise ValueError(f"there is no team {team[:80]!r} in config.yaml (teams: {known})")
        return TokenRow(name, role.value, services, self._clock.now(), calling().name, None, team)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
