"""The port of the page on loopback: files, sessions, and the routes of the API that a page may use.

It is opened by the first `serve dashboard`, and by a controller that starts while a session of before lasts. Files need no
session: they are the same for everyone. Every route of the API does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from provisioners.files import write_json
from skyserve_cli.config import DashboardConfig
from skyserve_cli.controller.api.access import OWNER, AccessRole, Caller, calling, set_caller
from skyserve_cli.controller.api.route import Route, failures
from skyserve_cli.controller.dashboard.guards import HEADERS, refusal
from skyserve_cli.controller.rejected import RejectedError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
FOLDER = Path(__file__).parent / "static"
ACTION_HEADER = "X-Skyserve-Action"
MAX_BODY_BYTES = 64 * 1024
_DEFAULTS = DashboardConfig()
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageClosedError(RejectedError):
    """The port of the page cannot be opened; the text names it and the reason."""

    status = 409


@dataclass(frozen=True, slots=True)
class OfPage:
    """Routes of the API that the page may use. `acts` are served only if the configuration has `actions`."""

    reads: Sequence[Route]
    acts: Sequence[Route]
    sends: Sequence[Route] = ()


class Dashboard:
    """One per daemon. `file` keeps the port and the digests of sessions; `now` is UNIX time.

    Without a configured port it is that of before, or any. `named` returns the holder of a session, None once the token is revoked;
    without it every session is the owner's.
    """

    def __init__(
        self,
        file: Path,
        now: Callable[[], float],
        draw: Callable[[], str],
        routes: OfPage,
        settings: DashboardConfig = _DEFAULTS,
        named: Callable[[str], Awaitable[Caller | None]] | None = None,
    ) -> None:
        self._named = named or _owner_alone
        self._file = file
        self._now = now
        kept = _kept(file)
        self._sessions = Sessions(draw, kept["sessions"])
        self._port: int | None = settings.port or kept["port"]
        self._routes = routes
        self._actions = settings.actions
        self._hosts = frozenset(host.lower() for host in settings.hosts)
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()

    async def resume(self) -> None:
        """Open the port of an earlier controller again, while a session of then lasts."""
        if self._port is not None and any(
            session.until > self._now() for session in self._sessions.kept().values()
        ):
            try:
                await self._open(self._port)
            except PageClosedError as error:
                log.warning("the page is not served: %s", error)

    async def code(self, port: int | None) -> dict[str, Any]:
        """Return the address of the page with a code that works once, for the caller. Opens the port. Raises PageClosedError."""
        async with self._opening:
            if self._runner is not None and port not in (None, self._port):
                await self.close()
            if self._runner is None:
                await self._open_any(port)
        code = self._sessions.new_code(calling().name, self._now())
        return {"url": f"http://{HOST}:{self._port}/#{code}", "port": self._port, "expires_s": CODE_S}

    async def close(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def for_proxy(self) -> list[Route]:
        """Return the routes of the page for users whom a proxy has authenticated, beside those of the API.

        The proxy's cookie takes the place of a session here; `teams.proxy_login` rejects what pages of other sites send.
        """
        return [
            Route("GET", "/session", self._session_by_proxy, for_proxy=True),
            Route("GET", "/{path:.*}", self._static_by_proxy, for_proxy=True),
        ]

    def app(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            refused = refusal(request.method, request.headers, self._hosts)
            if refused is not None:
                return _refuse(*refused)
            return await handler(request)

        async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
            response.headers.update(HEADERS)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[failures, guard])
        app.on_response_prepare.append(add_headers)
        app.router.add_get("/session", self._session)
        app.router.add_post("/session", self._enter)
        for route in self._routes.reads:
            app.router.add_get(route.path, self._with_session(route.definition().handler))
        for route in self._routes.acts:
            app.router.add_post(route.path, self._acting(route.definition().handler))
        for route in self._routes.sends:
            app.router.add_post(route.path, self._with_session(route.definition().handler))
        app.router.add_get("/{path:.*}", self._static)
        return app

    # --- handlers

    async def _session(self, request: web.Request) -> web.Response:
        caller = await self._caller(request)
        if caller is None:
            return _refuse(401, "no session; run serve dashboard again")
        return self._session_of(caller, self._secret(request))

    async def _session_by_proxy(self, request: web.Request) -> web.Response:
        response = self._session_of(calling(), "")
        response.headers.update(HEADERS)
        return response

    async def _static_by_proxy(self, request: web.Request) -> web.Response:
        response = await self._static(request)
        response.headers.update(HEADERS)
        return response

    def _session_of(self, caller: Caller, secret: str) -> web.Response:
        may_set = caller.role.includes(AccessRole.OPERATOR)
        body = {
            "name": caller.name,
            "role": caller.role.value,
            "chat": may_set,
            "actions": self._actions and may_set,
            "token": action_token(secret) if self._actions and may_set and secret else None,
        }
        return web.json_response(body, headers={"Cache-Control": "no-store"})

    async def _enter(self, request: web.Request) -> web.Response:
        try:
            code = str((await request.json())["code"])
        except (ValueError, KeyError, TypeError):
            return _refuse(400, "the body must be a JSON object with a code")
        secret = self._sessions.enter(code, self._now())
        if secret is None:
            return _refuse(401, "the code was used before or is too old; run serve dashboard again")
        await asyncio.to_thread(self._keep)
        response = web.Response(status=204)
        response.set_cookie(
            self._cookie, secret, max_age=int(SESSION_S), httponly=True, samesite="Strict", path="/"
        )
        return response

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["path"]
        path = (FOLDER / name).resolve() if "." in Path(name).name else FOLDER / "index.html"
        if not path.is_relative_to(FOLDER.resolve()) or not path.is_file():
            return _refuse(404, "there is no such file")
        content = await asyncio.to_thread(path.read_bytes)
        kind = _TYPES.get(path.suffix, "text/plain")
        headers = {"Cache-Control": "no-cache"}
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    def _with_session(self, handler: Any) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            caller = await self._caller(request)
            if caller is None:
                return _refuse(401, "no session; run serve dashboard again")
            set_caller(caller, lambda: self._caller(request))
            found: web.StreamResponse = await handler(request)
            return found

        return checked

    async def _caller(self, request: web.Request) -> Caller | None:
        """Return whose session it is; None without one, or if its token was revoked."""
        name = self._sessions.name_of(self._secret(request), self._now())
        return None if name is None else await self._named(name)

    def _acting(self, handler: Any) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            if not self._actions:
                return _refuse(403, "the page only reads; set dashboard.actions: true in config.yaml")
            given = request.headers.get(ACTION_HEADER, "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, action_token(self._secret(request)).encode()):
                return _refuse(403, f"the header {ACTION_HEADER} is missing or wrong")
            found: web.StreamResponse = await handler(request)
            return found

        return self._with_session(checked)

    # --- inside

    @property
    def _cookie(self) -> str:
        """Cookies are shared by all ports of a host, so the name has the port."""
        return f"skyserve_{self._port}"

    def _secret(self, request: web.Request) -> str:
        return request.cookies.get(self._cookie, "")

    async def _open_any(self, port: int | None) -> None:
        if port is None and self._port is not None:
            with suppress(PageClosedError):
                await self._open(self._port)
                return
        await self._open(port or 0)

    async def _open(self, port: int) -> None:
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            await runner.cleanup()
            raise PageClosedError(f"port {port} of {HOST} cannot be opened: {error.strerror}") from error
        self._runner, self._port = runner, int(runner.addresses[0][1])
        await asyncio.to_thread(self._keep)
        log.info("the page is served at http://%s:%d/", HOST, self._port)

    def _keep(self) -> None:
        write_json(self._file, {"port": self._port, "sessions": self._sessions.kept()})


def _kept(file: Path) -> dict[str, Any]:
    """Return what an earlier controller kept; nothing, where that cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(file.read_text())
        sessions = {str(key): _session(kept) for key, kept in found["sessions"].items()}
        return {"port": None if found["port"] is None else int(found["port"]), "sessions": sessions}
    return {"port": None, "sessions": {}}


