"""What a key is charged is what engines have worked for it, over random requests, spellings, APIs and endings, in virtual time.

The engine here reads requests as leniently as any: it decodes paths and reads numbers that are text. It counts what it has
read and written, except for what it refuses or fails at.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import pytest

from lb.config.key_limits import KeyLimits, Price
from lb.config.options import Access
from lb.config.schema import Table, Target
from lb.observe.access_log import RequestRecord
from tests.integration.lb_wires import DIES, Bench, Client, Peer, Seen, plainly, run, settle
from tests.kit.api_keys import api_key

CASES = 5_000
AT_A_TIME = 20
SEED = int(os.environ.get("SKYSERVE_TEST_SEED", "1"))
BYTES_PER_TOKEN = 3.4
FIRST_S, GAP_S = 0.2, 0.01
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
EMBEDDINGS = "/v1/embeddings"


def access(**limits: Any) -> Access:
    return Access((api_key("a", "ka", **limits),))


@dataclass
class Engine:
    """Counts tokens it has read and written."""

    rng: random.Random
    read: int = 0
    written: int = 0
    requests: int = 0
    fails: float = 0.15
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def on_request(self, peer: Peer, seen: Seen) -> None:
        task = asyncio.ensure_future(self._serve(peer, seen))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, peer: Peer, seen: Seen) -> None:
        self.requests += 1
        path = unquote(seen.target.decode().partition("?")[0])
        asked = json.loads(seen.body)
        if self.rng.random() < self.fails:
            status = self.rng.choice((b"400 Bad Request", b"404 Not Found", b"500 Internal Server Error"))
            await asyncio.sleep(FIRST_S)
            peer.wire.feed(plainly(b'{"error":{"message":"no"}}', status=status))
            return
        prompt = _text_bytes(asked, path) / BYTES_PER_TOKEN
        prompt_tokens = max(1, round(prompt))
        self.read += prompt_tokens
        choices = int(float(asked.get("n") or 1))
        length = int(float(asked.get("max_tokens") or asked.get("max_output_tokens") or 64))
        if path == EMBEDDINGS:
            await asyncio.sleep(FIRST_S)
            usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
            peer.wire.feed(plainly(json.dumps({"data": [], "usage": usage}).encode()))
            return
        await asyncio.sleep(FIRST_S)
        if asked.get("stream"):
            await self._stream(peer, path, asked, prompt_tokens, length)
            return
        for _ in range(length):
            if peer.wire.gone:
                return
            self.written += choices
            await asyncio.sleep(GAP_S)
        names = (
            ("input_tokens", "output_tokens")
            if path in (RESPONSES, MESSAGES)
            else ("prompt_tokens", "completion_tokens")
        )
        usage = dict(zip(names, (prompt_tokens, length * choices), strict=True))
        peer.wire.feed(plainly(json.dumps({"text": "x" * length, "usage": usage}).encode()))

    async def _stream(
        self, peer: Peer, path: str, asked: dict[str, Any], prompt_tokens: int, length: int
    ) -> None:
        peer.wire.feed(EVENTS)
        breaks_at = self.rng.randrange(length) if self.rng.random() < 0.1 else -1
        for number in range(length):
            if peer.wire.gone:
                return
            self.written += 1
            peer.wire.feed(_chunk(_event(path, f"word{number} ")))
            if number == breaks_at:
                peer.wire.feed(DIES)
                return
            await asyncio.sleep(GAP_S)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": length}
        end = _event(path, "", finish="stop")
        if (asked.get("stream_options") or {}).get("include_usage"):
            end += b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(usage).encode()
        peer.wire.feed(_chunk(end + b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Counted(Bench):
    """A proxy before two targets that are one engine."""

    def __init__(self, engine: Engine, keys: Access) -> None:
        targets = tuple(Target(f"t{number}", f"http://192.0.2.9:{8000 + number}") for number in range(2))
        super().__init__(table=Table("service", "r1", targets, policy="round_robin", access=keys))
        self.engine = engine

    def on_request(self, peer: Peer, seen: Seen) -> None:
        self.engine.on_request(peer, seen)


def _text_bytes(asked: dict[str, Any], path: str) -> int:
    if path in (CHAT, MESSAGES):
        return sum(len(one["content"].encode()) + 20 for one in asked["messages"])
    prompt = asked.get("input") or asked.get("prompt")
    return sum(len(one.encode()) for one in (prompt if isinstance(prompt, list) else [prompt]))


def _event(path: str, text: str, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if path == CHAT else {"text": text}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _spelled(path: str, rng: random.Random) -> str:
    if rng.random() < 0.8:
        return path
    return rng.choice(
        (
            path.replace("c", "%63", 1),
            path + "/",
            path.replace("/v1/", "/v1//"),
            path.replace("/v1/", "/v1/./"),
            path.replace("/v1", "/x/../v1"),
            path.upper(),
            path + ";a=b",
            path.replace("/", "%2F").replace("%2F", "/", 1),
        )
    )


def _number(value: int, rng: random.Random) -> int | float | str:
    return rng.choice((value, value, value, str(value), float(value)))


def _request(rng: random.Random) -> tuple[bytes, bool]:
    """Return a request, and whether its body is one that parsers disagree about."""
    path = rng.choice((CHAT, CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS))
    text = "".join(rng.choice("aé b,日") for _ in range(rng.randrange(100, 3000)))
    asked: dict[str, Any] = {"model": "m"}
    if path in (CHAT, MESSAGES):
        asked["messages"] = [{"role": "user", "content": text[:half]} for half in (len(text) // 2, len(text))]
    elif path == COMPLETIONS:
        asked["prompt"] = text
    else:
        asked["input"] = [text, "more"] if path == EMBEDDINGS else text
    if path != EMBEDDINGS:
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        asked[limit] = _number(rng.randrange(10, 200), rng)
        if path in (CHAT, COMPLETIONS):
            if rng.random() < 0.6:
                asked["stream"] = True
                if rng.random() < 0.5:
                    asked["stream_options"] = {"include_usage": True}
            elif rng.random() < 0.3:
                asked["n"] = _number(3, rng)
    body = json.dumps(asked).encode()
    odd = rng.random() < 0.05
    if odd:
        body = rng.choice(
            (
                body[:-1] + b',"x":NaN}',
                b"\xef\xbb\xbf" + body,
                body.decode().encode("utf-16"),
                body[:-1] + b',"x":"\\ud800"}',
                body[:-1] + b',"model":"m2"}',
            )
        )
    head = f"POST {_spelled(path, rng)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ka\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), odd


async def _client(bench: Bench, request: bytes, leaves_s: float | None) -> int:
    """Send a request, and leave after a while or wait for the whole response. Returns its status; 0 if there is none."""
    client = Client(bench, takes=True)
    client.send(request)
    if leaves_s is not None:
        await asyncio.sleep(leaves_s)
        got = bytes(client.wire.out[9:12])
        client.wire.feed(DIES)
        return int(got or b"0")
    while client.connection.request is not None:  # noqa: ASYNC110 (in virtual time)
        await asyncio.sleep(0.05)
    await settle()
    return int(client.wire.out[9:12])


def test_what_is_charged_is_what_was_worked() -> None:
    records: list[RequestRecord] = []

    async def story() -> tuple[Engine, Bench]:
        rng = random.Random(SEED)
        engine = Engine(rng)
        bench = Counted(engine, access(tokens_per_minute=1e12))
        bench.account._record = records.append
        turn = asyncio.Semaphore(AT_A_TIME)

        async def one() -> None:
            async with turn:
                request, odd = _request(rng)
                leaves_s = rng.uniform(0.0, 3.0) if rng.random() < 0.3 else None
                status = await _client(bench, request, leaves_s)
                assert not odd or status in (0, 400), request

        await asyncio.gather(*(one() for _ in range(CASES)))
        await asyncio.sleep(5)
        assert not engine.tasks
        bench.check()
        return engine, bench

    engine, bench = run(story())
    worked = engine.read + engine.written
    (usage,) = bench.account.api_keys.usage(1e9)
    charged = usage.tokens
    assert 0.98 * worked <= charged <= 1.05 * worked, (charged / worked, engine)
    assert sum(record.charged for record in records) == charged  # a row for each
    assert usage.reserved == usage.in_flight == 0
    reasons = {record.charge for record in records}
    assert reasons >= {"reported", "counted", "estimated", "refused"}


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"tokens_per_minute": 50_000.0}, id="a minute"),
        pytest.param({"tokens_per_day": 200_000.0}, id="a day"),
        pytest.param({"usd_per_month": 0.2}, id="a month in dollars"),
        pytest.param({"models": (("*", KeyLimits(tokens_per_month=200_000.0)),)}, id="a month of a model"),
    ],
)
def test_no_more_is_worked_than_the_limit_and_one_request(limits: dict[str, Any]) -> None:
    seconds = 180

    async def story() -> Engine:
        rng = random.Random(SEED)
        engine = Engine(rng, fails=0.0)
        bench = Counted(engine, replace(access(**limits), prices=(("*", Price(1.0, 1.0)),)))
        tasks = []
        for _ in range(seconds * 10):
            leaves_s = rng.uniform(0.0, 3.0) if rng.random() < 0.3 else None
            tasks.append(asyncio.ensure_future(_client(bench, _request(rng)[0], leaves_s)))
            await asyncio.sleep(0.1)
        statuses = await asyncio.gather(*tasks)
        assert statuses.count(429) > 100
        return engine

    engine = run(story())
    per_minute = limits.get("tokens_per_minute", 0.0)
    filled = per_minute * (1 + (seconds + 10) / 60) or 200_000.0
    largest = 3_000 + 3 * 200
    assert 0.9 * filled <= engine.read + engine.written <= 1.02 * filled + largest
