"""Tokens for the people who share a controller. Only admins may use these routes.

GET  /v1/tokens              -> {"tokens": [{"name", "role", "services", "team", "created_at", "created_by", "revoked_at"}]}
POST /v1/tokens              {"name", "role", "services": null or a list, "team": "" or of config.yaml} -> {"token"}, which is not
                             stored and not shown again
POST /v1/tokens/NAME/revoke
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import (
    OWNER,
    AccessRole,
    Caller,
    caller_of,
    calling,
    digest_of,
    new_token,
)
from skyserve_cli.controller.api.json_body import json_body
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.state.team import TeamTokens, TokenRow

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_MOST_SERVICES = 1000


class Team:
    """Who the holder of a token is, and the routes about tokens. `http.Api` turns their errors into status codes.

    `teams` are those of config.yaml.
    """

    def __init__(self, tokens: TeamTokens, clock: Clock, teams: Collection[str] = ()) -> None:
        self._tokens = tokens
        self._teams = teams
        self._clock = clock

    async def holder_of(self, token: str) -> Caller | None:
        """Return the caller with this token; None if it is unknown or revoked."""
        digest = digest_of(token)
        row = await asyncio.to_thread(lambda: self._tokens.token_with(digest=digest))
        return None if row is None else caller_of(row)

    async def named(self, name: str) -> Caller | None:
        """Return the caller with the token of this name, or the owner; None if it is unknown or revoked."""
        if name == OWNER.name:
            return OWNER
        row = await asyncio.to_thread(lambda: self._tokens.token_with(name=name))
        return None if row is None else caller_of(row)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/tokens", self._list),
            web.post("/v1/tokens", self._create),
            web.post("/v1/tokens/{token}/revoke", self._revoke),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        rows = await asyncio.to_thread(self._tokens.tokens)
        return web.json_response({"tokens": [row._asdict() for row in rows]})

    async def _create(self, request: web.Request) -> web.Response:
        """Raise TokenExistsError, KeyError, TypeError, ValueError."""
        row, token = self._row(await json_body(request)), new_token()
        await asyncio.to_thread(self._tokens.add_token, row, digest_of(token))
        return web.json_response({"token": token}, headers={"Cache-Control": "no-store"})

    async def _revoke(self, request: web.Request) -> web.Response:
        """Raise NoSuchTokenError."""
        name = request.match_info["token"]
        await asyncio.to_thread(self._tokens.revoke_token, name, self._clock.now())
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
