"""Mooncake's recorded requests (Qin et al., FAST '25), whose prompts are known as ids of blocks of 512 tokens.

Equal ids mean equal blocks behind equal prefixes, so what can be shared is known although no text is. A block becomes
made-up bytes for the balancer and made-up tokens for the engine, `shrink` times shorter than it was: an L4's cache
would hold two of the recorded prompts. The trace's clock moves in steps of three seconds; requests of one step are
spread over it. It names no conversations: the routing key is the third block, which in nearly all of them belongs to
one conversation, while the first is common to all requests (so that a policy which follows the longest prefix, and nothing
else, sends everything to one target).
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import orjson

from benchmarks.traffic.workloads import Arrival, Call, Passage
from skyserve_cli.engine.kv import BLOCK_TOKENS

RECORDED_BLOCK_TOKENS = 512
STEP_S = 3.0
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of the trace. Lengths are in tokens."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load_mooncake(path: Path, limit: int | None = None) -> list[Recorded]:
    """The trace, packed by gzip, in order of time. Raises OSError, ValueError or KeyError for other files."""
    recorded: list[Recorded] = []
    with gzip.open(path, "rb") as lines:
        for line in lines:
            if limit is not None and len(recorded) >= limit:
                break
            entry = orjson.loads(line)
            recorded.append(
                Recorded(
                    at_s=entry["timestamp"] / 1000,
                    input_length=entry["input_length"],
                    output_length=entry["output_length"],
                    hash_ids=tuple(entry["hash_ids"]),
                )
            )
    return sorted(recorded, key=lambda one: one.at_s)


class Mooncake:
    """The trace, `speed` times as fast. `shrink` is 1, 2, 4, 8, 16 or 32; prompts that would still be longer than
    `longest_tokens` are left out, as a service would refuse them. Raises ValueError for another `shrink`."""

    name = "mooncake"

    def __init__(
        self,
        recorded: Sequence[Recorded],
        seed: int,
        *,
        speed: float = 1.0,
        shrink: int = 8,
        longest_tokens: int = 15_000,
    ) -> None:
        if shrink < 1 or RECORDED_BLOCK_TOKENS % (shrink * BLOCK_TOKENS):
            raise ValueError(f"shrink must be a power of two up to 32 (got {shrink})")
        self._recorded = recorded
        self._rng = random.Random(seed)
        self._speed = speed
        self._shrink = shrink
        self._block_tokens = RECORDED_BLOCK_TOKENS // shrink
        self._longest = longest_tokens

    def opening(self) -> Iterator[Arrival]:
        """Steps come in order, and within a step those who were drawn earlier."""
        step: list[tuple[float, int, Recorded]] = []
        for number, one in enumerate(self._recorded):
            if step and one.at_s - step[-1][2].at_s > STEP_S / 2:
                yield from self._arrivals(step)
                step = []
            step.append((one.at_s + self._rng.random() * STEP_S, number, one))
        yield from self._arrivals(step)

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return ()

    def _arrivals(self, step: list[tuple[float, int, Recorded]]) -> Iterator[Arrival]:
        for at_s, number, one in sorted(step):
            tokens = max(1, min(one.input_length, len(one.hash_ids) * RECORDED_BLOCK_TOKENS) // self._shrink)
            if tokens > self._longest:
                continue
            # Negative numbers are the blocks of responses: no prompt holds them.
            answer = (-1 - number,) * max(1, one.output_length // self._shrink)
            call = Call(
                id=str(number),
                prompt=self._prompt(one.hash_ids, tokens),
                answer=answer,
                scope=self.name,
                session=str(one.hash_ids[min(2, len(one.hash_ids) - 1)]),
            )
            yield Arrival(at_s / self._speed, call)

    def _prompt(self, hash_ids: Sequence[int], tokens: int) -> Passage:
        blocks = [_block(block, self._block_tokens) for block in hash_ids[: -(-tokens // self._block_tokens)]]
        text = b"".join(block.text for block in blocks)[: tokens * _BYTES_PER_TOKEN]
        return Passage(text, tuple(token for block in blocks for token in block.tokens)[:tokens])


@lru_cache(maxsize=1 << 16)
def _block(block: int, tokens: int) -> Passage:
    """Bytes that differ from those of every other block at once, and tokens that do so in each engine block."""
    size = tokens * _BYTES_PER_TOKEN
    digest = blake2b(str(block).encode(), digest_size=32).hexdigest().encode()
    first = block * (tokens // BLOCK_TOKENS)
    return Passage(
        (digest * (size // len(digest) + 1))[:size],
        tuple(first + index for index in range(tokens // BLOCK_TOKENS) for _ in range(BLOCK_TOKENS)),
    )
