"""The bodies of requests: chat completions of made-up words, from a seed, one in a line."""

from __future__ import annotations

import json
import random
from functools import cache

_NONCE = "nonce-0000000000000000"  # load.c puts another one into every request
_WORDS = 20_000


def plain_body(seed: str, size: int, tokens: int, stream: bool, pace_ms: int) -> str:
    """Return a body of `size` bytes, whose response has `tokens` tokens, in a stream one in `pace_ms`."""
    rng = random.Random(seed)
    messages = [{"role": "user", "content": pad(rng, 40) + f" every-{pace_ms}ms {_NONCE}"}]
    spare = size - len(_body(messages, tokens, stream))
    messages[0]["content"] = pad(rng, max(0, spare)) + messages[0]["content"]
    return _body(messages, tokens, stream)


def prefix_bodies(seed: str, size: int, tokens: int, groups: int, questions: int) -> list[str]:
    """Return `questions` bodies of about `size` bytes for each group. Line i is of group i modulo `groups`: three quarters of
    its prompt are the group's."""
    rng = random.Random(seed)
    systems = [pad(rng, size * 3 // 4) for _ in range(groups)]
    bodies = []
    for index in range(groups * questions):
        system = {"role": "system", "content": systems[index % groups]}
        question = pad(rng, size // 4 - 180)
        bodies.append(
            _body([system, {"role": "user", "content": f"{question} {_NONCE}"}], tokens, stream=False)
        )
    return bodies


@cache
def _vocabulary() -> list[str]:
    rng = random.Random("vocabulary")
    return ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(_WORDS)]


def pad(rng: random.Random, size: int) -> str:
    """Text of that many bytes: made-up words, of so many that prompts share no more than they are meant to."""
    words = rng.choices(_vocabulary(), k=size // 3 + 1)  # a word and its space have three bytes or more
    return " ".join(words)[:size]


def _body(messages: list[dict[str, str]], tokens: int, stream: bool) -> str:
    wanted: dict[str, object] = {
        "messages": messages,
        "model": "mock",
        "temperature": 0.7,
        "max_tokens": tokens,
    }
    if stream:
        wanted |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(wanted, separators=(",", ":"))
