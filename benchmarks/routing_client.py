"""A workload of the traffic simulator, played by the clock against a real address.

Calls become streamed chat completions, and what they measure comes back in the simulator's own terms: seconds are
the model's, that is those of the clock times `speed`. The simulator knows the response of an engine; a real one says
its own words. So where the next prompt of a conversation repeats a response, the words that were really said are put
in the place of those that were foreseen: else no cache would hold them.

One connection per call and no parsing while a response streams, because the client shares its processors with the
engines: bytes are kept, and read when the response is complete.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import httptools
import orjson

from benchmarks.traffic.measure import Served, quantile
from benchmarks.traffic.workloads import ANSWER_BEGIN, MESSAGE_END, Arrival, Call, Workload
from skyserve_cli.engine.text import token_bytes

WATCH_S = 0.02  # of the clock

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)


class NotAChat(ValueError):
    """A prompt that is not a conversation in the engine's chat template."""


class Until:
    """A workload without the calls that would arrive at `until_s` or later: people stop talking then."""

    def __init__(self, workload: Workload, until_s: float = math.inf) -> None:
        self.name = workload.name
        self._workload = workload
        self._until_s = until_s

    def opening(self) -> Iterator[Arrival]:
        for arrival in self._workload.opening():
            if arrival.at_s >= self._until_s:
                return
            yield arrival

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return [later for later in self._workload.ended(call, now) if later.at_s < self._until_s]


# --- prompts ------------------------------------------------------------------------------------------------


def messages(prompt: bytes) -> list[dict[str, str]]:
    """The messages from which the engine's template makes `prompt`; a prompt without any mark of the template is one
    message of its user. Raises NotAChat for anything else."""
    if b"<|" not in prompt:
        return [{"role": "user", "content": prompt.decode()}]
    text = prompt.removesuffix(ANSWER_BEGIN.text).decode()
    found = list(_MESSAGE.finditer(text))
    if not prompt.endswith(ANSWER_BEGIN.text) or sum(len(one.group()) for one in found) != len(text):
        raise NotAChat(f"no conversation: {prompt[:80]!r}")
    return [{"role": one.group(1), "content": one.group(2)} for one in found]


class _Turn(NamedTuple):
    foreseen: bytes  # how the next prompt begins, by the workload
    said: bytes  # how it has to begin


class Memory:
    """What was really said in each session, as far as its next prompt can need it."""

    def __init__(self) -> None:
        self._last: dict[str, _Turn] = {}

    def prompt(self, call: Call) -> bytes:
        """The prompt of `call`, with responses as they were said."""
        text = call.prompt.text
        turn = self._last.get(call.session)
        if turn is None or not text.startswith(turn.foreseen):
            return text
        return turn.said + text[len(turn.foreseen) :]

    def hear(self, call: Call, prompt: bytes, answer: str) -> None:
        """The response to `call`, which was asked as `prompt`. Of a recorded one only the length is known (its tokens are
        no engine's): the next prompt of its session is recorded as well, and takes nothing from what was said."""
        if any(token < 0 for token in call.answer):
            return
        foreseen = b"".join(map(token_bytes, call.answer))
        ending = MESSAGE_END.text.rstrip(b"\n")
        self._last[call.session] = _Turn(call.prompt.text + foreseen, prompt + answer.encode() + ending)


# --- one call -----------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What came back. Instants are of `time.monotonic`; `fault` is empty if all is well."""

    fault: str
    first_at: float = 0.0
    ended_at: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    response_tokens: int = 0


def read(stream: bytes) -> Answer:
    """An event stream of chat chunks that has ended, without its instants."""
    text: list[str] = []
    usage = None
    done = False
    for event in stream.split(b"\n\n"):
        data = event.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            done = True
        elif event.startswith(b"data: "):
            chunk = orjson.loads(data)
            if "error" in chunk:
                return Answer(f"error event: {chunk['error']}")
            usage = chunk.get("usage") or usage
            text += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    if not done or usage is None:
        return Answer("the stream ended early")
    return Answer(
        fault="",
        text="".join(text),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        response_tokens=usage["completion_tokens"],
    )


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._first_at = 0.0
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not say that it is one
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Answer(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Answer(f"the connection broke: {exc or 'closed'}"))

    def on_body(self, body: bytes) -> None:
        if not self._parts:
            self._first_at = time.monotonic()
        self._parts.append(body)

    def on_message_complete(self) -> None:
        ended_at = time.monotonic()
        status = self._parser.get_status_code()
        body = b"".join(self._parts)
        if status != 200:
            self._end(Answer(f"status {status}: {body[:200]!r}"))
            return
        self._end(read(body)._replace(first_at=self._first_at, ended_at=ended_at))

    def _end(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)
            self._transport.close()


