"""Tokens and logins as a part of the controller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from skyserve_cli.controller.api.access import Caller, StillValid, valid_for
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.teams.proxy_login import LOGIN_S, login_of
from skyserve_cli.controller.teams.tokens import Team
from skyserve_cli.state.team import TeamTokens


class TeamsPart(Part):
    """Knows the holders of tokens, and on the port the users whom a proxy names."""

    name = "teams"

    def __init__(self, kernel: Kernel) -> None:
        self._tokens = TeamTokens(kernel.store.database)
        self._team = Team(self._tokens, kernel.clock, kernel.config.teams)
        self._login = login_of(kernel.config)

    def routes(self) -> Sequence[Route]:
        return self._team.routes()

    async def caller_of(self, request: web.Request, is_remote: bool) -> tuple[Caller, StillValid] | None:
        user = self._login.of(request) if is_remote and self._login is not None else None
        if user is not None:
            return user, valid_for(LOGIN_S)
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            return None
        look_up = partial(self._team.holder_of, token)
        holder = await look_up()
        return None if holder is None else (holder, look_up)

    async def named(self, name: str) -> Caller | None:
        return await self._team.named(name)

    def callers_revision(self) -> object:
        return self._tokens.token_changes()
