"""The load generator of `benchmarks.router` sees what a proxy does wrong: it runs against the mock engine, straight
and through relays that damage what passes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.cells import Cell, Measure
from benchmarks.router.keys import client_key
from benchmarks.router.machine import Process, ask, compiled, is_free
from benchmarks.router.systems import ORIGIN, Group
from lb.core.admission import EngineLoad
from lb.engines.kinds import NO_RESPONSE, EngineKind, Fetched, LoadQuery, detection, page_adapter
from lb.stream.resume_request import Strip
from lb.stream.stream_merge import stripper

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

UNARY = Cell("unary", "", "", connections=4)
PACED = Cell("paced", "", "", connections=4, rate_s=200)
LARGE = Cell("large", "", "", connections=2, body_bytes=300_000)
STREAMS = Cell("streams", "", "", mode="streams", connections=5)
LATE = Cell("late", "", "", mode="streams", connections=5, late_s=50, measure=Measure.FIRST_CHUNK)
IDLE = Cell("idle", "", "", mode="idle", connections=5)
EXTRAS = Cell("extras", "", "", group=Group.EXTRAS, connections=4, rate_s=200, traced=True)
PREFIX = Cell("prefix", "", "", group=Group.PREFIX, connections=4, body_bytes=4096)

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The ports of a mock engine."""
    yield from engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def nameless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The port of a mock engine whose kind cannot be found out."""
    yield from engine(tmp_path_factory.mktemp("nameless"), "--nameless")


def engine(folder: Path, *arguments: str) -> Iterator[list[int]]:
    command = [str(compiled("backend")), "4", *arguments]
    with Process(command, folder / "log", min(os.sched_getaffinity(0)), folder, pipe=True) as process:
        ports: list[int] = json.loads(process.line())["ports"]
        yield ports
    assert all(is_free(port) for port in ports)


async def load(cell: Cell, port: int, folder: Path, *more: str) -> dict[str, Any]:
    arguments = cell.load_arguments(folder, 0.05, 0.2)
    command = [str(compiled("load")), cell.mode, "-P", str(port), *arguments, *more]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    said: dict[str, Any] = json.loads(out)
    return said


@asynccontextmanager
async def relay(port: int, damage: Damage, request: Damage = lambda data: data) -> AsyncIterator[int]:
    """A proxy of bytes that does something to the bytes of every response, and of every request. Its port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Damage) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(change(data))
                await writer.drain()
        except ConnectionError:
            pass  # the other side is closed below
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, upstream_writer, request), pump(upstream_reader, writer, damage))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def cut(data: bytes, where: bytes) -> bytes:
    if where in data:
        raise ConnectionError
    return data


@pytest.mark.parametrize("cell", [UNARY, PACED, LARGE, STREAMS, LATE, PREFIX], ids=lambda cell: cell.name)
async def test_every_answer_of_the_engine_is_right(cell: Cell, backend: list[int], tmp_path: Path) -> None:
    before = requests(backend)
    said = await load(cell, backend[0], tmp_path)
    assert said["sent"] > 0
    assert said["answered"] == said["sent"] == requests(backend) - before
    assert said["by_target"] == {str(backend[0]): said["sent"]}


async def test_requests_have_keys_in_turn_traces_and_an_origin(backend: list[int], tmp_path: Path) -> None:
    heads: list[bytes] = []

    def seen(data: bytes) -> bytes:
        heads.extend(re.findall(rb"POST .*?\r\n\r\n", data, re.DOTALL))
        return data

    async with relay(backend[0], lambda data: data, seen) as port:
        said = await load(EXTRAS, port, tmp_path, "-k", "3")
    assert said["answered"] == said["sent"] == len(heads) > 10
    keys = [re.search(rb"Authorization: Bearer (\S+)", head)[1].decode() for head in heads]  # type: ignore[index]
    assert set(keys) == {client_key(number) for number in range(3)}
    traces = {re.search(rb"\r\ntraceparent: (\S+)", head)[1] for head in heads}  # type: ignore[index]
    assert len(traces) == len(heads)
    assert all(re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace) for trace in traces)
    assert all(f"\r\nOrigin: {ORIGIN}\r\n".encode() in head for head in heads)


async def test_idle_streams_have_begun_and_are_silent(backend: list[int], tmp_path: Path) -> None:
    said = await load(IDLE, backend[1], tmp_path)
    assert said["by_target"] == {str(backend[1]): 5}
    assert (said["unfinished"], said["events"], said["wrong"]) == (5, 0, 0)


async def test_the_first_events_of_late_streams_are_timed(backend: list[int], tmp_path: Path) -> None:
    said = await load(LATE, backend[2], tmp_path)
    assert said["sent"] - 5 >= said["latencies"] > 0
    assert said["p99_us"] >= said["p50_us"] > 0
    # Each of them is a client of its own, and none of the long ones is.
    assert said["reconnected"] == said["sent"] - 5


def test_the_kind_of_engine_is_told_by_its_metrics(backend: list[int], nameless: list[int]) -> None:
    assert kind_of(backend[0]) is EngineKind.VLLM
    assert kind_of(nameless[0]) is EngineKind.UNKNOWN


async def test_metrics_count_the_streams_that_run(backend: list[int]) -> None:
    port = backend[3]
    assert engine_load(port) == EngineLoad(0, 0, 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = stream_body(max_tokens=1000)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"data: ")
    assert engine_load(port) == EngineLoad(1, 0, 0.1)
    assert running(port) == 1
    writer.close()
    await writer.wait_closed()
    assert running(port) == 0  # the engine reads that the client has left before it reads this request


