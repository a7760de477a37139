"""Bodies become values or a sentence; text is held back for stop strings and no longer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyserve_cli.engine import chat
from skyserve_cli.engine.api import Generation, Kind, parse_generation, parse_json
from skyserve_cli.engine.errors import BadRequest
from skyserve_cli.engine.model import FinishReason, TokenOutput
from skyserve_cli.engine.replies import ReplyTranscript
from skyserve_cli.engine.style import Style
from skyserve_cli.engine.text import EOS, VOCABULARY, decode, encode

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello"}
INPUT: dict[str, Any] = {"input": "Hello"}


def parse(body: dict[str, Any]) -> Generation:
    kind = Kind.CHAT if "messages" in body else Kind.RESPONSE if "input" in body else Kind.COMPLETION
    return parse_generation(body, kind, "llama", max_model_len=1000)


def nested(levels: int) -> list[Any]:
    """Lists in lists: as deep as a parser lets pass, and deeper than a writer goes."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


# Valid requests


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(PROMPT, {"max_tokens": (16,), "n": 1}, id="a completion's default"),
        pytest.param(PROMPT | {"max_tokens": 7}, {"max_tokens": (7,)}, id="max_tokens"),
        pytest.param(
            HELLO | {"max_tokens": 7, "max_completion_tokens": 9},
            {"max_tokens": (9,)},
            id="the newer name wins",
        ),
        pytest.param(HELLO | {"temperature": None, "n": None}, {"n": 1}, id="null is absent"),
        pytest.param(
            PROMPT | {"max_tokens": None}, {"max_tokens": (998,)}, id="max_tokens null: all there is room for"
        ),
        pytest.param({"prompt": [5, 6]}, {"prompts": ((5, 6),)}, id="token ids"),
        pytest.param(
            {"prompt": [[5], [6]]}, {"prompts": ((5,), (6,)), "choices": 2}, id="lists of token ids"
        ),
        pytest.param({"prompt": ["a", "b"], "n": 3}, {"choices": 6}, id="prompts times n"),
        pytest.param(PROMPT | {"stop": "x"}, {"stop": ("x",)}, id="one stop string"),
        pytest.param(PROMPT | {"stop": ["x", "y"]}, {"stop": ("x", "y")}, id="stop strings"),
        pytest.param(PROMPT | {"temperature": 0.7, "user": "u"}, {"n": 1}, id="sampling changes nothing"),
        pytest.param(
            HELLO
            | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"stream": True, "include_usage": True, "continuous_usage": True},
            id="stream options",
        ),
        pytest.param(
            INPUT | {"max_output_tokens": 7, "max_tokens": 9, "n": 3},
            {"max_tokens": (7,), "n": 1},
            id="a response knows neither max_tokens nor n",
        ),
        pytest.param(
            INPUT | {"store": True, "text": {"format": {"type": "text"}}, "include": []},
            {"choices": 1},
            id="a response that may be stored and is plain text",
        ),
    ],
)
def test_bodies_that_are_understood(body: dict[str, Any], expected: dict[str, Any]) -> None:
    parsed = parse(body)
    assert {name: getattr(parsed, name) for name in expected} == expected


def test_a_chat_may_use_what_the_context_has_left() -> None:
    parsed = parse(HELLO)
    assert parsed.max_tokens == (1000 - len(parsed.prompts[0]),)


@pytest.mark.parametrize(
    ("response", "messages"),
    [
        pytest.param(INPUT, HELLO["messages"], id="a string is the user's"),
        pytest.param({"input": HELLO["messages"]}, HELLO["messages"], id="messages"),
        pytest.param(
            INPUT | {"instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, *HELLO["messages"]],
            id="instructions are the system's first message",
        ),
        pytest.param(
            {
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
                    },
                    {"role": "user", "content": "Go on."},
                ]
            },
            [
                *HELLO["messages"],
                {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": "Go on."},
            ],
            id="a conversation, with the output of an earlier response",
        ),
    ],
)
def test_a_response_has_the_tokens_of_the_same_chat(response: dict[str, Any], messages: list[Any]) -> None:
    tools = [{"type": "function", "name": "f"}]
    for more in ({}, {"tools": tools}):
        assert parse(response | more).prompts == parse({"messages": messages} | more).prompts


def test_choices_of_one_prompt_differ_by_seed() -> None:
    requests = parse({"prompt": ["a", "b"], "n": 2, "seed": 5}).requests("call")
    assert [(r.id, decode(r.prompt), r.seed) for r in requests] == [
        ("call-0", "a", 5),
        ("call-1", "a", 6),
        ("call-2", "b", 5),
        ("call-3", "b", 6),
    ]


