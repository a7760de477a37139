"""The text of a file of API keys: what is read, and how a problem is named, without anything of a key."""

from __future__ import annotations

import hashlib
import json

import pytest

from lb.config import keys_file
from lb.config.key_limits import KeyLimits
from lb.config.keys_file import KeysFileError, KeysReading, merged
from lb.config.options import Access, ApiKey

DIGEST = "3f79bb7b435b05321651daefd374cdc681dc06faa65e374e38337b88ca046dea"
SECRET = "of-ada-0123456789"


def read(text: str | bytes, most: int = 1000) -> list[ApiKey]:
    reading = KeysReading(text if isinstance(text, bytes) else text.encode())
    while reading.step(most):
        pass
    return reading.keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        pytest.param("[]", [], id="no key"),
        pytest.param(" [ ]\n", [], id="spaces"),
        pytest.param(json.dumps([{"name": "a", "sha256": DIGEST}]), [ApiKey("a", DIGEST)], id="a digest"),
        pytest.param(
            json.dumps([{"name": "a", "sha256": DIGEST.upper()}]), [ApiKey("a", DIGEST)], id="in upper case"
        ),
        pytest.param(
            json.dumps([{"name": "ada", "key": SECRET}]),
            [ApiKey("ada", hashlib.sha256(SECRET.encode()).hexdigest())],
            id="the key itself",
        ),
        pytest.param(
            "\ufeff"
            + json.dumps([{"name": "é", "sha256": DIGEST, "requests_per_minute": 5, "weight": 2}], indent=2),
            [ApiKey("é", DIGEST, KeyLimits(requests_per_minute=5.0), weight=2.0)],
            id="limits, a byte order mark and lines",
        ),
        pytest.param(
            json.dumps(
                [
                    {
                        "name": "a",
                        "sha256": DIGEST,
                        "usd_per_month": 20,
                        "models": {"org/m": {"tokens_per_day": 5, "max_concurrent": 2}, "*": {}},
                    }
                ]
            ),
            [
                ApiKey(
                    "a",
                    DIGEST,
                    KeyLimits(usd_per_month=20.0),
                    models=(("org/m", KeyLimits(tokens_per_day=5.0, max_concurrent=2)), ("*", KeyLimits())),
                )
            ],
            id="limits of models",
        ),
        pytest.param(
            json.dumps([{"name": "a", "sha256": DIGEST}, {"name": "a", "key": SECRET}]),
            [ApiKey("a", DIGEST), ApiKey("a", hashlib.sha256(SECRET.encode()).hexdigest())],
            id="a key and its successor",
        ),
    ],
)
@pytest.mark.parametrize("most", [1, 2, 1000])
def test_keys_are_read(text: str, keys: list[ApiKey], most: int) -> None:
    assert read(text, most) == keys


GOOD = f'[{{"name": "a", "sha256": "{DIGEST}"}}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "entry 1 (line 1): expected a JSON list of keys"),
        ('{"keys": []}', "entry 1 (line 1): expected a JSON list of keys"),
        (GOOD, "entry 2 (line 1): expected a comma or the end of the list"),
        (f"{GOOD},\n]", "entry 2 (line 2): no JSON: Expecting value"),
        (f"{GOOD}]]", "expected nothing after the list"),
        (f"{GOOD},\n\n 7]", "entry 2 (line 3): expected an object, got a number"),
        (f'{GOOD},\n{{"name": "b"}}]', "entry 2 (line 2): has neither key nor sha256"),
        (
            f'[{{"name": "b", "sha256": "{DIGEST}", "key": "{SECRET}"}}]',
            "entry 1 (line 1): has both key and sha256",
        ),
        (f'[{{"key": "{SECRET}"}}]', "entry 1 (line 1): name: is missing"),
        ('[{"name": "b", "key": "short"}]', "entry 1 (line 1): key: has fewer than 16 characters"),
        ('[{"name": "b", "key": "with a space in it"}]', "key: must be one word of printable ASCII"),
        ('[{"name": "b", "key": 17}]', "key: must be one word of printable ASCII"),
        ('[{"name": "b", "sha256": "12"}]', "sha256: must be 64 hexadecimal digits"),
        (f'[{{"name": "b\\u200b", "sha256": "{DIGEST}"}}]', "name: must be at most 100 printable characters"),
        (f'[{{"name": "b", "sha256": "{DIGEST}", "limit": 3}}]', "entry 1 (line 1): limit: is not known"),
        (f'[{{"name": "b", "sha256": "{DIGEST}", "weight": NaN}}]', "weight: must be between"),
        (
            f'[{{"name": "b", "sha256": "{DIGEST}", "models": {{"m": {{"tokens_per_day": -1}}}}}}]',
            "entry 1 (line 1): models.m.tokens_per_day: must be between 0 and 1e+12",
        ),
        (
            f'[{{"name": "b", "sha256": "{DIGEST}", "models": {{"m": {{"weight": 1}}}}}}]',
            "entry 1 (line 1): models.m.weight: is not known",
        ),
        (
            f'[{{"name": "b", "sha256": "{DIGEST}", "models": {{"m": {{}}, "m": {{}}}}}}]',
            "entry 1 (line 1): m: is there twice",
        ),
        (f'[{{"name": "b", "name": "c", "sha256": "{DIGEST}"}}]', "name: is there twice"),
        (f'{GOOD},\n{{"name": "b", "sha256": "{DIGEST}"}}]', "entry 2 (line 2): is the same key as entry 1"),
        ("[" * 100_000, "entry 1 (line 1): "),
        (
            f'[{{"name": "b", "sha256": "{DIGEST}", "weight": {"1" * 5000}}}]',
            "entry 1 (line 1): no JSON that is read",
        ),
        (b'[{"name": "\xff"}]', "is no UTF-8: byte 11"),
    ],
)
def test_a_problem_is_named_with_its_place(text: str | bytes, problem: str) -> None:
    with pytest.raises(KeysFileError) as error:
        read(text)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        f'[{{"name": "b", "key": "{SECRET} "}}]',
        f'[{{"name": "b", "key": "{SECRET}", "sha256": 1}}]',
        f'[{{"name": "b", "key": "{SECRET}", "weight": "{SECRET}"}}]',
        f'[{{"name": "b", "key": "{SECRET}"',
    ],
)
def test_no_error_has_anything_of_a_key_in_it(text: str) -> None:
    with pytest.raises(KeysFileError) as error:
        read(text)
    assert SECRET[:8] not in str(error.value)
    assert error.value.__cause__ is None


def test_size_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_file, "MOST_KEYS", 2)
    text = json.dumps([{"name": "a", "sha256": f"{number:064x}"} for number in range(3)])
    with pytest.raises(KeysFileError, match=r"entry 3 .*more than 2 keys"):
        read(text)
    monkeypatch.setattr(keys_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(KeysFileError, match="more than 1 MiB"):
        KeysReading(b" " * ((1 << 20) + 1))


def test_a_name_or_a_key_of_the_table_is_the_tables() -> None:
    table = Access((ApiKey("a", "0" * 64, weight=2.0),), keys_file="/keys")
    of_file = [ApiKey("a", "1" * 64), ApiKey("b", "0" * 64), ApiKey("c", "2" * 64)]
    assert merged(table, of_file) == Access((*table.keys, of_file[2]), keys_file="/keys")
    assert merged(table, []) is table
