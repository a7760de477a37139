"""Send random chunks through the helper in C, and compare with a model of what it may do. For a build with sanitizers.

    python scripts/fuzz_fast_path.py [--cases 100000] [--seed 1]

Compiles lb/proxy/_fast_path.c with -fsanitize=address,undefined into a temporary folder, and runs the cases in a process that has
the run-time library of the sanitizers preloaded. Any report of theirs ends it. Leaks are not looked for: Python itself keeps memory.

A case is one forwarding in a random mode over socket pairs, to which a stream is sent in random pieces: whole events, with
token ids and usage, and among them what is irregular: other sizes, extensions, halves, changed bytes. The model knows what holds for any input:

- What came is what was forwarded, followed by what the helper gave back, with nothing lost, repeated or reordered.
- Without a change (CHUNKS, EVENTS) the client was sent exactly what was forwarded. In the other modes it was sent as many chunks or fewer, each
  well-formed; and what has neither token ids nor usage passes unchanged.
- What is forwarded is whole chunks of whole events, but for CHUNKS.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = CHUNKS, EVENTS, WITHOUT_IDS, WITHOUT_USAGE = range(
    4
)  # `ForwardingMode`; lb itself is not imported here
IRREGULAR, UNSENT, FULL, ENDED = range(4)  # `StopReason`
READ_BYTES = 1 << 14  # to allocate more costs more than the case, with sanitizers
MOST_READS = 1000
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
EXTRAS = (
    b'"token_ids":[1,22,333]', b'"token_ids":[]', b'"token_ids":null', b'"prompt_token_ids":[1]', b'"usage":{"a":{"b":1}}',
    b'"usage":null', b'"finish_reason":"stop"', b'"finish_reason":"abort"', b'"error":{}', b'"logprobs":null', b'"usage":"}"',
)  # fmt: skip
LINES = (
    b": ping\n\n",
    b"data: [DONE]\n\n",
    b"event: error\ndata: {}\n\n",
    b"data: half",
    b"",
    b"\n\n",
    b"data:\n\n",
    b"data: {\n\n",
)
SIZES = (b"%x", b"%X", b"0%x", b"%x;a=b", b"+%x", b" %x", b"%x ", b"-%x", b"fffffffffffffff%x", b"", b"0x%x")
PLAIN_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")


def event(rng: random.Random) -> bytes:
    text = rng.choice(
        (b"a", b"hello ", b'\\"', b"\\\\", "é😀".encode(), b"x" * rng.choice((50, 5000)), b"[DONE]")
    )
    fields = [b'"choices":[{"index":0,"delta":{"content":"%b"}%b}]'
              % (text, b"," + rng.choice(EXTRAS) if rng.random() < 0.4 else b"")]  # fmt: skip
    if rng.random() < 0.3:
        fields.insert(rng.randrange(2), rng.choice(EXTRAS))
    return b"data: {" + b",".join(fields) + b"}\n\n"


def chunk(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.85:
        data = event(rng)
    elif kind < 0.95:
        data = event(rng) + event(rng)
    else:
        data = rng.choice(LINES)
    size = b"%x" if rng.random() < 0.97 else rng.choice(SIZES)
    return (size % len(data) if b"%" in size else size) + b"\r\n" + data + b"\r\n"


def mutated(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
    if kind == 1:
        return data[:at] + data[at + rng.randint(1, 9) :]
    if kind == 2:
        return (
            data[:at]
            + rng.choice((b"\r\n", b"\0", b'"', b"{", b"]", b"\\", b"token_ids", b"usage"))
            + data[at:]
        )
    return data[:at]


def chunks_of(data: bytes) -> list[bytes] | None:
    """Return the contents of whole chunks without extensions; None if the bytes are anything else."""
    found, at = [], 0
    while at < len(data):
        size = PLAIN_CHUNK.match(data, at)
        if size is None:
            return None
        end = size.end() + int(size[1], 16)
        if data[end : end + 2] != b"\r\n":
            return None
        found.append(data[size.end() : end])
        at = end + 2
    return found


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def received(end: socket.socket) -> bytes:
    """Return all that has come there."""
    data = b""
    with suppress(BlockingIOError, ConnectionError):
        for _ in range(MOST_READS):
            part = end.recv(READ_BYTES)
            data += part
            if not part:
                break
    return data


class Owner:
    """Whom a forwarding reports to."""


class Sockets(tuple[socket.socket, ...]):
    """Two pairs: from the engine to the helper, and from there to the client. Used again, as to make them takes longer than a case."""

    def __new__(cls) -> Sockets:
        one = super().__new__(cls, (*socket.socketpair(), *socket.socketpair()))
        for end in one:
            end.setblocking(False)
        return one


class Case:
    def __init__(self, path: Any, spare: list[Sockets], seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.path, self.spare = path, spare
        self.mode = rng.choice(MODES)
        self.limit = rng.choice((1, 500, 1 << 18))
        self.sockets = spare.pop() if spare else Sockets()
        self.engine, self.source, self.sink, self.client = self.sockets
        self.is_spare = True
        if rng.random() < 0.05:
            self.is_spare = False
            self.sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.reads = rng.random() < 0.9  # a client that does not is sent what its buffer takes

    def run(self) -> str:
        end = self._run()
        if self.is_spare:
            self.spare.append(self.sockets)
        else:
            for one in self.sockets:
                one.close()
        return end

    def _run(self) -> str:
        rng, owner = self.rng, Owner()
        forwarding = self.path.forwarding(
            self.source.fileno(), self.sink.fileno(), self.limit, owner, self.mode
        )
        sent, passed, got, back, reason = b"", b"", b"", b"", -1
        for _ in range(rng.randint(1, 6)):
            data = b"".join(chunk(rng) for _ in range(rng.randint(1, 4)))
            if rng.random() < 0.15:
                data = mutated(rng, data)
            if rng.random() < 0.03:
                self.engine.close()
                self.is_spare = False
            elif data:
                sent += data[: self.engine.send(data)]
            for stopped, reason_, back_ in self.path.run():
                require(stopped is owner, "another owner was called")
                reason, back = reason_, back_
            if rng.random() < 0.5 or reason >= 0:
                passed += forwarding.take()
                chunks, sent_bytes, events, ids = forwarding.counts()
                require(min(chunks, sent_bytes, events, ids) >= 0, "a count is negative")
                forwarding.pulse()
            if self.reads:
                got += received(self.client)
            if reason >= 0:
                break
        else:
            forwarding.stop()
            passed += forwarding.take()
        got += received(self.client)
        self.check(sent, passed, got, back, reason)
        if rng.random() < 0.5:
            forwarding.stop()
        return ("running", "irregular", "unsent", "full", "ended")[reason + 1]

    def check(self, sent: bytes, passed: bytes, got: bytes, back: bytes, reason: int) -> None:
        to_client = got + (back if reason == UNSENT else b"")  # the caller writes those
        given_back = b"" if reason == UNSENT else back
        unread = received(self.source)
        if self.mode != CHUNKS:  # there only the last bytes are kept
            require(
                passed + given_back + unread == sent, "what came is not what was forwarded and given back"
            )
        whole = chunks_of(to_client)
        forwarded = sent[: len(sent) - len(unread) - len(given_back)]
        if self.mode in (CHUNKS, EVENTS):
            require(to_client == forwarded, "the client was not sent what was forwarded")
        if self.mode != CHUNKS:
            came = chunks_of(forwarded)
            if came is None or whole is None:
                raise AssertionError("an irregular chunk was forwarded")
            require(len(whole) <= len(came), "the client was sent more chunks than came")
            require(all(one.endswith(b"\n\n") for one in whole), "half an event was forwarded")
            if b"token_ids" not in forwarded and b"usage" not in forwarded:
                require(whole == came, "an event without ids and usage was changed")


def run(library: str, cases: int, first: int) -> None:
    spec = importlib.util.spec_from_file_location("_fast_path", library)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{library} is no extension module")
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    path, ends = native.FastPath(), Counter[str]()
    spare: list[Sockets] = []
    for seed in range(first, first + cases):
        try:
            ends[Case(path, spare, seed).run()] += 1
        except AssertionError as error:
            raise SystemExit(f"case {seed} (--cases 1 --seed {seed}): {error}") from error
        if seed % 1000 == 0:
            path = native.FastPath()  # the one before is freed with its forwardings
    print(f"{cases} cases through the fast path with sanitizers: {dict(sorted(ends.items()))}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.library:
        run(given.library, given.cases, given.seed)
        return
    again = [__file__, "--cases", str(given.cases), "--seed", str(given.seed)]
    name = f"_fast_path{sysconfig.get_config_var('EXT_SUFFIX')}"
    sys.exit(sanitized("lb/proxy/_fast_path.c", name, again))


def sanitized(source: str, name: str, command: list[str]) -> int:
    """Run a script with `--library` and a library of this name, compiled with sanitizers. Returns its exit code."""
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/{name}"
        flags = [*SANITIZE, "-shared", "-fPIC", "-pthread", f"-I{sysconfig.get_path('include')}"]
        subprocess.run([*compiler, *flags, str(ROOT / source), "-o", library], check=True)
        found = [subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
                 for name in ("libasan.so", "libubsan.so")]  # fmt: skip
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        }
        again = [sys.executable, *command, "--library", library]
        return subprocess.run(again, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