def _session(kept: Any) -> Session:
    """Sessions of earlier releases are only an instant, and the owner's."""
    until, name = kept if isinstance(kept, list) else (kept, OWNER.name)
    return Session(float(until), str(name))


async def _owner_alone(name: str) -> Caller | None:
    return OWNER if name == OWNER.name else None


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


# Who may read the page: a code that works once becomes a session. Pure; `now` is UNIX seconds.
#
# Codes are kept in memory for a minute. Of sessions only digests are kept, in a file of the home, so that a page goes on after the
# controller was killed, and a copy of that file opens nothing.

CODE_S = 60.0
SESSION_S = 12 * 3600.0
MOST_CODES = 16
MOST_SESSIONS = 64


class Session(NamedTuple):
    """`until` is UNIX seconds, `name` that of a token, or of the owner."""

    until: float
    name: str


class Sessions:
    """`draw` returns a new secret. `kept` are the sessions by their digests."""

    def __init__(self, draw: Callable[[], str], kept: Mapping[str, Session] | None = None) -> None:
        self._draw = draw
        self._codes: dict[str, Session] = {}
        self._sessions = dict(kept or {})

    def new_code(self, name: str, now: float) -> str:
        """Return a code for `enter`, which opens a session for `name`. Of more than MOST_CODES the oldest stop working."""
        code = self._draw()
        self._codes[_digest(code)] = Session(now + CODE_S, name)
        while len(self._codes) > MOST_CODES:
            del self._codes[next(iter(self._codes))]
        return code

    def enter(self, code: str, now: float) -> str | None:
        """Return the secret of a new session; None if the code is unknown, too old, or was used before."""
        found = self._codes.pop(_digest(code), None)
        if found is None or now > found.until:
            return None
        secret = self._draw()
        self._sessions[_digest(secret)] = Session(now + SESSION_S, found.name)
        self._sessions = {key: session for key, session in self._sessions.items() if session.until > now}
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key])]
        return secret

    def name_of(self, secret: str, now: float) -> str | None:
        """Return whose session this secret is of; None if there is none, or it has expired."""
        found = self._sessions.get(_digest(secret)) if secret else None
        return found.name if found is not None and found.until > now else None

    def kept(self) -> dict[str, Session]:
        """Return what `kept` of the next `Sessions` is to be."""
        return dict(self._sessions)


def action_token(secret: str) -> str:
    """Return what every request that acts must have in a header: only scripts of the page can read it."""
    return hmac.new(secret.encode(), b"skyserve dashboard action", hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
