"""Tokens of API keys: the charge is the number of tokens generated for the client, however its requests end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lb.config.options import Access
from lb.config.schema import Table, Target
from lb.engines.kinds import EngineKind
from lb.stream.request_size import MESSAGE_BYTES
from tests.kit.api_keys import api_key

from .lb_wires import DIES, ENDS, Bench, Seen, run, settle

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PROMPT = b"p" * 400
PROMPT_TOKENS = (len(b"user" + PROMPT) + MESSAGE_BYTES) // 4


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int, kind: EngineKind, finish: bytes = b"null") -> bytes:
    ids = b',"token_ids":[%d]' % number if kind is EngineKind.VLLM else b""
    text = b'{"content":"w%d "}' % number if finish == b"null" else b"{}"
    return chunk(
        b'data: {"id":"a","choices":[{"index":0,"delta":%b,"finish_reason":%b%b}]}\n\n' % (text, finish, ids)
    )


@dataclass(frozen=True)
class Ended:
    """One request: `tokens` are generated, a few at a time, and then it ends."""

    how: str
    tokens: int
    at_once: int
    kind: EngineKind


endings = st.builds(
    Ended,
    how=st.sampled_from(["whole", "target dies", "target closes", "client leaves", "unary", "never sent"]),
    tokens=st.integers(1, 40),
    at_once=st.integers(1, 7),
    kind=st.sampled_from([EngineKind.VLLM, EngineKind.UNKNOWN]),
)


def bench_for(ended: Ended) -> Bench:
    def behave(seen: Seen) -> list[bytes]:
        if ended.how == "unary":
            body = b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (
                PROMPT_TOKENS,
                ended.tokens,
            )
            return [
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            ]
        events = [event(number, ended.kind) for number in range(ended.tokens)]
        step = ended.at_once
        pieces = [STREAM_HEAD, *(b"".join(events[at : at + step]) for at in range(0, len(events), step))]
        if ended.how == "target dies":
            return [*pieces, DIES]
        if ended.how == "target closes":
            return [*pieces, ENDS]
        if ended.how == "client leaves":
            return pieces
        return [*pieces, event(0, EngineKind.UNKNOWN, b'"stop"'), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]

    key = api_key("alice", "secret", tokens_per_minute=100_000, max_concurrent=2)
    table = Table(
        "service",
        "r1",
        (Target("t0", "http://192.0.2.9:8000"),),
        policy="cache_aware",
        access=Access((key,)),
    )
    return Bench(behave, table=table, kind=ended.kind)


def request_of(ended: Ended) -> bytes:
    stream = b"false" if ended.how == "unary" else b"true"
    body = b'{"model":"m","stream":%b,"messages":[{"role":"user","content":"%b"}]}' % (stream, PROMPT)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(endings)
def test_what_is_charged_is_what_was_generated(ended: Ended) -> None:
    async def story() -> None:
        bench = bench_for(ended)
        client = bench.client()
        if ended.how == "never sent":
            bench.refuses = True
        client.send(request_of(ended))
        await asyncio.sleep(1)
        if ended.how == "never sent":
            await asyncio.sleep(120)
        client.wire.feed(DIES)
        await settle()
        await asyncio.sleep(60)
        (usage,) = bench.account.api_keys.usage(0.0)
        expected = 0 if ended.how == "never sent" else PROMPT_TOKENS + ended.tokens
        assert usage.tokens == expected
        assert (usage.reserved, usage.in_flight) == (0, 0)
        bench.check()

    run(story())


def test_requests_in_parallel_get_the_limit_and_one_more() -> None:
    async def story() -> None:
        ended = Ended("client leaves", 10, 1, EngineKind.VLLM)
        bench = bench_for(ended)
        key = api_key("alice", "secret", tokens_per_minute=60)
        table = bench.table.table
        bench.table.apply(
            Table(table.service, "r2", table.targets, policy=table.policy, access=Access((key,))), 0.0
        )
        bench.intake.applied()
        clients = [bench.client() for _ in range(40)]
        for client in clients:
            client.send(request_of(ended))
        await settle()
        statuses = [int(client.wire.take()[9:12]) for client in clients]
        assert statuses.count(200) == 1
        assert statuses.count(429) == 39
        for client in clients:
            client.wire.feed(DIES)
        await settle()
        bench.check()

    run(story())


@pytest.mark.parametrize(
    "header", [b"x-api-key: secret", b"API-Key: secret", b"Authorization: Bearer secret"]
)
def test_each_header_for_keys_is_accepted_and_ends_here(header: bytes) -> None:
    async def story() -> None:
        bench = bench_for(Ended("unary", 3, 1, EngineKind.VLLM))
        client = bench.client()
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        await settle()
        assert [got.status for got in client.answers(b"GET")] == [200]
        assert b"secret" not in b"".join(value for _, value in bench.seen[0].headers)
        client.wire.feed(DIES)
        await settle()
        bench.check()

    run(story())


def test_the_time_between_tokens_is_measured_by_tokens_and_not_by_reads() -> None:
    async def story() -> None:
        bench = bench_for(Ended("whole", 21, 7, EngineKind.VLLM))
        client = bench.client()
        client.send(request_of(Ended("whole", 21, 7, EngineKind.VLLM)))
        await asyncio.sleep(1)
        assert [got.whole for got in client.answers(b"POST")] == [True]
        observed = bench.account.metrics.of(bench.table.table.targets[0]).inter_token
        assert sum(observed.counts) == 1
        assert observed.sum < 0.01
        client.wire.feed(DIES)
        await settle()
        bench.check()

    run(story())
