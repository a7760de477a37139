"""From chat messages to prompt tokens: a ChatML template.

    <|im_start|>role\\ncontent<|im_end|>\\n     per message, then <|im_start|>assistant\\n

With `continue_final_message` the last message stays open, so a conversation that ends in half a response renders
to exactly the tokens the engine had when it had said that half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as shown  # in a message: bounded, however long or deep the value is
from typing import Any

import orjson

from skyserve_cli.engine.errors import BadRequest
from skyserve_cli.engine.text import encode

_TEXT_PARTS = ("text", "input_text", "output_text")


def render(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    instructions: str | None = None,
    where: str = "messages",
) -> str:
    """Return the prompt text of a conversation.

    `instructions` are the system's, before all messages; `where` is the field of the body that has the messages. Raises
    BadRequest naming the message that is wrong.
    """
    if continue_final_message and add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt cannot both be true: "
            "send add_generation_prompt false to continue the last message",
            param="continue_final_message",
        )
    if not messages:
        raise BadRequest(f"{where} must hold at least one message", param=where)
    # Tools change nothing in what this engine says, but they are read: their tokens take time and memory.
    turns = [("system", json_text(tools, "tools"))] if tools else []
    turns += [("system", instructions)] if instructions is not None else []
    turns += [_turn(message, f"{where}[{index}]") for index, message in enumerate(messages)]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    if continue_final_message:
        return text.removesuffix("<|im_end|>\n")
    return text + "<|im_start|>assistant\n" if add_generation_prompt else text


def tokens(messages: Sequence[Any], **options: Any) -> tuple[int, ...]:
    """Return the prompt tokens of a conversation; arguments and errors as for `render`."""
    return tuple(encode(render(messages, **options)))


def response_tokens(
    items: str | Sequence[Any], instructions: str | None, *, tools: Sequence[Any] = ()
) -> tuple[int, ...]:
    """Return the prompt tokens of a Responses API call: those of a chat whose first message, of the system, has the instructions.

    As with vLLM, a last message whose status is `in_progress` or `incomplete` stays open. Raises BadRequest naming the item
    that is wrong.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else "message"
        if kind != "message":
            where = f"input[{index}].type"
            raise BadRequest(f"{where}: this engine reads messages only (got {shown(kind)})", param=where)
    last = items[-1] if items else None
    is_open = isinstance(last, Mapping) and last.get("status") in ("in_progress", "incomplete")
    return tokens(
        items,
        tools=tools,
        instructions=instructions,
        where="input",
        continue_final_message=is_open,
        add_generation_prompt=not is_open,
    )


def message_tokens(messages: Sequence[Any], system: Any, *, tools: Sequence[Any] = ()) -> tuple[int, ...]:
    """Return the prompt tokens of a Messages API call: those of a chat whose first message has what `system` says.

    Raises BadRequest naming the message that is wrong.
    """
    instructions = None if system is None else _content(system, "system")
    return tokens(messages, tools=tools, instructions=instructions)


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where}.role must be a string", param=f"{where}.role")
    content = _content(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    return role, content + (json_text(calls, f"{where}.tool_calls") if calls else "")


def _content(content: Any, where: str) -> str:
    if content is None:  # an assistant's message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise BadRequest(f"{where} must be a string or a list of parts", param=where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadRequest(f"{where}: this engine reads text parts only (got {kind!r})", param=where)


def json_text(value: Any, where: str) -> str:
    """`value` as JSON. Raises BadRequest if it is nested deeper than JSON can be written."""
    try:
        return orjson.dumps(value).decode()
    except (
        orjson.JSONEncodeError
    ) as error:  # what orjson reads is nested four times deeper than what it writes
        raise BadRequest(f"{where} is nested too deeply", param=where) from error