# Refused requests


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        pytest.param({"messages": []}, "messages", "at least one", id="no messages"),
        pytest.param(
            HELLO | {"tools": nested(900)}, "tools", "nested too deeply", id="tools nested beyond writing"
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": nested(900)}]},
            "messages[0].tool_calls",
            "nested too deeply",
            id="calls nested beyond writing",
        ),
        pytest.param(HELLO | {"n": nested(900)}, "n", "integer", id="a number nested beyond showing"),
        pytest.param({"messages": "hi"}, "messages", "list", id="messages that are a string"),
        pytest.param({"messages": ["hi"]}, "messages[0]", "object", id="a message that is a string"),
        pytest.param({"messages": [{"content": "x"}]}, "messages[0].role", "string", id="no role"),
        pytest.param(
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "list of parts",
            id="a number",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
            "text parts only",
            id="an image",
        ),
        pytest.param(
            HELLO | {"continue_final_message": True}, "continue_final_message", "both", id="both flags"
        ),
        pytest.param(HELLO | {"tools": "x"}, "tools", "list", id="tools that are a string"),
        pytest.param({"prompt": None}, "prompt", "string", id="no prompt"),
        pytest.param({"prompt": []}, "prompt", "string", id="an empty list"),
        pytest.param({"prompt": ""}, "prompt[0]", "at least one token", id="an empty prompt"),
        pytest.param({"prompt": [1, "a"]}, "prompt[0]", "token ids", id="ids and text mixed"),
        pytest.param({"prompt": [VOCABULARY]}, "prompt[0]", "token ids", id="an id that does not exist"),
        pytest.param({"prompt": [True]}, "prompt[0]", "token ids", id="true is no id"),
        pytest.param({"prompt": ["a"] * 129}, "prompt", "128", id="too many prompts"),
        pytest.param(PROMPT | {"n": 0}, "n", "at least 1", id="no choices"),
        pytest.param(PROMPT | {"n": 129}, "n", "at most 128", id="too many choices"),
        pytest.param({"prompt": ["a", "b"], "n": 100}, "n", "at most 128", id="too many in all"),
        pytest.param(PROMPT | {"max_tokens": 0}, "max_tokens", "at least 1", id="max_tokens 0"),
        pytest.param(PROMPT | {"max_tokens": "5"}, "max_tokens", "integer", id="max_tokens as a string"),
        pytest.param(
            PROMPT | {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "more than", id="min above max"
        ),
        pytest.param(PROMPT | {"max_tokens": 999}, "prompt", "maximum context length", id="too long in all"),
        pytest.param({"prompt": [5] * 1000}, "prompt", "maximum context length", id="too long a prompt"),
        pytest.param(
            {"messages": [{"role": "user", "content": "a " * 2000}]},
            "messages",
            "maximum context length",
            id="too long a chat",
        ),
        pytest.param(PROMPT | {"stream": "yes"}, "stream", "true or false", id="stream as a string"),
        pytest.param(
            PROMPT | {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream true",
            id="no stream",
        ),
        pytest.param(
            PROMPT | {"stream": True, "stream_options": 1}, "stream_options", "object", id="options"
        ),
        pytest.param(PROMPT | {"stop": ""}, "stop", "non-empty", id="an empty stop string"),
        pytest.param(PROMPT | {"stop": ["x"] * 17}, "stop", "16", id="too many stop strings"),
        pytest.param(PROMPT | {"stop_token_ids": [-1]}, "stop_token_ids", "token ids", id="stop ids"),
        pytest.param(PROMPT | {"logprobs": 0}, "logprobs", "no weights", id="log-probabilities"),
        pytest.param(
            HELLO | {"response_format": {"type": "json_object"}}, "response_format", "plain", id="JSON"
        ),
        pytest.param(HELLO | {"tool_choice": "required"}, "tool_choice", "never calls", id="forced tools"),
        pytest.param(PROMPT | {"best_of": 2}, "best_of", "must be 1", id="best_of"),
        pytest.param(PROMPT | {"model": 5}, "model", "string", id="a model that is a number"),
        pytest.param({"input": None}, "input", "string or a list", id="no input"),
        pytest.param({"input": []}, "input", "at least one", id="an empty input"),
        pytest.param({"input": ["hi"]}, "input[0]", "object", id="an item that is a string"),
        pytest.param(
            {"input": [*HELLO["messages"], {"type": "function_call_output", "output": "x"}]},
            "input[1].type",
            "messages only",
            id="the output of a tool",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "text parts only",
            id="an image in the input",
        ),
        pytest.param(INPUT | {"instructions": []}, "instructions", "string", id="a list of instructions"),
        pytest.param({"input": "a " * 2000}, "input", "maximum context length", id="too long an input"),
        pytest.param(INPUT | {"max_output_tokens": 0}, "max_output_tokens", "at least 1", id="no output"),
        pytest.param(
            INPUT | {"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing", id="stored"
        ),
        pytest.param(INPUT | {"conversation": "c"}, "conversation", "stores nothing", id="a conversation"),
        pytest.param(INPUT | {"prompt": {"id": "p"}}, "prompt", "stores nothing", id="a stored prompt"),
        pytest.param(INPUT | {"background": True}, "background", "no background", id="in the background"),
        pytest.param(
            INPUT | {"text": {"format": {"type": "json_object"}}}, "text.format", "plain text", id="JSON text"
        ),
        pytest.param(
            INPUT | {"include": ["message.output_text.logprobs"]}, "include", "no weights", id="logprobs"
        ),
        pytest.param(INPUT | {"include": 1}, "include", "list", id="include as a number"),
    ],
)
def test_bodies_that_are_refused(body: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence) as refused:
        parse(body)
    assert refused.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"a":"\\ud800"}', b"\xff"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_json(raw)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "prompt",
    "messages",
    "tools",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "seed",
    "stream",
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "stream_options", "echo", "logprobs"]), JSON))
def test_junk_raises_nothing_but_bad_request(junk: dict[str, Any]) -> None:
    refusal = None
    try:
        assert parse(PROMPT | junk).requests("x")
    except BadRequest as refused:
        refusal = refused.body()
    assert refusal is None or refusal["error"]["message"]


