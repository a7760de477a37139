"""Streams that are longer than what a forwarding of the fast path keeps: 10,000 tokens, whole and in order.

`scripts/test_native.sh` runs this on the compiled modules.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.lb_harness import Seen, World, self_signed, until, world

TOKENS = 10_000
STREAMS = int(os.environ.get("SKYSERVE_LONG_STREAMS", "2"))
EVENTS_PER_WRITE = 10
CHAT = "/v1/chat/completions"
METRICS = b'vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{model_name="m"} 0\n'


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def event(token: int, ids: bool, finish: str = "null") -> bytes:
    """One event as vLLM writes it; the next token is its number."""
    more = ""
    if ids:
        more = ',"prompt_token_ids":[1,2,3]' if token == 0 else ""
    listed = f',"token_ids":[{token}]' if ids else ""
    data = (
        '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        f'{{"content":" {token}"}},"logprobs":null,"finish_reason":{finish}{listed}}}]{more}}}'
    )
    return b"data: " + data.encode() + b"\n\n"


async def as_vllm(seen: Seen) -> None:
    """Streams as many tokens as are requested, with their ids where they are."""
    body = json.loads(seen.body)
    tokens, ids = body["max_tokens"], bool(body.get("return_token_ids"))
    await seen.begin_stream()
    for first in range(0, tokens, EVENTS_PER_WRITE):
        events = (event(token, ids) for token in range(first, min(tokens, first + EVENTS_PER_WRITE)))
        await seen.send(b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events))
        await asyncio.sleep(0)
    await seen.chunk(event(tokens, ids, '"length"'))
    await seen.chunk(b"data: [DONE]\n\n")
    await seen.send(b"0\r\n\r\n")


async def metrics(seen: Seen) -> None:
    if seen.path == "/metrics":
        await seen.answer(METRICS, "200 OK", "Content-Type: text/plain")
    else:
        await seen.answer(b"", "404 Not Found")


@pytest.mark.parametrize("mode", ["auto", "exact", "off"])
@pytest.mark.parametrize("tls", ["", "clients", "targets", "clients and targets"])
async def test_a_long_stream_arrives_whole(w: World, tmp_path: Path, mode: str, tls: str) -> None:
    certfile, keyfile = self_signed(tmp_path)
    flags: list[str] = []
    behind = None
    if "targets" in tls:
        behind = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        behind.load_cert_chain(certfile, keyfile)
        flags += ["--targets-cafile", str(certfile)]
    if "clients" in tls:
        flags += ["--tls-certfile", str(certfile), "--tls-keyfile", str(keyfile)]
    engine = await w.target("a", as_vllm, behind)
    engine.respond_to_poll = metrics
    agent = await w.agent(*flags)
    await agent.push(engine.json, continuation={"mode": mode})

    async def recognised() -> bool:
        return "kind=vllm" in agent.log.read_text()

    await until(recognised)
    trust: ssl.SSLContext | bool = (
        ssl.create_default_context(cafile=str(certfile)) if "clients" in tls else False
    )
    url = f"{'https' if 'clients' in tls else 'http'}://127.0.0.1:{agent.port}{CHAT}"
    asked = {
        "model": "m",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": "x"}],
    }

    async def streamed() -> list[bytes]:
        async with agent.http.post(url, json=asked, ssl=trust) as response:
            assert response.status == 200
            return (await response.read()).split(b"\n\n")

    expected = [event(token, False)[:-2] for token in range(TOKENS)]
    expected += [event(TOKENS, False, '"length"')[:-2], b"data: [DONE]", b""]
    for events in await asyncio.gather(*(streamed() for _ in range(STREAMS))):
        assert events == expected
