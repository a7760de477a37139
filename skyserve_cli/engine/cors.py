"""CORS on the engine's own port: web pages of the allowed origins may call it without a load balancer in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from lb.config.cors import Cors
from lb.http.cors import CorsDecision, CorsRules
from skyserve_cli.engine.errors import error_body


class WrongOrigin(ValueError):
    """An origin that cannot be allowed: the message names it, and the expected form."""


def cors_for(origins: Sequence[str]) -> Cors | None:
    """Return the options that allow `origins` (see `Cors`); None without any. Raises WrongOrigin."""
    try:
        return Cors.from_json({"origins": list(origins)}) if origins else None
    except ValueError as error:
        raise WrongOrigin(str(error)) from None


def allow(app: web.Application, cors: Cors) -> None:
    """Let pages call `app`. All responses get the headers, errors and preflights of unknown paths too."""
    rules = CorsRules(cors)

    @web.middleware
    async def respond_to_preflights(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        decision = _decision(rules, request)
        if decision.status is None:
            return await handler(request)
        if decision.status == 204:
            return web.Response(status=204)
        body = error_body(f"CORS: {decision.problem}", "invalid_request_error", code="cors_rejected")
        return web.json_response(body, status=decision.status)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        for line in _decision(rules, request).lines.decode("ascii").splitlines():
            name, _, value = line.partition(": ")
            response.headers.add(name, value)

    app.middlewares.insert(0, respond_to_preflights)
    app.on_response_prepare.append(add_headers)


def _decision(rules: CorsRules, request: web.Request) -> CorsDecision:
    names = ("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers")
    given = [request.headers.get(name) for name in names]
    origin, method, headers = [
        None if value is None else value.encode("utf-8", "surrogateescape") for value in given
    ]
    return rules.decide(request.method.encode(), origin, method, headers)