async def ask(port: int, model: str, prompt: bytes, max_tokens: int) -> Answer:
    """One chat completion, exactly `max_tokens` long, as a stream. What goes wrong is the response's fault."""
    body = orjson.dumps(
        {
            "model": model,
            "messages": messages(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: text/event-stream\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(lambda: _Exchange(head.encode() + body), "127.0.0.1", port)
    except OSError as error:
        return Answer(f"no connection: {error.strerror}")
    answer = await exchange.answer
    if not answer.fault and answer.response_tokens != max_tokens:
        return answer._replace(fault=f"{answer.response_tokens} tokens, not {max_tokens}")
    return answer


# --- all calls ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Played:
    """`served` has no idea of the engines: each is number 0. `faults` are of calls that got no whole response.
    `late_s` of the model is how late the client itself was woken, at the 99th percentile: what the machine adds."""

    served: tuple[Served, ...]
    faults: tuple[str, ...]
    late_s: float


async def play(workload: Workload, port: int, model: str, speed: float) -> Played:
    """Play `workload` to its end; its seconds pass `speed` times as fast as the clock's."""
    return await _Player(workload, port, model, speed).play()


class _Player:
    def __init__(self, workload: Workload, port: int, model: str, speed: float) -> None:
        self._workload = workload
        self._port = port
        self._model = model
        self._speed = speed
        self._memory = Memory()
        self._served: list[Served] = []
        self._faults: list[str] = []
        self._calls: list[asyncio.Task[None]] = []  # a call announces those it sets off before it ends
        self._begun_at = 0.0
        self._late: list[float] = []

    async def play(self) -> Played:
        self._begun_at = time.monotonic()
        watch = asyncio.get_running_loop().create_task(self._watch())
        for at_s, call in self._workload.opening():
            await self._sleep_until(at_s)
            self._announce(at_s, call)
        for ended in self._calls:  # the list grows meanwhile
            await ended
        watch.cancel()
        return Played(tuple(self._served), tuple(self._faults), quantile(sorted(self._late or [0.0]), 0.99))

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._late.append((time.monotonic() - due) * self._speed)

    def _announce(self, at_s: float, call: Call) -> None:
        self._calls.append(asyncio.get_running_loop().create_task(self._call(at_s, call)))

    async def _call(self, at_s: float, call: Call) -> None:
        await self._sleep_until(at_s)
        arrived_at = time.monotonic()
        prompt = self._memory.prompt(call)
        answer = await ask(self._port, self._model, prompt, len(call.answer))
        if answer.fault:
            self._faults.append(f"{call.id}: {answer.fault}")
        else:
            self._memory.hear(call, prompt, answer.text)
            self._served.append(
                Served(
                    call_id=call.id,
                    engine=0,
                    arrived_at=self._seconds(arrived_at),
                    pushed_at=self._seconds(arrived_at),
                    first_at=self._seconds(answer.first_at),
                    ended_at=self._seconds(answer.ended_at),
                    prompt_tokens=answer.prompt_tokens,
                    cached_tokens=answer.cached_tokens,
                    response_tokens=answer.response_tokens,
                    prompt_bytes=len(prompt),
                    matched_bytes=0,
                )
            )
        for later in self._workload.ended(call, self._seconds(time.monotonic())):
            self._announce(later.at_s, later.call)

    async def _sleep_until(self, at_s: float) -> None:
        pause_s = self._begun_at + at_s / self._speed - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)

    def _seconds(self, at: float) -> float:
        return (at - self._begun_at) * self._speed
