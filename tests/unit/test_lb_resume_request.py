"""Which streams may be continued, and by which request: the rules as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.stream.first_request import Strip, prepare, with_fields
from lb.stream.resume_request import ResumeMethod, ResumeRequest, left, resume
from lb.stream.resume_rules import NotResumable, Reason, refusal
from lb.stream.transcript import StreamProgress

USER = {"role": "user", "content": "Hello"}
HALF = {"role": "assistant", "content": "Half"}
HELLO: dict[str, Any] = {"model": "m", "stream": True, "messages": [USER]}
PROMPT: dict[str, Any] = {"model": "m", "stream": True, "prompt": "Hello"}
BROKEN = StreamProgress(
    id="x", role_sent=True, text=" sun, lake", tokens=3, events=4, context_ids=(8, 9), output_ids=(1, 2, 3)
)
BY_TEXT = StreamProgress(id="x", role_sent=True, text=" sun, lake", tokens=3, events=4, output_ids=None)
SKYSERVE, VLLM, SGLANG = EngineKind.SKYSERVE, EngineKind.VLLM, EngineKind.SGLANG
LLAMACPP, TGI, TRTLLM, UNKNOWN = EngineKind.LLAMACPP, EngineKind.TGI, EngineKind.TRTLLM, EngineKind.UNKNOWN
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEXT_PART = {"role": "user", "content": [{"type": "text", "text": "a"}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}


def asked(path: bytes, more: dict[str, Any]) -> dict[str, Any]:
    return (HELLO if path == CHAT else PROMPT) | more


def body_of(resumption: ResumeRequest) -> dict[str, Any]:
    body = orjson.loads(resumption.body)
    assert isinstance(body, dict)
    return body


def reason_of(path: bytes, request: dict[str, Any], sofar: StreamProgress, kind: EngineKind) -> Reason | None:
    try:
        resume(path, request, sofar, kind)
    except NotResumable as refused:
        return refused.reason
    return None


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        pytest.param(CHAT, {}, None, id="a chat"),
        pytest.param(COMPLETIONS, {}, None, id="a completion"),
        pytest.param(b"/v1/responses", {}, Reason.NOT_A_STREAM, id="another path"),
        pytest.param(CHAT, {"stream": False}, Reason.NOT_A_STREAM, id="not streamed"),
        pytest.param(CHAT, {"stream": None}, Reason.NOT_A_STREAM, id="stream null"),
        pytest.param(CHAT, {"n": 1}, None, id="n 1"),
        pytest.param(CHAT, {"n": 2}, Reason.SEVERAL_CHOICES, id="n 2"),
        pytest.param(COMPLETIONS, {"best_of": 2}, Reason.SEVERAL_CHOICES, id="best_of 2"),
        pytest.param(CHAT, {"use_beam_search": True}, Reason.SEVERAL_CHOICES, id="beam search"),
        pytest.param(COMPLETIONS, {"prompt": ["a"]}, None, id="a list of one prompt"),
        pytest.param(COMPLETIONS, {"prompt": [1, 2]}, None, id="a prompt of ids"),
        pytest.param(COMPLETIONS, {"prompt": [[1, 2]]}, None, id="a list of one prompt of ids"),
        pytest.param(COMPLETIONS, {"prompt": ["a", "b"]}, Reason.SEVERAL_PROMPTS, id="two prompts"),
        pytest.param(COMPLETIONS, {"prompt": [[1], [2]]}, Reason.SEVERAL_PROMPTS, id="two prompts of ids"),
        pytest.param(COMPLETIONS, {"echo": True}, Reason.ECHO, id="echo"),
        pytest.param(COMPLETIONS, {"suffix": "z"}, Reason.SUFFIX, id="suffix"),
        pytest.param(CHAT, {"logprobs": True}, Reason.LOGPROBS, id="logprobs"),
        pytest.param(CHAT, {"logprobs": False, "top_logprobs": 0}, None, id="no logprobs"),
        pytest.param(CHAT, {"top_logprobs": 5}, Reason.LOGPROBS, id="top_logprobs"),
        pytest.param(COMPLETIONS, {"logprobs": 0}, Reason.LOGPROBS, id="logprobs of the chosen"),
        pytest.param(COMPLETIONS, {"logprobs": None}, None, id="logprobs null"),
        pytest.param(CHAT, {"prompt_logprobs": 0}, Reason.LOGPROBS, id="prompt_logprobs"),
        pytest.param(CHAT, {"response_format": {"type": "text"}}, None, id="plain text"),
        pytest.param(CHAT, {"response_format": {"type": "json_object"}}, Reason.GRAMMAR, id="JSON"),
        pytest.param(CHAT, {"response_format": {"type": "json_schema"}}, Reason.GRAMMAR, id="a schema"),
        pytest.param(CHAT, {"guided_choice": ["a"]}, Reason.GRAMMAR, id="guided_choice"),
        pytest.param(CHAT, {"guided_json": None}, None, id="guided_json null"),
        pytest.param(CHAT, {"structured_outputs": {"regex": "a"}}, Reason.GRAMMAR, id="structured outputs"),
        pytest.param(CHAT, {"grammar": "root ::= a"}, Reason.GRAMMAR, id="a grammar"),
        pytest.param(CHAT, {"regex": "a+"}, Reason.GRAMMAR, id="a regex"),
        pytest.param(CHAT, {"json_schema": {"type": "object"}}, Reason.GRAMMAR, id="llama.cpp's schema"),
        pytest.param(CHAT, {"ebnf": "a"}, Reason.GRAMMAR, id="ebnf"),
        pytest.param(CHAT, {"tools": TOOLS}, None, id="tools on offer"),
        pytest.param(CHAT, {"tools": TOOLS, "tool_choice": "auto"}, None, id="tools if wanted"),
        pytest.param(CHAT, {"tools": TOOLS, "tool_choice": "required"}, Reason.FORCED_TOOL, id="some tool"),
        pytest.param(CHAT, {"tool_choice": TOOLS[0]}, Reason.FORCED_TOOL, id="this tool"),
        pytest.param(CHAT, {"function_call": {"name": "f"}}, Reason.FORCED_TOOL, id="this function"),
        pytest.param(COMPLETIONS, {"prompt_embeds": "AA=="}, Reason.PROMPT_EMBEDS, id="embeddings"),
        pytest.param(
            COMPLETIONS, {"prompt": None, "prompt_embeds": "A"}, Reason.PROMPT_EMBEDS, id="only them"
        ),
        pytest.param(CHAT, {"modalities": ["text"]}, None, id="text"),
        pytest.param(CHAT, {"modalities": ["text", "audio"]}, Reason.MODALITIES, id="speech"),
        pytest.param(CHAT, {"audio": {"voice": "v"}}, Reason.MODALITIES, id="a voice"),
        pytest.param(CHAT, {"kv_transfer_params": {"a": 1}}, Reason.KV_TRANSFER, id="a KV transfer"),
        pytest.param(CHAT, {"stop": ["a"]}, None, id="stop strings"),
        pytest.param(CHAT, {"presence_penalty": 1.0, "seed": 3, "top_k": 5}, None, id="sampling"),
        pytest.param(CHAT, {"messages": [IMAGE]}, None, id="an image"),
    ],
)
def test_requests(path: bytes, more: dict[str, Any], reason: Reason | None) -> None:
    assert refusal(path, asked(path, more)) is reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = (
    "n",
    "prompt",
    "messages",
    "stop",
    "tools",
    "max_tokens",
    "min_tokens",
    "response_format",
    "modalities",
)


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    junk=st.dictionaries(st.sampled_from(NAMES), JSON),
    kind=st.sampled_from(EngineKind),
    sofar=st.sampled_from([BROKEN, BY_TEXT, StreamProgress(events=1)]),
)
def test_junk_raises_nothing_but_its_reason(
    path: bytes, junk: dict[str, Any], kind: EngineKind, sofar: StreamProgress
) -> None:
    request = asked(path, junk)
    assert prepare(path, request, kind).refused is refusal(path, request)
    reason = reason_of(path, request, sofar, kind)
    assert reason is None or reason.value


# What the first request is given


COUNTING = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("kind", "path", "more", "strip"),
    [
        pytest.param(VLLM, CHAT, {}, Strip.IDS, id="vllm chat"),
        pytest.param(VLLM, COMPLETIONS, {}, Strip.IDS, id="vllm completion"),
        pytest.param(SKYSERVE, CHAT, {}, Strip.IDS, id="our chat"),
        pytest.param(SGLANG, COMPLETIONS, {}, Strip.IDS, id="sglang completion"),
        pytest.param(SGLANG, CHAT, {}, Strip.USAGE, id="sglang refuses ids on a chat"),
        pytest.param(LLAMACPP, CHAT, {}, Strip.NOTHING, id="llama.cpp"),
        pytest.param(TGI, COMPLETIONS, {}, Strip.NOTHING, id="tgi"),
        pytest.param(TRTLLM, COMPLETIONS, {}, Strip.NOTHING, id="trt-llm refuses what it does not know"),
        pytest.param(UNKNOWN, CHAT, {}, Strip.NOTHING, id="unknown"),
        pytest.param(VLLM, CHAT, {"n": 2}, Strip.NOTHING, id="a stream that will not be continued"),
        pytest.param(VLLM, CHAT, {"tools": TOOLS}, Strip.IDS, id="tools: ids prove what is read back"),
        pytest.param(
            VLLM, CHAT, {"tools": TOOLS, "tool_choice": "none"}, Strip.IDS, id="tools not to be used"
        ),
        pytest.param(VLLM, CHAT, {"messages": [USER, IMAGE]}, Strip.IDS, id="an image: as with tools"),
        pytest.param(VLLM, CHAT, {"messages": [TEXT_PART]}, Strip.IDS, id="text parts"),
        pytest.param(VLLM, CHAT, {"stop": "a"}, Strip.IDS, id="stop strings"),
        pytest.param(SKYSERVE, CHAT, {"stop": "a"}, Strip.IDS, id="ours keep step"),
        pytest.param(
            SGLANG,
            CHAT,
            {"stream_options": {"include_usage": True}},
            Strip.COUNTS,
            id="the last usage was asked for",
        ),
        pytest.param(SGLANG, CHAT, {"stream_options": COUNTING}, Strip.NOTHING, id="all of it was asked for"),
        pytest.param(VLLM, CHAT, {"return_token_ids": True}, Strip.NOTHING, id="the ids were asked for"),
    ],
)
def test_prepare(kind: EngineKind, path: bytes, more: dict[str, Any], strip: Strip) -> None:
    fields = {
        Strip.NOTHING: {},
        Strip.IDS: {"return_token_ids": True},
        Strip.COUNTS: {"stream_options": COUNTING},
        Strip.USAGE: {"stream_options": COUNTING},
    }
    ready = prepare(path, asked(path, more), kind)
    assert (ready.strip, dict(ready.fields)) == (strip, fields[strip])
    assert prepare(path, asked(path, more), kind, Continue.EXACT) == ready
    assert prepare(path, asked(path, more), kind, Continue.OFF).refused is Reason.OFF


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b'{"a": 1}', b'{"a": 1,"return_token_ids":true}', id="appended"),
        pytest.param(b'{"a": 1 }\r\n', b'{"a": 1 ,"return_token_ids":true}', id="white space behind"),
        pytest.param(b"{}", b'{"return_token_ids":true}', id="an empty body"),
        pytest.param(
            b'{"return_token_ids":false,"a":1}',
            b'{"return_token_ids":true,"a":1}',
            id="said otherwise by the client",
        ),
    ],
)
def test_fields_are_added_to_the_bytes(body: bytes, expected: bytes) -> None:
    assert with_fields(body, orjson.loads(body), {"return_token_ids": True}) == expected
    assert with_fields(body, orjson.loads(body), {}) is body


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("text", "in_place"),
    [
        pytest.param('"stream_options" : {"include_usage": true}', True, id="an object"),
        pytest.param('"stream_options":null', True, id="nothing"),
        pytest.param('"stream_options":{}', True, id="an empty object"),
        pytest.param(
            '"stream_options":{"include_usage":true,"x":[1]}', False, id="an object of more than flags"
        ),
        pytest.param(
            '"metadata":{"stream_options":{}},"stream_options":{"include_usage":true}',
            False,
            id="another's, too",
        ),
        pytest.param(
            r'"metadata":{"stream_options":{}},"stream\u005foptions":{"include_usage":true}',
            False,
            id="escaped",
        ),
        pytest.param(r'"user":"\"stream_options\":{}","stream_options":{}', True, id="quoted in a text"),
        pytest.param('"user":"stream_options","stream_options":{}', False, id="as a value, too"),
        pytest.param('"stream":true', True, id="none"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "behind"])
def test_a_long_body_is_changed_in_its_text(text: str, in_place: bool, first: bool) -> None:
    messages = f'"messages" :  [{{"role":"user","content":"{LONG}"}}]'
    body = ("{%s,%s}\n" % ((text, messages) if first else (messages, text))).encode()
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    request = orjson.loads(body)
    sent = with_fields(body, request, fields)
    assert orjson.loads(sent) == {**request, **fields}
    assert (messages.encode() in sent) is in_place


# The ways


@pytest.mark.parametrize(
    ("kind", "path", "more", "sofar", "way"),
    [
        pytest.param(VLLM, CHAT, {}, BROKEN, ResumeMethod.TOKENS, id="vllm chat"),
        pytest.param(VLLM, COMPLETIONS, {}, BROKEN, ResumeMethod.TOKENS, id="vllm completion"),
        pytest.param(SGLANG, COMPLETIONS, {}, BROKEN, ResumeMethod.TOKENS, id="sglang completion"),
        pytest.param(VLLM, CHAT, {}, BY_TEXT, ResumeMethod.TEXT, id="an older vllm without ids"),
        pytest.param(VLLM, CHAT, {"tools": TOOLS}, BROKEN, ResumeMethod.TEXT, id="tools on offer"),
        pytest.param(VLLM, CHAT, {"messages": [IMAGE]}, BROKEN, ResumeMethod.TEXT, id="an image"),
        pytest.param(SGLANG, CHAT, {}, BROKEN, ResumeMethod.TEXT, id="sglang chat"),
        pytest.param(LLAMACPP, CHAT, {}, BROKEN, ResumeMethod.TEXT, id="llama.cpp chat"),
        pytest.param(
            UNKNOWN, COMPLETIONS, {}, BROKEN, ResumeMethod.TEXT, id="an unknown engine's completion"
        ),
        pytest.param(
            VLLM,
            CHAT,
            {"logprobs": True},
            StreamProgress(events=1, role_sent=True),
            ResumeMethod.RESTART,
            id="only the role",
        ),
        pytest.param(
            UNKNOWN,
            CHAT,
            {"response_format": {"type": "json_object"}},
            StreamProgress(),
            ResumeMethod.RESTART,
            id="nothing",
        ),
        pytest.param(
            VLLM,
            CHAT,
            {},
            StreamProgress(events=3, role_sent=True, tokens=2, output_ids=(1, 2)),
            ResumeMethod.RESTART,
            id="tokens, but no text of them",
        ),
        pytest.param(
            VLLM,
            CHAT,
            {},
            StreamProgress(reasoning=True, text="a", tokens=9, context_ids=(1,), output_ids=(1, 2)),
            ResumeMethod.TOKENS,
            id="reasoning is over",
        ),
    ],
)
def test_ways(
    kind: EngineKind, path: bytes, more: dict[str, Any], sofar: StreamProgress, way: ResumeMethod
) -> None:
    resumption = resume(path, asked(path, more), sofar, kind)
    assert resumption.way is way
    assert (resumption.inexact is None) is (way is not ResumeMethod.TEXT)


@pytest.mark.parametrize(
    ("kind", "path", "more", "sofar", "reason"),
    [
        pytest.param(
            VLLM,
            CHAT,
            {"n": 2},
            StreamProgress(events=1),
            Reason.SEVERAL_CHOICES,
            id="n 2, whatever was said",
        ),
        pytest.param(
            VLLM, CHAT, {"logprobs": True}, BROKEN, Reason.LOGPROBS, id="logprobs, once text was said"
        ),
        pytest.param(VLLM, CHAT, {}, StreamProgress(text="a", lost=True), Reason.LOST, id="outgrown"),
        pytest.param(
            VLLM, CHAT, {}, StreamProgress(text="a", failed=True), Reason.FAILED, id="an error was said"
        ),
        pytest.param(VLLM, CHAT, {}, StreamProgress(text="a", strange=True), Reason.STRANGE, id="unreadable"),
        pytest.param(VLLM, CHAT, {}, StreamProgress(finish_reason="stop"), Reason.ENDED, id="finished"),
        pytest.param(VLLM, CHAT, {"max_tokens": 3}, BROKEN, Reason.ENDED, id="no token left"),
        pytest.param(
            VLLM, CHAT, {}, StreamProgress(text="a", tool_call=True), Reason.TOOL_CALL, id="in a tool call"
        ),
        pytest.param(
            VLLM,
            CHAT,
            {},
            StreamProgress(reasoning=True, output_ids=(1,), context_ids=(1,)),
            Reason.REASONING,
            id="in its reasoning",
        ),
        pytest.param(
            SGLANG,
            CHAT,
            {},
            StreamProgress(reasoning=True, text="a", output_ids=None),
            Reason.REASONING,
            id="reasoned, no ids",
        ),
        pytest.param(TGI, CHAT, {}, BROKEN, Reason.ENGINE, id="a chat on tgi"),
        pytest.param(TRTLLM, CHAT, {}, BROKEN, Reason.ENGINE, id="a chat on trt-llm"),
        pytest.param(UNKNOWN, CHAT, {}, BROKEN, Reason.ENGINE, id="a chat on who knows what"),
        pytest.param(TGI, COMPLETIONS, {"prompt": [1, 2]}, BROKEN, Reason.PROMPT_IDS, id="text behind ids"),
        pytest.param(
            SGLANG,
            CHAT,
            {"messages": [USER, HALF]},
            BROKEN,
            Reason.LAST_MESSAGE,
            id="sglang would call it the user's",
        ),
        pytest.param(
            VLLM,
            CHAT,
            {"tools": TOOLS, "add_generation_prompt": False},
            BROKEN,
            Reason.LAST_MESSAGE,
            id="no turn was begun",
        ),
    ],
)
def test_refused(
    kind: EngineKind, path: bytes, more: dict[str, Any], sofar: StreamProgress, reason: Reason
) -> None:
    assert reason_of(path, asked(path, more), sofar, kind) is reason


def test_switched_off() -> None:
    with pytest.raises(NotResumable, match="off"):
        resume(CHAT, HELLO, BROKEN, VLLM, Continue.OFF)


# The requests


def test_a_chat_goes_on_as_a_completion_of_ids() -> None:
    request = HELLO | {
        "max_completion_tokens": 10,
        "min_tokens": 5,
        "seed": 4,
        "temperature": 0.5,
        "stop_token_ids": [7],
        "chat_template_kwargs": {"a": 1},
        "logprobs": False,
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True},
    }
    resumption = resume(CHAT, request, BROKEN, VLLM)
    assert resumption.path == COMPLETIONS
    assert body_of(resumption) == {
        "model": "m",
        "stream": True,
        "prompt": [8, 9, 1, 2, 3],
        "max_tokens": 7,
        "min_tokens": 2,
        "seed": 4,
        "temperature": 0.5,
        "stop_token_ids": [7],
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_chat_without_a_limit_keeps_the_whole_context() -> None:
    assert body_of(resume(CHAT, HELLO, BROKEN, VLLM))["max_tokens"] is None


@pytest.mark.parametrize(
    ("kind", "more", "sofar", "expected"),
    [
        pytest.param(VLLM, {}, BROKEN, {"prompt": [8, 9, 1, 2, 3], "max_tokens": 13}, id="by tokens"),
        pytest.param(
            VLLM,
            {"prompt": [5]},
            BROKEN,
            {"prompt": [8, 9, 1, 2, 3], "max_tokens": 13},
            id="the engine's ids count",
        ),
        pytest.param(
            VLLM,
            {"prompt": [5], "truncate_prompt_tokens": 4},
            StreamProgress(text="a", tokens=1, output_ids=(6,)),
            {"prompt": [5, 6], "max_tokens": 15},
            id="or else the client's",
        ),
        pytest.param(
            VLLM,
            {"prompt": ["Hello"]},
            StreamProgress(text="a", tokens=1, output_ids=(6,)),
            {"prompt": "Helloa", "max_tokens": 15},
            id="or the text, without ids of the prompt",
        ),
        pytest.param(TGI, {}, BY_TEXT, {"prompt": "Hello sun, lake"}, id="by text"),
        pytest.param(
            TGI,
            {"prompt": ["Hello"], "max_tokens": 9},
            BY_TEXT,
            {"prompt": "Hello sun, lake", "max_tokens": 6},
            id="a list of one",
        ),
        pytest.param(
            LLAMACPP,
            {"n_predict": 9},
            BY_TEXT,
            {"prompt": "Hello sun, lake", "n_predict": 6},
            id="llama.cpp's limit",
        ),
        pytest.param(
            UNKNOWN, {}, BY_TEXT, {"prompt": "Hello sun, lake", "max_tokens": 13}, id="OpenAI's default"
        ),
        pytest.param(
            UNKNOWN,
            {},
            StreamProgress(text="a", tokens=40, output_ids=None),
            {"prompt": "Helloa"},
            id="a longer default",
        ),
    ],
)
def test_completions_that_go_on(
    kind: EngineKind, more: dict[str, Any], sofar: StreamProgress, expected: dict[str, Any]
) -> None:
    body = body_of(resume(COMPLETIONS, PROMPT | more, sofar, kind))
    del body["stream"], body["model"]
    body.pop("return_token_ids", None)
    assert body == expected


@pytest.mark.parametrize(
    ("kind", "more", "messages", "flags"),
    [
        pytest.param(VLLM, {}, [USER, "assistant: sun, lake"], True, id="a message is added"),
        pytest.param(SGLANG, {}, [USER, "assistant: sun, lake"], True, id="on sglang too"),
        pytest.param(LLAMACPP, {}, [USER, "assistant: sun, lake"], True, id="on llama.cpp too"),
        pytest.param(
            VLLM,
            {"messages": [USER, HALF]},
            [USER, HALF, "assistant: sun, lake"],
            True,
            id="a new turn stays new",
        ),
        pytest.param(
            VLLM,
            {"messages": [USER, HALF], "continue_final_message": True, "add_generation_prompt": False},
            [USER, "assistant:Half sun, lake"],
            True,
            id="the client's own continuation is continued",
        ),
        pytest.param(
            LLAMACPP,
            {"messages": [USER, HALF]},
            [USER, "assistant:Half sun, lake"],
            True,
            id="llama.cpp goes on with a trailing message unasked",
        ),
    ],
)
def test_chats_that_go_on_from_text(
    kind: EngineKind, more: dict[str, Any], messages: list[Any], flags: bool
) -> None:
    body = body_of(resume(CHAT, HELLO | {"max_tokens": 10} | more, BY_TEXT, kind))
    said = [
        {"role": "assistant", "content": one.partition(":")[2]} if isinstance(one, str) else one
        for one in messages
    ]
    assert body["messages"] == said
    assert body["max_tokens"] == 7
    assert body.get("continue_final_message", False) is flags
    if flags:
        assert body["add_generation_prompt"] is False


def test_parts_of_a_message_stay_parts() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Half"}]}
    body = body_of(resume(CHAT, HELLO | {"messages": [USER, parts]}, BY_TEXT, LLAMACPP))
    assert body["messages"][-1]["content"] == [*parts["content"], {"type": "text", "text": " sun, lake"}]


def test_a_restart_is_the_same_request() -> None:
    request = HELLO | {"max_tokens": 10, "logprobs": True}
    resumption = resume(CHAT, request, StreamProgress(events=1, role_sent=True), VLLM)
    assert (resumption.path, body_of(resumption)) == (CHAT, request)


def test_a_restart_asks_for_ids_again() -> None:
    resumption = resume(CHAT, HELLO, StreamProgress(events=1, role_sent=True), VLLM)
    assert body_of(resumption) == HELLO | {"return_token_ids": True}


def test_ids_that_were_told_are_not_begun_anew() -> None:
    request = HELLO | {"return_token_ids": True, "temperature": 0}
    sofar = StreamProgress(events=2, role_sent=True, tokens=1, context_ids=(8,), output_ids=(1,))
    assert resume(CHAT, request, sofar, VLLM).way is ResumeMethod.RESTART
    assert reason_of(CHAT, request | {"temperature": 1}, sofar, VLLM) is Reason.SAMPLED, "others would come"


@pytest.mark.parametrize(
    ("path", "more", "kind", "rest"),
    [
        pytest.param(CHAT, {}, VLLM, None, id="a chat without a limit"),
        pytest.param(CHAT, {"max_tokens": 10}, VLLM, 7, id="max_tokens"),
        pytest.param(CHAT, {"max_tokens": 10, "max_completion_tokens": 5}, VLLM, 2, id="the newer name wins"),
        pytest.param(CHAT, {"max_tokens": 2}, VLLM, 0, id="more than allowed"),
        pytest.param(CHAT, {"max_tokens": None}, VLLM, None, id="null"),
        pytest.param(COMPLETIONS, {}, VLLM, 13, id="a completion's default"),
        pytest.param(COMPLETIONS, {"max_tokens": None}, VLLM, None, id="a completion's null"),
        pytest.param(COMPLETIONS, {}, LLAMACPP, None, id="llama.cpp has no default"),
    ],
)
def test_what_is_left(path: bytes, more: dict[str, Any], kind: EngineKind, rest: int | None) -> None:
    assert left(path, asked(path, more), BY_TEXT, kind) == rest


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("sofar", [BROKEN, BY_TEXT, StreamProgress()], ids=["by ids", "by text", "restart"])
def test_a_request_that_orjson_reads_and_does_not_write_cannot_be_resumed(sofar: StreamProgress) -> None:
    request = HELLO | {"zzz": nested(300)}
    with pytest.raises(NotResumable) as raised:
        resume(CHAT, request, sofar, VLLM)
    assert raised.value.reason is Reason.STRANGE
    with pytest.raises(NotResumable):
        with_fields(b"{}", request | {"return_token_ids": False}, {"return_token_ids": True})


@pytest.mark.parametrize("content", [5, True, {"text": "x"}], ids=repr)
def test_an_open_message_whose_content_is_no_text_cannot_be_resumed(content: Any) -> None:
    open_message = {"role": "assistant", "content": content}
    request = HELLO | {"messages": [USER, open_message], "continue_final_message": True}
    with pytest.raises(NotResumable) as raised:
        resume(CHAT, request | {"add_generation_prompt": False}, BY_TEXT, VLLM)
    assert raised.value.reason is Reason.LAST_MESSAGE


# What makes a continuation exact, inexact or impossible

GREEDY = {"temperature": 0}
# Five tokens, one event each: "sun", ", ", a half character, its other half, " lake".
PLACES = StreamProgress(
    id="x",
    role_sent=True,
    text="sun, é lake",
    tokens=5,
    events=6,
    context_ids=(8, 9),
    output_ids=(1, 2, 3, 4, 1),
    positions=(1, 3, 1, 2, 5, 1, 4, 6, 1, 5, 11, 1),
)
HALF_SEEN = replace(PLACES, output_ids=(1, 2, 3, 4, 1, 3), tokens=6)  # a half character behind the last event
MERGED = replace(PLACES, positions=(1, 3, 1, 5, 11, 0))
ALL_MERGED = replace(PLACES, positions=(5, 11, 0))
LONG_MERGED = replace(PLACES, text="sun, é lake and more", positions=(5, 20, 0))
UNCOUNTED = replace(BY_TEXT, counted=False)


@pytest.mark.parametrize(
    ("more", "sofar", "kind", "kept", "repeated"),
    [
        pytest.param({}, PLACES, VLLM, 5, "", id="behind the last token"),
        pytest.param({}, HALF_SEEN, VLLM, 5, "", id="not within a character"),
        pytest.param(GREEDY, MERGED, VLLM, 1, ", é lake", id="from an event of one token"),
        pytest.param({}, LONG_MERGED, VLLM, 5, "", id="sampled, with the prompt taken off if it comes"),
        pytest.param(GREEDY, ALL_MERGED, VLLM, 0, "sun, é lake", id="all of it once more"),
        pytest.param(GREEDY | {"stop": "z"}, PLACES, VLLM, 5, "", id="a stop string of one character"),
        pytest.param(
            GREEDY | {"stop": "zzzzzz"}, PLACES, VLLM, 4, "", id="the held text ends where seen text does"
        ),
        pytest.param(GREEDY | {"stop": ["z", "zzz"]}, PLACES, VLLM, 4, "ake", id="the longest of several"),
        pytest.param(GREEDY | {"stop": "z" * 12}, PLACES, VLLM, 0, "sun, é lake", id="a long one"),
        pytest.param(
            GREEDY | {"stop": "zzzzzz", "include_stop_str_in_output": True},
            PLACES,
            VLLM,
            4,
            " lake",
            id="nothing is held, but it may begin before",
        ),
        pytest.param({"stop": "zzz", "seed": 3}, PLACES, SKYSERVE, 5, "", id="our engine's ids keep step"),
    ],
)
def test_from_which_position_tokens_go_on(
    more: dict[str, Any], sofar: StreamProgress, kind: EngineKind, kept: int, repeated: str
) -> None:
    resumption = resume(CHAT, HELLO | {"max_tokens": 20, "min_tokens": 10} | more, sofar, kind)
    body = body_of(resumption)
    assert (resumption.way, resumption.kept.tokens, resumption.repeated) == (
        ResumeMethod.TOKENS,
        kept,
        repeated,
    )
    assert body["prompt"] == [8, 9, *(sofar.output_ids or ())[:kept]] == resumption.given_ids
    assert (body["max_tokens"], body["min_tokens"]) == (20 - kept, 10 - kept)
    assert resumption.inexact is None


@pytest.mark.parametrize(
    ("path", "more", "sofar", "kind", "inexact"),
    [
        pytest.param(CHAT, {"seed": 1}, PLACES, VLLM, Reason.SEED, id="a seed"),
        pytest.param(CHAT, {"seed": 1} | GREEDY, PLACES, VLLM, None, id="a seed that is not used"),
        pytest.param(CHAT, {"seed": 1}, PLACES, SKYSERVE, None, id="our engine's seed"),
        pytest.param(CHAT, {"stop": "zz"}, PLACES, VLLM, Reason.RETOKENIZED, id="stop strings, sampled"),
        pytest.param(CHAT, {}, BY_TEXT, LLAMACPP, Reason.RETOKENIZED, id="text"),
        pytest.param(
            COMPLETIONS, {"max_tokens": None}, BY_TEXT, TGI, Reason.RETOKENIZED, id="a completion's text"
        ),
        pytest.param(
            CHAT, {"repetition_penalty": 1.1}, PLACES, VLLM, None, id="repetition counts the prompt"
        ),
    ],
)
def test_what_is_inexact_is_named_and_not_done_in_the_mode_exact(
    path: bytes, more: dict[str, Any], sofar: StreamProgress, kind: EngineKind, inexact: Reason | None
) -> None:
    assert resume(path, asked(path, more), sofar, kind).inexact is inexact
    try:
        resume(path, asked(path, more), sofar, kind, Continue.EXACT)
        refused = None
    except NotResumable as error:
        refused = error.reason
    # Whether text is read back into the same tokens shows only when the engine reports them.
    assert refused is (None if inexact is Reason.RETOKENIZED and sofar is PLACES else inexact)


@pytest.mark.parametrize(
    ("path", "more", "sofar", "kind", "reason"),
    [
        pytest.param(CHAT, {"presence_penalty": 0.1}, PLACES, VLLM, Reason.PENALTIES, id="presence"),
        pytest.param(CHAT, {"presence_penalty": 0}, PLACES, VLLM, None, id="no presence"),
        pytest.param(
            CHAT,
            {"frequency_penalty": 0.1, "repetition_penalty": 1.1},
            PLACES,
            VLLM,
            Reason.PENALTIES,
            id="a factor between bias and penalty",
        ),
        pytest.param(
            CHAT,
            {"frequency_penalty": 0.1},
            BY_TEXT,
            VLLM,
            Reason.PENALTIES,
            id="frequency of unknown tokens",
        ),
        pytest.param(
            CHAT,
            {"frequency_penalty": 2, "logit_bias": {"1": -99}},
            PLACES,
            VLLM,
            Reason.PENALTIES,
            id="clamped",
        ),
        pytest.param(
            CHAT, {"repetition_penalty": 1.1}, BY_TEXT, SGLANG, Reason.PENALTIES, id="sglang's repetition"
        ),
        pytest.param(CHAT, {"bad_words": ["a b"]}, PLACES, VLLM, Reason.SAMPLER, id="bad words"),
        pytest.param(CHAT, {"guided_json": {}}, PLACES, VLLM, Reason.GRAMMAR, id="a grammar of any JSON"),
        pytest.param(
            CHAT, {"truncate_prompt_tokens": 5}, BY_TEXT, VLLM, Reason.TRUNCATED_PROMPT, id="cut once more"
        ),
        pytest.param(CHAT, {"truncate_prompt_tokens": 5}, PLACES, VLLM, None, id="the ids are cut already"),
        pytest.param(CHAT, {"max_tokens": 9}, UNCOUNTED, VLLM, Reason.UNCOUNTED, id="a limit, and a guess"),
        pytest.param(CHAT, {"min_tokens": 9}, UNCOUNTED, VLLM, Reason.UNCOUNTED, id="a least, and a guess"),
        pytest.param(CHAT, {}, UNCOUNTED, VLLM, None, id="a guess without a limit"),
        pytest.param(CHAT, {"max_tokens": 9}, UNCOUNTED, LLAMACPP, None, id="one token per event"),
    ],
)
def test_what_would_be_another_stream_is_refused(
    path: bytes, more: dict[str, Any], sofar: StreamProgress, kind: EngineKind, reason: Reason | None
) -> None:
    assert reason_of(path, asked(path, more), sofar, kind) is reason


def test_a_frequency_penalty_becomes_a_bias_on_the_tokens_so_far() -> None:
    asked_bias = {"1": 2.0, "7": 150}
    request = HELLO | GREEDY | {"frequency_penalty": 0.5, "logit_bias": asked_bias}
    body = body_of(resume(CHAT, request, PLACES, VLLM))
    assert body["logit_bias"] == {"1": 1.0, "2": -0.5, "3": -0.5, "4": -0.5, "7": 100.0}
    assert body["frequency_penalty"] == 0.5, "for the tokens to come"


@pytest.mark.parametrize(
    ("text", "given", "repeated"),
    [
        pytest.param("def f(x):\n    ", "def f(x):", "\n    ", id="white space at the end"),
        pytest.param("word", "word", "", id="none"),
    ],
)
def test_text_is_given_back_without_the_white_space_at_its_end(text: str, given: str, repeated: str) -> None:
    resumption = resume(CHAT, HELLO, replace(BY_TEXT, text=text), LLAMACPP)
    assert body_of(resumption)["messages"][-1]["content"] == given
    assert resumption.repeated == repeated


def test_white_space_alone_is_made_again() -> None:
    resumption = resume(CHAT, HELLO, replace(BY_TEXT, text="\n "), LLAMACPP)
    assert (resumption.way, resumption.repeated) == (ResumeMethod.RESTART, "\n ")