@pytest.mark.parametrize(
    ("fields", "ids", "counts", "usage"),
    [
        pytest.param({}, False, False, False, id="nothing asked"),
        pytest.param({"return_token_ids": True}, True, False, False, id="ids"),
        pytest.param({"return_token_ids": False}, False, False, False, id="no ids"),
        pytest.param({"stream_options": {"include_usage": True}}, False, False, True, id="usage at the end"),
        pytest.param(
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            False,
            True,
            True,
            id="usage with every chunk",
        ),
    ],
)
def test_a_stream_has_what_is_asked_for(
    fields: dict[str, Any], ids: bool, counts: bool, usage: bool, backend: list[int]
) -> None:
    role, *tokens, finish, last = chunks(backend[0], fields) + ([] if usage else [{}])
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(role.get("prompt_token_ids", ())) == (250 if ids else 0)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in tokens] == [
        " t000000",
        " t000001",
        " t000002",
    ]
    assert [len(chunk["choices"][0].get("token_ids", ())) for chunk in (*tokens, finish)] == [int(ids)] * 4
    assert [chunk.get("usage", {}).get("completion_tokens") for chunk in (role, *tokens, finish)] == (
        [0, 1, 2, 3, 3] if counts else [None] * 5
    )
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert last.get("usage") == (
        {"prompt_tokens": 250, "total_tokens": 253, "completion_tokens": 3} if usage else None
    )


def test_what_is_asked_for_can_be_taken_out_again(backend: list[int], nameless: list[int]) -> None:
    strip = stripper(Strip.IDS)
    assert strip is not None
    plain, with_ids = stream(backend[0], {}), stream(backend[0], {"return_token_ids": True})
    assert len(with_ids) > len(plain)
    assert strip(with_ids) == plain
    assert b"token_ids" not in stream(nameless[0], {"return_token_ids": True})


async def test_bytes_may_come_in_any_pieces(backend: list[int], tmp_path: Path) -> None:
    async with relay(backend[2], lambda data: data) as port:
        for cell in (UNARY, STREAMS):
            said = await load(cell, port, tmp_path)
            assert said["answered"] == said["sent"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "damage", "kind"),
    [
        pytest.param(UNARY, lambda data: data.replace(b"quick", b"quack"), "wrong", id="another text"),
        pytest.param(UNARY, lambda data: data.replace(b"200 OK", b"502 No"), "failed", id="an error"),
        pytest.param(UNARY, lambda data: data + b"x", "wrong", id="a byte too many"),
        pytest.param(
            UNARY,
            lambda data: data.replace(b'"chatcmpl-0', b'"chatcmpl-f'),
            "wrong",
            id="somebody else's answer",
        ),
        pytest.param(
            STREAMS, lambda data: data.replace(b" t000003", b" t000004"), "wrong", id="a number skipped"
        ),
        pytest.param(STREAMS, lambda data: b"" if b" t000003" in data else data, "wrong", id="an event lost"),
        pytest.param(
            STREAMS, lambda data: data * 2 if b" t000003" in data else data, "wrong", id="an event twice"
        ),
        pytest.param(
            STREAMS,
            lambda data: data.replace(b'"total_tokens":', b'"total_takens":'),
            "wrong",
            id="another usage",
        ),
        pytest.param(
            STREAMS,
            lambda data: data.replace(b'"finish_reason":null}', b'"finish_reason":null,"token_ids":[1]}'),
            "wrong",
            id="ids that were not asked for",
        ),
        pytest.param(
            STREAMS, lambda data: data.replace(b"[DONE]", b"[NONE]"), "wrong", id="another sentinel"
        ),
    ],
)
async def test_damage_is_seen(
    cell: Cell, damage: Damage, kind: str, backend: list[int], tmp_path: Path
) -> None:
    async with relay(backend[3], damage) as port:
        said = await load(cell, port, tmp_path)
    assert said[kind] > 0
    assert said["answered"] == 0


def requests(ports: list[int]) -> int:
    return sum(port["requests"] for port in counts(ports[0]).values())


def running(port: int) -> int:
    return counts(port)[str(port)]["running"]


def counts(port: int) -> dict[str, dict[str, int]]:
    _, body = ask(port, "GET", "/counts")
    by_port: dict[str, dict[str, int]] = json.loads(body)
    return by_port


def kind_of(port: int) -> EngineKind | None:
    """What the load balancer takes the engine for."""
    steps = detection()
    wanted = next(steps)
    while True:
        try:
            status, body = ask(wanted.port or port, "GET", wanted.path)
            wanted = steps.send(Fetched(status, body))
        except OSError:
            wanted = steps.send(NO_RESPONSE)
        except StopIteration as end:
            return end.value.kind if end.value else None


def engine_load(port: int) -> EngineLoad | None:
    adapter = page_adapter(Fetched(*ask(port, "GET", "/metrics")), LoadQuery("/metrics"))
    assert adapter is not None
    return adapter.read(Fetched(*ask(port, "GET", "/metrics")))


def stream_body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "every-1ms nonce-0123456789abcdef"}]
    return json.dumps({"messages": messages, "stream": True, **fields}).encode()


def stream(port: int, fields: dict[str, Any]) -> bytes:
    status, body = ask(port, "POST", "/v1/chat/completions", stream_body(max_tokens=3, **fields))
    assert status == 200
    return body


def chunks(port: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    *events, done, rest = stream(port, fields).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]
