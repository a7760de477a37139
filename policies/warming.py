"""Which prefixes a new replica computes before it takes its share of the requests, and in which order. Pure.

A replica that has just become ready has an empty cache, so its first requests compute what the other replicas have: system
prompts, tools, examples. The load balancer has a sample of the prompts of the last minutes. A prefix that several of them
share is worth computing beforehand; how much, by how many share it: each byte of it saves as many prefills.

*Order.* Prefixes are taken by the number of samples that share them, the most first. A part of a prefix is shared by at least
as many as the whole, so the short one comes first and the long one adds only its end. That order saves the most prefill for
whatever part of it is done when time is over.

*Cost.* A prefix costs the bytes that those before it do not have in common with it. One that adds less than LEAST_BYTES is
left out: a request would cost more than it saves. The sum is bounded.

*How they are found.* In a sorted list the samples with a common prefix are neighbours. One pass over the lengths that
neighbours have in common, with a stack, finds every shared prefix and how many samples share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_BYTES = 1024  # about 256 tokens
MOST_PREFIXES = 32
MOST_BYTES = 256 * 1024  # about 64,000 tokens


class Prompt(NamedTuple):
    """A prompt of the sample. Prompts of different scopes (model and tenant) have nothing in common."""

    scope: str
    text: bytes


class HotPrefix(NamedTuple):
    """The first `length` bytes of the prompt number `sample`, which `shared_by` prompts of the sample begin with.

    `added` of these bytes are in no prefix before it.
    """

    sample: int
    length: int
    shared_by: int
    added: int


def hottest(
    prompts: Sequence[Prompt], most: int = MOST_PREFIXES, most_bytes: int = MOST_BYTES
) -> list[HotPrefix]:
    """Return the prefixes that at least two of the prompts share, in the order in which they are worth computing."""
    chosen: list[HotPrefix] = []
    left = most_bytes
    for index, length, shared_by in sorted(_shared(prompts), key=_hottest_first):
        if len(chosen) == most:
            break
        prompt = prompts[index]
        known = max((min(length, _in_common(prompt, one, prompts)) for one in chosen), default=0)
        added = length - known
        if LEAST_BYTES <= added <= left:
            chosen.append(HotPrefix(index, length, shared_by, added))
            left -= added
    return chosen


def common_bytes(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts have in common from their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _shared(prompts: Sequence[Prompt]) -> list[tuple[int, int, int]]:
    """Return each prefix that several prompts share: the index of one of them, its length, and how many there are."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    found: list[tuple[int, int, int]] = []
    open_: list[
        tuple[int, int]
    ] = []  # a length in common, and the place in the order where it begins; growing
    for place in range(1, len(order) + 1):
        before = order[place - 1]
        common, start = 0, place - 1
        if place < len(order) and prompts[before].scope == prompts[order[place]].scope:
            common = common_bytes(prompts[before].text, prompts[order[place]].text)
        while open_ and open_[-1][0] > common:
            length, start = open_.pop()
            found.append((before, length, place - start))
        if common and (not open_ or open_[-1][0] < common):
            open_.append((common, start))
    return found


def _in_common(prompt: Prompt, chosen: HotPrefix, prompts: Sequence[Prompt]) -> int:
    other = prompts[chosen.sample]
    if other.scope != prompt.scope:
        return 0
    return min(chosen.length, common_bytes(prompt.text, other.text))


def _hottest_first(prefix: tuple[int, int, int]) -> tuple[int, int, int]:
    index, length, shared_by = prefix
    return -shared_by, length, index
