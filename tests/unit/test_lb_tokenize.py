"""The conversation of a completion, as its tokens are requested."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from lb.cache_events.tokenize import conversation


@pytest.mark.parametrize(
    ("more", "text"),
    [
        pytest.param({}, "Once upon", id="prompt and response"),
        pytest.param({"echo": False}, "Once upon", id="no echo"),
        pytest.param({"echo": True}, "Once", id="a response that begins with the prompt"),
    ],
)
def test_the_conversation_of_a_completion(more: dict[str, Any], text: str) -> None:
    body = orjson.dumps({"model": "m", "prompt": "Once", **more})
    reply = "Once upon" if more.get("echo") else " upon"
    found = conversation(b"/v1/completions", body, b"Once", reply)
    assert found is not None
    assert orjson.loads(found.body) == {"model": "m", "prompt": text}
    assert (found.prompt, found.whole) == (b"Once", text.encode())
