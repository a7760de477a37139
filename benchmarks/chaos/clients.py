"""Clients on bare sockets, good ones and bad ones, and what they received.

Bare, so that every byte is seen: a response that comes twice, one that ends too early and looks whole, a connection
that is promised and closed.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.chaos.cases import Case, Kind, Manner
from benchmarks.chaos.toys import LARGE_BYTES

_GIVE_UP_S = 60.0
_PIPELINED = 40
_PATIENCE = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What came. `whole`: it ended as its framing says; if not, the client knows that it has not got all."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """`good`: the response was right and complete. `reported`: it was not, and the client was informed (an error status, a cut, an
    error event); neither: a wrong response that looks right. `error` is what came instead."""

    good: bool
    reported: bool = True
    error: str = ""


GOOD = Outcome(True)


class Crowd:
    """All clients of a run. Those that never read keep their sockets here, open, until `close`."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._deaf: list[socket.socket] = []
        self.stale = 0  # connections that had been promised to stay open, and had not

    def hang_up(self) -> None:
        """All but those that never read."""
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle = []

    def close(self) -> None:
        self.hang_up()
        for deaf in self._deaf:
            deaf.close()
        self._deaf = []

    @property
    def deaf(self) -> int:
        return len(self._deaf)

    async def ask(self, case: Case) -> Outcome:
        """Do what the case says; of a bad client the outcome means nothing."""
        if case.manner is Manner.WELL:
            return await self._well(case)
        if case.manner in (Manner.NEVER_READS, Manner.ASKS_AND_NEVER_READS):
            await self._deafly(case)
        elif case.manner in (Manner.SLOW_HEAD, Manner.SLOW_BODY):
            return await self._slowly(case)
        else:
            await self._leaving(case)
        return GOOD

    # --- the good

    async def _well(self, case: Case) -> Outcome:
        try:
            undisturbed_s = case.words * case.pace_s
            return await asyncio.wait_for(self._exchange(case), _GIVE_UP_S + 2 * undisturbed_s)
        except TimeoutError:
            return Outcome(False, error="no end of the answer")

    async def _exchange(self, case: Case) -> Outcome:
        reader, writer, fresh = await self._connection()
        again = self._rng.random() < 0.7
        try:
            writer.write(_request(case, keep_alive=again))
            answer = await _read(reader)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            writer.transport.abort()
            if not fresh:  # it was closed for its age while we wrote; every client asks again then
                self.stale += 1
                return await self._exchange(case)
            return Outcome(False, error=f"no answer: {type(error).__name__}")
        keeps = again and answer.whole and answer.headers.get("connection") != "close"
        if keeps:
            self._idle.append((reader, writer))
        else:
            # A response too many would come now.
            left = await reader.read() if answer.whole else b""
            writer.close()
            if left:
                return Outcome(False, reported=False, error=f"more than one answer: {left[:80]!r}")
        return outcome_of(case, answer)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bool]:
        """One to write on, and whether it is new."""
        while self._idle:
            reader, writer = self._idle.pop(self._rng.randrange(len(self._idle)))
            if not (reader.at_eof() or writer.transport.is_closing()):
                return reader, writer, False
            self.stale += 1
            writer.close()
        return *await asyncio.open_connection("127.0.0.1", self._port), True

    # --- the bad

    async def _leaving(self, case: Case) -> None:
        request = _request(case, keep_alive=True)
        head = request.index(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if case.manner is Manner.LEAVES_IN_HEAD:
                writer.write(request[: head // 2])
            elif case.manner is Manner.LEAVES_IN_BODY:
                writer.write(request[: head + 10])
            else:
                writer.write(request)
            if case.manner is Manner.LEAVES_IN_ANSWER:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(self._rng.uniform(0.0, 2 * case.pace_s))
        if self._rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def _slowly(self, case: Case) -> Outcome:
        """A head that comes a byte at a time, or half a body and then nothing, until the balancer has had enough."""
        request = _request(case, keep_alive=True)
        end = request.index(b"\r\n\r\n")
        sent, then = (
            (request[: end - 5], b"a") if case.manner is Manner.SLOW_HEAD else (request[: end + 10], b"")
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(sent)
        answer = asyncio.ensure_future(_read(reader))
        for _ in range(_PATIENCE):
            done, _ = await asyncio.wait([answer], timeout=0.2)
            if done:
                break
            writer.write(then)
        writer.transport.abort()
        if not answer.done():
            answer.cancel()
            return Outcome(False, error="is still listened to")
        if answer.exception() is not None:
            return Outcome(False, error=f"got no error: {answer.exception()!r}")
        status = answer.result().status
        return GOOD if status == 408 else Outcome(False, error=f"got {status}")

    async def _deafly(self, case: Case) -> None:
        """Send a request, and do not read the response. The socket stays open: no other client may wait for this one."""
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, ("127.0.0.1", self._port))
        times = _PIPELINED if case.manner is Manner.ASKS_AND_NEVER_READS else 1
        for _ in range(times):
            with suppress(ConnectionError, BlockingIOError):
                deaf.send(_request(case, keep_alive=True))
                await asyncio.sleep(0.01)
        self._deaf.append(deaf)


def _request(case: Case, *, keep_alive: bool) -> bytes:
    body = case.body()
    head = (
        f"POST {case.path} HTTP/1.1\r\nHost: chaos\r\nX-Request-Id: {case.id}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return (head + ("" if keep_alive else "Connection: close\r\n") + "\r\n").encode() + body


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return Answer(0, {}, head, False)
    first, *lines = head.decode("latin-1")[:-4].split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split(" ")[1])
    parts: list[bytes] = []
    try:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readexactly(2)
        else:
            parts.append(await reader.readexactly(int(headers["content-length"])))
    except asyncio.IncompleteReadError as error:
        parts.append(error.partial)
        return Answer(status, headers, b"".join(parts), False)
    except ConnectionError:
        return Answer(status, headers, b"".join(parts), False)
    return Answer(status, headers, b"".join(parts), True)


def outcome_of(case: Case, answer: Answer) -> Outcome:
    """Whether the response is that of the case."""
    if not answer.status:
        return Outcome(False, reported=False, error=f"no answer begins with {answer.body[:80]!r}")
    if answer.status != 200:
        return Outcome(False, error=f"{answer.status} {_code(answer.body)}")
    if case.odd and answer.whole and answer.body == b"Welcome!":
        return GOOD  # what the target has said
    if case.kind is Kind.LARGE:
        good = answer.whole and len(answer.body) == LARGE_BYTES
        return GOOD if good else Outcome(False, not answer.whole, f"{len(answer.body)} bytes")
    if case.kind is Kind.UNARY:
        try:
            said = json.loads(answer.body)["choices"][0]["text"]
        except (ValueError, LookupError):
            return Outcome(False, not answer.whole, f"unreadable: {answer.body[:80]!r}")
        return GOOD if answer.whole and said == case.text else Outcome(False, False, f"said {said[:80]!r}")
    return _outcome_of_stream(case, answer)


def _outcome_of_stream(case: Case, answer: Answer) -> Outcome:
    *events, last = answer.body.split(b"\n\n")
    said, done, finishes, error = "", 0, 0, ""
    for event in events:
        if event == b"data: [DONE]":
            done += 1
            continue
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk:
            error = str(chunk["error"].get("code") or chunk["error"])
            continue
        (choice,) = chunk["choices"]
        said += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        finishes += choice["finish_reason"] is not None
    if error or not answer.whole or last:
        right = case.text.startswith(said)
        return Outcome(False, right, error or f"cut after {len(said)} of {len(case.text)} characters")
    if (said, done, finishes) == (case.text, 1, 1):
        return GOOD
    return Outcome(False, False, f"said {len(said)} of {len(case.text)}, {done} ends, {finishes} finishes")


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"].get("code") or "")
    except (ValueError, LookupError, AttributeError):
        return repr(body[:60])
