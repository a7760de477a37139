"""What a run of traffic was worth, in the numbers that papers and operators compare.

The first tenth of all calls, by arrival, fills the caches and is not counted. Throughput is taken between the
instants at which a tenth and nine tenths of all calls had ended, so that neither the start nor the last stragglers
of a closed loop dilute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.traffic.workloads import Call
from skyserve_cli.engine.kv import BLOCK_TOKENS, BlockKey, block_keys

_EDGE = 0.1  # of a run, at its start (and for throughput at its end)


class Served(NamedTuple):
    """One call that got its whole response. Instants are the balancer's, in seconds from the start; between
    `arrived_at` and `pushed_at` it was held. `matched_bytes` is what the policy thought to be cached."""

    call_id: str
    engine: int
    arrived_at: float
    pushed_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    response_tokens: int
    prompt_bytes: int
    matched_bytes: int
    tenant: str = ""
    ttft_s: float = 0.0

    @property
    def work(self) -> int:
        """Tokens that an engine had to compute."""
        return self.prompt_tokens - self.cached_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Metrics:
    """Seconds, tokens per second, and rates between 0 and 1.

    `hit_rate` is the part of all prompt tokens that engines found in their caches, `foreseen` the part of all prompt
    bytes that the policy counted on. `ttft` and `e2e` run from arrival at the balancer, `held` is the part of it spent
    in its queue. `normalized_s` is end-to-end time per output token (PreServe). `imbalance` is the work of the busiest
    engine over the mean.
    """

    calls: int
    refused: int
    hit_rate: float
    foreseen: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    normalized_p99_s: float
    held_p50_s: float
    held_p90_s: float
    tokens_per_s: float
    calls_per_s: float
    imbalance: float
    preemptions: int


def measure(served: Iterable[Served], engines: int, refused: int = 0, preemptions: int = 0) -> Metrics:
    """The numbers of a run. Raises ValueError if too little was served to measure anything."""
    by_arrival = sorted(served, key=lambda one: one.arrived_at)
    counted = by_arrival[int(len(by_arrival) * _EDGE) :]
    by_end = sorted(by_arrival, key=lambda one: one.ended_at)
    middle = by_end[int(len(by_end) * _EDGE) : int(len(by_end) * (1 - _EDGE))]
    if len(middle) < 2:
        raise ValueError(f"{len(by_end)} calls are too few to measure")
    span_s = middle[-1].ended_at - middle[0].ended_at
    ttft = sorted(one.first_at - one.arrived_at for one in counted)
    e2e = sorted(one.ended_at - one.arrived_at for one in counted)
    held = sorted(one.pushed_at - one.arrived_at for one in counted)
    normalized = sorted((one.ended_at - one.arrived_at) / one.response_tokens for one in counted)
    work = [0] * engines
    for one in counted:
        work[one.engine] += one.work
    return Metrics(
        calls=len(by_arrival),
        refused=refused,
        hit_rate=sum(one.cached_tokens for one in counted) / sum(one.prompt_tokens for one in counted),
        foreseen=sum(one.matched_bytes for one in counted) / sum(one.prompt_bytes for one in counted),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p90_s=quantile(ttft, 0.9),
        ttft_p99_s=quantile(ttft, 0.99),
        e2e_p50_s=quantile(e2e, 0.5),
        e2e_p90_s=quantile(e2e, 0.9),
        normalized_p99_s=quantile(normalized, 0.99),
        held_p50_s=quantile(held, 0.5),
        held_p90_s=quantile(held, 0.9),
        # The first of them ended as the clock started.
        tokens_per_s=sum(one.response_tokens for one in middle[1:]) / span_s,
        calls_per_s=(len(middle) - 1) / span_s,
        imbalance=max(work) * engines / sum(work),
        preemptions=preemptions,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two neighbours, as far as `share` says. `ordered` is not empty and rises."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def ideal_hit_rate(calls: Iterable[Call]) -> float:
    """The part of all prompt tokens that one engine with endless memory would find, serving call after call.

    As the engine does it: whole blocks, behind equal prefixes, of prompts and responses; and never the last token of
    a prompt, which must be computed to say what follows.
    """
    blocks = _Blocks()
    found = asked = 0
    for call in calls:
        asked += len(call.prompt.tokens)
        found += min(blocks.add(call), (len(call.prompt.tokens) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return found / asked


def working_set_tokens(calls: Iterable[Call]) -> int:
    """Tokens of all prompts and responses, in whole blocks, those behind equal prefixes once."""
    blocks = _Blocks()
    for call in calls:
        blocks.add(call)
    return len(blocks) * BLOCK_TOKENS


class _Blocks:
    """What an engine with endless memory has cached."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, BlockKey], int] = {}

    def __len__(self) -> int:
        return len(self._node_of)

    def add(self, call: Call) -> int:
        """Add its prompt and response; return how many of their first blocks were there."""
        parent, found, known = 0, 0, True
        for key in block_keys(call.prompt.tokens + call.answer):
            place = (parent, key)
            known = known and place in self._node_of
            found += known
            parent = self._node_of.setdefault(place, len(self._node_of) + 1)
        return found
