"""Who may call, and how much, as JSON: what goes out comes back, older agents take it, and faults are named with their path."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.decode import WireError
from lb.config.key_limits import LIMITS, KeyLimits, Price, price_of
from lb.config.options import Access, ApiKey

DIGEST = "0" * 64
KEY = {"name": "a", "sha256": DIGEST}

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=40)
amounts = st.just(0.0) | st.floats(0.0, 1e12)
limits = st.builds(
    KeyLimits, **dict.fromkeys(LIMITS[:-1], amounts), max_concurrent=st.integers(0, 1_000_000)
)  # fmt: skip
keys = st.builds(
    ApiKey, name=texts, sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True), limits=limits,
    weight=st.floats(0.001, 1000.0), residency=st.just("") | texts, paths=st.lists(texts, max_size=3).map(tuple),
    models=st.dictionaries(texts, limits, max_size=3).map(lambda found: tuple(found.items())),
)  # fmt: skip
prices = st.dictionaries(texts, st.builds(Price, st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=3)
accesses = st.builds(
    Access, keys=st.lists(keys, max_size=3).map(tuple), overrides=st.booleans(), strict_json=st.booleans(),
    keys_file=st.sampled_from(["", "/keys.json"]), keys_in_query=st.booleans(),
    prices=prices.map(lambda found: tuple(found.items())),
)  # fmt: skip


@given(accesses)
def test_an_access_survives_the_wire(access: Access) -> None:
    assert Access.from_json(json.loads(json.dumps(access.to_json()))) == access


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_has_a_place_of_its_own(name: str) -> None:
    limits = KeyLimits(**{name: 7})
    key = ApiKey("a", DIGEST, limits, models=(("m", limits),))
    assert key.to_json() == {**KEY, "weight": 1.0, name: 7, "models": {"m": {name: 7}}}
    assert ApiKey.from_json(key.to_json()) == key


def test_an_older_agent_takes_what_has_none_of_the_new_limits() -> None:
    """It rejects keys that it does not know, so what is at its default is left out."""
    plain = Access((ApiKey("a", DIGEST),)).to_json()
    assert plain == {"keys": [{**KEY, "weight": 1.0}], "overrides": False}
    limited = ApiKey("a", DIGEST, KeyLimits(60.0, 9000.0, max_concurrent=4), 2.0)
    assert limited.to_json() == {
        **KEY, "weight": 2.0, "requests_per_minute": 60.0, "tokens_per_minute": 9000.0, "max_concurrent": 4,
    }  # fmt: skip


def test_the_table_of_an_older_controller_is_read() -> None:
    """It sends the limits that it knows, those without a limit as 0."""
    sent = {**KEY, "requests_per_minute": 0.0, "tokens_per_minute": 5.0, "weight": 1.0, "max_concurrent": 0}
    assert ApiKey.from_json(sent) == ApiKey("a", DIGEST, KeyLimits(tokens_per_minute=5.0))


def test_keys_of_equal_limits_share_them() -> None:
    first, second = (ApiKey.from_json({**KEY, "name": name, "tokens_per_day": 5}) for name in "ab")
    assert first.limits is second.limits


NUMBER = "must be between 0 and 1e+12"
A_PRICE = {"input": 1, "output": 1}


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        pytest.param({"tokens_per_day": -1}, "tokens_per_day", NUMBER, id="negative"),
        pytest.param({"tokens_per_month": float("nan")}, "tokens_per_month", NUMBER, id="NaN"),
        pytest.param({"usd_per_month": float("inf")}, "usd_per_month", NUMBER, id="infinite"),
        pytest.param({"requests_per_day": 1e13}, "requests_per_day", NUMBER, id="too many"),
        pytest.param({"input_tokens_per_day": "5"}, "input_tokens_per_day", "got a text", id="a text"),
        pytest.param({"output_tokens_per_day": None}, "output_tokens_per_day", "got null", id="null"),
        pytest.param({"input_tokens_per_minute": True}, "input_tokens_per_minute", "true or false", id="a flag"),
        pytest.param({"output_tokens_per_minute": []}, "output_tokens_per_minute", "got a list", id="a list"),
        pytest.param({"max_concurrent": 1.5}, "max_concurrent", "whole number", id="half a request"),
        pytest.param({"max_concurrent": 1_000_001}, "max_concurrent", "between 0 and 1000000", id="many at once"),
        pytest.param({"tokens_per_week": 1}, "tokens_per_week", "is not known", id="another limit"),
        pytest.param({"models": []}, "models", "expected an object, got a list", id="a list of models"),
        pytest.param({"models": {"m": 5}}, "models.m", "expected an object, got a number", id="a model's number"),
        pytest.param({"models": {"m": {"tokens_per_day": -1}}}, "models.m.tokens_per_day", NUMBER, id="of a model"),
        pytest.param({"models": {"m": {"weight": 1}}}, "models.m.weight", "is not known", id="weight of a model"),
        pytest.param({"models": {"": {}}}, "models", "the names of models", id="no name"),
        pytest.param({"models": {"m" * 513: {}}}, "models", "the names of models", id="a long name"),
        pytest.param({"models": {"a\nb": {}}}, "models", "the names of models", id="a name of two lines"),
        pytest.param(
            {"models": {str(number): {} for number in range(10_001)}}, "models", "more than 10000", id="many models"
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_key_is_named(value: dict[str, object], path: str, words: str) -> None:
    with pytest.raises(WireError) as error:
        Access.from_json({"keys": [{**KEY, "name": "good"}, {**KEY, **value}]}, "access")
    assert error.value.path == f"access.keys[1].{path}"
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        pytest.param([], "", "expected an object, got a list", id="a list"),
        pytest.param({"m": 5}, ".m", "expected an object, got a number", id="a number"),
        pytest.param({"m": {"input": 1}}, ".m.output", "is missing", id="half a price"),
        pytest.param({"m": {**A_PRICE, "input": -1}}, ".m.input", "between 0 and 1e+06", id="negative"),
        pytest.param({"m": {**A_PRICE, "input": float("nan")}}, ".m.input", "between 0 and 1e+06", id="NaN"),
        pytest.param({"m": {**A_PRICE, "output": "1"}}, ".m.output", "got a text", id="a text"),
        pytest.param({"m": {**A_PRICE, "output": 2e6}}, ".m.output", "between 0 and 1e+06", id="too much"),
        pytest.param({"m": {**A_PRICE, "cached": 1}}, ".m.cached", "is not known", id="another price"),
        pytest.param({"": A_PRICE}, "", "the names of models", id="no name"),
        pytest.param(
            dict.fromkeys(map(str, range(10_001)), A_PRICE), "", "more than 10000", id="many models"
        ),
    ],
)
def test_what_is_wrong_with_prices_is_named(value: object, path: str, words: str) -> None:
    with pytest.raises(WireError) as error:
        Access.from_json({"prices": value}, "access")
    assert error.value.path == f"access.prices{path}"
    assert words in str(error.value)


def test_a_model_without_a_price_has_that_of_the_others() -> None:
    known = {"m": Price(1.0, 2.0), "*": Price(3.0, 4.0)}
    assert price_of(known, "m").usd(1_000_000, 500_000) == 2.0
    assert [price_of(known, name) for name in ("m", "x", "")] == [known["m"], known["*"], known["*"]]
    assert price_of({"m": Price(1.0, 2.0)}, "x").usd(1e9, 1e9) == 0.0


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_known_by_what_it_counts(name: str) -> None:
    limits = KeyLimits(**{name: 1})
    assert limits.counts_tokens == (name not in ("requests_per_minute", "requests_per_day", "max_concurrent"))
    assert limits.of_calendar == ("day" in name or "month" in name)
    assert ApiKey("a", DIGEST, models=(("m", limits),)).of_calendar == limits.of_calendar
