"""Prompts spelled with letters, and a closed loop of requests over targets, for tests of prefix policies."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping

from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView

LETTER_BYTES = 1024


def spell(word: str) -> bytes:
    """A KiB of text per letter: words with a common beginning have it in common, and nothing else."""
    return b"".join(hashlib.shake_256(letter.encode()).digest(LETTER_BYTES) for letter in word)


def ask(word: str, scope: str = "") -> RequestView:
    return RequestView(word, "POST", "/v1/chat/completions", prompt=spell(word), scope=scope)


def views(loads: Mapping[str, int]) -> list[TargetView]:
    return [TargetView(name, load) for name, load in loads.items()]


def chosen(policy: RoutingPolicy, request: RequestView, loads: Mapping[str, int]) -> Choice:
    """The choice, after a look at how it explains itself."""
    choice = policy.choose(request, views(loads), 0.0)
    assert choice is not None
    assert [row[0] for row in choice.scored] == list(loads)
    assert all(len(row) == 2 + len(choice.terms) for row in choice.scored)
    costs = {str(row[0]): float(row[1]) for row in choice.scored}
    assert costs[choice.target_id] == min(costs.values())
    matched = {str(row[0]): row[2 + choice.terms.index("matched_bytes")] for row in choice.scored}
    assert choice.matched_bytes == matched[choice.target_id]
    return choice


def closed_loop(
    policy: RoutingPolicy,
    prompt: Callable[[random.Random], bytes],
    concurrency: int = 64,
    requests: int = 2000,
    targets: int = 8,
) -> tuple[list[str], int]:
    """`concurrency` requests are always under way and end in random order: who got each, and the highest load."""
    rng = random.Random(1)
    loads = {f"t{index}": 0 for index in range(targets)}
    running: list[str] = []
    got: list[str] = []
    highest = 0
    for index in range(requests):
        if len(running) == concurrency:
            loads[running.pop(rng.randrange(concurrency))] -= 1
        request = RequestView(str(index), "POST", "/v1/completions", prompt=prompt(rng))
        target = chosen(policy, request, loads).target_id
        policy.record(request, target, 0.0)
        loads[target] += 1
        running.append(target)
        got.append(target)
        highest = max(highest, loads[target])
    return got, highest
