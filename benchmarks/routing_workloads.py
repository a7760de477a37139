"""The workloads of the benchmarks of routing, each with the engines and the load that suit it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.traffic.chat import Chat, Habits
from benchmarks.traffic.documents import Documents
from benchmarks.traffic.mooncake import Mooncake, Recorded, load_mooncake
from benchmarks.traffic.trees import Clients, Problem, TreesOfThought, load_gsm8k, made_up
from benchmarks.traffic.workloads import Spread, Workload

DATA = Path(os.environ.get("SKYSERVE_TRACES", ".")) / "workload"
GSM8K = "gsm8k_train.jsonl.gz"
MOONCAKE = "mooncake_conversation_trace.jsonl.gz"
MUSING_TOKENS = Spread(
    60, 200, 1, 256
)  # to thoughts of about 60 tokens, up to the 256 of SGLang's own example

TOOL_CALLS = Habits(  # all assumed
    tenants=8,
    system_tokens=2000,
    turns_mean=12.0,
    message_tokens=Spread(250, 1500, 20, 4000),
    response_tokens=Spread(80, 250, 2, 1000),
    think_s=Spread(2, 10, 0.2, 60),
    longest_tokens=16_000,
)


@lru_cache(maxsize=1)
def problems(data: Path) -> list[Problem]:
    return load_gsm8k(data / GSM8K, 2000) if (data / GSM8K).exists() else made_up(1, 2000)


@lru_cache(maxsize=1)
def recorded(data: Path) -> list[Recorded]:
    return load_mooncake(data / MOONCAKE)


class Load(NamedTuple):
    """How much of a workload: `per_engine` clients (of trees), or the rate in conversations per second (of chat) or
    in times the recorded one (of Mooncake), per engine; `length` trees per client, or seconds."""

    per_engine: float
    length: float


def trees(seed: int, data: Path, engines: int, load: Load) -> Workload:
    clients = [Clients(round(load.per_engine * engines), 2, round(load.length))]
    return TreesOfThought(problems(data), clients, seed, musing_tokens=MUSING_TOKENS)


def mixed(seed: int, data: Path, engines: int, load: Load) -> Workload:
    """A tenth as many clients think in 4 branches: well over a third of all requests are theirs, up to 64 at once."""
    number = load.per_engine * engines
    clients = [
        Clients(round(number), 2, round(load.length)),
        Clients(max(1, round(number / 10)), 4, round(load.length)),
    ]
    return TreesOfThought(problems(data), clients, seed, musing_tokens=MUSING_TOKENS, name="mixed")


def mooncake(seed: int, data: Path, engines: int, load: Load) -> Workload:
    speed = load.per_engine * engines
    until_s = load.length * speed
    part = [one for one in recorded(data) if one.at_s < until_s]
    return Mooncake(part, seed, speed=speed)


def chat(seed: int, data: Path, engines: int, load: Load) -> Workload:
    """People think four times as fast as in the trace, so that a few minutes show a steady state."""
    return Chat(load.per_engine * engines, load.length, seed, Habits(think_s=Spread(14, 71, 1, 600)))


def agents(seed: int, data: Path, engines: int, load: Load) -> Workload:
    """Programs that call tools: a long common beginning, many short turns, what tools return in each, hardly a pause."""
    return Chat(load.per_engine * engines, load.length, seed, TOOL_CALLS)


def documents(seed: int, data: Path, engines: int, load: Load) -> Workload:
    return Documents(load.per_engine * engines, load.length, seed)


class Usual(NamedTuple):
    """A workload, on the engines that suit it, at about three quarters of what they can take."""

    make: Callable[[int, Path, int, Load], Workload]
    profile: str
    load: Load


WORKLOADS: Mapping[str, Usual] = {
    "trees": Usual(trees, "l4-8b", Load(9, 4)),
    "mixed": Usual(mixed, "l4-8b", Load(7, 3)),
    "mooncake": Usual(mooncake, "a100-7b", Load(1.2, 200)),  # an L4 could not hold its prompts
    "chat": Usual(chat, "l4-8b", Load(0.6, 240)),
    "documents": Usual(documents, "a100-7b", Load(0.55, 200)),
    "agents": Usual(agents, "a100-7b", Load(0.1, 200)),
}
