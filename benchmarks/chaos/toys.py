"""Targets that do to each request what its case says (`benchmarks.chaos.cases`), on real sockets.

Besides the faults of single requests a target as a whole can be down (it refuses, and what runs is reset), frozen
(it takes connections and bytes, and does nothing) or overloaded (503 for everything): `Weather`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos.cases import Case, Fault, Kind, word

LARGE_BYTES = 2 * 1024 * 1024
_GONE = (ConnectionError, RuntimeError)  # the latter is uvloop's, of a transport that is closed
_FILLER = b"x" * 65536
_NO_HTTP = b"SSH-2.0-OpenSSH_9.6\r\n\r\n"
_SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Died(Exception):
    """The target breaks the connection."""


class Toy:
    """One target. `cases` are those of the whole run, by id."""

    def __init__(self, name: str, cases: dict[str, Case], unary_bytes: int = 400) -> None:
        self.name = name
        self.port = 0
        self.overloaded = False
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._cases = cases
        self._unary_bytes = unary_bytes
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def json(self) -> dict[str, Any]:
        return {"id": self.name, "url": f"http://127.0.0.1:{self.port}", "health_path": "/health"}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a killed process: connections are refused, and the open ones reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def end(self) -> None:
        """Stop, and wait until no request is served any longer."""
        await self.stop()
        self.thaw()
        while self._writers:  # noqa: ASYNC110 (each sees its connection closed at its next step)
            await asyncio.sleep(0.02)

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    # --- a connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        # What has been drained is with the kernel, and arrives even if the connection is closed at once.
        writer.transport.set_write_buffer_limits(0)
        try:
            while (asked := await _read(reader)) is not None:
                path, request_id, body = asked
                case = self._cases.get(request_id)
                if not self._thawed.is_set():
                    if case is not None:
                        case.started += 1
                        case.fails(False)
                    await self._thawed.wait()
                    return  # the client has given up by now
                if case is None:
                    found = path == "/health"
                    writer.write(_whole(b"ok" if found else b"", "200 OK" if found else "404 Not Found"))
                    continue
                await self._attempt(case, body, writer)
        except (*_GONE, asyncio.IncompleteReadError, Died):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _attempt(self, case: Case, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault = case.next_fault()
        if self.overloaded:
            fault = Fault.UNAVAILABLE
        attempt = _Attempt(case, fault, json.loads(body), writer, self._thawed, self._unary_bytes)
        try:
            await attempt.answer()
        except (Died, *_GONE):  # or the balancer has left: it has lost patience with us
            case.fails(attempt.passed_on)
            raise
        if not (fault.is_fatal or fault is Fault.WRONG_TYPE) and not writer.transport.is_closing():
            case.responded += 1
        if fault in (Fault.CLOSE, Fault.GARBAGE):
            raise Died


class _Attempt:
    """One response, as far as it gets. `passed_on`: the client may have seen some of it."""

    def __init__(
        self,
        case: Case,
        fault: Fault,
        asked: dict[str, Any],
        writer: asyncio.StreamWriter,
        thawed: asyncio.Event,
        unary_bytes: int,
    ) -> None:
        self.passed_on = False
        self._case = case
        self._fault = fault
        self._asked = asked
        self._writer = writer
        self._thawed = thawed
        self._unary_bytes = unary_bytes

    async def answer(self) -> None:
        case, fault, writer = self._case, self._fault, self._writer
        if fault is Fault.RESET:
            raise Died
        if fault is Fault.MUTE:
            case.mute = True
            await self._until_left()
        if fault is Fault.SLOW:
            await asyncio.sleep(0.3)
        if fault is Fault.UNAVAILABLE:
            case.fails(False)
            writer.write(_whole(b'{"error": {}}', "503 Service Unavailable"))
        elif fault is Fault.EMPTY:
            case.fails(False)
            writer.write(_whole(b"") if case.started % 2 else _SSE + b"0\r\n\r\n")
        elif fault is Fault.GARBAGE:
            case.fails(False)
            writer.write(_NO_HTTP)
        elif fault is Fault.WRONG_TYPE:
            case.odd = True
            writer.write(_whole(b"Welcome!", kind="text/html"))
        elif case.kind in (Kind.STREAM, Kind.CHAT):
            await self._stream()
        elif case.kind is Kind.LARGE:
            await self._large()
        else:
            await self._unary()
        await writer.drain()

    async def _unary(self) -> None:
        case = self._case
        filler = "x" * self._unary_bytes
        body = json.dumps({"id": case.id, "choices": [{"text": case.text}], "filler": filler}).encode()
        whole = _whole(body)
        cut = {Fault.RESET_AFTER_HEAD: whole.index(b"\r\n\r\n") + 4, Fault.RESET_IN_BODY: len(whole) - 50}
        await self._work()
        self._writer.write(whole[: cut.get(self._fault)])
        if self._fault in cut:
            await self._die()

    async def _large(self) -> None:
        self._writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)
        for sent in range(0, LARGE_BYTES, len(_FILLER)):
            if self._fault is Fault.RESET_IN_BODY and sent >= LARGE_BYTES // 2:
                await self._die()
            self.passed_on = True
            self._writer.write(_FILLER)
            await self._writer.drain()

    async def _stream(self) -> None:
        """The rest of the text, from where the prompt ends; half a chunk may hold whole events."""
        case, fault, writer = self._case, self._fault, self._writer
        first = self._words_given()
        writer.write(_SSE)
        dies_at = {
            Fault.RESET_AFTER_HEAD: first,
            Fault.RESET_IN_BODY: max(first + 1, case.words * 2 // 3),
            Fault.HALF_CHUNK: case.words // 2,
            Fault.STALL: max(first + 1, case.words // 2),
        }.get(fault)
        for number in range(first, case.words):
            if number == dies_at:
                break
            await self._work()
            writer.write(_chunk(self._event(number)))
            self.passed_on = True
            await writer.drain()
        if dies_at is not None:
            if fault is Fault.HALF_CHUNK:
                writer.write(_chunk(self._event(case.words - 1))[:-20])
            elif fault is Fault.STALL:
                await self._until_left()
            await self._die()
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _words_given(self) -> int:
        """How many words of the response are in the prompt; they and the limit must be right."""
        case = self._case
        if case.kind is Kind.CHAT:
            return 0
        given = str(self._asked["prompt"])
        count = given.count(" ")
        if given != case.prompt + "".join(word(case.id, number) for number in range(count)):
            case.complaints.append(f"continued from {given[-60:]!r}")
        if self._asked["max_tokens"] != case.words - count:
            case.complaints.append(
                f"{count} of {case.words} received, and {self._asked['max_tokens']} asked for"
            )
        return count

    def _event(self, number: int) -> bytes:
        case = self._case
        finish = "length" if number == case.words - 1 else None
        said = word(case.id, number)
        choice = {"delta": {"content": said}} if case.kind is Kind.CHAT else {"text": said}
        # With the id of its token: a stream with a limit is continued only if its tokens are known.
        given = {"index": 0, **choice, "finish_reason": finish, "token_ids": [number]}
        chunk = {"id": case.id, "choices": [given]}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    async def _work(self) -> None:
        """One step, unless the client has left: engines stop then."""
        await asyncio.sleep(self._case.pace_s)
        if not self._thawed.is_set():
            await self._thawed.wait()
            await asyncio.sleep(0.01)  # to hear that it has been left meanwhile
        if self._writer.transport.is_closing():
            raise Died

    async def _until_left(self) -> None:
        """Silence, until the other side has had enough of it."""
        while not self._writer.transport.is_closing():  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.05)
        raise Died

    async def _die(self) -> None:
        """Let go out what was written, then reset."""
        await asyncio.sleep(0.002)
        raise Died


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, bytes] | None:
    """Path, request id and body of the next request; None if there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (*_GONE, asyncio.IncompleteReadError):
        return None
    first, *lines = head.decode("latin-1")[:-4].split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return first.split(" ")[1], headers.get("x-request-id", ""), body


def _whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


async def weather(toys: Sequence[Toy], rng: random.Random, calm_s: float) -> None:
    """One target at a time has bad weather, for up to two seconds; until cancelled, and then the sun shines."""
    while True:
        await asyncio.sleep(calm_s * rng.uniform(0.5, 1.5))
        toy, for_s = rng.choice(toys), rng.uniform(0.2, 2.0)
        kind = rng.choice(("down", "frozen", "overloaded"))
        try:
            if kind == "down":
                await toy.stop()
            elif kind == "frozen":
                toy.freeze()
            else:
                toy.overloaded = True
            await asyncio.sleep(for_s)
        finally:
            toy.overloaded = False
            toy.thaw()
            if kind == "down":
                await toy.start()
