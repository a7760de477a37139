"""Send the same random requests to an interpreted and to a compiled load balancer, and compare all that can be observed.

    python scripts/compare_builds.py FOLDER [--seconds 60] [--seed 1]

FOLDER is a copy of this checkout whose modules are compiled (`python hatch_build.py FOLDER`). Each agent has a fake engine of its
own. A case is a seed: it decides the bytes of a request, those of the engine's response, and where both are cut. Compared are
the bytes of all responses on the connection, whether it was closed, and the bytes that the engine was sent. What depends on time or
chance is blanked first (`blanked`). Request and a second, valid one go in one write, and no body is longer than a segment on the
loopback interface: whether a body has arrived already when the head is refused decides whether the connection is kept, and must not
depend on the speed of an agent.

Exits with 1 after the first differences, each with its seed; `--only SEED` runs that case alone and prints both outcomes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, Popen, check_output
from typing import IO, Any, NamedTuple, cast

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "a-token-for-comparisons"  # noqa: S105
CASES_PER_ROUND = 40  # between two changes of the options
MOST_ROUNDS = 10_000
AT_ONCE = 8
SILENCE_S = 2.0  # after which a connection counts as left open
SECOND_SILENCE_S = 20.0  # for a case that differs: on a busy machine one agent may have been slow
MOST_DIFFERENCES = 5

POLICIES = (
    "round_robin", "least_load", "power_of_two", "consistent_hash", "cache_aware", "prefix_tree", "gorgo",
)  # fmt: skip
PATHS = (
    b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses", b"/v1/embeddings", b"/generate",
    b"/tokenize", b"/", b"/a/b?c=%20", b"//x", b"/%7Euser", b"/v1/models",
)  # fmt: skip
HEADERS = (
    b"Authorization: Bearer ka", b"Authorization: Bearer ka", b"Authorization: Bearer ka", b"x-api-key: kb",
    b"Authorization: Basic eA==", b"Authorization: Bearer wrong", b"Connection: keep-alive, x-a", b"X-A: 1", b"X-Empty:",
    b"Expect: 100-continue", b"TE: trailers", b"Upgrade: h2c", b"Via: 1.1 x", b"Cookie: a=b; skyserve_session=z",
    b"X-SkyServe-Session: s", b"X-SkyServe-Policy: least_load", b"X-SkyServe-Policy: none", b"X-SkyServe-Continue: off",
    b"X-SkyServe-Hop: age=1.000;left=1.000;weight=1;tenant=a", b"X-Forwarded-For: 192.0.2.1", b"Forwarded: for=192.0.2.2",
    b"Origin: https://a.example", b"Idempotency-Key: k", b"X-Latin: h\xe9", b"X-Tab: a\tb", b"Accept-Encoding: gzip",
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)  # fmt: skip
HOSTILE = (
    b"Content-Length: +3", b"Content-Length: 3", b"Content-Length: 18446744073709551617", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: xchunked", b"Host: b", b"X-N: a\x00b", b"X-N: a\rb",
    b" folded", b"X N: a", b"X-N : a", b"X-N", b": x", b"X-Long: " + b"a" * 70_000, b"Content_Length: 3",
    *(b"\r\n".join(b"X-%d: a" % at for at in range(count)) for count in (90, 300)),
)  # fmt: skip
FIELDS: tuple[tuple[str, Any], ...] = (
    ("stream", True), ("stream", True), ("stream", 1), ("stream", "true"), ("n", 2), ("n", "x"), ("n", True), ("n", 2.0),
    ("max_tokens", 5), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "7"), ("max_tokens", 2**70), ("stop", ["x"]),
    ("max_completion_tokens", 9), ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tools", 3), ("user", 7),
    ("prompt", "abc"), ("prompt", [1, 2]), ("prompt", ["a", "b"]), ("prompt", {"x": 1}), ("input", [{"role": "user"}]),
    ("system", [{"type": "text", "text": "s"}]), ("stream_options", {"include_usage": True}), ("stream_options", 5),
    ("messages", "x"), ("messages", {"a": 1}), ("messages", [1, None, [], {"role": 1, "content": {"a": 1}}]), ("best_of", 3),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 3000}}]}]),
    ("model", 5), ("model", "other"), ("model", None), ("sampling_params", {"max_new_tokens": 4}), ("logprobs", True),
    ("return_token_ids", True), ("response_format", "x"), ("previous_response_id", "resp_1"), ("text", "t"), ("echo", True),
)  # fmt: skip
BODIES = (
    b"", b"[]", b"null", b"{", b'"x"', b'{"model":"\\ud800","messages":[]}', b'{"a":' * 300 + b"1" + b"}" * 300,
    b"\xef\xbb\xbf{}", b'{"stream":true,"stream":false}', b'{"max_tokens":5,"max_tokens":6}', b"\xff\xfe", b"x" * 64_000,
)  # fmt: skip
BLANKED = re.compile(
    rb"(?im)^((?:x-request-id|date|x-ratelimit-[a-z-]+|retry-after|x-skyserve-(?:credit|hop)|traceparent|age|set-cookie):)[^\r\n]*"
)
REQUEST_ID = re.compile(rb"req[-_][0-9a-f-]{8,}|[0-9a-f]{16,32}")


class Case(NamedTuple):
    """The bytes of a request with a second one behind it, and the pieces in which the engine responds to the first."""

    request: bytes
    response: list[bytes]
    closes: bool


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    request = _request(rng, seed)
    response, closes = _response(rng)
    cuts = sorted(rng.randrange(len(response) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    edges = [0, *cuts, len(response)]
    pieces = [response[first:last] for first, last in pairwise(edges) if first < last]
    return Case(request, pieces, closes)


def _request(rng: random.Random, seed: int) -> bytes:
    method = rng.choice((b"POST",) * 8 + (b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"))
    path = rng.choice(PATHS[:5]) if rng.random() < 0.7 else rng.choice(PATHS)
    lines = [b"Host: a.example", b"X-Case: %d" % seed]
    lines += [rng.choice(HEADERS) for _ in range(rng.randint(0, 5))]
    if rng.random() < 0.6:
        lines.append(b"Authorization: Bearer ka")
    body = b""
    if method == b"POST":
        body = _body(rng)
        lines.append(b"Content-Type: application/json")
    elif rng.random() < 0.3:
        body = b"x" * rng.choice((0, 1, 5000))
    if body or method in (b"POST", b"PUT"):
        if rng.random() < 0.3:
            lines.append(b"Transfer-Encoding: chunked")
            body = _chunked(rng, body)
        else:
            lines.append(b"Content-Length: %d" % len(body))
    if rng.random() < 0.12:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HOSTILE))
    version = rng.choice((b"1.1",) * 12 + (b"1.0", b"2.0", b"1.11"))
    head = b"%b %b HTTP/%b\r\n" % (method, path, version) + b"\r\n".join(lines) + b"\r\n\r\n"
    if rng.random() < 0.03:
        at = rng.randrange(len(head))
        head = head[:at] + bytes((rng.randrange(256),)) + head[at + 1 :]
    following = b"GET /following HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ka\r\nConnection: close\r\n\r\n"
    return head + body + following


def _body(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return rng.choice(BODIES)
    content = rng.choice(("hi", "é" * 10, "😀", "x" * 3000))
    json_body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": content}] * rng.randint(1, 3),
    }
    json_body.update(rng.choice(FIELDS) for _ in range(rng.randint(0, 5)))
    written = json.dumps(
        json_body, ensure_ascii=rng.random() < 0.5, separators=rng.choice(((",", ":"), (", ", ": ")))
    )
    return written.encode()[: None if rng.random() < 0.97 else -3]


def _chunked(rng: random.Random, body: bytes) -> bytes:
    parts, at = list[bytes](), 0
    while at < len(body):
        part = body[at : at + rng.choice((1, 7, 100, 5000, 100_000))]
        if len(parts) > 50:
            part = body[at:]
        size = b"%x" % len(part) if rng.random() < 0.7 else b"00%X" % len(part)
        parts.append(size + rng.choice((b"",) * 9 + (b";a=b",)) + b"\r\n" + part + b"\r\n")
        at += len(part)
    end = rng.choice((b"0\r\n\r\n",) * 9 + (b"0\r\nX-T: 1\r\n\r\n",))
    if rng.random() < 0.03:
        end = rng.choice((b"zz\r\n", b"-1\r\n\r\n", b"1\r\nabc\r\n0\r\n\r\n"))
    return b"".join(parts) + end


def _events(rng: random.Random) -> Iterator[bytes]:
    for at in range(rng.randint(0, 8)):
        text = rng.choice(("a", "hello ", "é中", "😀", "data: x", "[DONE]", "\n\n", '{"error"', "x" * 3000))
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        if rng.random() < 0.2:
            choice["token_ids"] = [at]
        event: dict[str, Any] = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        if rng.random() < 0.1:
            event["usage"] = {"prompt_tokens": 5, "completion_tokens": at, "total_tokens": 5 + at}
        line_end = b"\r\n" if rng.random() < 0.1 else b"\n"
        prefix = rng.choice((b"data: ",) * 9 + (b"data:", b": ping\n\ndata: ", b"event: x\ndata: "))
        yield prefix + json.dumps(event).encode() + line_end * 2
    yield b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    yield b"data: [DONE]\n\n"


def _response(rng: random.Random) -> tuple[bytes, bool]:
    """Return a response, and whether its end is that of the connection."""
    status = rng.choice(
        (b"200 OK",) * 10 + (b"200 ", b"201 Created", b"400 Bad", b"404 Not Found", b"422 No", b"429 Slow")
    )
    lines = [rng.choice((b"X-R: a", b"Set-Cookie: a=b", b"Server: e", b"Connection: x-r", b"Keep-Alive: timeout=5",
                         b"Access-Control-Allow-Origin: *", b"Vary: a", b"X-L: \xff", b"X-SkyServe-Credit: 1-2"))
             for _ in range(rng.randint(0, 3))]  # fmt: skip
    framing = rng.choice(("chunked", "chunked", "length", "close"))
    if rng.random() < 0.6:
        lines.append(b"Content-Type: text/event-stream")
        events = list(_events(rng))
        body = b"".join(events)
        whole = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events) + b"0\r\n\r\n"
    else:
        lines.append(b"Content-Type: application/json")
        body = rng.choice(
            (
                b"",
                b"{}",
                b'{"id":"r","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
                b"x" * 9000,
            )
        )
        whole = _chunked(random.Random(1), body)
    if framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        body = whole
    elif framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
    return b"HTTP/1.1 " + status + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body, framing == "close"


def blanked(data: bytes) -> bytes:
    """Return the bytes without what depends on time or chance: dates, ids, what is left of a limit."""
    return REQUEST_ID.sub(b"ID", BLANKED.sub(rb"\1", data))


class Engine:
    """What an agent sends requests to. `seen` has the bytes of the requests of each case."""

    def __init__(self) -> None:
        self.seen: dict[int, list[bytes]] = {}

    async def start(self) -> str:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 22)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._respond(*await _read_request(reader), writer):
                pass
        writer.close()

    async def _respond(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        found = re.search(rb"(?i)\r\nx-case: (\d+)\r\n", head)
        if found is None:  # a poll, or the request behind that of a case
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        seed = int(found[1])
        self.seen.setdefault(seed, []).append(blanked(head) + body)
        case = case_of(seed)
        for piece in case.response:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return not case.closes


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body as they came."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower, body = head.lower(), b""
    if b"\r\ntransfer-encoding: chunked" in lower:
        for _ in range(100_000):
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            body += line + await reader.readexactly(size + 2)
            if not size:
                break
    elif found := re.search(rb"\r\ncontent-length: *(\d+)", lower):
        body = await reader.readexactly(int(found[1]))
    return head, body


class Agent:
    """An agent that runs the modules in `folder`, with its engine."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        self.name = "compiled" if compiled else "interpreted"
        self._folder = folder
        self._environment = {**os.environ, "PYTHONPATH": str(folder), "SKYSERVE_LB_TOKEN": TOKEN}
        look = "import lb.http.request_head as it; print(it.__file__)"
        file = check_output(
            [sys.executable, "-c", look], cwd=folder, env=self._environment, text=True
        ).strip()
        if file.startswith(str(folder)) is False or file.endswith(".so") is not compiled:
            raise SystemExit(f"{folder} is not a checkout whose load balancer is {self.name}: it uses {file}")
        self.engine = Engine()

    async def start(self, stack: ExitStack) -> None:
        url = await self.engine.start()
        command = [sys.executable, "-m", "lb", "--port", "0", "--admin-port", "0", "--target", url]
        process = Popen(command, stdout=PIPE, cwd=self._folder, env=self._environment)  # noqa: ASYNC220
        stack.enter_context(process)
        stack.callback(process.kill)
        self._ports = json.loads(await asyncio.to_thread(cast(IO[bytes], process.stdout).readline))

    def use(self, options: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._ports['admin_port']}/-/options",
            method="PATCH",
            data=json.dumps(options).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310

    async def outcome(self, seed: int, silence_s: float = SILENCE_S) -> tuple[bytes, str, list[bytes]]:
        """Return what came on the connection, how that ended, and what the engine saw."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports["port"])
        received, end = bytearray(), "open"
        try:
            writer.write(case_of(seed).request)
            while data := await asyncio.wait_for(reader.read(1 << 16), silence_s):
                received += data
            end = "closed"
        except TimeoutError:
            pass
        except ConnectionError:
            end = "closed"  # with a reset, if bytes were unread
        finally:
            writer.close()
        return blanked(_joined(bytes(received))), end, self.engine.seen.pop(seed, [])


def _joined(data: bytes) -> bytes:
    """Return chunked responses without their framing: how events share chunks depends on when they were read."""
    out, rest = [], data
    for _ in range(3):
        head, mark, rest = rest.partition(b"\r\n\r\n")
        out.append(head + mark)
        if b"\r\ntransfer-encoding: chunked" not in head.lower():
            out.append(rest)
            return b"".join(out)
        while rest:
            line, _, after = rest.partition(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if not size:
                at = rest.find(b"\r\n\r\n") + 4
                out.append(rest[len(line) : at])
                rest = rest[at:]
                break
            out.append(after[:size])
            rest = after[size + 2 :]
    return b"".join(out) + rest


def options_of(number: int) -> dict[str, Any]:
    """Return the options of a round."""
    keys = [
        ("a", "ka", {"tokens_per_minute": 10**9, "requests_per_minute": 10**7, "weight": 2}),
        ("b", "kb", {}),
    ]
    access = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more} for name, key, more in keys
    ]
    return {
        "policy": POLICIES[number % len(POLICIES)],
        "access": {"keys": access if number % 3 else []},
        "cors": {"origins": ["https://a.example"] if number % 2 else []},
        "trusted_proxies": ["127.0.0.0/8"] if number % 2 else [],
        "pushing": {"mode": ("work", "selective", "blind", "fixed_cap")[number % 4]},
    }


async def compare(folder: Path, seconds: float, first: int, only: int | None) -> int:
    """Returns how many cases differed."""
    differences, outcomes = 0, Counter[str]()
    began = time.monotonic()  # noqa: TID251 (how long to go on)
    with ExitStack() as stack:
        agents = [Agent(ROOT, False), Agent(folder, True)]
        for agent in agents:
            await agent.start(stack)
        for number in range(MOST_ROUNDS):
            for agent in agents:
                await asyncio.to_thread(agent.use, options_of(number))
            seeds = range(first + number * CASES_PER_ROUND, first + (number + 1) * CASES_PER_ROUND)
            for at in range(0, CASES_PER_ROUND, AT_ONCE):
                some = [only] if only is not None else seeds[at : at + AT_ONCE]
                pairs = await asyncio.gather(
                    *(asyncio.gather(*(agent.outcome(seed) for agent in agents)) for seed in some)
                )
                for seed, pair in zip(some, pairs, strict=True):
                    ours, theirs = pair
                    outcomes[ours[0][9:12].decode("latin-1") or ours[1]] += 1
                    if ours != theirs:
                        ours, theirs = [await agent.outcome(seed, SECOND_SILENCE_S) for agent in agents]
                    if ours != theirs or only is not None:
                        differences += ours != theirs
                        print(
                            f"case {seed}, options of round {number}:\n  interpreted {ours}\n  compiled    {theirs}"[
                                :4000
                            ]
                        )
                if only is not None or differences >= MOST_DIFFERENCES:
                    break
            if only is not None or differences >= MOST_DIFFERENCES:
                break
            if time.monotonic() - began > seconds:  # noqa: TID251
                break
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(outcomes.items()))
    print(
        f"{outcomes.total()} requests to an interpreted and a compiled agent, {differences} differ ({statuses})"
    )
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--only", type=int, help="run this case alone")
    given = parser.parse_args()
    sys.exit(1 if asyncio.run(compare(given.folder.resolve(), given.seconds, given.seed, given.only)) else 0)


if __name__ == "__main__":
    main()
