"""What cache events cost a load balancer: a choice with them and without, and 50,000 block events a second of 100 engines.

    python -m benchmarks.cache_events_cost [--rounds 5] [--blocks 200000]
    PYTHONPATH=FOLDER python -m benchmarks.cache_events_cost     with a copy of the packages in which those of `hatch_build.py` are

Nothing is sent over sockets: batches are encoded beforehand, and each feed is given its own, as the subscriber does. Times are CPU
seconds of this process; of several rounds the least counts, as others use the same cores.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import msgspec

from lb.cache_events.feed import CacheFeed
from policies.routing import cached_tree
from policies.routing.base import RequestView, TargetView
from policies.routing.block_index import BlockIndex
from policies.routing.cache_aware import CacheAware
from policies.routing.cached_tree import EngineCaches
from policies.routing.gorgo import Gorgo

SIZE = 16
BYTES_OF_TOKEN = 4
PER_SECOND = 50_000
ENGINES = 100
PROMPTS = 400
PROMPT_TOKENS = 2048
SHARED_TOKENS = 512
CHOICES = 400


def seconds(act: Callable[[], object], rounds: int) -> float:
    """Return the least CPU time of some rounds."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        act()
        taken.append(time.process_time() - began)
    return min(taken)


def prompts(rng: random.Random) -> list[tuple[bytes, list[int]]]:
    """Prompts that begin as others do, with their tokens."""
    shared = [rng.randbytes(SHARED_TOKENS * BYTES_OF_TOKEN) for _ in range(10)]
    texts = [
        rng.choice(shared) + rng.randbytes((PROMPT_TOKENS - SHARED_TOKENS) * BYTES_OF_TOKEN)
        for _ in range(PROMPTS)
    ]
    return [
        (text, [int.from_bytes(text[at : at + 4], "big") for at in range(0, len(text), 4)]) for text in texts
    ]


def choice_us(
    make: Callable[[], CacheAware | Gorgo], targets: int, events: bool, rounds: int
) -> tuple[float, float]:
    """Return microseconds of CPU for a choice, and for one with all that the policy then records of the request."""
    rng = random.Random(4)
    policy, caches = make(), EngineCaches()
    views = [TargetView(f"t{number}") for number in range(targets)]
    known = prompts(rng)
    if events:
        policy.follow(caches)
        for view in views:
            caches.index.clear(view.id, complete=True)
    for number, (text, tokens) in enumerate(known):
        request, target = (
            RequestView(str(number), "POST", "/", prompt=text, scope="m"),
            views[number % targets],
        )
        policy.record(request, target.id, 0.0)
        policy.ended(request, target.id, 0.0, 100)
        if events:
            cache = caches.index.cache(target.id)
            assert cache is not None
            caches.index.stored(
                cache, None, [hash((number, at)) for at in range(len(tokens) // SIZE)], tokens, SIZE
            )
            caches.link("m", text, tokens)
    requests = [
        RequestView(f"r{number}", "POST", "/", prompt=rng.choice(known)[0] + rng.randbytes(256), scope="m")
        for number in range(CHOICES)
    ]

    def choose() -> None:
        for request in requests:
            policy.choose(request, views, 1.0)

    def serve() -> None:
        for request in requests:
            choice = policy.choose(request, views, 1.0)
            assert choice is not None
            policy.record(request, choice.target_id, 1.0)
            policy.responded(request, choice.target_id, 1.0)
            policy.ended(request, choice.target_id, 1.0, None)

    choose()
    chosen = seconds(choose, rounds) / CHOICES * 1e6
    return chosen, seconds(serve, 1) / CHOICES * 1e6


def feeds_share(blocks: int, rounds: int) -> float:
    """Return the share of a core that PER_SECOND block events take, half of them stored and half removed."""
    rng = random.Random(5)
    batches: list[list[bytes]] = [[] for _ in range(ENGINES)]
    held: list[deque[int]] = [deque() for _ in range(ENGINES)]
    count = 0
    while count < blocks:
        engine = rng.randrange(ENGINES)
        stored = rng.choice(
            (1, 1, 1, 8, 32, 64)
        )  # decoding fills a block now and then, prompts many at a time
        names = [rng.getrandbits(63) for _ in range(stored)]
        events: list[object] = [
            {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None,
             "token_ids": [rng.randrange(128_000) for _ in range(stored * SIZE)], "block_size": SIZE, "lora_id": None,
             "medium": "GPU", "lora_name": None, "extra_keys": [None] * stored, "group_idx": 0}
        ]  # fmt: skip
        held[engine].extend(names)
        count += stored
        while len(held[engine]) > 500:
            events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": [held[engine].popleft()],
                    "medium": "GPU",
                    "group_idx": 0,
                }
            )
            count += 1
        batches[engine].append(msgspec.msgpack.encode([0.0, events, 0]))

    def apply() -> None:
        index = BlockIndex()
        for engine in range(ENGINES):
            feed = CacheFeed(index, f"t{engine}")
            feed.replay_ended()
            for number, payload in enumerate(batches[engine]):
                feed.live(number, payload)

    return seconds(apply, rounds) / count * PER_SECOND


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=200_000)
    options = parser.parse_args()
    print("compiled" if cached_tree.__file__.endswith(".so") else "interpreted")
    for make in (CacheAware, Gorgo):
        for targets in (8, 100):
            pairs = [
                (
                    choice_us(make, targets, False, options.rounds),
                    choice_us(make, targets, True, options.rounds),
                )
                for _ in range(3)
            ]
            for at, what in enumerate(("a choice", "all of a request")):
                ratio = median(on[at] / off[at] for off, on in pairs)
                before, after = min(off[at] for off, _ in pairs), min(on[at] for _, on in pairs)
                print(
                    f"{make.name}, {targets} targets, {what}: {before:.1f} us, with events {after:.1f}: {ratio:.2f} times"
                )
    print(
        f"{PER_SECOND:,} block events/s of {ENGINES} engines: {feeds_share(options.blocks, options.rounds):.1%} of a core"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
