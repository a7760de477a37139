"""CPU time and memory of the radix tree behind the prefix-aware routing policies.

    python benchmarks/radix_tree.py [--inserts 1000000] [--targets 8] [--tree-mib 64]

First `inserts` prompts of 4 KiB into one tree, the first half of each one of 50 texts and the rest new, with what
the tree says it takes and what the process has grown by. Then the cost of a match and of an insert against the
length of the prompt, in CPU time per call (not wall-clock time; the median of five rounds): such prompts, sent to
targets in turn, in a tree that is not yet full and in one that evicts; and the turns of conversations, of which one
in ten goes to another target than the turn before it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

from policies.routing.radix_tree import RadixTree

ROUNDS = 5
PAGE_BYTES = 4096
MIB = 2**20


def half_new(length: int, targets: int, rng: random.Random) -> Iterator[tuple[bytes, str]]:
    groups = [rng.randbytes(length // 2) for _ in range(50)]
    for index in count():
        yield rng.choice(groups) + rng.randbytes(length - length // 2), f"t{index % targets}"


def turns(length: int, targets: int, rng: random.Random) -> Iterator[tuple[bytes, str]]:
    """Conversations that begin alike and grow by a twentieth, until `length`; 200 of them at a time."""
    system = rng.randbytes(length // 10)
    talks = [system] * 200
    homes = [f"t{rng.randrange(targets)}" for _ in talks]
    while True:
        index = rng.randrange(200)
        if len(talks[index]) >= length:
            talks[index] = system
        if rng.random() < 0.1:
            homes[index] = f"t{rng.randrange(targets)}"
        talks[index] += rng.randbytes(length // 20)
        yield talks[index], homes[index]


def cpu_us(call: Callable[[bytes, str], object], requests: list[tuple[bytes, str]]) -> float:
    start_s = time.process_time()
    for prompt, target in requests:
        call(prompt, target)
    return (time.process_time() - start_s) / len(requests) * 1e6


def cost(label: str, requests: Iterator[tuple[bytes, str]], batch: int, max_bytes: int) -> None:
    """The tree is warm: it has seen three rounds before anything is measured."""
    tree = RadixTree(max_bytes)
    for prompt, target in islice(requests, 3 * batch):
        tree.insert("m", prompt, target)
    matching: list[float] = []
    inserting: list[float] = []
    for _ in range(ROUNDS):
        ahead = list(islice(requests, batch))
        matching.append(cpu_us(lambda prompt, _: tree.matches("m", prompt), ahead))
        inserting.append(cpu_us(lambda prompt, target: tree.insert("m", prompt, target), ahead))
    print(
        f"{label:34}  match {statistics.median(matching):6.2f} us  insert {statistics.median(inserting):6.2f} us"
        f"  nodes {tree.nodes:7}  {tree.size_bytes / MIB:6.1f} MiB"
    )


def resident_bytes() -> int:
    """Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def fill(inserts: int, targets: int, max_bytes: int) -> None:
    requests = half_new(4096, targets, random.Random(2))
    tree = RadixTree(max_bytes)
    gc.collect()
    before, spent_s = resident_bytes(), 0.0
    done = 0
    while done < inserts:
        ahead = list(islice(requests, min(1000, inserts - done)))
        spent_s += cpu_us(lambda prompt, target: tree.insert("m", prompt, target), ahead) * len(ahead) / 1e6
        done += len(ahead)
        if done % max(1000, inserts // 5 // 1000 * 1000) == 0 or done == inserts:
            grown = resident_bytes() - before
            print(
                f"{done:8} inserts  {spent_s / done * 1e6:5.2f} us each  nodes {tree.nodes:7}"
                f"  tree {tree.size_bytes / MIB:6.1f} MiB  process grew {grown / MIB:6.1f} MiB"
                f"  = {grown / tree.size_bytes:4.2f} x tree"
            )
    charged = [tree.charged_bytes(f"t{index}") for index in range(targets)]
    print(f"charged per target: at most {max(charged) / MIB:.1f} MiB of {max_bytes / MIB:.1f} MiB allowed")
    start_s = time.process_time()
    gc.collect()
    print(f"a full garbage collection: {(time.process_time() - start_s) * 1e3:.0f} ms of CPU")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--inserts", type=int, default=1_000_000)
    arguments.add_argument("--targets", type=int, default=8)
    arguments.add_argument("--tree-mib", type=float, default=64.0, help="limit per target, MiB")
    given = arguments.parse_args()

    targets, max_bytes = given.targets, int(given.tree_mib * MIB)
    fill(given.inserts, targets, max_bytes)
    rng = random.Random(1)
    for length in (256, 1024, 4096, 16_384, 65_536):
        batch = min(4000, 2**24 // length)
        kib = f"{length / 1024:5g} KiB"
        cost(f"{kib}, half new", half_new(length, targets, rng), batch, max_bytes)
        cost(f"{kib}, half new, tree full", half_new(length, targets, rng), batch, 100 * length)
        cost(f"{kib}, turns", turns(length, targets, rng), batch, max_bytes)


if __name__ == "__main__":
    main()
