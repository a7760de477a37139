"""Streams of the simulated engine: tokens that are handed to a response, and the events it makes of them."""

from __future__ import annotations

import json
from typing import Any

from skyserve_cli.engine.messages import MessageReply
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.responses import ResponseReply
from skyserve_cli.engine.text import encode


def feed(one: MessageReply | ResponseReply, text: str, finish: FinishReason | None = None) -> bytes:
    """Hand the tokens of `text` to the reply; returns the events of this step."""
    *tokens, last = encode(text)
    for token in tokens:
        one.transcripts[0].feed(TokenOutput("1", token, None, 3))
    one.transcripts[0].feed(TokenOutput("1", last, finish, 3))
    return one.chunk(0, one.transcripts[0].take())


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each names its type twice."""
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
