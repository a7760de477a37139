"""An OpenAI-compatible server as a client sees it: which model it has, and streams of chat completions.

What the server sends is bounded where it is kept: of a stream only its end, which has the usage. A response that is an error of
the client (4xx, but for 408 and 429) raises `RejectedError`, since all further requests would get the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from skyserve_cli.output import printable
from skyserve_cli.profile.load import Flight
from skyserve_cli.profile.prompts import Shape, prompt

LONGEST_S = 600.0  # of a request
CONNECT_S = 10.0
KEPT_BYTES = 8192
MOST_OF_ERROR = 300
_BUSY = (408, 429)


class ServerError(Exception):
    """The server cannot be measured: the message gives the reason."""


class RejectedError(ServerError):
    """The server rejects a prompt as a mistake of the client. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """`base` is the URL without ``/v1``. `whole`: responses are as long as they may be, for engines that know `ignore_eos`."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: str, rng: random.Random) -> None:
        self.base = base
        self.model = model
        self.whole = True
        self._session = session
        self._rng = rng

    async def first(self, shape: Shape) -> Flight:
        """Return one request alone, and learn whether `ignore_eos` is accepted. Raises ServerError."""
        try:
            return await self._alone(shape)
        except RejectedError as error:
            if error.status not in (400, 422):
                raise
        self.whole = False
        return await self._alone(shape)

    async def _alone(self, shape: Shape) -> Flight:
        loop = asyncio.get_running_loop()
        flight = Flight(shape, loop.time())
        await self.send(flight)
        flight.ended_at = loop.time()
        if flight.error is not None:
            raise ServerError(f"{self.base}: the first request failed: {flight.error}")
        return flight

    async def send(self, flight: Flight) -> None:
        """Send a request of the flight's shape, and note there what comes. Raises RejectedError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt(self._rng, flight.shape.prompt)}],
            "max_tokens": flight.shape.response,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.whole:
            body["ignore_eos"] = True
        try:
            async with self._session.post(f"{self.base}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise _Refused(response.status, await beginning_of(response))
                await self._read(response, flight)
        except _Refused as refusal:
            if refusal.is_ours:
                raise RejectedError(refusal.status, f"{self.base} rejects requests: {refusal}") from None
            flight.error = str(refusal)
        except (aiohttp.ClientError, TimeoutError) as error:
            flight.error = printable(str(error)) or type(error).__name__

    async def _read(self, response: aiohttp.ClientResponse, flight: Flight) -> None:
        loop = asyncio.get_running_loop()
        kept, events = b"", 0
        async for chunk in response.content.iter_any():
            if flight.first_at is None:
                flight.first_at = loop.time()
            events += chunk.count(b"data: {")
            kept = (kept + chunk)[-KEPT_BYTES:]
        usage = _usage(kept)
        flight.prompt_tokens = _count(usage, "prompt_tokens", flight.shape.prompt)
        flight.tokens = _count(usage, "completion_tokens", events)
        if b"data: [DONE]" not in kept:
            flight.error = "the stream broke off"


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}" if text else f"HTTP {status}")
        self.status = status
        self.is_ours = 400 <= status < 500 and status not in _BUSY


@asynccontextmanager
async def connected(
    url: str, model: str | None, api_key: str | None, rng: random.Random
) -> AsyncIterator[Server]:
    """Yield the server at a URL, with its first model unless one is named. Raises ServerError."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=LONGEST_S, sock_connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield Server(session, base, model or await _first_model(session, base), rng)


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    try:
        async with session.get(f"{base}/v1/models") as response:
            if response.status != 200:
                raise ServerError(
                    f"{base}/v1/models: HTTP {response.status}: {await beginning_of(response)}; name the model with --model"
                )
            listed = orjson.loads(await response.content.read(1 << 20))
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"cannot reach {base}: {printable(str(error)) or type(error).__name__}") from None
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise ServerError(f"{base}/v1/models lists no model; name one with --model") from None


async def beginning_of(response: aiohttp.ClientResponse) -> str:
    """Return the beginning of an error's text, of the usual JSON its message."""
    text = await response.content.read(KEPT_BYTES)
    try:
        error = orjson.loads(text)["error"]
        found = error["message"] if isinstance(error, Mapping) else error
    except (orjson.JSONDecodeError, LookupError, TypeError):
        found = text.decode(errors="replace")
    return printable(str(found)).strip()[:MOST_OF_ERROR]


def _usage(kept: bytes) -> Mapping[str, Any]:
    """Return the usage of the last event that has one."""
    for line in reversed(kept.split(b"\n")):
        if line.startswith(b"data: {") and b'"usage"' in line:
            try:
                found = orjson.loads(line[len(b"data: ") :])["usage"]
            except (orjson.JSONDecodeError, LookupError):
                continue
            if isinstance(found, Mapping):
                return found
    return {}


def _count(usage: Mapping[str, Any], key: str, otherwise: int) -> int:
    found = usage.get(key)
    return found if isinstance(found, int) and found >= 0 else otherwise
