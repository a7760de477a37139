"""The budget of bytes that are kept, and what parsing a body costs."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import pytest

from lb.core.byte_budget import ByteBudget, parsed_bytes
from lb.stream.openai_request import is_dense, read, scan

MIB = 1024 * 1024


def test_takers_share_a_limit() -> None:
    budget = ByteBudget(100)
    assert budget.take(60)
    assert not budget.take(60)
    assert (budget.taken, budget.refused) == (60, 1)
    budget.give_back(60)
    assert budget.take(60)


def test_one_taker_alone_may_have_more_than_the_limit() -> None:
    budget = ByteBudget(100)
    assert budget.take(1000)
    assert not budget.take(1)


def size_of(value: Any) -> int:
    """What an object and all in it take."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(size_of(key) + size_of(one) for key, one in value.items())
    if isinstance(value, list):
        return size + sum(map(size_of, value))
    return size


@pytest.mark.parametrize(
    "item", ["{}", "[]", "1.5", '{"a":1}', '"word"', '{"role":"user","content":"hello you"}']
)
def test_what_parsing_costs_is_not_underestimated_by_much(item: str) -> None:
    body = f'{{"a":[{",".join([item] * 20_000)}]}}'.encode()
    assert parsed_bytes(body) > size_of(orjson.loads(body)) / 3


def body_of(item: bytes, size: int) -> bytes:
    many = b"[" + (item + b",") * (size // (len(item) + 1)) + item + b"]"
    fields = b'"model":"m","user":"u","stream":true,"max_tokens":7,"messages":[{"role":"user","content":"x"}]'
    return b"{" + fields + b',"metadata":' + many + b"}"


@pytest.mark.parametrize(
    ("item", "size", "dense"),
    [
        pytest.param(b"{}", MIB, True, id="many objects"),
        pytest.param(b"[]", MIB, True, id="many lists"),
        pytest.param(b"{}", 1000, False, id="many objects of a small body"),
        pytest.param(b'"' + b"x" * MIB + b'"', MIB, False, id="a long text"),
    ],
)
def test_a_body_of_many_small_values_is_scanned_and_not_parsed(item: bytes, size: int, dense: bool) -> None:
    body = body_of(item, size)
    assert is_dense(body, parsed_bytes(body)) is dense
    scanned, parsed = scan(body), read(body)
    assert scanned.json is None
    assert scanned[1:] == parsed[1:]


@pytest.mark.parametrize(
    ("body", "stream"),
    [
        (rb'{"messages":[{"content":"say \"stream\": true"}]}', False),
        (b'{"stream" :  true}', True),
        (b'{"stream":truely}', False),
        (b'{"stream":false}', False),
    ],
)
def test_text_is_not_taken_for_a_field(body: bytes, stream: bool) -> None:
    assert scan(body).stream is stream