# Chat


def test_the_template() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert chat.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    )


def test_half_an_answer_renders_to_what_the_engine_had() -> None:
    user = {"role": "user", "content": "Hello"}
    half = [user, {"role": "assistant", "content": " sun, lake"}]
    resumed = chat.tokens(half, add_generation_prompt=False, continue_final_message=True)
    assert resumed == (*chat.tokens([user]), *encode(" sun, lake"))


def test_tools_are_read() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    assert '"weather"' in chat.render(HELLO["messages"], tools=[tool])


# Stop strings


def transcript(**asked: Any) -> ReplyTranscript:
    return ReplyTranscript(parse(PROMPT | {"max_tokens": 50} | asked))


def feed(one: ReplyTranscript, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
    """The text shown after each token, until the transcript is finished."""
    shown = []
    for token in tokens:
        one.feed(TokenOutput("r", token, FinishReason.STOP if token == EOS else None, 0))
        shown.append(tuple(one.take()))
        if one.finish is not None:
            break
    return [(text, ids) for text, ids in shown]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        pytest.param({"stop": "lake"}, " sun ", id="the stop string is cut off"),
        pytest.param({"stop": " lake"}, " sun", id="with its space"),
        pytest.param({"stop": "n lak"}, " su", id="over two tokens"),
        pytest.param({"stop": ["moon", "lake"]}, " sun ", id="the first that is met"),
        pytest.param({"stop": "lake", "include_stop_str_in_output": True}, " sun lake", id="or kept"),
        pytest.param({"stop": "sun", "min_tokens": 2}, " sun lake moon", id="not before min_tokens"),
        pytest.param({"stop": "star"}, " sun lake moon", id="one that never comes"),
        pytest.param({"stop_token_ids": encode(" lake")}, " sun", id="a token id"),
    ],
)
def test_stop_strings(asked: dict[str, Any], text: str) -> None:
    one = transcript(**asked)
    shown = feed(one, [*encode(" sun lake moon"), EOS])
    assert "".join(piece for piece, _ in shown) == text
    assert one.finish is FinishReason.STOP


@pytest.mark.parametrize("looks", [1, 2, 3, 5], ids=lambda every: f"every {every} tokens")
def test_when_somebody_looks_makes_no_difference(looks: int) -> None:
    one = transcript(stop="sun", min_tokens=3)
    text = ""
    for count, token in enumerate(encode(" sun lake moon sun sea"), start=1):
        one.feed(TokenOutput("r", token, None, 0))
        text += one.take().text if count % looks == 0 or one.finish is not None else ""
    assert (text, one.stop_reason, one.tokens) == (" sun lake moon ", "sun", 4)


