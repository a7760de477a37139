"""Engines as pure functions from a request to the events of its stream, each in the shape its documentation gives.

All speak with the same `Language`: the next token depends on the seed and all tokens before it, so a stream that was
continued rightly has the text of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT
from skyserve_cli.engine import chat
from skyserve_cli.engine.api import Kind, parse_generation
from skyserve_cli.engine.errors import BadRequest
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.replies import Reply, ReplyTranscript
from skyserve_cli.engine.text import EOS, Language, decode, encode

MODEL = "llama"
CONTEXT = 2000
LANGUAGE = Language(seed=7, mean_output_tokens=30)


@dataclass(frozen=True, slots=True)
class Said:
    """One event's worth: text and ids that have become visible together."""

    text: str
    ids: tuple[int, ...]
    finish: str | None = None
    tokens: int = 0  # made so far


def stream(kind: EngineKind, path: bytes, body: Mapping[str, Any], leg: int, burst: int = 1) -> list[bytes]:
    """The events of the response, `[DONE]` included, with `burst` tokens each: an engine that is behind with its events
    puts more into one. Raises BadRequest as the engine would respond with 400."""
    if kind is EngineKind.SKYSERVE:
        return list(_ours(path, body, leg, burst))
    prompt = _prompt(kind, path, body)
    said = _together(list(_generate(kind, prompt, body, path)), burst)
    return list(_SHAPES[kind](path, body, prompt, said, leg))


def _together(said: list[Said], burst: int) -> list[Said]:
    groups = [said[at : at + burst] for at in range(0, len(said), burst)]
    return [
        Said(
            "".join(one.text for one in group),
            tuple(token for one in group for token in one.ids),
            group[-1].finish,
            group[-1].tokens,
        )
        for group in groups
    ]


def _prompt(kind: EngineKind, path: bytes, body: Mapping[str, Any]) -> list[int]:
    if path != CHAT:
        prompt = body["prompt"]
        if isinstance(prompt, list) and kind is EngineKind.TGI:
            raise BadRequest("a prompt is a string")
        return encode(prompt) if isinstance(prompt, str) else list(prompt)
    flags = {name: body[name] for name in ("continue_final_message", "add_generation_prompt") if name in body}
    if kind is EngineKind.LLAMACPP and body["messages"][-1]["role"] == "assistant":
        flags = {"continue_final_message": True, "add_generation_prompt": False}
    return list(chat.tokens(body["messages"], **flags))


