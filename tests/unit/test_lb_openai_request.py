"""Messages that are nothing but a role and a text take a short cut, which must not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.core.byte_budget import parsed_bytes
from lb.stream import openai_request
from lb.stream.openai_request import ParsedRequest, prompt_of

_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_CONTENT = _TEXT | st.none() | st.integers() | st.lists(st.fixed_dictionaries({"text": _TEXT}), max_size=2)
_MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": _TEXT | st.none(), "content": _CONTENT}),
    st.fixed_dictionaries({"role": _TEXT}, optional={"content": _TEXT, "name": _TEXT | st.none()}),
    _TEXT,
)


@given(st.lists(_MESSAGE, max_size=4))
def test_the_short_cut_gives_what_the_long_way_gives(messages: list[Any]) -> None:
    body: dict[str, Any] = {"model": "m", "messages": messages}
    # A third key sends a message the long way, and without a value it is ignored.
    longer = [one | {"null": None} if isinstance(one, dict) else one for one in messages]
    assert prompt_of(body, b"") == prompt_of(body | {"messages": longer}, b"")


def test_two_plain_messages() -> None:
    body = orjson.loads(
        b'{"messages":[{"content":"be k\\u0131nd","role":"system"},{"role":"user","content":""}]}'
    )
    assert prompt_of(body, b"") == "system\x1fbe kınd\x1euser\x1f\x1e".encode()


MIB = 1024 * 1024


@pytest.mark.parametrize("count", [511, 512, 513, 2000, 30_000])
def test_many_messages_are_written_as_few_are(count: int) -> None:
    messages = [{"role": "user", "content": f"number {at}"} for at in range(count)]
    whole = "".join(f"user\x1fnumber {at}\x1e" for at in range(count)).encode()
    assert prompt_of({"messages": messages}, b"") == whole[: openai_request.MAX_PROMPT_BYTES]
    messages[-1]["name"] = "Ann"  # a message that goes the long way, among others that do not
    whole = whole[:-1] + b"\x1fnameAnn\x1e"
    assert prompt_of({"messages": messages}, b"") == whole[: openai_request.MAX_PROMPT_BYTES]


@pytest.mark.parametrize("count", [3, 600, 10_000])
def test_tools_are_json_before_the_messages(count: int) -> None:
    tools = [{"type": "function", "function": {"name": f"tool{at}"}} for at in range(count)]
    prompt = prompt_of({"tools": tools, "messages": [{"role": "user", "content": "x"}]}, b"")
    expected = orjson.dumps(tools) + b"\x1euser\x1fx\x1e"
    assert prompt == expected[: openai_request.MAX_PROMPT_BYTES]


@pytest.mark.parametrize("letter", ["x", "é", "中", "😀"])
def test_of_a_long_text_the_beginning_is_read(letter: str) -> None:
    text = letter * MIB
    prompt = prompt_of({"messages": [{"role": "user", "content": text}]}, b"")
    assert prompt == ("user\x1f" + text).encode()[: openai_request.MAX_PROMPT_BYTES]
    assert prompt_of({"prompt": text}, b"") == text.encode()[: openai_request.MAX_PROMPT_BYTES]


def image(data: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]}


def changed(data: str, at: int) -> str:
    return data[:at] + "B" + data[at + 1 :]


@pytest.mark.parametrize(
    "size", [10, 3000, MIB + 10_000, 6 * MIB], ids=["tiny", "small", "long", "very long"]
)
def test_images_are_the_same_prompt_only_if_they_are_the_same(size: int) -> None:
    data = "A" * size
    others = [data + "A", changed(data, 0), changed(data, size - 1), changed(data, size - 5)]
    prompts = {prompt_of(image(one), b"") for one in (data, *others)}
    assert len(prompts) == 5
    assert prompt_of(image("A" * size), b"") in prompts
    assert all(len(prompt) < 3000 for prompt in prompts)
    assert all(prompt.endswith(b"What is it?\x1e") for prompt in prompts)


@pytest.mark.parametrize(
    ("body", "ambiguous"),
    [
        (b'{"max_tokens":5,"max_tokens":6}', True),
        (b'{"max_tokens":5,"metadata":{"max_tokens":6}}', False),
        (b'{"max_tokens":5,"user":"max_tokens"}', False),
        (b'{"max_tokens":5,"user":"\\"max_tokens\\":6"}', False),
        (b'{"options":{"num_predict":5,"num_predict":6}}', True),
        (b'{"options":{"num_predict":5},"options":1}', True),
        (b'{"model":"n","messages":[{"role":"user","content":"input"}]}', False),
        (b'{"max_tokens":5,"max_\\u0074okens":6}', True),
        (b'{"max_\\u0074okens":6,"max_tokens":5}', True),
        (b'{"max_tokens":5,"user":"\\u0074\\u00e9"}', False),
        (
            b'{"max_tokens":6,"max_tokens":5,"user":"\\u0022\\u0022"}',
            True,
        ),  # as many quotation marks as without the first
        (b'{"user":"\\"\\u0022\\\\","prompt":[1,"a",["b"]],"n":null}', False),
        (b'{"messages":[{"role":"user","content":"a","role":"system"}]}', True),
        (b'{"max_tokens":5,"user":"%b","max_tokens":6}' % (b"x" * 300_000), False),  # too long to search
    ],
)
def test_a_field_that_is_there_twice_is_ambiguous(body: bytes, ambiguous: bool) -> None:
    assert openai_request.is_ambiguous(orjson.loads(body), body) is ambiguous


@pytest.mark.parametrize(
    ("message", "count", "dense"),
    [
        ("abcdefghijklmnopqrstuvwxyz", 25_000, True),
        ("abcdefghijklmnopqrstuvwxyz", 15_000, False),
        ("lorem ipsum dolor sit amet, " * 40, 2000, False),
    ],
    ids=["very many short messages", "many short messages", "messages of a kilobyte"],
)
def test_a_body_is_not_parsed_if_that_takes_long(message: str, count: int, dense: bool) -> None:
    messages = [{"role": "user", "content": message}] * count
    body = orjson.dumps({"model": "m", "stream": True, "max_tokens": 9, "messages": messages})
    assert openai_request.is_dense(body, parsed_bytes(body)) is dense
    scanned, read = openai_request.scan(body), openai_request.read(body)
    for name in ("model", "max_tokens", "stream", "choices"):
        assert getattr(scanned, name) == getattr(read, name)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("way", [openai_request.read, openai_request.scan], ids=["parsed", "scanned"])
def test_the_limit_of_what_is_generated_is_read_by_any_of_its_names(
    name: str, way: Callable[[bytes], ParsedRequest]
) -> None:
    body = f'{{"model": "m", "{name}": 77, "input": []}}'.encode()
    assert way(body).max_tokens == 77
