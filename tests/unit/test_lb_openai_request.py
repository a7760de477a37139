"""Messages that are nothing but a role and a text take a short cut, which must not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("way", [openai_request.read, openai_request.scan], ids=["parsed", "scanned"])
def test_the_limit_of_what_is_generated_is_read_by_any_of_its_names(
    name: str, way: Callable[[bytes], ParsedRequest]
) -> None:
    body = f'{{"model": "m", "{name}": 77, "input": []}}'.encode()
    assert way(body).max_tokens == 77
