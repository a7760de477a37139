"""A few requests to an OpenAI-compatible endpoint, which show whether it serves: models, a chat, a stream, tools, latency.

All of it ends within a given time. Each check is a value; nothing is printed here.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from skyserve_cli.output import printable
from skyserve_cli.profile.server import CONNECT_S, beginning_of

SMALL_REQUESTS = 10
TOKENS = 32
MOST_BYTES = 4 << 20
SHOWN_CHARS = 60
OK, NOTE, FAILED, SKIPPED = "ok", "note", "failed", "skipped"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `result` is ok, note (it serves, but not all of it), failed or skipped. `figures` are milliseconds and counts."""

    name: str
    result: str
    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)


class _CheckError(Exception):
    """A check failed; the message gives the reason."""


async def checks(url: str, model: str | None, api_key: str | None, within_s: float) -> AsyncIterator[Check]:
    """Yield the result of each check. The model is the first that is listed, unless one is named."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        trial = _Trial(session, url.rstrip("/").removesuffix("/v1"), model, within_s)
        first = await trial.checked("models", trial.models)
        yield first
        if trial.model is None:
            for name in ("chat", "stream", "tools", "latency"):
                yield Check(name, SKIPPED, "no model is known: name one with --model")
            return
        chat = await trial.checked("chat", trial.chat)
        yield chat
        for name, check in (("stream", trial.stream), ("tools", trial.tools), ("latency", trial.latency)):
            if chat.result == FAILED:
                yield Check(name, SKIPPED, "the chat failed")
            else:
                yield await trial.checked(name, check)


class _Trial:
    def __init__(self, session: aiohttp.ClientSession, base: str, model: str | None, within_s: float) -> None:
        self.model = model
        self._session = session
        self._base = base
        self._within_s = within_s
        self._ends = asyncio.get_running_loop().time() + within_s

    async def checked(self, name: str, check: Callable[[], Awaitable[Check]]) -> Check:
        """Return the result of one check, a failure too; none goes beyond the time that is left for all."""
        try:
            async with asyncio.timeout_at(self._ends):
                return await check()
        except _CheckError as error:
            return Check(name, FAILED, str(error))
        except TimeoutError:
            return Check(name, FAILED, f"no response within the {self._within_s:g} s of --max-time")
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or str(error.os_error)
            return Check(name, FAILED, f"cannot connect to {error.host}:{error.port}: {printable(reason)}")
        except aiohttp.ClientError as error:
            return Check(name, FAILED, printable(str(error)) or type(error).__name__)

    async def models(self) -> Check:
        started = self._now()
        try:
            async with self._session.get(f"{self._base}/v1/models") as response:
                body = await _whole(response)
        except _CheckError as error:
            if self.model is None:
                raise
            return Check("models", NOTE, str(error))
        names = [str(each.get("id")) for each in _list(body, "data")]
        ms = self._ms(started)
        if not names and self.model is None:
            raise _CheckError("lists no model")
        if self.model is None:
            self.model = names[0]
        elif self.model not in names:
            return Check("models", NOTE, f"{self.model} is not among {_short(', '.join(names))}", {"ms": ms})
        return Check("models", OK, _short(", ".join(names)), {"ms": ms, "models": len(names)})

    async def chat(self) -> Check:
        started = self._now()
        body = await self._post(max_tokens=TOKENS, content="Say hello in one sentence.")
        message = _message(body)
        text = message.get("content") or message.get("reasoning_content") or message.get("reasoning")
        usage = body.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        figures = {"ms": self._ms(started), **({"tokens": tokens} if isinstance(tokens, int) else {})}
        if not text:
            return Check("chat", NOTE, "the message is empty", figures)
        return Check("chat", OK, _short(str(text)), figures)

    async def stream(self) -> Check:
        """Measure the time to the first token, and between tokens on the mean."""
        started = self._now()
        times: list[float] = []
        ended, kept = False, b""
        async with self._request(
            max_tokens=TOKENS, content="Count from one to twenty.", stream=True
        ) as response:
            if response.status != 200:
                raise _CheckError(await _refusal(response))
            async for chunk in response.content.iter_any():
                kept += chunk
                *lines, kept = kept.split(b"\n")
                times += [self._now() for line in lines if _has_token(line)]
                ended = ended or any(line.strip() == b"data: [DONE]" for line in lines)
        if not times:
            raise _CheckError("the stream has no token")
        if not ended and kept.strip() != b"data: [DONE]":
            raise _CheckError(f"the stream broke off after {len(times)} events")
        figures = {"first_token_ms": 1000 * (times[0] - started), "events": len(times)}
        between = ""
        if len(times) > 1:
            figures["between_tokens_ms"] = 1000 * (times[-1] - times[0]) / (len(times) - 1)
            between = f", then {figures['between_tokens_ms']:.1f} ms each"
        return Check("stream", OK, f"first token after {figures['first_token_ms']:.0f} ms{between}", figures)

    async def tools(self) -> Check:
        """Look for a tool call. Servers without tools reject the request or respond with text, and serve all the same."""
        started = self._now()
        try:
            body = await self._post(
                max_tokens=4 * TOKENS, content="What is the weather in Paris?", tools=[_TOOL]
            )
        except _CheckError as error:
            return Check("tools", NOTE, f"rejected: {error}")
        figures = {"ms": self._ms(started)}
        calls = _message(body).get("tool_calls")
        if not isinstance(calls, list) or not calls:
            return Check("tools", NOTE, "accepted, and the response calls none", figures)
        function = calls[0].get("function") if isinstance(calls[0], dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return Check("tools", OK, f"calls {_short(str(name))}", figures)

    async def latency(self) -> Check:
        """Measure small requests, one after the other. One that fails is a failure."""
        times: list[float] = []
        for number in range(SMALL_REQUESTS):
            started = self._now()
            try:
                await self._post(max_tokens=1, content=f"Say {number}.")
            except _CheckError as error:
                raise _CheckError(f"request {number + 1} of {SMALL_REQUESTS}: {error}") from None
            times.append(self._ms(started))
        median, worst = statistics.median(times), max(times)
        figures = {"requests": len(times), "median_ms": median, "worst_ms": worst}
        return Check(
            "latency",
            OK,
            f"{len(times)} small requests: median {median:.0f} ms, worst {worst:.0f} ms",
            figures,
        )

    def _request(self, *, max_tokens: int, content: str, **more: Any) -> Any:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            **more,
        }
        return self._session.post(f"{self._base}/v1/chat/completions", json=body)

    async def _post(self, **body: Any) -> dict[str, Any]:
        async with self._request(**body) as response:
            return await _whole(response)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ms(self, started: float) -> float:
        return 1000 * (self._now() - started)


async def _whole(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the JSON object of a response with status 200. Raises _CheckError."""
    if response.status != 200:
        raise _CheckError(await _refusal(response))
    text = b""
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > MOST_BYTES:
            raise _CheckError(f"the response is larger than {MOST_BYTES >> 20} MiB")
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise _CheckError("the response is no JSON object")
    return body


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = await beginning_of(response)
    return f"HTTP {response.status}: {text}" if text else f"HTTP {response.status}"


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _message(body: Mapping[str, Any]) -> dict[str, Any]:
    choices = _list(body, "choices")
    message = choices[0].get("message") if choices else None
    if not isinstance(message, dict):
        raise _CheckError("the response has no message")
    return message


def _has_token(line: bytes) -> bool:
    """Return whether the line of a stream is an event with text."""
    if not line.startswith(b"data: {"):
        return False
    try:
        choices = _list(orjson.loads(line[len(b"data: ") :]), "choices")
    except (orjson.JSONDecodeError, AttributeError):
        return False
    delta = choices[0].get("delta") if choices else None
    return isinstance(delta, dict) and any(
        delta.get(key) for key in ("content", "reasoning_content", "reasoning")
    )


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"
