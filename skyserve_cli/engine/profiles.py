"""What an engine on a given GPU costs in time and memory, and where each number comes from.

One iteration of a chunked-prefill continuous batch takes

    t = t0 + a * prefill_tokens + b * sequences + c * context_tokens

`t0` is one read of the weights, `a` the compute of one prompt token, `b` the sampling and kernel work of
one sequence, `c` the read of one context token's keys and values. Before its first iteration a request
spends `base` in front of the engine (HTTP, tokenization, scheduling), so without a queue

    TTFT = base + sum of t over the iterations until the prompt is done.

Every parameter is marked whether it was measured (on that GPU, by the named source), computed (from bandwidth
and sizes) or assumed. Trust them in that order: `serve engine --list-profiles` prints them.

Known bias: `t0` is also paid by iterations that only prefill, where a GPU is bound by compute and hides it.
A lone 512-token prompt on `l4-8b` takes 369 ms here; the measurement behind `a` says 300 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum


class ProfileOrigin(str, Enum):
    """How far a number can be trusted."""

    MEASURED = "measured"
    COMPUTED = "computed"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number with its unit, its origin and the source a reader can check."""

    value: float
    unit: str
    origin: ProfileOrigin
    source: str


def measured(value: float, unit: str, source: str) -> Parameter:
    return Parameter(value, unit, ProfileOrigin.MEASURED, source)


def computed(value: float, unit: str, source: str) -> Parameter:
    return Parameter(value, unit, ProfileOrigin.COMPUTED, source)


def assumed(value: float, unit: str, source: str) -> Parameter:
    return Parameter(value, unit, ProfileOrigin.ASSUMED, source)


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one GPU configuration. The letters in the comments are those of the formula above."""

    name: str
    title: str
    model: str  # the name clients request unless the operator chooses another
    base_ttft: Parameter  # base, ms
    prefill: Parameter  # a, ms per prompt token
    weights: Parameter  # t0, ms per iteration
    per_sequence: Parameter  # b, ms per sequence in the batch
    per_context: Parameter  # c, ms per 1,000 context tokens in the batch
    kv_capacity: Parameter  # tokens whose keys and values fit in memory
    max_num_seqs: Parameter  # sequences in one batch
    max_batched_tokens: Parameter  # tokens in one iteration: the chunk of chunked prefill
    max_model_len: Parameter  # prompt + output tokens of one request
    cold_start: Parameter  # s from process start to first response, shortest
    cold_start_slow: Parameter  # s, longest

    def iteration_s(self, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """Return seconds one iteration takes: the formula at the top of this file."""
        ms = (
            self.weights.value
            + self.prefill.value * prefill_tokens
            + self.per_sequence.value * sequences
            + self.per_context.value * context_tokens / 1000
        )
        return ms / 1000

    @property
    def base_s(self) -> float:
        """Seconds between a request's arrival and the moment the scheduler can see it."""
        return self.base_ttft.value / 1000

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield every parameter with its name, in the order above."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Parameter):
                yield field.name, value


_ENGINE_DEFAULT_CHUNK = assumed(2048, "tokens", "vLLM's default max_num_batched_tokens for online serving")
_HEADROOM = "operator's choice: several such requests fit in the KV cache at once"
_ENGINE_DEFAULT_SEQS = assumed(256, "sequences", "engine default (vLLM max_num_seqs)")

L4_8B = Profile(
    name="l4-8b",
    title="1 x L4 24 GB, Llama-3.1-8B, 16 bit",
    model="llama-3.1-8b",
    base_ttft=assumed(20, "ms", "engine intercepts of 2-8 ms in vidur's profiles, plus HTTP"),
    prefill=measured(0.55, "ms/token", "SkyWalker (2025) section 2: 512 prompt tokens in 300 ms, less base"),
    weights=computed(67, "ms", "16 GB of weights / (300 GB/s x 0.8)"),
    per_sequence=assumed(0.25, "ms/sequence", "between vidur's A100 slope and the H100 slope below"),
    per_context=computed(0.58, "ms/1k tokens", "128 KiB per token / (300 GB/s x 0.75)"),
    kv_capacity=computed(33_000, "tokens", "(24 GB x 0.9 - 16 GiB of weights) / 128 KiB per token"),
    max_num_seqs=assumed(48, "sequences", "SkyWalker reports 20-50 outstanding requests on an L4"),
    max_batched_tokens=_ENGINE_DEFAULT_CHUNK,
    max_model_len=assumed(16_384, "tokens", _HEADROOM),
    cold_start=assumed(60, "s", 'PreServe: "tens to hundreds of seconds"'),
    cold_start_slow=assumed(180, "s", 'PreServe: "tens to hundreds of seconds"'),
)

