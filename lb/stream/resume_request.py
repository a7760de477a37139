"""How a broken stream goes on with another target: the request that continues it. Pure.

A stream of `/v1/chat/completions` or `/v1/completions` breaks after k tokens. Another engine with the same model goes
on where the first stopped if it is given the same context: the prompt and those k tokens. Three ways, best first:

    RESTART   nothing of the response has been sent yet: the same request again
    TOKENS    the engine has sent its token ids: `/v1/completions` with prompt ids + output ids (a chat is turned
              back into chat chunks by `lb.stream.stream_merge`). No seam: what follows depends on the same tokens as before
    TEXT      the text so far is given back: appended to the prompt, or as the assistant's unfinished message with
              the flags that keep it unfinished. The engine reads the text into tokens of its own, which need not
              be those that made it, and a chat template may trim white space at the seam

What engines understand (vLLM 0.33, SGLang 0.5, llama.cpp and TGI as documented):

    engine       sends ids                     goes on from ids    goes on from the text of a chat by
    vLLM         if requested (return_token_ids)   yes                 continue_final_message, no generation prompt
    our engine   as vLLM                       yes                 as vLLM
    SGLang       completions only              completions only    as vLLM
    llama.cpp    no                            no                  as vLLM, and before it could itself: a trailing
                                                                   assistant message is open
    others       no                            no                  not at all: unknown flags are refused (TRT-LLM)
                                                                   or ignored, and then the model begins a new turn
The text of a completion is continued by every engine. Text does not show how many tokens it was: where it is the
only way, the request makes vLLM, SGLang and our engine count along (continuous_usage_stats). With others an event counts
as one token, so the response may get longer than its limit by what came together in one event.

TOKENS is not taken, though ids are known, where the text of a response is more than its tokens: for a chat with tools
(their parser reads chats only), with images or audio (their content is not in the ids), and, but for our engine,
with stop strings: engines hold back text that may become one, so the ids run ahead of what the client has seen. From
the text the response goes on just behind what was seen, be it within a word, and what was held back is made again. A stop
string that begins in front of such a seam and ends behind it is not found: no engine sees both of its parts.

Not preserved over a seam: the position of a seeded generator (an engine whose next token depends on the seed and the
context alone, as ours does, is not affected), and penalties for tokens that are now part of the prompt.

Refusals are decided by `lb.stream.resume_rules` (by the request) and by `resume` (by the stream, and by the engine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.stream.first_request import ASK_IDS, TAKES_FLAGS, Strip, ids_are_of_use, prepare, written
from lb.stream.openai_request import CHAT, COMPLETIONS
from lb.stream.resume_rules import NEVER, Reason, prompts_of, refusal, whole
from lb.stream.resume_rules import NotResumable as NotResumable
from lb.stream.transcript import StreamProgress


class ResumeMethod(str, Enum):
    """How a stream goes on; see above."""

    RESTART = "restart"
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The request that continues a stream: POST `body` to `path`; `lb.stream.stream_merge.Stitcher` joins the response."""

    way: ResumeMethod
    path: bytes
    body: bytes
    strip: Strip = Strip.NOTHING

    @property
    def exact(self) -> bool:
        """Whether the engine goes on from the very tokens of the response."""
        return self.way is not ResumeMethod.TEXT


# How long a completion gets that sets no limit; others have none, or one that the operator sets.
_DEFAULT_TOKENS: Mapping[EngineKind, int] = {
    EngineKind.VLLM: 16,
    EngineKind.SGLANG: 16,
    EngineKind.SKYSERVE: 16,
    EngineKind.UNKNOWN: 16,  # OpenAI's
}
_OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
# What a completion of ids has no use for, or would apply to the prompt once more.
_NOT_WITH_IDS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "function_call",
        "functions",
        "include_reasoning",
        "logprobs",
        "max_completion_tokens",
        "media_io_kwargs",
        "messages",
        "metadata",
        "mm_processor_kwargs",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt",
        "reasoning_effort",
        "response_format",
        "store",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncate_prompt_tokens",
        "verbosity",
    }
)


def resume(
    path: bytes,
    request: Mapping[str, Any],
    sofar: StreamProgress,
    kind: EngineKind,
    mode: Continue = Continue.AUTO,
) -> ResumeRequest:
    """Return the request that continues a broken stream on an engine of this kind. Raises NotResumable."""
    refused = Reason.OFF if mode is Continue.OFF else refusal(path, request)
    if refused is Reason.OFF or refused in NEVER:
        raise NotResumable(refused)
    _check(sofar)
    if sofar.silent and not (request.get("return_token_ids") and sofar.output_ids):
        ready = prepare(path, request, kind, mode)
        return ResumeRequest(ResumeMethod.RESTART, path, written({**request, **ready.fields}), ready.strip)
    if refused is not None:
        raise NotResumable(refused)
    if sofar.tool_call:
        raise NotResumable(Reason.TOOL_CALL)
    if sofar.reasoning and not sofar.text:
        raise NotResumable(Reason.REASONING)
    if left(path, request, sofar, kind) == 0:
        raise NotResumable(Reason.ENDED)
    if mode is Continue.AUTO and ids_are_of_use(path, request, kind) and sofar.output_ids:
        context = sofar.context_ids or _ids_of(request.get("prompt"))
        if context:
            return _by_tokens(path, request, sofar, context, kind)
    if sofar.reasoning or not sofar.text:
        raise NotResumable(Reason.REASONING if sofar.reasoning else Reason.STRANGE)
    return _by_text(path, request, sofar, kind, mode)


def left(path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> int | None:
    """Return how many tokens the response may still get; None if nothing limits it that is known here."""
    limits = [limit for name in _OUTPUT_LIMITS if (limit := whole(request.get(name))) is not None]
    if limits:
        return max(0, limits[0] - sofar.tokens)
    # A completion with an explicit null may use what the context has left.
    default = _DEFAULT_TOKENS.get(kind) if path == COMPLETIONS and "max_tokens" not in request else None
    if default is None or sofar.tokens > default:  # longer than the default: the operator has set another
        return None
    return default - sofar.tokens


def _by_tokens(
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, context: Sequence[int], kind: EngineKind
) -> ResumeRequest:
    body = {name: value for name, value in request.items() if name not in _NOT_WITH_IDS}
    body.update(_lowered(path, request, sofar, kind))
    rest = left(path, request, sofar, kind)
    body.pop("max_completion_tokens", None)
    # A chat without a limit may use what the context has left. To a completion, only an explicit null means that.
    if rest is not None or path == CHAT:
        body["max_tokens"] = rest
    body.update(ASK_IDS)
    body["prompt"] = [*context, *(sofar.output_ids or ())]
    return ResumeRequest(ResumeMethod.TOKENS, COMPLETIONS, written(body), prepare(path, request, kind).strip)


def _by_text(
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, mode: Continue
) -> ResumeRequest:
    ready = prepare(path, request, kind, mode)
    body = {**request, **_lowered(path, request, sofar, kind), **ready.fields}
    if path == CHAT:
        body.update(_reopened(request, sofar.text, kind))
    else:
        (prompt,) = prompts_of(request.get("prompt"))
        if not isinstance(prompt, str):
            raise NotResumable(Reason.PROMPT_IDS)
        body["prompt"] = prompt + sofar.text
    return ResumeRequest(ResumeMethod.TEXT, path, written(body), ready.strip)


def _reopened(request: Mapping[str, Any], text: str, kind: EngineKind) -> dict[str, Any]:
    """Return the messages of a chat, with the text as an assistant's message that is not finished."""
    if kind not in TAKES_FLAGS and kind is not EngineKind.LLAMACPP:
        raise NotResumable(Reason.ENGINE)
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise NotResumable(Reason.STRANGE)
    last = messages[-1] if messages else {}
    follows_assistant = last.get("role") == "assistant"
    already_open = request.get("continue_final_message") is True
    if request.get("add_generation_prompt") is False and not already_open:
        raise NotResumable(Reason.LAST_MESSAGE)
    if follows_assistant and (already_open or kind is EngineKind.LLAMACPP):
        if not already_open and isinstance(started := last.get("content"), str):
            text = text.removeprefix(started)  # without the flags it repeats what the client has started
        messages = [*messages[:-1], _longer(last, text)]
    elif already_open or (follows_assistant and kind is EngineKind.SGLANG):
        raise NotResumable(Reason.LAST_MESSAGE)
    else:
        messages = [*messages, {"role": "assistant", "content": text}]
    # llama.cpp would open the message unasked, but then its response begins with all text so far, once more;
    # versions that do not know the flags pass them over.
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _longer(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    if content is not None and not isinstance(content, str):
        raise NotResumable(Reason.LAST_MESSAGE)
    return {**message, "content": (content or "") + text}


def _lowered(
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind
) -> dict[str, Any]:
    """Return the limits of the response, less what it has."""
    lowered: dict[str, Any] = {}
    for name in _OUTPUT_LIMITS:
        limit = whole(request.get(name))
        if limit is not None:
            lowered[name] = max(1, limit - sofar.tokens)
    if not lowered and path == COMPLETIONS:
        rest = left(path, request, sofar, kind)
        if rest is not None:
            lowered["max_tokens"] = rest
    least = whole(request.get("min_tokens"))
    if least:
        lowered["min_tokens"] = max(0, least - sofar.tokens)
    return lowered


def _check(sofar: StreamProgress) -> None:
    """Raise NotResumable if the content of the stream so far cannot be continued."""
    for reason, holds in (
        (Reason.LOST, sofar.lost),
        (Reason.FAILED, sofar.failed),
        (Reason.STRANGE, sofar.strange),
        (Reason.ENDED, sofar.finish_reason or sofar.done),
    ):
        if holds:
            raise NotResumable(reason)


def _ids_of(prompt: Any) -> Sequence[int] | None:
    """Return the ids of a prompt that the client has given as such."""
    prompts = prompts_of(prompt)
    return prompts[0] if len(prompts) == 1 and isinstance(prompts[0], list) else None
