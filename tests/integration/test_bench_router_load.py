"""The load generator of `benchmarks.router` sees what a proxy does wrong: it runs against the mock engine, straight
and through relays that damage what passes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.router.cells import Cell
from benchmarks.router.machine import Process, ask, compiled, is_free
from benchmarks.router.systems import Group

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

UNARY = Cell("unary", "", "", connections=4)
PACED = Cell("paced", "", "", connections=4, rate_s=200)
LARGE = Cell("large", "", "", connections=2, body_bytes=300_000)
STREAMS = Cell("streams", "", "", mode="streams", connections=5)
IDLE = Cell("idle", "", "", mode="idle", connections=5)
PREFIX = Cell("prefix", "", "", group=Group.PREFIX, connections=4, body_bytes=4096)

Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The ports of a mock engine."""
    log = tmp_path_factory.mktemp("engine") / "log"
    with Process(
        [str(compiled("backend")), "4"], log, min(os.sched_getaffinity(0)), log.parent, pipe=True
    ) as process:
        ports: list[int] = json.loads(process.line())["ports"]
        yield ports
    assert all(is_free(port) for port in ports)


async def load(cell: Cell, port: int, folder: Path) -> dict[str, Any]:
    arguments = cell.load_arguments(folder, 0.05, 0.2)
    command = [str(compiled("load")), cell.mode, "-P", str(port), *arguments]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    assert child.returncode == 0
    said: dict[str, Any] = json.loads(out)
    return said


@asynccontextmanager
async def relay(port: int, damage: Damage) -> AsyncIterator[int]:
    """A proxy of bytes that does something to the bytes of every answer. Its port."""

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
        await asyncio.gather(
            pump(reader, upstream_writer, lambda data: data), pump(upstream_reader, writer, damage)
        )

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def cut(data: bytes, where: bytes) -> bytes:
    if where in data:
        raise ConnectionError
    return data


@pytest.mark.parametrize("cell", [UNARY, PACED, LARGE, STREAMS, PREFIX], ids=lambda cell: cell.name)
async def test_every_answer_of_the_engine_is_right(cell: Cell, backend: list[int], tmp_path: Path) -> None:
    before = requests(backend)
    said = await load(cell, backend[0], tmp_path)
    assert said["sent"] > 0
    assert said["answered"] == said["sent"] == requests(backend) - before
    assert said["by_target"] == {str(backend[0]): said["sent"]}


async def test_idle_streams_have_begun_and_are_silent(backend: list[int], tmp_path: Path) -> None:
    said = await load(IDLE, backend[1], tmp_path)
    assert said["by_target"] == {str(backend[1]): 5}
    assert (said["unfinished"], said["events"], said["wrong"]) == (5, 0, 0)


async def test_bytes_may_come_in_any_pieces(backend: list[int], tmp_path: Path) -> None:
    async with relay(backend[2], lambda data: data) as port:
        for cell in (UNARY, STREAMS):
            said = await load(cell, port, tmp_path)
            assert said["answered"] == said["sent"] > 0


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
    _, body = ask(ports[0], "GET", "/counts")
    return sum(port["requests"] for port in json.loads(body).values())
