"""The cells: each is one kind of traffic at one load, with its goal."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks.router.bodies import plain_body, prefix_bodies
from benchmarks.router.systems import ORIGIN, Group

TARGETS = 4
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
    """`connections` at a time, or that many streams of `chunks_s` each. `rate_s` requests per second by a schedule, or that
    `share_of_maximum` of what our agent reaches in the cell `beside`. `late_s` streams per second are opened beside the
    running ones. At the end of the window streams have had `reached` tokens on average; 0: as many as come in it. Bodies of
    `body_bytes`; in the group PREFIX `questions` for each of `groups`. `traced`: each request has a traceparent of its own.

    `goal` is the highest ratio to the best Rust router that is accepted, `limit` the highest value. `beside` is the cell
    with which the same system is compared.
    """

    name: str
    title: str
    unit: str  # what the cost is of
    mode: str = "unary"
    group: Group = Group.PLAIN
    measure: Measure = Measure.CPU
    connections: int = 32
    rate_s: float = 0.0
    share_of_maximum: float = 0.0
    late_s: float = 0.0
    chunks_s: float = 1000 / _CHUNK_MS
    body_bytes: int = 1024
    groups: int = 50
    questions: int = 20
    traced: bool = False
    reached: int = 0
    goal: float | None = None
    limit: float | None = None
    beside: str = ""

    @property
    def has_goal(self) -> bool:
        return self.goal is not None or self.limit is not None

    @property
    def is_paced(self) -> bool:
        """Whether requests come by a schedule, so that their latency says something of the proxy."""
        return bool(self.rate_s or self.late_s or self.share_of_maximum)

    def load_arguments(self, folder: Path, warm_s: float, window_s: float) -> list[str]:
        """The arguments of the load generator. Writes the bodies into `folder`."""
        ramp_s = 0.0 if self.mode == "unary" else max(0.5, self.connections * _RAMP_S_PER_STREAM)
        if self.reached:
            warm_s = self.reached / self.chunks_s - window_s - ramp_s / 2
        bodies = self._written(folder, self.name, self._tokens(ramp_s + warm_s + window_s))
        given = ["-f", str(bodies), "-c", str(self.connections), "-w", str(warm_s), "-d", str(window_s)]
        if self.mode != "unary":
            given += ["-R", str(ramp_s)]
        if self.rate_s:
            given += ["-r", str(self.rate_s)]
        if self.late_s:
            late = self._written(folder, f"{self.name}-late", _LATE_TOKENS)
            given += ["-F", str(late), "-l", str(self.late_s)]
        if self.group is Group.PREFIX:
            given += ["-g", str(self.groups)]
        if self.group is Group.EXTRAS:
            given += ["-H", f"Origin: {ORIGIN}"]
        if self.traced:
            given += ["-T"]
        return given

    def _tokens(self, span_s: float) -> int:
        """The length of a response. Streams outlast the window and end soon after it, so that all of their bytes are
        compared."""
        return {"unary": 160, "streams": int((span_s + 0.3) * self.chunks_s), "idle": 1000}[self.mode]

    def _written(self, folder: Path, name: str, tokens: int) -> Path:
        """Long bodies take seconds to make, so each file is made once for all systems."""
        file = folder / f"{name}-{tokens}.bodies"
        if not file.exists():
            file.write_text("".join(line + "\n" for line in self._bodies(tokens)))
        return file

    def _bodies(self, tokens: int) -> list[str]:
        if self.group is Group.PREFIX:
            return prefix_bodies(self.name, self.body_bytes, tokens, self.groups, self.questions)
        pace_ms = _SILENCE_MS if self.mode == "idle" else round(1000 / self.chunks_s)
        return [plain_body(self.name, self.body_bytes, tokens, self.mode != "unary", pace_ms)]


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


def _prefix(
    name: str, size: str, body_bytes: int, groups: int, questions: int, connections: int, goal: float | None
) -> Cell:
    title = f"prefix-aware, {size}, {groups} groups, {TARGETS} targets"
    return Cell(
        name,
        title,
        "request",
        group=Group.PREFIX,
        connections=connections,
        body_bytes=body_bytes,
        groups=groups,
        questions=questions,
        goal=goal,
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
    Cell(
        "running",
        "memory of 1,000 running streams of 2,000 tokens",
        "1,000 streams",
        mode="streams",
        measure=Measure.MEMORY,
        connections=1000,
        chunks_s=20,
        reached=2000,
        limit=40.0,
    ),
    Cell("unary", "unary, 1 KB, saturated", "request", goal=0.6),
    Cell("unary16", "unary, 16 KB, saturated", "request", body_bytes=16 * 1024),
    Cell("body1m", "unary, 1 MiB, saturated", "request", body_bytes=1 << 20, connections=8),
    Cell("traced", "unary, 1 KB, saturated, a traceparent for each", "request", traced=True, beside="unary"),
    Cell("light", "unary, 1 KB, 500 requests/s", "request", rate_s=500, connections=64, goal=1.0),
    Cell(
        "half",
        "unary, 1 KB, at half of our own maximum",
        "request",
        share_of_maximum=0.5,
        connections=256,
        beside="unary",
    ),
    _streams("streams100", 100, None),
    _streams("streams250", 250, 0.75),
    _streams("streams500", 500, 0.75),
    Cell(
        "overrun",
        "250 streams, 100 chunks/s each",
        "chunk",
        mode="streams",
        connections=250,
        chunks_s=100,
    ),
    _latecomers("latecomers", 20),
    _latecomers("latecomers50", 50),
    _prefix("prefix", "4 KB", 4096, groups=50, questions=20, connections=32, goal=0.5),
    _prefix("prefix64", "64 KB", 64 * 1024, groups=50, questions=5, connections=16, goal=None),
    _prefix("prefix400", "400 KB", 400_000, groups=10, questions=8, connections=8, goal=None),
    Cell(
        "extras",
        "unary, 1 KB, saturated, with traceparent, access log, CORS, and API keys where ours",
        "request",
        group=Group.EXTRAS,
        traced=True,
        beside="unary",
    ),
)
BY_NAME = {cell.name: cell for cell in CELLS}
# Measured when asked for.
EXTRA = (
    "running",
    "unary16",
    "body1m",
    "traced",
    "streams100",
    "overrun",
    "latecomers50",
    "prefix64",
    "prefix400",
)
# The cells of the cost per chunk.
STREAM_CELLS = frozenset(
    cell.name for cell in CELLS if cell.mode == "streams" and cell.measure is Measure.CPU
)
PREFIX_CELLS = frozenset(cell.name for cell in CELLS if cell.group is Group.PREFIX)
