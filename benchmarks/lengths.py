"""How well response lengths are guessed before they begin, on sets of prompts with their responses.

    python -m benchmarks.lengths FILE... [--each 1500] [--seed 0]

Each FILE (JSON or JSON lines, may be gzipped) is one tenant: objects with `instruction`/`input`/`response`, `question`/`answer`,
or `requests` with a `prompt` and an `Output Length`. Responses come in random order and are guessed before they are learned from;
a token is four bytes unless the file counts it.

Columns: mean absolute error in tokens, share of guesses within 25, 50 and 100 tokens, sum of the guesses over that of the
responses, and the CPU time of a guess, mean and 99th percentile.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.preserve.length_learner import LengthLearner
from policies.routing.base import RequestView
from policies.routing.response_length import Constant, ResponseLength, RunningMedian

Pair = tuple[bytes, int]


def pairs(path: Path) -> Iterator[Pair]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        text = file.read()
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    for row in rows:
        if "requests" in row:
            for one in row["requests"]:
                yield one["prompt"].encode(), int(one["Output Length"])
        elif "question" in row:
            yield row["question"].encode(), len(row["answer"].encode()) // 4
        else:
            yield f"{row['instruction']}\n{row['input']}".encode(), len(row["response"].encode()) // 4


def evaluated(name: str, learner: ResponseLength, asked: list[tuple[RequestView, int]]) -> str:
    errors, guesses, took = [], 0, []
    for request, tokens in asked:
        began = time.thread_time()
        guess = learner.predict(request)
        took.append(time.thread_time() - began)
        errors.append(abs(guess - tokens))
        guesses += guess
        learner.learn(request, tokens)
    total, count = sum(tokens for _, tokens in asked), len(asked)
    within = "/".join(f"{100 * sum(error <= most for error in errors) / count:.0f}" for most in (25, 50, 100))
    took.sort()
    return (
        f"{name:38} {sum(errors) / count:6.1f}  {within:>9}  {guesses / total:5.2f}  "
        f"{1000 * sum(took) / count:6.3f} {1000 * took[int(0.99 * count)]:6.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=1500, help="responses of each tenant")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    drawn: list[tuple[str, Pair]] = []
    for path in given.files:
        found = [pair for pair in pairs(path) if pair[1] > 0]
        rng.shuffle(found)
        drawn += [(path.name, pair) for pair in found[: given.each]]
    rng.shuffle(drawn)

    def asked(*, tenants: bool, prompts: bool) -> list[tuple[RequestView, int]]:
        return [
            (
                RequestView(
                    str(number), "POST", "/v1/chat/completions", len(prompt), prompt if prompts else None,
                    scope=tenant if tenants else "all",
                ),
                tokens,
            )
            for number, (tenant, (prompt, tokens)) in enumerate(drawn)
        ]  # fmt: skip

    print(f"{'':38} {'MAE':>6}  {'25/50/100':>9}  {'sum':>5}  predict mean, p99")
    print(evaluated("constant 200", Constant(), asked(tenants=True, prompts=True)))
    print(evaluated("median of all", RunningMedian(), asked(tenants=False, prompts=True)))
    print(evaluated("median per tenant", RunningMedian(), asked(tenants=True, prompts=True)))
    print(evaluated("learner: tenants, no prompts", LengthLearner(), asked(tenants=True, prompts=False)))
    print(evaluated("learner: prompts, no tenants", LengthLearner(), asked(tenants=False, prompts=True)))
    print(evaluated("learner: tenants and prompts", LengthLearner(), asked(tenants=True, prompts=True)))


if __name__ == "__main__":
    main()
