"""Which streams may be continued on another target if theirs is lost: the table of rules. Pure.

Allowed are streams of `/v1/chat/completions` and `/v1/completions` with one choice of plain text and tools on offer, as far
as the rest is what an undisturbed engine would have made, or at least of the same distribution. `Reason` lists what is not
allowed, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from lb.http.api_paths import CHAT, COMPLETIONS


class Reason(str, Enum):
    """Why a stream is not continued, or not exactly."""

    OFF = "off"  # by the service's options or by the request's own header
    TOO_OFTEN = "broken_too_often"  # without a token in between
    # What an inexact continuation differs by: the distribution is the same, the tokens need not be.
    SEED = "seed"  # a seeded generator starts again
    USAGE = "usage"  # the response is whole, and the count of its tokens is lost
    RETOKENIZED = "retokenized"  # the engine reads the text back, not surely into the tokens that made it
    # By the request.
    NOT_A_STREAM = "not_a_stream"
    SEVERAL_CHOICES = "several_choices"  # n, best_of, beam search: choices cannot be distinguished
    SEVERAL_PROMPTS = "several_prompts"
    ECHO = "echo"  # the prompt is part of the text
    SUFFIX = "suffix"  # the text must meet its end
    LOGPROBS = "logprobs"  # those of tokens that have become prompt are not available
    GRAMMAR = "grammar"  # the state of the grammar is lost
    PENALTIES = "penalties"  # of tokens that have become prompt, which the next engine would not count
    SAMPLER = "sampler_state"  # of other rules over the whole output: bad words, detection of repetitions
    TRUNCATED_PROMPT = "truncated_prompt"  # the engine would cut the longer prompt once more
    FORCED_TOOL = "forced_tool"  # as with a grammar
    PROMPT_EMBEDS = "prompt_embeds"  # a prompt that is no tokens cannot be appended to
    MODALITIES = "modalities"  # a response that is not text
    KV_TRANSFER = "kv_transfer"  # tied to one other engine
    ENGINE_STATE = "engine_state"  # an earlier response, or this one, is stored on the engine
    ENGINE_TOOLS = "engine_tools"  # the engine itself runs tools, which must not run twice
    SAMPLED = (
        "sampled"  # the same request gets another response, and there is no text that an engine takes back
    )
    # By the content of the stream.
    ENDED = "ended"  # nothing is left to be made: see `lb.stream.stream_merge.closing`
    LOST = "buffer_limit"  # more than the journal keeps
    FAILED = "engine_error"  # the engine's own error has reached the client
    STRANGE = "unreadable"
    UNCOUNTED = "tokens_unknown"  # there is a limit, and the engine has not reported how much of it is used
    MISMATCH = "mismatch"  # the rest does not begin with what the client has, or does not add up
    DIVERGED = "diverged"  # the same request, sent again, has got another response
    TOOL_CALL = "tool_call"  # in progress
    REASONING = "reasoning"  # in progress, or only its text is known: no engine takes it back
    # By the engine that would continue it.
    ENGINE = "engine"
    PROMPT_IDS = "prompt_ids"  # the prompt is ids and only the response's text is known
    LAST_MESSAGE = "last_message"  # the client's own use of the template leaves no place for the text


class NotResumable(Exception):
    """The stream ends here; `reason` is why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


# A stream without any data is started again, and one whose response is complete is closed, whatever else its
# request requests, unless it is one of these.
NEVER = frozenset({Reason.NOT_A_STREAM, Reason.SEVERAL_CHOICES, Reason.SEVERAL_PROMPTS, Reason.KV_TRANSFER})


# Fields of a request that rule a continuation out if they request anything.
_RULES_OUT: tuple[tuple[Reason, tuple[str, ...]], ...] = (
    (Reason.SEVERAL_CHOICES, ("use_beam_search",)),
    (Reason.ECHO, ("echo",)),
    (Reason.SUFFIX, ("suffix",)),
    (Reason.LOGPROBS, ("logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "return_hidden_states")),
    (
        Reason.SAMPLER,
        (
            "bad_words",
            "repetition_detection",
            "logits_processors",
            "custom_logit_processor",
            "mirostat",
            "dry_multiplier",
        ),
    ),
    (Reason.PROMPT_EMBEDS, ("prompt_embeds",)),
    (Reason.MODALITIES, ("audio",)),
    (Reason.KV_TRANSFER, ("kv_transfer_params", "disaggregated_params", "bootstrap_room", "bootstrap_host")),
)
# Any value but these three is a grammar: `{}` is that of any JSON.
_GRAMMARS = ("structured_outputs", "grammar", "regex", "ebnf", "json_schema", "structural_tag")
_NO_GRAMMAR = (None, False, "")
_ZERO_ASKS = frozenset({"logprobs", "prompt_logprobs"})  # of a completion: those of the chosen tokens


def refusal(path: bytes, request: Mapping[str, Any]) -> Reason | None:
    """Return why a request's response cannot be continued once the client has some of it; None if it can."""
    if path not in (CHAT, COMPLETIONS) or request.get("stream") is not True:
        return Reason.NOT_A_STREAM
    if _above_one(request.get("n")) or _above_one(request.get("best_of")):
        return Reason.SEVERAL_CHOICES
    if path == COMPLETIONS and len(prompts_of(request.get("prompt"))) != 1:
        return Reason.PROMPT_EMBEDS if request.get("prompt_embeds") else Reason.SEVERAL_PROMPTS
    for reason, names in _RULES_OUT:
        if any(_is_set(name, request.get(name)) for name in names):
            return reason
    shape = request.get("response_format")
    if shape and not (isinstance(shape, Mapping) and shape.get("type") == "text"):
        return Reason.GRAMMAR
    for name, value in request.items():
        if (name in _GRAMMARS or name.startswith("guided_")) and value not in _NO_GRAMMAR:
            return Reason.GRAMMAR
    if request.get("tool_choice") not in (None, "none", "auto"):
        return Reason.FORCED_TOOL
    if request.get("function_call") not in (None, "none", "auto"):
        return Reason.FORCED_TOOL
    if request.get("modalities") not in (None, [], ["text"]):
        return Reason.MODALITIES
    return None


def _is_set(name: str, value: Any) -> bool:
    return bool(value) or (name in _ZERO_ASKS and value == 0 and value is not False)


def _above_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 1


def prompts_of(prompt: Any) -> Sequence[Any]:
    """Return the prompts of a completion: texts, or lists of ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt and whole(prompt[0]) is not None:
        return (prompt,)
    return prompt if isinstance(prompt, list) else ()


def whole(value: Any) -> int | None:
    """Return a number without a fraction; true and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def settled(text: str) -> str:
    """Return the part of a text that an engine may be given back: chat templates may trim white space at its end.

    An engine takes a replacement character there for a character that is not whole, and vLLM then sends the prompt with its first text.
    """
    before = None
    while text != before:
        before = text
        text = text.rstrip().rstrip("\ufffd")
    return text
