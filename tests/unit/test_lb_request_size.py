"""How much work a request will be, before an engine counts it."""

from __future__ import annotations

import base64
import struct
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.http.api_paths import Work
from lb.stream.openai_request import NOT_PARSED, read, scan
from lb.stream.request_size import (
    AUDIO_TOKENS_PER_S,
    MESSAGE_BYTES,
    MOST_IMAGE_TOKENS,
    USUAL_IMAGE_TOKENS,
    RequestSize,
    size_of,
)


def size(body: dict[str, Any], work: Work = Work.GENERATES) -> RequestSize:
    data = orjson.dumps(body)
    return size_of(work, read(data), data)


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


SAID = MESSAGE_BYTES + len("user")


@pytest.mark.parametrize(
    ("body", "text_bytes", "tokens"),
    [
        (user("x" * 40), 40 + SAID, 0),
        (user("é" * 40), 80 + SAID, 0),
        ({"prompt": "x" * 40, "user": "not a prompt", "stop": ["y" * 100]}, 40, 0),
        ({"prompt": ["ab", "cd"]}, 4, 0),
        ({"prompt": [1, 2, 3]}, 0, 3),
        ({"prompt": [[1, 2, 3], [4, 5]]}, 0, 5),
        ({"input": "ab", "instructions": "cd"}, 4, 0),
        ({"query": "ab", "documents": ["cd", "ef"]}, 6, 0),
        ({"system": [{"type": "text", "text": "abc"}]}, MESSAGE_BYTES + 7, 0),
        ({}, 0, 0),
        (user(None), SAID, 0),
        (
            {"messages": [{"role": "user", "content": "é", "name": "n"}, {"role": "é", "content": "x"}]},
            2 * MESSAGE_BYTES + 10,
            0,
        ),
    ],
)
def test_text_counts_by_its_bytes_and_ids_by_their_number(
    body: dict[str, Any], text_bytes: int, tokens: int
) -> None:
    found = size(body)
    assert (found.text_bytes, found.tokens) == (text_bytes, tokens)


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 1500, 1000)
GIF = b"GIF89a" + struct.pack("<HH", 1500, 1000)
JPEG = b"\xff\xd8\xff\xe0\0\x04ab\xff\xc2\0\x11\x08" + struct.pack(">HH", 1000, 1500)
JPEG_BASELINE = JPEG.replace(b"\xff\xc2", b"\xff\xc4\0\x04ab\xff\xc0")  # after a table
WEBP_X = b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (1499).to_bytes(3, "little") + (999).to_bytes(3, "little")
WEBP_L = b"RIFF\0\0\0\0WEBPVP8L" + bytes(5) + (1499 | 999 << 14).to_bytes(4, "little")
WEBP = b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 1500, 1000)


def image(data: bytes) -> dict[str, Any]:
    return user(
        [
            {
                "type": "image_url",
                "image_url": {"url": "data:image/x;base64," + base64.b64encode(data).decode()},
            }
        ]
    )


@pytest.mark.parametrize("head", [PNG, GIF, JPEG, JPEG_BASELINE, WEBP_X, WEBP_L, WEBP])
def test_an_image_counts_by_its_pixels_however_many_bytes_it_has(head: bytes) -> None:
    for data in (head, head + bytes(1_000_000)):
        assert size(image(data)).tokens == 1500 * 1000 // 750


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, USUAL_IMAGE_TOKENS),
        ({"type": "image_url", "image_url": "https://x/y.png"}, USUAL_IMAGE_TOKENS),
        ({"type": "image_url"}, USUAL_IMAGE_TOKENS),
        ({"type": "input_image", "image_url": "data:image/png;base64,???"}, USUAL_IMAGE_TOKENS),
        (
            {
                "type": "image",
                "source": {"type": "base64", "data": base64.b64encode(PNG).decode()},
            },
            2000,
        ),
        (
            {
                "type": "image",
                "source": {
                    "data": base64.b64encode(PNG[:16] + struct.pack(">II", 9**9, 9**9)).decode(),
                },
            },
            MOST_IMAGE_TOKENS,
        ),
    ],
)
def test_images_that_do_not_say_how_large_they_are_are_usual(part: dict[str, Any], tokens: int) -> None:
    assert size(user([part])).tokens == tokens


def wav(seconds: float, rate: int = 32_000) -> bytes:
    head = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHII", 16, 1, 1, 16_000, rate)
    return head + bytes(round(seconds * rate) - len(head))


def test_sound_counts_by_its_seconds() -> None:
    spoken = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(wav(3.0)).decode(), "format": "wav"},
    }
    assert size(user([spoken])).tokens == pytest.approx(3 * AUDIO_TOKENS_PER_S, rel=0.01)
    form = b"--x\r\nContent-Type: audio/wav\r\n\r\n" + wav(10.0) + b"\r\n--x--"
    assert size_of(Work.MEDIA, NOT_PARSED, form).tokens == pytest.approx(10 * AUDIO_TOKENS_PER_S, rel=0.01)
    compressed = size_of(Work.MEDIA, NOT_PARSED, bytes(160_000))
    assert compressed.tokens == 10 * AUDIO_TOKENS_PER_S


@pytest.mark.parametrize(
    ("body", "most_out", "choices"),
    [
        ({"max_tokens": 50}, 50, 1),
        ({"max_tokens": "50"}, 50, 1),
        ({"max_tokens": 50.0, "n": "2"}, 100, 2),
        ({"max_tokens": 5e1, "n": 2.0}, 100, 2),
        ({"max_tokens": 50, "n": 2, "best_of": 3}, 300, 6),
        ({"max_tokens": 1, "max_completion_tokens": 50}, 50, 1),
        ({"max_tokens": 50, "prompt": ["a", "b", "c"], "n": 2}, 300, 6),
        ({"max_tokens": 50, "prompt": [[1], [2]]}, 100, 2),
        ({"max_tokens": 50, "prompt": [1, 2]}, 50, 1),
        ({"text": "a", "sampling_params": {"max_new_tokens": 50, "n": 4}}, 200, 4),
        ({"inputs": "a", "parameters": {"max_new_tokens": 50}}, 50, 1),
        ({"options": {"num_predict": 50}}, 50, 1),
        ({"n_predict": -1}, None, 1),
        ({"max_tokens": None, "n": None}, None, 1),
        ({"max_tokens": True, "n": True}, 1, 1),
        ({"max_tokens": "many", "n": [1]}, None, 1),
        ({"max_tokens": 2**40}, None, 1),
        ({}, None, 1),
    ],
)
def test_what_may_be_generated_over_all_choices(
    body: dict[str, Any], most_out: int | None, choices: int
) -> None:
    found = size(body)
    assert (found.most_out, found.choices) == (most_out, choices)
    assert size(body, Work.READS).most_out == 0


def test_a_body_that_is_not_parsed_is_all_text() -> None:
    body = b'{"model":"m","max_tokens":7,"n":3,"messages":[' + b"1," * 300_000 + b"1]}"
    found = size_of(Work.GENERATES, scan(body), body)
    assert (found.text_bytes, found.tokens, found.most_out, found.choices) == (len(body), 0, 21, 3)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("type", "data", "url", "image_url", "a")), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(("messages", "prompt", "input", "n", "max_tokens", "best_of", "options", "tools")), _VALUES), st.sampled_from(list(Work)))  # fmt: skip
def test_no_json_is_too_odd_to_be_measured(body: dict[str, Any], work: Work) -> None:
    found = size(body, work)
    assert found.text_bytes >= 0
    assert found.tokens >= 0
    assert found.choices >= 1
    assert found.most_out is None or found.most_out >= 0