A100_7B = Profile(
    name="a100-7b",
    title="1 x A100 80 GB, 7B with grouped-query attention (Mistral, Llama), 16 bit",
    model="mistral-7b",
    base_ttft=measured(150.7, "ms", "GORGO's fit, with HTTP and scheduler (the engine alone: about 10)"),
    prefill=measured(0.094, "ms/token", "GORGO: 0.0938, R2 .986, n = 87; vidur's linear layers 0.064-0.066"),
    weights=computed(12, "ms", "vidur measures 9.3-9.7 for the linear layers; attention and launches added"),
    per_sequence=assumed(0.05, "ms/sequence", "vidur: 9.3 to 12.2 ms from 1 to 128 sequences, and sampling"),
    per_context=computed(0.086, "ms/1k tokens", "128 KiB per token / (2039 GB/s x 0.75)"),
    kv_capacity=computed(435_000, "tokens", "(80 GB x 0.9 - 15 GB of weights) / 128 KiB per token"),
    max_num_seqs=_ENGINE_DEFAULT_SEQS,
    max_batched_tokens=_ENGINE_DEFAULT_CHUNK,
    max_model_len=assumed(49_152, "tokens", _HEADROOM),
    cold_start=assumed(60, "s", 'PreServe: "tens to hundreds of seconds"'),
    cold_start_slow=assumed(120, "s", 'PreServe: "tens to hundreds of seconds"'),
)

H100_70B = Profile(
    name="h100-70b",
    title="4 x H100 80 GB (tensor parallel), Llama-70B, 16 bit",
    model="llama-3.1-70b",
    base_ttft=assumed(40, "ms", "engine intercepts of 2-8 ms in vidur's profiles, four workers, plus HTTP"),
    prefill=measured(
        0.118, "ms/token", "fit of splitwise-sim's performance table, TP4 (TP2 0.164, TP8 0.106)"
    ),
    weights=measured(29.3, "ms", "splitwise-sim's performance table, TP4, batch 1 (TP2 37.2)"),
    per_sequence=measured(0.35, "ms/sequence", "splitwise-sim's performance table, TP4: slope .352"),
    per_context=computed(0.033, "ms/1k tokens", "320 KiB per token / (4 x 3350 GB/s x 0.75)"),
    kv_capacity=computed(450_000, "tokens", "(4 x 80 GB x 0.9 - 141 GB of weights) / 320 KiB per token"),
    max_num_seqs=_ENGINE_DEFAULT_SEQS,
    max_batched_tokens=_ENGINE_DEFAULT_CHUNK,
    max_model_len=assumed(32_768, "tokens", _HEADROOM),
    cold_start=assumed(180, "s", 'PreServe: "several minutes"'),
    cold_start_slow=assumed(600, "s", 'PreServe: "several minutes"'),
)

PROFILES = {profile.name: profile for profile in (L4_8B, A100_7B, H100_70B)}


class UnknownProfile(ValueError):
    """There is no profile of that name: the message lists those there are."""


def profile_named(name: str) -> Profile:
    """Return the profile of that name. Raises UnknownProfile."""
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownProfile(f"no profile {name!r}: choose one of {', '.join(PROFILES)}") from None


def describe() -> str:
    """Return all profiles as a table for people: value, unit, origin and source of every parameter."""
    blocks = []
    for profile in PROFILES.values():
        rows = [
            f"  {name:<19} {parameter.value:>9g} {parameter.unit:<13} {parameter.origin.value:<9} {parameter.source}"
            for name, parameter in profile.parameters()
        ]
        blocks.append("\n".join([f"{profile.name}: {profile.title} (model {profile.model!r})", *rows]))
    return "\n\n".join(blocks)
