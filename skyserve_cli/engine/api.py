"""Request bodies of OpenAI's and Anthropic's APIs as values: one frozen `Generation`, or a BadRequest that names the field.

Sampling parameters that change which words a real model says (temperature, top_p, penalties, user, metadata, ...)
are accepted and have no effect: this engine's words are a function of context and seed. What a client would have
to see in the response and cannot get (logprobs, JSON schemas, forced tool calls) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from reprlib import repr as shown  # in a message: bounded, however long or deep the value is
from typing import Any

import orjson

from skyserve_cli.engine import chat
from skyserve_cli.engine.errors import BadRequest, ModelNotFound
from skyserve_cli.engine.model import Request
from skyserve_cli.engine.text import VOCABULARY, decode, encode

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
_COMPLETION_DEFAULT_TOKENS = 16  # OpenAI's default for /v1/completions


class Kind(str, Enum):
    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    MESSAGE = "message"


_PROMPT_FIELD = {
    Kind.CHAT: "messages",
    Kind.COMPLETION: "prompt",
    Kind.RESPONSE: "input",
    Kind.MESSAGE: "messages",
}
_LIMITS = {
    Kind.CHAT: ("max_completion_tokens", "max_tokens"),
    Kind.COMPLETION: ("max_completion_tokens", "max_tokens"),
    Kind.RESPONSE: ("max_output_tokens",),
    Kind.MESSAGE: ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call requests. Choices are numbered prompt by prompt: `choice // n` is its prompt."""

    kind: Kind
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: tuple[int, ...]  # per prompt
    min_tokens: int
    ignore_eos: bool
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def requests(self, call_id: str) -> tuple[Request, ...]:
        """Return one engine request per choice. The choices of one prompt differ by their seeds alone."""
        return tuple(
            Request(
                id=f"{call_id}-{choice}",
                prompt=self.prompts[choice // self.n],
                max_tokens=self.max_tokens[choice // self.n],
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                seed=self.seed + choice % self.n,
            )
            for choice in range(self.choices)
        )


def parse_json(raw: bytes) -> Mapping[str, Any]:
    """Return the body as an object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def parse_generation(
    body: Mapping[str, Any], kind: Kind, served_model: str, max_model_len: int
) -> Generation:
    """Return the call `body` requests. Raises BadRequest or ModelNotFound."""
    fields = _BodyFields(body)
    check_model(body, served_model)
    _refuse_what_cannot_be_seen(body)
    if kind is Kind.RESPONSE:
        _refuse_what_is_not_stored(body)
    prompts = _PROMPTS[kind](body)
    # The other two APIs have no `n`: there, it is an unknown field.
    is_openai = kind in (Kind.CHAT, Kind.COMPLETION)
    n = fields.integer("n", default=1, least=1, most=MAX_CHOICES) if is_openai else 1
    if n * len(prompts) > MAX_CHOICES:
        raise BadRequest(f"n times the number of prompts must be at most {MAX_CHOICES}", param="n")
    asked = next((limit for name in _LIMITS[kind] if (limit := fields.integer(name, least=1))), 0)
    if kind is Kind.MESSAGE and not asked:
        raise BadRequest("max_tokens must be given", param="max_tokens")
    # As with vLLM, a completion that says null means it: as much as the context has room for.
    unlimited = kind is not Kind.COMPLETION or "max_tokens" in body
    default = max_model_len if unlimited else _COMPLETION_DEFAULT_TOKENS
    max_tokens = tuple(_max_tokens(len(prompt), asked, default, kind, max_model_len) for prompt in prompts)
    min_tokens = fields.integer("min_tokens", default=0, least=0)
    if min_tokens > max(max_tokens):
        raise BadRequest(
            f"min_tokens {min_tokens} is more than max_tokens {max(max_tokens)}", param="min_tokens"
        )
    stream = fields.boolean("stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise BadRequest("stream_options must be an object", param="stream_options")
    if options and not stream:
        raise BadRequest("stream_options is for streams: send stream true too", param="stream_options")
    return Generation(
        kind=kind,
        model=served_model,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        seed=fields.integer("seed", default=0),
        stop=_stop_strings(body.get("stop_sequences" if kind is Kind.MESSAGE else "stop")),
        stop_token_ids=frozenset(_token_ids(body.get("stop_token_ids") or [], "stop_token_ids")),
        include_stop=fields.boolean("include_stop_str_in_output"),
        echo=fields.boolean("echo"),
        stream=stream,
        include_usage=_BodyFields(options).boolean("include_usage"),
        continuous_usage=_BodyFields(options).boolean("continuous_usage_stats"),
        return_token_ids=fields.boolean("return_token_ids"),
    )


def check_model(body: Mapping[str, Any], served_model: str) -> None:
    """A call may leave the model out, but not name another one."""
    asked = body.get("model")
    if asked is None or asked == served_model:
        return
    if not isinstance(asked, str):
        raise BadRequest("model must be a string", param="model")
    raise ModelNotFound(asked, served_model)


def chat_prompts(body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the one prompt of a chat body."""
    fields = _BodyFields(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list", param="messages")
    return (
        chat.tokens(
            messages,
            tools=_tools(body),
            add_generation_prompt=fields.boolean("add_generation_prompt", default=True),
            continue_final_message=fields.boolean("continue_final_message"),
        ),
    )


def response_prompts(body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the one prompt of a Responses API body."""
    items, instructions = body.get("input"), body.get("instructions")
    if not isinstance(items, str | list):
        raise BadRequest("input must be a string or a list of messages", param="input")
    if instructions is not None and not isinstance(instructions, str):
        raise BadRequest("instructions must be a string", param="instructions")
    return (chat.response_tokens(items, instructions, tools=_tools(body)),)


def message_prompts(body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the one prompt of a Messages API body."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list", param="messages")
    return (chat.message_tokens(messages, body.get("system"), tools=_tools(body)),)


def parse_tokenize(body: Mapping[str, Any], served_model: str) -> tuple[int, ...]:
    """Return the tokens of a /tokenize body: of its `prompt`, or of its `messages` through the template."""
    check_model(body, served_model)
    if "messages" in body:
        return chat_prompts(body)[0]
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("send a prompt (string) or messages (list)", param="prompt")
    return tuple(encode(prompt))


def parse_detokenize(body: Mapping[str, Any], served_model: str) -> str:
    """Return the text of a /detokenize body's `tokens`."""
    check_model(body, served_model)
    return decode(_token_ids(body.get("tokens"), "tokens"))


def _completion_prompts(body: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return a string, a list of token ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_integer(prompt[0])):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a string, a list of token ids, or a list of these", param="prompt")
    if len(prompt) > MAX_CHOICES:
        raise BadRequest(f"prompt holds more than {MAX_CHOICES} prompts", param="prompt")
    prompts = []
    for index, one in enumerate(prompt):
        ids = tuple(encode(one)) if isinstance(one, str) else _token_ids(one, f"prompt[{index}]")
        if not ids:
            raise BadRequest("a prompt must hold at least one token", param=f"prompt[{index}]")
        prompts.append(ids)
    return tuple(prompts)


_PROMPTS = {
    Kind.CHAT: chat_prompts,
    Kind.COMPLETION: _completion_prompts,
    Kind.RESPONSE: response_prompts,
    Kind.MESSAGE: message_prompts,
}


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    return tools


def _max_tokens(prompt_tokens: int, asked: int, default: int, kind: Kind, max_model_len: int) -> int:
    """Return the output limit of one prompt; `asked` 0 means the default, or less if the context has no room for it."""
    room = max_model_len - prompt_tokens
    wanted = asked or max(min(default, room), 1)
    if wanted > room:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} in the completion).",
            param=_PROMPT_FIELD[kind],
            code="context_length_exceeded",
        )
    return wanted


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise BadRequest("stop must be a non-empty string or a list of them", param="stop")
    if len(strings) > MAX_STOP_STRINGS or any(len(one) > MAX_STOP_LENGTH for one in strings):
        raise BadRequest(
            f"stop may hold {MAX_STOP_STRINGS} strings of {MAX_STOP_LENGTH} characters", param="stop"
        )
    return tuple(strings)


def _token_ids(ids: Any, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(_is_integer(one) and 0 <= one < VOCABULARY for one in ids):
        raise BadRequest(f"{where} must be a list of token ids (0 to {VOCABULARY - 1})", param=where)
    return tuple(ids)


def _refuse_what_cannot_be_seen(body: Mapping[str, Any]) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        # `logprobs: 0` of a completion requests those of the chosen tokens: only null and false request none.
        if body.get(name) is not None and body[name] is not False:
            raise BadRequest("this engine has no weights, hence no log-probabilities", param=name)
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise BadRequest("this engine writes plain text only", param="response_format")
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("auto", "none"):  # as Anthropic's API writes it
        choice = choice["type"]
    if choice not in (None, "none", "auto"):
        raise BadRequest("this engine never calls tools: leave tool_choice to auto", param="tool_choice")
    if body.get("best_of") not in (None, 1):
        raise BadRequest("best_of must be 1", param="best_of")


def _refuse_what_is_not_stored(body: Mapping[str, Any]) -> None:
    """What the Responses API alone offers, and an engine without a store and without tools does not have."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise BadRequest("this engine stores nothing: send the whole conversation as input", param=name)
    if body.get("background"):
        raise BadRequest("this engine has no background responses", param="background")
    include = body.get("include") or []
    if not isinstance(include, list):
        raise BadRequest("include must be a list", param="include")
    if "message.output_text.logprobs" in include:
        raise BadRequest("this engine has no weights, hence no log-probabilities", param="include")
    text = body.get("text") or {}
    if not isinstance(text, Mapping) or text.get("format") not in (None, {"type": "text"}):
        raise BadRequest("this engine writes plain text only", param="text.format")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _BodyFields:
    """Typed reads of a body; null means absent, as OpenAI's clients send it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false (got {shown(value)})", param=name)
        return value

    def integer(
        self, name: str, *, default: int = 0, least: int | None = None, most: int | None = None
    ) -> int:
        value = self._body.get(name)
        if value is None:
            return default
        if not _is_integer(value):
            raise BadRequest(f"{name} must be an integer (got {shown(value)})", param=name)
        if least is not None and value < least:
            raise BadRequest(f"{name} must be at least {least} (got {value})", param=name)
        if most is not None and value > most:
            raise BadRequest(f"{name} must be at most {most} (got {value})", param=name)
        return int(value)
