"""A chat of the page: goes through the endpoint of the service as that of any client, and streams the response back.

POST /v1/services/NAME/chat  {"messages", "max_tokens"}    the header X-Skyserve-Key has the API key, if the service needs one

The page cannot request the endpoint itself: it is another origin, and it may be on a host that only the controller reaches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from skyserve_cli.controller.api.access import AccessRole
from skyserve_cli.controller.api.route import Route

KEY_HEADER = "X-Skyserve-Key"
MOST_AT_ONCE = 16
MOST_TOKENS = 4096
CONNECT_S = 10.0
SILENT_S = 300.0
_PASSED_BACK = ("X-Request-Id", "Retry-After")


class ChatRoute:
    """`view` returns the view of a service; raises NoSuchServiceError."""

    def __init__(self, view: Callable[[str], Mapping[str, Any]]) -> None:
        self._view = view
        self._chats = 0

    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/services/{name}/chat", self.send, AccessRole.OPERATOR)]

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Raise NoSuchServiceError, ValueError, KeyError, TypeError."""
        body = await request.json()
        messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in body["messages"]]
        tokens = min(MOST_TOKENS, max(1, int(body.get("max_tokens", 512))))
        name = request.match_info["name"]
        endpoint = (await asyncio.to_thread(self._view, name))["endpoint"]
        if not endpoint:
            return web.json_response({"error": f"{name} has no endpoint yet"}, status=409)
        if self._chats >= MOST_AT_ONCE:
            return web.json_response({"error": "too many chats at once"}, status=503)
        key = request.headers.get(KEY_HEADER, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=SILENT_S)
        self._chats += 1
        try:
            async with aiohttp.ClientSession(endpoint, headers=headers, timeout=timeout) as session:
                model = await _first_model(session)
                asked = {"messages": messages, "max_tokens": tokens, "stream": True}
                asked |= {"model": model} if model else {}
                async with session.post("/v1/chat/completions", json=asked) as found:
                    return await _passed_on(request, found)
        except (aiohttp.ClientError, TimeoutError) as error:
            return web.json_response(
                {"error": f"the endpoint does not respond: {type(error).__name__}"}, status=502
            )
        finally:
            self._chats -= 1


async def _first_model(session: aiohttp.ClientSession) -> str | None:
    """Return the first model that the endpoint lists; None if it lists none."""
    async with session.get("/v1/models") as response:
        if response.status != 200:
            return None
        try:
            return str(orjson.loads(await response.read())["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            return None


async def _passed_on(request: web.Request, found: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass a response on as it comes. One that breaks off ends with an event that says so."""
    headers = {name: found.headers[name] for name in _PASSED_BACK if name in found.headers}
    response = web.StreamResponse(status=found.status, headers={"Cache-Control": "no-store", **headers})
    response.content_type = found.content_type
    await response.prepare(request)
    try:
        async for piece in found.content.iter_any():
            await response.write(piece)
    except (aiohttp.ClientError, TimeoutError):
        await response.write(b'\n\ndata: {"error": {"message": "the response has broken off"}}\n\n')
    await response.write_eof()
    return response
