"""What is measured: one cell is one kind of traffic at one load. The bodies are made here, from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router.systems import Group

TARGETS = 4
PREFIX_GROUPS = 50
_QUESTIONS_PER_GROUP = 20
_NONCE = "nonce-0000000000000000"
_CHUNK_MS = 20
_SILENCE_MS = 600_000


@dataclass(frozen=True, slots=True)
class Cell:
    """`connections` at a time, or `streams`; `rate_s` paces requests by a schedule. Bodies of `body_bytes`."""

    name: str
    title: str
    unit: str  # what the cost is of
    mode: str = "unary"
    group: Group = Group.PLAIN
    connections: int = 32
    rate_s: float = 0.0
    body_bytes: int = 1024
    goal: float | None = None  # our CPU time over that of the best Rust router

    def load_arguments(self, folder: Path, warm_s: float, window_s: float) -> list[str]:
        """Writes the bodies, too."""
        ramp_s = 0.0 if self.mode == "unary" else max(0.5, self.connections / 400)
        events = self._events(ramp_s + warm_s + window_s)
        bodies = folder / f"{self.name}.bodies"
        bodies.write_text("".join(line + "\n" for line in self._bodies(events)))
        given = ["-f", str(bodies), "-c", str(self.connections), "-w", str(warm_s), "-d", str(window_s)]
        if self.mode != "unary":
            given += ["-R", str(ramp_s), "-n", str(events)]
        if self.rate_s:
            given += ["-r", str(self.rate_s)]
        if self.group is Group.PREFIX:
            given += ["-g", str(PREFIX_GROUPS)]
        return given

    def _events(self, span_s: float) -> int:
        """Streams outlast the window, and end soon after: then they are checked to the last byte."""
        return {"unary": 0, "streams": int((span_s + 0.3) * 1000 / _CHUNK_MS), "idle": 1000}[self.mode]

    def _bodies(self, events: int) -> list[str]:
        rng = random.Random(self.name)
        if self.group is not Group.PREFIX:
            messages = [{"role": "user", "content": _pad(rng, 40) + f" {self._pace()} {_NONCE}"}]
            spare = self.body_bytes - len(_body(messages, events, self.mode))
            messages[0]["content"] = _pad(rng, max(0, spare)) + messages[0]["content"]
            return [_body(messages, events, self.mode)]
        # Line i belongs to group i modulo PREFIX_GROUPS: three quarters of the prompt are the group's.
        systems = [_pad(rng, self.body_bytes * 3 // 4) for _ in range(PREFIX_GROUPS)]
        bodies = []
        for index in range(PREFIX_GROUPS * _QUESTIONS_PER_GROUP):
            system = {"role": "system", "content": systems[index % PREFIX_GROUPS]}
            question = _pad(rng, self.body_bytes // 4 - 180)
            bodies.append(
                _body([system, {"role": "user", "content": f"{question} {_NONCE}"}], events, self.mode)
            )
        return bodies

    def _pace(self) -> str:
        return f"every-{_SILENCE_MS if self.mode == 'idle' else _CHUNK_MS}ms"


def _body(messages: list[dict[str, str]], events: int, mode: str) -> str:
    wanted: dict[str, object] = {"messages": messages, "model": "mock", "temperature": 0.7}
    wanted |= {"max_tokens": 160} if mode == "unary" else {"max_tokens": events, "stream": True}
    return json.dumps(wanted, separators=(",", ":"))


def _pad(rng: random.Random, size: int) -> str:
    """Text of that many bytes: made-up words, so that prompts share no more than they are meant to."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append("".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


CELLS = (
    Cell("idle", "memory of 1,000 idle streams", "1,000 streams", mode="idle", connections=1000),
    Cell("unary", "unary, 1 KB, saturated", "request", goal=0.6),
    Cell("paced", "unary, 1 KB, 500 requests/s", "request", rate_s=500, connections=64),
    Cell("unary16", "unary, 16 KB, saturated", "request", body_bytes=16 * 1024),
    Cell("streams", "250 streams, 50 chunks/s each", "chunk", mode="streams", connections=250, goal=0.9),
    Cell("streams100", "100 streams, 50 chunks/s each", "chunk", mode="streams", connections=100),
    Cell("streams500", "500 streams, 50 chunks/s each", "chunk", mode="streams", connections=500),
    Cell(
        "prefix",
        f"prefix-aware, 4 KB, {PREFIX_GROUPS} groups, {TARGETS} targets",
        "request",
        group=Group.PREFIX,
        body_bytes=4096,
        goal=0.5,
    ),
)
EXTRA = ("streams100", "streams500")  # measured when asked for
