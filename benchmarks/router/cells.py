"""The cells: each is one kind of traffic at one load, with its goal. The bodies are made here, from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.router.systems import Group

TARGETS = 4
PREFIX_GROUPS = 50
_QUESTIONS_PER_GROUP = 20
_NONCE = "nonce-0000000000000000"
_CHUNK_MS = 20
_SILENCE_MS = 600_000
_LATE_TOKENS = 10
_RAMP_S_PER_STREAM = 1 / 400


class Measure(str, Enum):
    """The compared quantity of a cell, and its unit."""

    CPU = "CPU µs"  # of the proxy, per unit of the cell
    MEMORY = "MiB"  # that the streams add to the proxy
    FIRST_CHUNK = "first chunk p99 ms"  # of the late streams


@dataclass(frozen=True, slots=True)
class Cell:
    """`connections` at a time, or that many streams of `chunks_s` each. `rate_s` requests per second by a schedule;
    `late_s` streams per second that are opened beside the running ones. Bodies of `body_bytes`.

    `goal` is the highest ratio to the best Rust router that is accepted, `limit` the highest value.
    """

    name: str
    title: str
    unit: str  # what the cost is of
    mode: str = "unary"
    group: Group = Group.PLAIN
    measure: Measure = Measure.CPU
    connections: int = 32
    rate_s: float = 0.0
    late_s: float = 0.0
    chunks_s: float = 1000 / _CHUNK_MS
    body_bytes: int = 1024
    goal: float | None = None
    limit: float | None = None

    @property
    def has_goal(self) -> bool:
        return self.goal is not None or self.limit is not None

    def load_arguments(self, folder: Path, warm_s: float, window_s: float) -> list[str]:
        """The arguments of the load generator. Writes the bodies into `folder`."""
        ramp_s = 0.0 if self.mode == "unary" else max(0.5, self.connections * _RAMP_S_PER_STREAM)
        bodies = self._written(folder / f"{self.name}.bodies", self._tokens(ramp_s + warm_s + window_s))
        given = ["-f", str(bodies), "-c", str(self.connections), "-w", str(warm_s), "-d", str(window_s)]
        if self.mode != "unary":
            given += ["-R", str(ramp_s)]
        if self.rate_s:
            given += ["-r", str(self.rate_s)]
        if self.late_s:
            late = self._written(folder / f"{self.name}-late.bodies", _LATE_TOKENS)
            given += ["-F", str(late), "-l", str(self.late_s)]
        if self.group is Group.PREFIX:
            given += ["-g", str(PREFIX_GROUPS)]
        return given

    def _tokens(self, span_s: float) -> int:
        """The length of a response. Streams outlast the window and end soon after it, so that all of their bytes are
        compared."""
        return {"unary": 160, "streams": int((span_s + 0.3) * self.chunks_s), "idle": 1000}[self.mode]

    def _written(self, file: Path, tokens: int) -> Path:
        file.write_text("".join(line + "\n" for line in self._bodies(tokens)))
        return file

    def _bodies(self, tokens: int) -> list[str]:
        rng = random.Random(self.name)
        if self.group is not Group.PREFIX:
            messages = [{"role": "user", "content": _pad(rng, 40) + f" {self._pace()} {_NONCE}"}]
            spare = self.body_bytes - len(_body(messages, tokens, self.mode))
            messages[0]["content"] = _pad(rng, max(0, spare)) + messages[0]["content"]
            return [_body(messages, tokens, self.mode)]
        # Line i belongs to group i modulo PREFIX_GROUPS: three quarters of the prompt are the group's.
        systems = [_pad(rng, self.body_bytes * 3 // 4) for _ in range(PREFIX_GROUPS)]
        bodies = []
        for index in range(PREFIX_GROUPS * _QUESTIONS_PER_GROUP):
            system = {"role": "system", "content": systems[index % PREFIX_GROUPS]}
            question = _pad(rng, self.body_bytes // 4 - 180)
            bodies.append(
                _body([system, {"role": "user", "content": f"{question} {_NONCE}"}], tokens, self.mode)
            )
        return bodies

    def _pace(self) -> str:
        return f"every-{_SILENCE_MS if self.mode == 'idle' else round(1000 / self.chunks_s)}ms"


def _body(messages: list[dict[str, str]], tokens: int, mode: str) -> str:
    wanted: dict[str, object] = {
        "messages": messages,
        "model": "mock",
        "temperature": 0.7,
        "max_tokens": tokens,
    }
    if mode != "unary":
        wanted |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(wanted, separators=(",", ":"))


def _pad(rng: random.Random, size: int) -> str:
    """Text of that many bytes: made-up words, so that prompts share no more than they are meant to."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append("".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def _streams(name: str, count: int, goal: float | None) -> Cell:
    title = f"{count} streams, {1000 // _CHUNK_MS} chunks/s each"
    return Cell(name, title, "chunk", mode="streams", connections=count, goal=goal)


def _latecomers(name: str, chunks_s: float) -> Cell:
    title = f"first chunk of new streams beside 1,000 of {chunks_s:g} chunks/s"
    return Cell(
        name,
        title,
        "stream",
        mode="streams",
        measure=Measure.FIRST_CHUNK,
        connections=1000,
        late_s=100,
        chunks_s=chunks_s,
        goal=1.0,
    )


CELLS = (
    Cell(
        "idle",
        "memory of 1,000 idle streams",
        "1,000 streams",
        mode="idle",
        measure=Measure.MEMORY,
        connections=1000,
        limit=10.0,
    ),
    Cell("unary", "unary, 1 KB, saturated", "request", goal=0.6),
    Cell("unary16", "unary, 16 KB, saturated", "request", body_bytes=16 * 1024),
    Cell("light", "unary, 1 KB, 500 requests/s", "request", rate_s=500, connections=64, goal=1.0),
    _streams("streams100", 100, None),
    _streams("streams250", 250, 0.75),
    _streams("streams500", 500, 0.75),
    _latecomers("latecomers", 20),
    _latecomers("latecomers50", 50),
    Cell(
        "prefix",
        f"prefix-aware, 4 KB, {PREFIX_GROUPS} groups, {TARGETS} targets",
        "request",
        group=Group.PREFIX,
        body_bytes=4096,
        goal=0.5,
    ),
)
EXTRA = ("unary16", "streams100", "latecomers50")  # measured when asked for
# The cells of the cost per chunk.
STREAM_CELLS = frozenset(
    cell.name for cell in CELLS if cell.mode == "streams" and cell.measure is Measure.CPU
)