def test_what_may_become_a_stop_string_is_held_back_in_whole_tokens() -> None:
    one = transcript(stop="lake road")
    sun, lake, moon = encode(" sun lake moon")
    assert feed(one, [sun, lake, moon, EOS]) == [
        (" sun", (sun,)),
        ("", ()),
        (" lake moon", (lake, moon)),
        ("", (EOS,)),
    ]


@given(
    st.lists(st.sampled_from([" sun", " lake", ".", " moon"]), max_size=12),
    st.lists(st.text("sun lake.", min_size=1, max_size=6), max_size=3),
)
def test_streaming_shows_what_cutting_the_whole_text_would(words: list[str], stops: list[str]) -> None:
    one = transcript(stop=stops)
    shown = feed(one, [*encode("".join(words)), EOS])
    streamed = "".join(text for text, _ in shown)
    whole = "".join(words)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    if not cuts:
        assert streamed == whole
    else:
        # Tokens come one by one: a stop that ends earlier wins over one that begins earlier.
        assert whole.startswith(streamed)
        assert any(whole.startswith(stop, len(streamed)) for stop in stops)
    for end in range(len(shown)):
        ids = [token for _, tokens in shown[:end] for token in tokens]
        assert decode(ids, skip_special=True) == "".join(text for text, _ in shown[:end])


# Habits of real engines


def styled(style: Style, **asked: Any) -> ReplyTranscript:
    return ReplyTranscript(parse(PROMPT | {"max_tokens": 50} | asked), style)


def test_ids_run_ahead_of_text_that_is_held_for_stop_strings() -> None:
    one = styled(Style(holds_text=True), stop=["zqzqzq"])
    sun, lake, moon = encode(" sun lake moon")
    assert feed(one, [sun, lake, moon, EOS]) == [
        ("", (sun,)),
        (" sun", (lake,)),
        (" lake", (moon,)),
        (" moon", (EOS,)),
    ]


@pytest.mark.parametrize(
    ("asked", "text", "reason"),
    [
        pytest.param({"stop": ["lake"]}, " sun ", "lake", id="within a token"),
        pytest.param({"stop": ["n lak", "zqzqzq"]}, " su", "n lak", id="over two tokens"),
        pytest.param({"stop": ["lake"], "include_stop_str_in_output": True}, " sun lake", "lake", id="kept"),
        pytest.param({"stop": ["sun"], "min_tokens": 2}, " sun lake moon", None, id="before min_tokens"),
    ],
)
def test_a_stop_string_ends_held_text(asked: dict[str, Any], text: str, reason: str | None) -> None:
    one = styled(Style(holds_text=True), **asked)
    shown = feed(one, [*encode(" sun lake moon"), EOS])
    assert ("".join(piece for piece, _ in shown), one.stop_reason) == (text, reason)
    assert one.finish is FinishReason.STOP


@given(
    st.lists(st.sampled_from([" sun", " lake", ".", " moon"]), max_size=12),
    st.lists(st.text("sun lake.", min_size=1, max_size=6), max_size=3),
    st.integers(1, 4),
)
def test_a_style_changes_when_text_is_sent_and_not_which(
    words: list[str], stops: list[str], tokens_per_event: int
) -> None:
    tokens = [*encode("".join(words)), EOS]
    plain = feed(styled(Style(), stop=stops), tokens)
    held = feed(styled(Style(False, True, tokens_per_event), stop=stops), tokens)
    assert "".join(text for text, _ in held) == "".join(text for text, _ in plain)
    ids = [token for _, some in held for token in some]
    assert ids == [token for _, some in plain for token in some]


def test_an_event_has_several_tokens() -> None:
    one = styled(Style(tokens_per_event=2))
    sun, lake, moon = encode(" sun lake moon")
    assert feed(one, [sun, lake, moon, EOS]) == [
        ("", ()),
        (" sun lake", (sun, lake)),
        ("", ()),
        (" moon", (moon, EOS)),
    ]


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (" def f():\n    ", "def f():"),
        ([{"type": "text", "text": " a "}, {"type": "text", "text": "b "}], "a b"),
        (None, None),
        ([{"type": "image_url"}], [{"type": "image_url"}]),
    ],
    ids=["text", "parts", "none", "an image"],
)
def test_a_template_trims_messages(content: Any, read: Any) -> None:
    message = {"role": "assistant", "content": content}
    body = {"messages": [message], "continue_final_message": True}
    assert Style(trims=True).read(body) == body | {"messages": [message | {"content": read}]}
    assert Style().read(body) is body


def test_an_event_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="tokens_per_event must be at least 1"):
        Style(tokens_per_event=0)
