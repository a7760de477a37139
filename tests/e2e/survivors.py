"""Clients of streams that remember every word, so that two rounds of the same questions can be compared."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 90.0
_POLL_S = 0.02
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Answer:
    """What a client has read. `ids` are those of the stream's chunks; a whole stream has one, and ends with [DONE]."""

    text: str = ""
    finish_reason: str | None = None
    ids: set[str] = field(default_factory=set)
    usage: dict[str, Any] | None = None
    done: bool = False
    chunks: int = 0
    error: str = ""

    @property
    def said(self) -> tuple[object, ...]:
        """All that must be the same in a round that was disturbed."""
        usage = (
            {key: self.usage[key] for key in sorted(self.usage) if key.endswith("_tokens")}
            if self.usage
            else None
        )
        return self.text, self.finish_reason, usage, len(self.ids), self.done, self.error


def ask(url: str, path: str, body: dict[str, Any], answer: Answer) -> None:
    """Read one stream to its end into `response`, which others may look at meanwhile."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read(300)!r}"
            return
        while line := response.readline():
            if line.startswith(b"data: "):
                _read(line.removeprefix(b"data: ").strip(), answer)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _read(event: bytes, answer: Answer) -> None:
    if event == b"[DONE]":
        answer.done = True
        return
    chunk = json.loads(event)
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    answer.ids.add(chunk["id"])
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        answer.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.chunks += 1


def questions(count: int, tokens: int, tag: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Half of them chats, half of them completions, each with a response of its own."""
    plain: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    asked = []
    for number in range(count):
        words = f"{tag}Question {number}: what becomes of a stream whose replica is taken away?"
        if number % 2:
            asked.append((COMPLETIONS, plain | {"prompt": words, "seed": number}))
        else:
            asked.append((CHAT, plain | {"messages": [{"role": "user", "content": words}], "seed": number}))
    return asked


@contextmanager
def streams(url: str, asked: Sequence[tuple[str, dict[str, Any]]], begun: int = 5) -> Iterator[list[Answer]]:
    """Send all at once; the block begins when each stream has sent `begun` chunks, and is left when all have ended."""
    answers = [Answer() for _ in asked]
    threads = [
        threading.Thread(target=ask, args=(url, path, body, answer), daemon=True)
        for (path, body), answer in zip(asked, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(answer.chunks >= begun or answer.error for answer in answers), "streams do not begin")
    yield answers
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a stream does not end"


def round_of(url: str, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[object, ...]]:
    """The undisturbed output."""
    with streams(url, asked) as answers:
        pass
    return [answer.said for answer in answers]


def until(holds: Callable[[], object], what: str) -> None:
    for _ in range(int(PATIENCE_S / _POLL_S)):
        if holds():
            return
        time.sleep(_POLL_S)
    raise AssertionError(what)