def _generate(kind: EngineKind, prompt: list[int], body: Mapping[str, Any], path: bytes) -> Iterator[Said]:
    """Token by token. vLLM sends ids at once and holds back as much text as a stop string could need; llama.cpp holds
    back what looks like the beginning of one; TGI holds back nothing."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None:
        unlimited = path == CHAT or "max_tokens" in body or kind not in (EngineKind.VLLM, EngineKind.SGLANG)
        limit = CONTEXT - len(prompt) if unlimited else 16
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    context = LANGUAGE.read(prompt, body.get("seed") or 0)
    text, shown, finish = "", 0, None
    for made in range(1, limit + 1):
        token = LANGUAGE.next(
            context, may_end=not body.get("ignore_eos") and made > body.get("min_tokens", 0)
        )
        context.extend((token,))
        known = len(text)
        if token == EOS:
            finish = "stop"
        else:
            text += decode((token,))
        found = [at for stop in stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]
        if found and made > body.get("min_tokens", 0):
            text, finish = text[: max(shown, min(found))], "stop"
        elif made == limit:
            finish = finish or "length"
        visible = len(text) if finish else len(text) - _held_back(kind, text, stops)
        yield Said(text[shown : max(visible, shown)], (token,), finish, made)
        shown = max(visible, shown)
        if finish:
            return


def _held_back(kind: EngineKind, text: str, stops: list[str]) -> int:
    if not stops or kind is EngineKind.TGI:
        return 0
    most = max(map(len, stops)) - 1
    if kind is EngineKind.VLLM:
        return min(most, len(text))
    return next(
        (size for size in range(most, 0, -1) if any(stop.startswith(text[-size:]) for stop in stops)), 0
    )


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _usage(prompt: list[int], made: int) -> dict[str, Any]:
    return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + made, "completion_tokens": made}


def _options(body: Mapping[str, Any]) -> tuple[bool, bool]:
    options = body.get("stream_options") or {}
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))


def _vllm(
    path: bytes, body: Mapping[str, Any], prompt: list[int], said: list[Said], leg: int
) -> Iterator[bytes]:
    is_chat = path == CHAT
    include, continuous = _options(body)
    wants_ids = bool(body.get("return_token_ids"))
    head = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{leg}",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1000 + leg,
        "model": MODEL,
    }

    def counted(made: int) -> dict[str, Any]:
        return {"usage": _usage(prompt, made)} if include and continuous else {}

    if is_chat:
        role = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield _event(
            {
                **head,
                "choices": [role],
                **counted(0),
                "prompt_token_ids": prompt if wants_ids else None,
                "prompt_text": None,
            }
        )
    for number, one in enumerate(said):
        ids = {"token_ids": list(one.ids) if wants_ids else None}
        end = {"logprobs": None, "finish_reason": one.finish}
        if is_chat:
            delta = {"content": one.text} if one.text else {}
            stop_reason = {"stop_reason": None} if one.finish else {}
            choice = {"index": 0, "delta": delta, **end, **stop_reason, **ids}
        else:
            first = wants_ids and number == 0
            choice = {
                "index": 0,
                "text": one.text,
                **end,
                "stop_reason": None,
                "prompt_token_ids": prompt if first else None,
                **ids,
            }
        yield _event({**head, "choices": [choice], **counted(one.tokens)})
    if include:
        yield _event({**head, "choices": [], "usage": _usage(prompt, said[-1].tokens)})
    yield b"data: [DONE]\n\n"


def _sglang(
    path: bytes, body: Mapping[str, Any], prompt: list[int], said: list[Said], leg: int
) -> Iterator[bytes]:
    is_chat = path == CHAT
    include, continuous = _options(body)
    wants_ids = bool(body.get("return_token_ids"))
    if is_chat and wants_ids:
        raise BadRequest("return_token_ids is not supported on a streamed chat")
    head = {"id": f"{leg:032x}", "object": "chat.completion.chunk" if is_chat else "text_completion"}
    head |= {"created": 1000 + leg, "model": MODEL}  # type: ignore[dict-item]
    nothing = {"reasoning_content": None, "tool_calls": None}

    def chunk(choices: list[Any], usage: Any) -> bytes:
        return _event({**head, "choices": choices, "usage": usage})

    def end(finish: str | None) -> dict[str, Any]:
        return {"logprobs": None, "finish_reason": finish, "matched_stop": None}

    if is_chat:
        yield chunk(
            [{"index": 0, "delta": {"role": "assistant", "content": "", **nothing}, **end(None)}], None
        )
    for number, one in enumerate(said):
        usage = _usage(prompt, one.tokens) if continuous else None
        if is_chat:
            delta = {"role": None, "content": one.text, **nothing}
            yield chunk([{"index": 0, "delta": delta, **end(None)}], usage)
            continue
        ids: dict[str, Any] = {"token_ids": list(one.ids)} if wants_ids else {}
        if wants_ids and number == 0:
            ids["prompt_token_ids"] = prompt
        yield chunk([{"index": 0, "text": one.text, **end(one.finish), **ids}], usage)
    if is_chat:
        empty = {"role": None, "content": None, **nothing}
        yield chunk([{"index": 0, "delta": empty, **end(said[-1].finish)}], None)
    if include:
        yield chunk([], _usage(prompt, said[-1].tokens))
    yield b"data: [DONE]\n\n"


def _llamacpp(
    path: bytes, body: Mapping[str, Any], prompt: list[int], said: list[Said], leg: int
) -> Iterator[bytes]:
    is_chat = path == CHAT
    include, _ = _options(body)
    tail = {"created": 1000 + leg, "id": f"chatcmpl-{leg}", "model": MODEL, "system_fingerprint": "b1-x"}
    tail["object"] = "chat.completion.chunk" if is_chat else "text_completion"

    def chunk(choices: list[Any], **more: Any) -> bytes:
        return _event({"choices": choices, **tail, **more})

    yield b":\n\n"  # a comment keeps the connection open while the prompt is read
    if is_chat:
        delta = {"role": "assistant", "content": None}
        yield chunk([{"finish_reason": None, "index": 0, "delta": delta}])
    for one in said:
        if one.text and is_chat:
            yield chunk([{"finish_reason": None, "index": 0, "delta": {"content": one.text}}])
        elif one.text:
            yield chunk([{"text": one.text, "index": 0, "logprobs": None, "finish_reason": None}])
    last = {"delta": {}} if is_chat else {"text": "", "logprobs": None}
    yield chunk(
        [{"finish_reason": said[-1].finish, "index": 0, **last}], timings={"predicted_n": said[-1].tokens}
    )
    if include:
        usage = _usage(prompt, said[-1].tokens) | {"prompt_tokens_details": {"cached_tokens": 0}}
        yield chunk([], usage=usage, timings={"predicted_n": said[-1].tokens})
    yield b"data: [DONE]\n\n"


def _tgi(
    path: bytes, body: Mapping[str, Any], prompt: list[int], said: list[Said], leg: int
) -> Iterator[bytes]:
    is_chat = path == CHAT
    include, _ = _options(body)
    head = {
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "id": "",
        "created": 1000 + leg,
    }
    head |= {"model": MODEL, "system_fingerprint": "3.3.4-native"}
    for one in said:
        said_so = {"delta": {"role": "assistant", "content": one.text}} if is_chat else {"text": one.text}
        choice = {"index": 0, **said_so, "logprobs": None, "finish_reason": one.finish}
        yield _event({**head, "choices": [choice], "usage": None})
    if include:
        yield _event({**head, "choices": [], "usage": _usage(prompt, said[-1].tokens)})
    yield b"data: [DONE]\n\n"


_SHAPES = {
    EngineKind.VLLM: _vllm,
    EngineKind.SGLANG: _sglang,
    EngineKind.LLAMACPP: _llamacpp,
    EngineKind.TGI: _tgi,
}


def _ours(path: bytes, body: Mapping[str, Any], leg: int, burst: int) -> Iterator[bytes]:
    """Our own engine's parsing, texts and chunks, without its scheduler."""
    asked = parse_generation(body, Kind.CHAT if path == CHAT else Kind.COMPLETION, MODEL, CONTEXT)
    (request,) = asked.requests("r")
    transcript = ReplyTranscript(asked)
    reply = Reply(f"chatcmpl-{leg}", 1000 + leg, asked, (transcript,))
    context = LANGUAGE.read(request.prompt, request.seed)
    yield reply.first_chunk(0)
    for made in range(1, request.max_tokens + 1):
        may_end = not request.ignore_eos and made > request.min_tokens
        token = LANGUAGE.next(context, may_end=may_end)
        context.extend((token,))
        finish = FinishReason.STOP if token == EOS else None
        if finish is None and made == request.max_tokens:
            finish = FinishReason.LENGTH
        transcript.feed(TokenOutput("r", token, finish, 0))
        if made % burst == 0 or transcript.finish is not None:
            yield reply.chunk(0, transcript.take())
        if transcript.finish is not None:
            break
    yield reply.last_chunks()
