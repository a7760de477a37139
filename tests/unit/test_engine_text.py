"""Tokens round-trip, and a broken response continues exactly where it stopped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyserve_cli.engine.text import (
    _WORD_TOKENS,
    EOS,
    IM_END,
    IM_START,
    VOCABULARY,
    Language,
    decode,
    encode,
    token_bytes,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200) | st.text(
    "ab 9<|im_end>\n", max_size=60
)


@given(TEXTS)
def test_decoding_what_was_encoded_gives_the_text(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token < VOCABULARY for token in ids)


@given(st.integers(0, VOCABULARY - 1))
def test_no_two_ids_share_a_text(token: int) -> None:
    raw = token_bytes(token)
    if token < 128 or token > 255:  # half of a UTF-8 character is no text
        same = encode(raw.decode())
        assert same == [token] or (token < 128 and raw.isalnum()), (
            "only bare letters have a shorter-piece twin"
        )


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param("word", 1, id="four letters"),
        pytest.param(" word", 1, id="the space before belongs to the word"),
        pytest.param("words", 2, id="five letters"),
        pytest.param("  a", 2, id="only one space belongs to the word"),
        pytest.param("a.b", 3, id="punctuation stands alone"),
        pytest.param("é", 2, id="a character of two bytes"),
        pytest.param("<|im_end|>", 1, id="a marker is one token"),
    ],
)
def test_pieces(text: str, tokens: int) -> None:
    assert len(encode(text)) == tokens


def test_english_has_about_four_characters_per_token() -> None:
    text = (
        "The weather in the mountains changes quickly, so travellers should carry warm clothes and water. "
        * 20
    )
    assert 3 < len(text) / len(encode(text)) < 5


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=str(token)):
        decode([token])


def test_special_tokens_can_be_left_out_of_the_text() -> None:
    assert decode([IM_START, *encode("hi"), IM_END], skip_special=True) == "hi"


def say(language: Language, prompt: list[int], tokens: int, seed: int = 0) -> list[int]:
    context = language.read(prompt, seed)
    said = []
    for _ in range(tokens):
        token = language.next(context, may_end=False)
        context.extend((token,))
        said.append(token)
    return said


def test_every_word_is_one_token_with_its_space() -> None:
    assert all(token_bytes(token).startswith(b" ") for token in _WORD_TOKENS)
    assert len(set(_WORD_TOKENS)) == len(_WORD_TOKENS) > 400


@given(prompt=TEXTS, cut=st.integers(0, 30), seed=st.integers(-3, 3))
def test_a_cut_answer_continues_from_its_ids_and_from_its_text(prompt: str, cut: int, seed: int) -> None:
    language = Language(seed=7)
    whole = say(language, encode(prompt), 30, seed)
    from_ids = say(language, encode(prompt) + whole[:cut], 30 - cut, seed)
    from_text = say(language, encode(prompt + decode(whole[:cut])), 30 - cut, seed)
    assert whole[:cut] + from_ids == whole
    assert whole[:cut] + from_text == whole


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((Language(0), "hi", 0), (Language(1), "hi", 0), id="another model"),
        pytest.param((Language(0), "hi", 0), (Language(0), "ho", 0), id="another prompt"),
        pytest.param((Language(0), "hi", 0), (Language(0), "hi", 1), id="another request seed"),
    ],
)
def test_another_input_says_something_else(
    first: tuple[Language, str, int], second: tuple[Language, str, int]
) -> None:
    answers = [say(language, encode(prompt), 20, seed) for language, prompt, seed in (first, second)]
    assert answers[0] != answers[1]


def test_answers_have_the_mean_length_asked_for() -> None:
    language = Language(mean_output_tokens=20)
    lengths = []
    for prompt in range(400):
        context = language.read(encode(f"prompt {prompt}"))
        tokens = [0]
        while tokens[-1] != EOS:
            tokens.append(language.next(context, may_end=True))
            context.extend(tokens[-1:])
        lengths.append(len(tokens) - 1)
    assert 17 < sum(lengths) / len(lengths) < 23
