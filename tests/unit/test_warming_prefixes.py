"""Which prefixes a new replica computes first: shared by most, the short before the long, within bounds."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.warming import LEAST_BYTES, MOST_BYTES, HotPrefix, Prompt, common_bytes, hottest

SYSTEM = b"s" * 4000
TOOLS = b"t" * 3000
OTHER = b"o" * 5000


def prompts(*texts: bytes, scope: str = "m") -> list[Prompt]:
    return [Prompt(scope, text) for text in texts]


def chosen(found: list[HotPrefix]) -> list[tuple[int, int, int]]:
    return [(one.length, one.shared_by, one.added) for one in found]


TABLE = {
    "nothing is known": ((), []),
    "one prompt is shared by none": (prompts(SYSTEM + b"a"), []),
    "what two share": (prompts(SYSTEM + b"a", SYSTEM + b"b"), [(4000, 2, 4000)]),
    "the same prompt twice": (prompts(SYSTEM, SYSTEM), [(4000, 2, 4000)]),
    "too short to be worth a request": (prompts(b"x" * 1000 + b"a", b"x" * 1000 + b"b"), []),
    "shared by more goes first, though it is shorter": (
        prompts(OTHER + b"1", OTHER + b"2", SYSTEM + b"1", SYSTEM + b"2", SYSTEM + b"3"),
        [(4000, 3, 4000), (5000, 2, 5000)],
    ),
    "the longer one costs only its end": (
        prompts(SYSTEM + TOOLS + b"1", SYSTEM + TOOLS + b"2", SYSTEM + b"3"),
        [(4000, 3, 4000), (7000, 2, 3000)],
    ),
    "an end that adds little is left out": (
        prompts(SYSTEM + b"x" * 900 + b"1", SYSTEM + b"x" * 900 + b"2", SYSTEM + b"3"),
        [(4000, 3, 4000)],
    ),
    "two branches of one stem": (
        prompts(SYSTEM + TOOLS + b"1", SYSTEM + TOOLS + b"2", SYSTEM + OTHER + b"1", SYSTEM + OTHER + b"2"),
        [(4000, 4, 4000), (7000, 2, 3000), (9000, 2, 5000)],
    ),
    "other tenants share nothing": (
        [*prompts(SYSTEM + b"1", scope="a"), *prompts(SYSTEM + b"2", scope="b")],
        [],
    ),
    "each tenant has its own": (
        [
            *prompts(SYSTEM + b"1", SYSTEM + b"2", scope="a"),
            *prompts(SYSTEM + b"1", SYSTEM + b"2", scope="b"),
        ],
        [(4000, 2, 4000), (4000, 2, 4000)],
    ),
}


@pytest.mark.parametrize(("given_prompts", "expected"), TABLE.values(), ids=TABLE.keys())
def test_what_is_computed_and_in_which_order(
    given_prompts: list[Prompt], expected: list[tuple[int, int, int]]
) -> None:
    assert chosen(hottest(given_prompts)) == expected


def test_requests_and_bytes_are_bounded() -> None:
    texts = [bytes([65 + number]) * 2000 + end for number in range(40) for end in (b"1", b"2")]
    assert len(hottest(prompts(*texts))) == 32
    assert len(hottest(prompts(*texts), most=5)) == 5
    assert len(hottest(prompts(*texts), most_bytes=7000)) == 3
    long = b"l" * (MOST_BYTES + 1)
    assert hottest(prompts(long + b"1", long + b"2")) == []


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_bytes_in_common(stem: bytes, one: bytes, other: bytes) -> None:
    first, second = stem + one, stem + other
    expected = next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    assert common_bytes(first, second) == expected


@given(st.lists(st.tuples(st.sampled_from("xy"), st.text("ab", max_size=6)), max_size=9))
def test_every_shared_prefix_is_counted_right(rows: list[tuple[str, str]]) -> None:
    """Blown up by LEAST_BYTES, so that each letter is worth a request of its own."""
    given_prompts = [
        Prompt(scope, b"".join(letter.encode() * LEAST_BYTES for letter in text)) for scope, text in rows
    ]
    holders: defaultdict[tuple[str, str], int] = defaultdict(int)
    for scope, text in rows:
        for length in range(1, len(text) + 1):
            holders[scope, text[:length]] += 1
    expected = {
        (scope, text): count
        for (scope, text), count in holders.items()
        if count > 1 and all(holders.get((scope, text + more), 0) < count for more in "ab")
    }
    found = hottest(given_prompts, most=1000, most_bytes=10**9)
    assert {
        (rows[one.sample][0], rows[one.sample][1][: one.length // LEAST_BYTES]): one.shared_by
        for one in found
    } == expected
    assert len(found) == len(expected)
    by_scope = {prefix: one for one in found for prefix in [(rows[one.sample][0], one.length)]}
    assert all(one.shared_by >= 2 and one.added <= one.length for one in by_scope.values())
    assert [one.shared_by for one in found] == sorted((one.shared_by for one in found), reverse=True)
