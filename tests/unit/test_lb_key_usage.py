"""Sums by key and model: what is counted where, and how many sums a client can make."""

from __future__ import annotations

import pytest

from lb.observe import key_usage
from lb.observe.key_usage import LONGEST_MODEL, MOST_MODELS, KeyUsage


def taken(usage: KeyUsage) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(found.key, found.model): found[2:] for found in usage.take()}


def test_requests_and_tokens_add_up_by_key_and_model() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 10, 5)
    usage.add("alice", "small", True, 1, 2)
    usage.add("alice", "large", True, 7, 7)
    usage.add("bob", "small", True, 3, 0)
    assert taken(usage) == {
        ("alice", "small"): (2, 11, 7),
        ("alice", "large"): (1, 7, 7),
        ("bob", "small"): (1, 3, 0),
    }


def test_what_was_taken_is_not_taken_again() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 10, 5)
    usage.take()
    assert usage.take() == []
    usage.add("alice", "small", True, 1, 1)
    assert taken(usage) == {("alice", "small"): (1, 1, 1)}


@pytest.mark.parametrize(
    ("model", "served", "counted_as"),
    [
        pytest.param("small", True, "small", id="an engine served it"),
        pytest.param("invented", False, "", id="no engine has served it"),
        pytest.param("", True, "", id="the request names none"),
        pytest.param("a\0b", True, "", id="a database may not take it"),
        pytest.param("\ud800", True, "", id="no text that can be encoded"),
        pytest.param("m" * LONGEST_MODEL, True, "m" * LONGEST_MODEL, id="as long as can be"),
        pytest.param("m" * (LONGEST_MODEL + 1), True, "", id="too long"),
    ],
)
def test_a_model_gets_a_sum_once_an_engine_has_served_it(model: str, served: bool, counted_as: str) -> None:
    usage = KeyUsage()
    usage.add("alice", model, served, 1, 1)
    assert list(taken(usage)) == [("alice", counted_as)]


def test_a_failure_of_a_model_that_was_served_before_is_counted_for_the_model() -> None:
    usage = KeyUsage()
    usage.add("alice", "small", True, 1, 1)
    usage.take()
    usage.add("alice", "small", False, 9, 0)
    usage.add("bob", "small", False, 9, 0)
    assert list(taken(usage)) == [("alice", "small"), ("bob", "")]


def test_a_key_that_invents_models_has_few_sums_and_takes_none_from_others() -> None:
    usage = KeyUsage()
    for number in range(MOST_MODELS + 50):
        usage.add("mallory", f"m{number}", True, 1, 1)
    usage.add("alice", "small", True, 1, 1)
    found = taken(usage)
    assert len(found) == MOST_MODELS + 2
    assert found["mallory", ""] == (50, 50, 50)
    assert found["alice", "small"] == (1, 1, 1)


def test_all_keys_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_usage, "MOST_SUMS", 3)
    usage = KeyUsage()
    for number in range(5):
        usage.add(f"k{number}", "small", True, 1, 1)
    assert list(taken(usage)) == [(f"k{number}", "small" if number < 3 else "") for number in range(5)]


def test_the_next_day_has_room_for_other_models() -> None:
    usage = KeyUsage()
    for number in range(MOST_MODELS):
        usage.add("alice", f"m{number}", True, 1, 1)
    usage.add("alice", "m0", True, 1, 1)
    usage.forget_models()
    usage.add("alice", "new", True, 1, 1)
    assert ("alice", "new") in taken(usage)
