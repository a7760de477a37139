"""Open-loop traffic: a request leaves when its time has come, whether or not the ones before have been served.

A closed loop would hide what this is to show: clients that wait for a dead replica would send less. Every
request is recorded, also the ones that fail, and how.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

_GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Instants are seconds of the monotonic clock.

    `status` None: no HTTP response came. `tokens` is how many the client received; of a stream it is counted chunk
    by chunk. `whole`: the response came to its proper end (a stream: every token, the usage that says so, [DONE]).
    """

    sent_at: float
    ended_at: float
    status: int | None
    error: str = ""
    model: str = ""
    tokens: int = 0
    whole: bool = False

    @property
    def took_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def good(self) -> bool:
        return self.status == 200 and self.whole


class Traffic:
    """Requests to `url` at `rate_per_s`, from a thread of its own. A context manager: leaving it sends no more
    and waits for running requests; then `outcomes` is complete."""

    def __init__(self, url: str, rate_per_s: float, *, tokens: int = 8, stream: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self._url = f"{url}/v1/chat/completions"
        self._rate_per_s = rate_per_s
        self._tokens = tokens
        self._stream = stream
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(_GIVE_UP_S + 10.0)

    def failed(self) -> list[Outcome]:
        """Those that got no good response, so far."""
        return [outcome for outcome in tuple(self.outcomes) if not outcome.good]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=_GIVE_UP_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            began_at, number = loop.time(), 0
            under_way: set[asyncio.Task[None]] = set()
            while not self._stopping.is_set():
                await asyncio.sleep(max(0.0, began_at + number / self._rate_per_s - loop.time()))
                task = loop.create_task(self._ask(http, number))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                number += 1
            await asyncio.gather(*under_way)

    async def _ask(self, http: aiohttp.ClientSession, number: int) -> None:
        sent_at = time.monotonic()
        status: int | None = None
        try:
            async with http.post(self._url, json=self._body(number)) as response:
                status = response.status
                if status != 200:
                    outcome = Outcome(sent_at, time.monotonic(), status, (await response.text())[:300])
                elif self._stream:
                    outcome = _streamed(sent_at, [line async for line in response.content], self._tokens)
                else:
                    outcome = _unary(sent_at, await response.json(), self._tokens)
        except (TimeoutError, aiohttp.ClientError, ConnectionError, ValueError, KeyError) as error:
            outcome = Outcome(sent_at, time.monotonic(), status, f"{type(error).__name__}: {error}")
        self.outcomes.append(outcome)

    def _body(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Request {number}: what has become of the replica?"}],
            "max_tokens": self._tokens,
            "ignore_eos": True,
        }
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        return body


def _unary(sent_at: float, answer: dict[str, Any], wanted: int) -> Outcome:
    tokens = int(answer["usage"]["completion_tokens"])
    return Outcome(
        sent_at, time.monotonic(), 200, model=answer["model"], tokens=tokens, whole=tokens == wanted
    )


def _streamed(sent_at: float, lines: Sequence[bytes], wanted: int) -> Outcome:
    """A stream is whole if it says that it is, and if the chunks we hold are as many as it says."""
    events = [line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: ")]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    tokens = sum(len(choice.get("token_ids", ())) for chunk in chunks for choice in chunk["choices"])
    usage = next((chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")), None)
    done = bool(events) and events[-1] == b"[DONE]"
    whole = done and tokens == usage == wanted
    error = "" if whole else f"received {tokens} tokens of {wanted}, usage says {usage}, [DONE] {done}"
    return Outcome(
        sent_at,
        time.monotonic(),
        200,
        error,
        model=chunks[0]["model"] if chunks else "",
        tokens=tokens,
        whole=whole,
    )


def latency(outcomes: Sequence[Outcome]) -> str:
    """Median, 99th percentile and longest wait, over all outcomes."""
    waits = sorted(outcome.took_s for outcome in outcomes)
    if not waits:
        return "nothing was asked"
    return f"median {waits[len(waits) // 2]:.3f} s, p99 {waits[int(len(waits) * 0.99)]:.3f} s, longest {waits[-1]:.3f} s"


def tally(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many of each kind of failure."""
    kinds: dict[str, int] = {}
    for outcome in outcomes:
        if not outcome.good:
            kind = f"{outcome.status or 'no answer'}: {outcome.error[:120]}"
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds
