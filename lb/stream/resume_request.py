"""How a broken stream goes on with another target: the request that continues it. Pure.

A stream of `/v1/chat/completions` or `/v1/completions` breaks after k tokens. Another engine with the same model goes
on where the first stopped if it is given the same context: the prompt and those k tokens. Three ways, best first:

    RESTART   nothing of the response has been sent yet: the same request again
    REPLAY    the same request again, whose response does not depend on chance: see `lb.stream.typed_stream`
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
(their parser reads chats only), and with images or audio (their content is not in the ids).

*Where TOKENS goes on.* Not always behind the last id. Engines read the prompt into a detokenizer, and a prompt that ends within
a character breaks it (vLLM then sends the whole prompt as text), so the position must be one where a character is
whole. And with stop strings ids run ahead of the text: vLLM holds back B = max(len(stop)) - 1 characters (0 with
include_stop_str_in_output), so after an event the tokens so far end B characters behind the visible text. Let the client have
seen V characters, and the first engine have looked for stop strings up to V + B. A stop string that this engine has not found
ends behind V + B, so it begins at V + B - (max(len(stop)) - 1) or later. From a position whose tokens end there or before, the
next engine sees every one of them whole, and finds it with its own finish reason: the response is the undisturbed one.
The characters between position and V come again; the merger takes them off and compares them. A greedy request may repeat tokens. One
that samples would draw others, so it goes on from where exactly the text ends that was seen, and tokens of which nothing was seen
are drawn again, which changes no distribution. With stop strings there is no such place on vLLM: those go by TEXT. Our own engine
sends ids and text of one event to the same place, and begins no event within a stop string.

TEXT withholds the white space at the end: templates trim it, and tokens are rarely cut behind it. The next leg must begin with it.

What an engine counts over its output would start again at zero. min_tokens is lowered. A frequency penalty is, on
vLLM, a bias of -penalty * count on each token of the response (both are added to the logit before the temperature; a
repetition penalty, which multiplies in between, rules that out). A repetition penalty itself counts the prompt as well
(vLLM). A presence penalty has no such form: a token that returns would be charged twice.

An *inexact* continuation may differ in its tokens: a seeded sampler starts again (but that of our engine, whose next token depends
on the seed and the context alone), or the text is not surely read into the same tokens. If the engine reports ids, those of its
prompt prove that they are the same (`proof`), and a greedy stream for which they prove the contrary ends.

Refusals are decided by `lb.stream.resume_rules` (by the request) and by `resume` (by the stream, and by the engine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.stream.first_request import (
    ASK_IDS,
    TAKES_FLAGS,
    Strip,
    continues_by_ids,
    prepare,
    reports_ids,
    written,
)
from lb.stream.resume_rules import NEVER, Reason, prompts_of, refusal, settled, whole
from lb.stream.resume_rules import NotResumable as NotResumable
from lb.stream.transcript import START, Position, StreamProgress, last_positions


class ResumeMethod(str, Enum):
    """How a stream goes on; see above."""

    RESTART = "restart"
    REPLAY = "replay"
    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The request that continues a stream: POST `body` to `path`; `lb.stream.stream_merge.StreamMerger` joins the response.

    The leg goes on from `kept`, so it begins with `repeated`, which the client has; it makes at most `most_tokens` (None: no
    limit is known). `given_ids` are the ids of its prompt, if it was given as such. `is_whole` is false if the prompt may end
    within a character. `inexact` is how the rest may differ from that of an undisturbed engine; with `proof` it does not if the
    engine reports that it has read its prompt into the ids known, and with `must_prove` it has to: a greedy response of other tokens
    would be another response.
    """

    way: ResumeMethod
    path: bytes
    body: bytes
    strip: Strip = Strip.NOTHING
    kept: Position = START
    repeated: str = ""
    most_tokens: int | None = None
    given_ids: Sequence[int] | None = None
    is_whole: bool = True
    inexact: Reason | None = None
    proof: bool = False
    must_prove: bool = False


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


_MAX_BIAS = 100.0  # vLLM clamps larger ones
_LOOK_BACK_TOKENS = 64  # to a position that is surely whole; farther back costs more than it is worth
_KNOWN_BY = 16  # characters by which text is recognized behind a prompt (see `StreamMerger`)
_GREEDY_BELOW = 1e-5  # vLLM's
# Engines with one event for each token; of others without a report the number of tokens is unknown.
_TOKEN_PER_EVENT = frozenset({EngineKind.LLAMACPP, EngineKind.TGI})
_OWN_SAMPLER = frozenset({EngineKind.SKYSERVE})  # the next token depends on the seed and the context alone
_HOLDS_TEXT = frozenset({EngineKind.VLLM})  # while it may become a stop string, though its ids are sent
_TAKES_BIAS = frozenset({EngineKind.VLLM, EngineKind.SKYSERVE})  # and counts prompts in a repetition penalty


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
    has_sent_ids = bool(request.get("return_token_ids")) and max(sofar.sent_tokens, sofar.tokens) > 0
    if sofar.silent and (not has_sent_ids or _may_repeat(request, kind)):
        return _again(path, request, sofar, kind, mode)
    if refused is not None:
        raise NotResumable(refused)
    if sofar.tool_call:
        raise NotResumable(Reason.TOOL_CALL)
    if sofar.reasoning and not sofar.text:
        raise NotResumable(Reason.REASONING)
    if not is_counted(sofar, kind) and _has_limit(path, request, sofar, kind):
        raise NotResumable(Reason.UNCOUNTED)
    if continues_by_ids(path, request, kind) and sofar.output_ids is not None:
        context = sofar.context_ids or _ids_of(request.get("prompt"))
        kept = _position(request, sofar, kind) if context else None
        if context and kept is not None:
            return _by_tokens(path, request, sofar, context, kept, kind, mode)
    if sofar.reasoning or not sofar.text:
        raise NotResumable(Reason.REASONING if sofar.reasoning else Reason.SAMPLED)
    return _by_text(path, request, sofar, kind, mode)


def left(
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, kept: int | None = None
) -> int | None:
    """Return how many tokens the response may still get behind its first `kept` (all it has); None if no limit is known here."""
    used = sofar.tokens if kept is None else kept
    limit = _limit(request)
    if limit is not None:
        return max(0, limit - used)
    # A completion with an explicit null may use what the context has left.
    default = _DEFAULT_TOKENS.get(kind) if path == COMPLETIONS and "max_tokens" not in request else None
    if default is None or sofar.tokens > default:  # longer than the default: the operator has set another
        return None
    return default - used


def is_counted(sofar: StreamProgress, kind: EngineKind) -> bool:
    """Return whether the number of tokens is known, of a response that an engine of this kind has made."""
    return sofar.counted or kind in _TOKEN_PER_EVENT


def _limit(request: Mapping[str, Any]) -> int | None:
    """Return the client's own limit."""
    limits = (limit for name in _OUTPUT_LIMITS if (limit := whole(request.get(name))) is not None)
    return next(limits, None)


def stop_length(request: Mapping[str, Any]) -> int:
    """Return the length of the longest stop string; 0 if there is none."""
    stop = request.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max((len(one) for one in stops if isinstance(one, str)), default=0)


def holds_text(request: Mapping[str, Any], kind: EngineKind) -> bool:
    """Return whether an engine of this kind has made text that it does not send before it is sure that no stop string comes."""
    if request.get("include_stop_str_in_output") is True:
        return False
    return kind not in _OWN_SAMPLER and (stop_length(request) > 1 or bool(request.get("stop_regex")))


def is_greedy(request: Mapping[str, Any]) -> bool:
    """Return whether the next token is always the likeliest; without a temperature it is the engine's to decide."""
    temperature = request.get("temperature")
    if isinstance(temperature, (int, float)) and not isinstance(temperature, bool):
        return 0 <= temperature < _GREEDY_BELOW or request.get("top_k") == 1
    return request.get("top_k") == 1


def _again(
    path: bytes,
    request: Mapping[str, Any],
    sofar: StreamProgress,
    kind: EngineKind,
    mode: Continue,
) -> ResumeRequest:
    """Return the first request once more; the leg has to begin with the text that the client has."""
    ready = prepare(path, request, kind, mode)
    return ResumeRequest(
        ResumeMethod.RESTART,
        path,
        written({**request, **ready.fields}),
        ready.strip,
        repeated=sofar.text,
        most_tokens=_limit(request),
    )


def _may_repeat(request: Mapping[str, Any], kind: EngineKind) -> bool:
    """Return whether an engine that makes tokens once more makes the same ones."""
    return is_greedy(request) or kind in _OWN_SAMPLER


def _position(request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> Position | None:
    """Return from which position the tokens go on; None if there is none.

    Its `chars` are where the text of its tokens ends, visible or not.
    """
    visible, longest = len(sofar.text), stop_length(request)
    may_repeat = _may_repeat(request, kind)
    if not visible:  # only ids that the client has asked for: others would come
        return None
    if sofar.positions is None:  # of a journal that keeps none
        return Position(sofar.base.tokens + len(sofar.output_ids or ()), visible, True)
    held = 0
    end = visible  # the position must not be behind it
    if longest and kind not in _OWN_SAMPLER:
        if kind not in _HOLDS_TEXT or sofar.reasoning or not may_repeat:
            return None
        held = 0 if request.get("include_stop_str_in_output") is True else longest - 1
        end = visible + held - (longest - 1)
    if request.get("stop_regex"):
        return None
    fallback: Position | None = None
    for one in last_positions(sofar):
        chars = one.chars + held
        if chars > end or one.chars == 0:
            continue
        if one.tokens < sofar.base.tokens:
            break
        if not may_repeat and chars < visible:
            break
        if fallback is not None and fallback.tokens - one.tokens > _LOOK_BACK_TOKENS:
            break
        if one.whole:
            return Position(one.tokens, chars, True)
        fallback = fallback or Position(one.tokens, chars, False)
    # Behind half a character the engine's text begins with the prompt, in which it would find stop strings, too.
    finds_more = longest > 0 and kind not in _OWN_SAMPLER
    if fallback is None or fallback.chars < _KNOWN_BY or finds_more:
        return sofar.base if may_repeat else None  # all of it once more
    return fallback


def _by_tokens(
    path: bytes,
    request: Mapping[str, Any],
    sofar: StreamProgress,
    context: Sequence[int],
    kept: Position,
    kind: EngineKind,
    mode: Continue,
) -> ResumeRequest:
    ids = (sofar.output_ids or ())[: kept.tokens - sofar.base.tokens]
    rest = left(path, request, sofar, kind, kept.tokens)
    if rest == 0:
        raise NotResumable(Reason.ENDED)
    inexact = _seed(request, kind)
    if inexact is not None and mode is Continue.EXACT:
        raise NotResumable(inexact)
    body = {name: value for name, value in request.items() if name not in _NOT_WITH_IDS}
    body.update(_lowered(path, request, sofar, kind, kept.tokens))
    if sofar.base.tokens and _penalizes(request, "frequency_penalty"):
        raise NotResumable(Reason.PENALTIES)  # the tokens of an earlier leg are not known
    body.update(_bias(request, ids, kind))
    body.pop("max_completion_tokens", None)
    # A chat without a limit may use what the context has left. To a completion, only an explicit null means that.
    if rest is not None or path == CHAT:
        body["max_tokens"] = rest
    body.update(ASK_IDS)
    given = [*context, *ids]
    body["prompt"] = given
    return ResumeRequest(
        ResumeMethod.TOKENS,
        COMPLETIONS,
        written(body),
        prepare(path, request, kind).strip,
        kept=kept,
        repeated=sofar.text[kept.chars :],
        most_tokens=rest,
        given_ids=given,
        is_whole=kept.whole,
        inexact=inexact,
    )


def _by_text(
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, mode: Continue
) -> ResumeRequest:
    if request.get("truncate_prompt_tokens") is not None:
        raise NotResumable(Reason.TRUNCATED_PROMPT)
    whole_text = sofar.text.rstrip("\ufffd")
    text = settled(sofar.text) if path == CHAT or is_greedy(request) else whole_text
    if not text:
        return _again(path, request, sofar, kind, mode)
    if _penalizes(request, "frequency_penalty", "presence_penalty"):
        raise NotResumable(Reason.PENALTIES)
    _bias(request, (), kind)  # for a repetition penalty
    kept = _behind(text, sofar)
    rest = left(path, request, sofar, kind, kept.tokens)
    if rest == 0:
        raise NotResumable(Reason.ENDED)
    ready = prepare(path, request, kind, mode)
    proof = sofar.output_ids is not None and sofar.context_ids is not None and reports_ids(path, kind)
    seed = _seed(request, kind)
    if mode is Continue.EXACT and (seed is not None or not proof):
        raise NotResumable(seed or Reason.RETOKENIZED)
    body = {**request, **_lowered(path, request, sofar, kind, kept.tokens), **ready.fields}
    if path == CHAT:
        body.update(_reopened(request, text, kind))
    else:
        (prompt,) = prompts_of(request.get("prompt"))
        if not isinstance(prompt, str):
            raise NotResumable(Reason.PROMPT_IDS)
        body["prompt"] = prompt + text
    return ResumeRequest(
        ResumeMethod.TEXT,
        path,
        written(body),
        ready.strip,
        kept=kept,
        repeated=sofar.text[len(text) :],
        most_tokens=rest,
        inexact=seed or Reason.RETOKENIZED,
        proof=proof and seed is None,
        must_prove=mode is Continue.EXACT or is_greedy(request),
    )


def _behind(text: str, sofar: StreamProgress) -> Position:
    """Return the position at the end of the text that is given back, as well as it is known."""
    tokens = sofar.tokens
    if len(text) < len(sofar.text):
        found = (one.tokens for one in last_positions(sofar) if one.chars <= len(text))
        tokens = next(found, sofar.tokens)
    return Position(tokens, len(text), True)


def _seed(request: Mapping[str, Any], kind: EngineKind) -> Reason | None:
    is_seeded = request.get("seed") is not None and not is_greedy(request) and kind not in _OWN_SAMPLER
    return Reason.SEED if is_seeded else None


def _penalizes(request: Mapping[str, Any], *names: str) -> bool:
    return any(request.get(name) for name in names)


def _bias(request: Mapping[str, Any], ids: Sequence[int], kind: EngineKind) -> dict[str, Any]:
    """Return the logit bias that stands for the penalties on these tokens, which are part of the prompt now."""
    repetition, frequency = request.get("repetition_penalty"), request.get("frequency_penalty")
    multiplies = repetition is not None and repetition != 1
    if multiplies and kind not in _TAKES_BIAS:
        raise NotResumable(Reason.PENALTIES)
    if not frequency and not _penalizes(request, "presence_penalty"):
        return {}
    given = request.get("logit_bias") or {}
    if (
        multiplies
        or kind not in _TAKES_BIAS
        or _penalizes(request, "presence_penalty")
        or not isinstance(frequency, (int, float))
        or not isinstance(given, Mapping)
    ):
        raise NotResumable(Reason.PENALTIES)
    try:
        bias = {int(token): min(_MAX_BIAS, max(-_MAX_BIAS, float(value))) for token, value in given.items()}
    except (TypeError, ValueError) as error:
        raise NotResumable(Reason.STRANGE) from error
    for token, count in Counter(ids).items():
        bias[token] = bias.get(token, 0.0) - frequency * count
        if abs(bias[token]) > _MAX_BIAS:
            raise NotResumable(Reason.PENALTIES)
    return {"logit_bias": {str(token): value for token, value in bias.items()}}


def _has_limit(path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind) -> bool:
    return left(path, request, sofar, kind) is not None or bool(whole(request.get("min_tokens")))


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
    path: bytes, request: Mapping[str, Any], sofar: StreamProgress, kind: EngineKind, kept: int
) -> dict[str, Any]:
    """Return the limits of the response, less the tokens that are kept."""
    lowered: dict[str, Any] = {}
    for name in _OUTPUT_LIMITS:
        limit = whole(request.get(name))
        if limit is not None:
            lowered[name] = max(1, limit - kept)
    if not lowered and path == COMPLETIONS:
        rest = left(path, request, sofar, kind, kept)
        if rest is not None:
            lowered["max_tokens"] = rest
    least = whole(request.get("min_tokens"))
    if least:
        lowered["min_tokens"] = max(0, least - kept)
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
