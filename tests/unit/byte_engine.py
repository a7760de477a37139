"""A greedy engine as a pure function, with everything by which a real one makes it hard to continue its streams.

Its tokens are bytes and pieces of text, so characters of several bytes are made in several steps, and it says tokens that its
tokenizer would not make of their text. It streams as vLLM does: several tokens come in one event if it is behind, text that may
become a stop string is held back while its ids are sent, a prompt that ends within a character comes out as text, templates may trim,
and penalties count the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from lb.http.api_paths import CHAT

_PIECES = ["a", "b", " ", "  ", "\n", "x", " a", "ab", "\n  ", "é", "日", ".", "\ufffd"]
TOKENS = [
    *(piece.encode() for piece in _PIECES),
    *(bytes([one]) for one in sorted(set("é日✓\ufffd".encode()))),
]
END = len(TOKENS)
_USER, _ASSISTANT = 1000, 1001  # special tokens: no text


def decode(ids: Sequence[int]) -> str:
    return b"".join(TOKENS[one] for one in ids if one < END).decode("utf-8", "replace")


def encode(text: str) -> list[int]:
    """The longest token first, as tokenizers do it, or nearly."""
    data, ids = text.encode(), []
    while data:
        size = max(len(token) for token in TOKENS if data.startswith(token))
        ids.append(TOKENS.index(data[:size]))
        data = data[size:]
    return ids


class DecodeStream:
    """The detokenizer of Hugging Face's tokenizers, primed with a prompt, as vLLM uses it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids = list(prompt)
        self._prefix = ""

    def step(self, token: int) -> str:
        if not self._prefix and self._ids and not (known := decode(self._ids)).endswith("\ufffd"):
            self._prefix = known
        self._ids.append(token)
        text = decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return ""
        new, self._prefix = text[len(self._prefix) :], text
        return new


@dataclass(frozen=True, slots=True)
class Engine:
    """`groups` are how many tokens come in one event, in turn; `trims`: whether the template does; `ends`: how easily it ends."""

    groups: tuple[int, ...] = (1,)
    trims: bool = False
    ends: float = 0.0

    def stream(self, path: bytes, body: Mapping[str, Any], leg: int) -> bytes:
        return b"".join(self._events(path, body, leg))

    def _prompt(self, path: bytes, body: Mapping[str, Any]) -> list[int]:
        if path != CHAT:
            prompt = body["prompt"]
            return encode(prompt) if isinstance(prompt, str) else list(prompt)
        ids: list[int] = []
        *earlier, last = body["messages"]
        for message in (*earlier, last):
            content = message["content"].strip() if self.trims else message["content"]
            ids += [_USER if message["role"] == "user" else _ASSISTANT, *encode(content)]
        return ids if body.get("continue_final_message") else [*ids, _ASSISTANT]

    def _next(self, context: Sequence[int], output: Sequence[int], body: Mapping[str, Any]) -> int:
        seed = repr((tuple(context[-6:]), len(context))).encode()
        noise = blake2b(seed, digest_size=END + 1).digest()
        bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
        counts = Counter(output)
        seen = set(context)

        def score(token: int) -> float:
            logit = noise[token] / 32 + bias.get(token, 0.0)
            logit /= float(body.get("repetition_penalty") or 1.0) if token in seen else 1.0
            return logit - float(body.get("frequency_penalty") or 0.0) * counts[token]

        may_end = len(output) >= body.get("min_tokens", 0) and noise[END] < 256 * self.ends
        return END if may_end else max(range(END), key=score)

    def _said(
        self, prompt: list[int], body: Mapping[str, Any]
    ) -> Iterator[tuple[str, list[int], str | None, str | None]]:
        stop = body.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        keeps = body.get("include_stop_str_in_output", False)
        held = max(map(len, stops)) - 1 if stops and not keeps else 0
        least, most = body.get("min_tokens", 0), body["max_tokens"]
        detokenizer, output = DecodeStream(prompt), list[int]()
        text, sent, found, event = "", 0, None, list[int]()
        group = 0
        for made in range(1, most + 1):
            token = self._next([*prompt, *output], output, body)
            output.append(token)
            event.append(token)
            new = "" if token == END else detokenizer.step(token)
            text += new
            if made > least and new:
                ends = [
                    (at + len(one), one)
                    for one in stops
                    if (at := text.find(one, max(0, len(text) - len(new) - len(one) + 1))) >= 0
                ]
                if ends:
                    end, found = min(ends)
                    text = text[: end if keeps else end - len(found)]
            finish = "stop" if found or token == END else "length" if made == most else None
            if finish is None and len(event) < self.groups[group % len(self.groups)]:
                continue
            visible = len(text) - (0 if finish else held)
            yield text[sent : max(sent, visible)], event, finish, found
            sent, event = max(sent, visible), []
            group += 1
            if finish:
                return

    def _events(self, path: bytes, body: Mapping[str, Any], leg: int) -> Iterator[bytes]:
        prompt, is_chat, made = self._prompt(path, body), path == CHAT, 0
        asked, options = body.get("return_token_ids"), body.get("stream_options") or {}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": f"x-{leg}", "object": kind, "created": leg, "model": "m"}

        def chunk(choices: list[Any], **more: Any) -> bytes:
            return b"data: " + orjson.dumps({**head, "choices": choices, **more}) + b"\n\n"

        if is_chat:
            delta = {"role": "assistant", "content": ""}
            shown = {"prompt_token_ids": prompt, "prompt_text": None} if asked else {}
            yield chunk([{"index": 0, "delta": delta, "finish_reason": None}], **shown)
        for text, ids, finish, reason in self._said(prompt, body):
            own = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **own, "logprobs": None, "finish_reason": finish, "stop_reason": reason}
            if asked:
                choice["token_ids"] = ids
                choice |= {"prompt_token_ids": prompt} if not is_chat and not made else {}
            made += len(ids)
            yield chunk([choice])
        if options.get("include_usage"):
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": made,
                "total_tokens": len(prompt) + made,
            }
            yield chunk([], usage=usage)
        yield b"data: [DONE]\n\n"
