"""A stream that was broken, anywhere and several times, is the stream that was not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.http.sse import EventBuffer
from lb.stream.first_request import Strip, prepare
from lb.stream.resume_request import ResumeMethod, resume
from lb.stream.resume_rules import NotResumable, Reason
from lb.stream.stream_merge import StreamMerger, closing, stripper
from lb.stream.transcript import StreamProgress, Transcript
from tests.unit.stream_engines import MODEL, stream

LIMIT = 1 << 20
OURS, VLLM, SGLANG = EngineKind.SKYSERVE, EngineKind.VLLM, EngineKind.SGLANG
LLAMACPP, TGI = EngineKind.LLAMACPP, EngineKind.TGI
EVERYBODY = [(kind, path) for kind in (OURS, VLLM, SGLANG, LLAMACPP) for path in (CHAT, COMPLETIONS)]
EVERYBODY.append((TGI, COMPLETIONS))
IDS = [f"{kind.value}-{path.rpartition(b'/')[2].decode()}" for kind, path in EVERYBODY]


def a_request(path: bytes, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me about the lake."}]}
    else:
        asked = {"prompt": "The lake is"}
    return {"model": MODEL, "stream": True, **asked, **more}


def chunks(events: bytes) -> list[dict[str, Any]]:
    found = [block for block in events.split(b"\n\n") if block.startswith(b"data: ")]
    return [orjson.loads(block[6:]) for block in found if block != b"data: [DONE]"]


def text_of(events: bytes) -> str:
    choices = [choice for chunk in chunks(events) for choice in chunk["choices"]]
    return "".join(
        (choice.get("delta") or choice).get("content") or choice.get("text") or "" for choice in choices
    )


def summary(events: bytes) -> dict[str, Any]:
    """What must be the same, however often the stream broke."""
    seen = chunks(events)
    choices = [choice for chunk in seen for choice in chunk["choices"]]
    deltas = [choice.get("delta", {}) for choice in choices]
    last = [chunk["usage"] for chunk in seen if chunk.get("usage")][-1:]
    return {
        "text": text_of(events),
        "signatures": len({(chunk["id"], chunk["created"]) for chunk in seen}),
        "kinds": {(chunk["object"], chunk["model"]) for chunk in seen},
        "fingerprints": {chunk.get("system_fingerprint") for chunk in seen},
        "roles": [delta["role"] for delta in deltas if delta.get("role")],
        "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [
            {name: one[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            for one in last
        ],
        "done": events.count(b"data: [DONE]"),
        "ends": events.endswith(b"data: [DONE]\n\n"),
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "prompt_ids": [ids for one in (*seen, *choices) if (ids := one.get("prompt_token_ids"))],
    }


class Client:
    """A client of a load balancer whose targets die after that many bytes."""

    def __init__(
        self, kind: EngineKind, path: bytes, request: dict[str, Any], mode: Continue, burst: int = 1
    ) -> None:
        self.kind, self.path, self.request, self.mode = kind, path, request, mode
        self.burst = burst
        self.got = b""
        self.ways: list[ResumeMethod] = []

    def run(self, cuts: list[int], pieces: int) -> bytes:
        """The first targets die after `cuts` bytes of their responses, which come `pieces` bytes at a time."""
        ready = prepare(self.path, self.request, self.kind, self.mode)
        first = b"".join(stream(self.kind, self.path, {**self.request, **ready.fields}, 0, self.burst))
        strip, gate, journal = (
            stripper(ready.strip),
            EventBuffer(LIMIT),
            Transcript(chunked=False, limit_bytes=LIMIT),
        )
        died = bool(cuts) and cuts[0] < len(first)
        for piece in split(first[: cuts[0]] if died else first, pieces):
            whole = gate.feed(piece)
            journal.add(whole)
            self.got += strip(whole) if strip is not None else whole
        return self.got if not died else self.goes_on(journal.read(), cuts[1:], pieces)

    def goes_on(self, sofar: StreamProgress, cuts: list[int], pieces: int) -> bytes:
        for leg in range(1, 9):
            end = closing(self.path, self.request, sofar, self.kind)
            if end is not None:
                return self.got + end
            resumption = resume(self.path, self.request, sofar, self.kind, self.mode)
            self.ways.append(resumption.way)
            answer = b"".join(
                stream(self.kind, resumption.path, orjson.loads(resumption.body), leg, self.burst)
            )
            stitcher = StreamMerger(self.path, self.request, sofar, resumption, LIMIT)
            died = bool(cuts) and cuts[0] < len(answer)
            for piece in split(answer[: cuts[0]] if died else answer, pieces):
                self.got += stitcher.feed(piece)
            if not died:
                return self.got
            sofar, cuts = stitcher.progress(), cuts[1:]
        raise AssertionError("it never ends")


def split(payload: bytes, size: int) -> list[bytes]:
    return [payload[at : at + size] for at in range(0, len(payload), size)]


def undisturbed(kind: EngineKind, path: bytes, request: dict[str, Any]) -> bytes:
    return b"".join(stream(kind, path, request, 0))


REQUESTS = st.fixed_dictionaries(
    {"seed": st.integers(0, 50)},
    optional={
        "max_tokens": st.integers(1, 40),
        "min_tokens": st.just(1),
        "stop": st.sampled_from([[" the l", " zone"], [" s"], ".", [" be", " li"]]),
        "ignore_eos": st.just(True),
        "stream_options": st.sampled_from(
            [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        ),
        "return_token_ids": st.just(True),
    },
)


@pytest.mark.parametrize(("kind", "path"), EVERYBODY, ids=IDS)
@settings(max_examples=25)
@given(
    more=REQUESTS,
    cuts=st.lists(st.integers(0, 6000), min_size=1, max_size=4),
    pieces=st.sampled_from([7, 64, 1000, 1 << 20]),
    burst=st.integers(1, 3),
)
@example(
    more={"seed": 32, "stop": [" the l", " zone"], "min_tokens": 1, "return_token_ids": True},
    cuts=[273],
    pieces=7,
    burst=1,
)
def test_a_broken_stream_is_the_undisturbed_one(
    kind: EngineKind, path: bytes, more: dict[str, Any], cuts: list[int], pieces: int, burst: int
) -> None:
    if kind in (VLLM, TGI):  # they do not cut at tokens: see the test of stop strings below
        more.pop("stop", None)
    if ("stop" in more or burst > 1) and not counts_exactly(kind, more):  # a limit would be passed
        more = {name: value for name, value in more.items() if name not in ("ignore_eos", "max_tokens")}
        more["max_tokens"] = 400
    if more.get("ignore_eos"):
        more["max_tokens"] = more.get("max_tokens", 40)
    if more.get("return_token_ids") and not (
        kind in (OURS, VLLM) or (kind is SGLANG and path == COMPLETIONS)
    ):
        del more["return_token_ids"]
    request = a_request(path, **more)
    expected = summary(undisturbed(kind, path, request))
    client = Client(kind, path, request, Continue.AUTO, burst)
    try:
        got = summary(client.run(cuts, pieces))
    except NotResumable as refused:
        # The client has ids whose text the engine holds back for a stop string. Made again, they would be others.
        has = summary(client.got)
        if refused.reason is not Reason.SAMPLED or kind is not SGLANG or has["text"] or not has["ids"]:
            raise
        return
    if not counts_exactly(kind, more):
        got["usage"] = expected["usage"] = []
    if "stop" in more and kind is not OURS:
        # The ids of the text that was held back have been sent, and are made again.
        got["ids"] = expected["ids"] = []
    if kind is SGLANG and got["usage"] != expected["usage"]:
        # The end token is counted, and only then the end is sent: between the two it is made, and counted, again.
        assert completion_tokens(got) == completion_tokens(expected) + 1
        got["usage"] = expected["usage"]
    assert got == expected


def completion_tokens(one: dict[str, Any]) -> int:
    (usage,) = one["usage"]
    return int(usage["completion_tokens"])


def counts_exactly(kind: EngineKind, more: dict[str, Any]) -> bool:
    """An engine that does not count along reports no number of tokens, and the text that is held back is counted twice."""
    return kind in (OURS, VLLM) or (kind is SGLANG and "stop" not in more)


@pytest.mark.parametrize(("kind", "path"), EVERYBODY, ids=IDS)
def test_cut_around_every_event(kind: EngineKind, path: bytes) -> None:
    mode = Continue.AUTO
    request = a_request(path, max_tokens=6, min_tokens=6)
    events = stream(kind, path, request, 0)
    ready = prepare(path, request, kind, mode)
    ends = accumulate(map(len, stream(kind, path, {**request, **ready.fields}, 0)))
    expected = summary(b"".join(events))
    assert len(expected["text"].split()) >= 3
    for cut in sorted({max(0, end + by) for end in (0, *ends) for by in (-40, -1, 0, 1)}):
        assert summary(Client(kind, path, request, mode).run([cut], 50)) == expected, cut


def test_cut_at_every_byte() -> None:
    request = a_request(CHAT, max_tokens=4, min_tokens=4, stream_options={"include_usage": True})
    whole = undisturbed(OURS, CHAT, request)
    for cut in range(len(whole) + 200):  # longer by the ids that were not requested
        assert summary(Client(OURS, CHAT, request, Continue.AUTO).run([cut], 50)) == summary(whole), cut


@pytest.mark.parametrize("kind", [OURS, VLLM, SGLANG, LLAMACPP], ids=["ours", "vllm", "sglang", "llamacpp"])
@settings(max_examples=25)
@given(
    seed=st.integers(0, 50),
    stop=st.lists(st.text("aeglnost .", min_size=1, max_size=4), min_size=1, max_size=2),
    cuts=st.lists(st.integers(0, 4000), min_size=1, max_size=3),
)
def test_stop_strings_that_fall_within_tokens(
    kind: EngineKind, seed: int, stop: list[str], cuts: list[int]
) -> None:
    request = a_request(CHAT, seed=seed, stop=stop, max_tokens=60)
    client = Client(kind, CHAT, request, Continue.AUTO)
    got, expected = summary(client.run(cuts, 300)), summary(undisturbed(kind, CHAT, request))
    assert (len(got["finishes"]), len(got["roles"]), got["done"]) == (1, 1, 1)
    if kind is OURS or not client.ways:
        assert got == expected


def test_with_stop_strings_a_stream_that_samples_goes_on_from_what_the_client_has_seen() -> None:
    request = a_request(CHAT, max_tokens=30, min_tokens=20, stop="zzzz")
    sofar = broken(VLLM, CHAT, request, 9)
    resumption = resume(CHAT, request, sofar, VLLM)
    assert resumption.way is ResumeMethod.TEXT
    assert orjson.loads(resumption.body)["messages"][-1] == {"role": "assistant", "content": sofar.text}


@pytest.mark.parametrize(
    ("kind", "path", "more", "mode", "way"),
    [
        pytest.param(OURS, CHAT, {}, Continue.AUTO, ResumeMethod.TOKENS, id="our chat"),
        pytest.param(OURS, COMPLETIONS, {}, Continue.AUTO, ResumeMethod.TOKENS, id="our completion"),
        pytest.param(
            OURS, CHAT, {"stop": "zzz"}, Continue.AUTO, ResumeMethod.TOKENS, id="ours with stop strings"
        ),
        pytest.param(VLLM, CHAT, {}, Continue.AUTO, ResumeMethod.TOKENS, id="vllm chat"),
        pytest.param(
            VLLM,
            CHAT,
            {"tools": [{"type": "function"}]},
            Continue.AUTO,
            ResumeMethod.TEXT,
            id="vllm with tools",
        ),
        pytest.param(SGLANG, CHAT, {}, Continue.AUTO, ResumeMethod.TEXT, id="sglang chat"),
        pytest.param(SGLANG, COMPLETIONS, {}, Continue.AUTO, ResumeMethod.TOKENS, id="sglang completion"),
        pytest.param(LLAMACPP, CHAT, {}, Continue.AUTO, ResumeMethod.TEXT, id="llama.cpp chat"),
        pytest.param(TGI, COMPLETIONS, {}, Continue.AUTO, ResumeMethod.TEXT, id="tgi completion"),
    ],
)
def test_the_way_taken(
    kind: EngineKind, path: bytes, more: dict[str, Any], mode: Continue, way: ResumeMethod
) -> None:
    request = a_request(path, max_tokens=30, min_tokens=20, **more)
    whole = undisturbed(kind, path, request)
    client = Client(kind, path, request, mode)
    assert text_of(client.run([len(whole) // 3, len(whole) // 4, len(whole) // 4], 100)) == text_of(whole)
    assert client.ways == [way] * len(client.ways)
    assert len(client.ways) == 3


# Details of the seam


def broken(kind: EngineKind, path: bytes, request: dict[str, Any], events: int) -> StreamProgress:
    """A stream that ended after that many events."""
    ready = prepare(path, request, kind)
    journal = Transcript(chunked=False, limit_bytes=LIMIT)
    for one in stream(kind, path, {**request, **ready.fields}, 0)[:events]:
        journal.add(one)
    return journal.read()


def test_the_first_prompt_is_counted_and_the_first_cache() -> None:
    request = a_request(CHAT, max_tokens=20, min_tokens=20, stream_options={"include_usage": True})
    sofar = broken(OURS, CHAT, request, 6)
    stitcher = StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, OURS), LIMIT)
    usage = {"prompt_tokens": 999, "completion_tokens": 15, "total_tokens": 1014}
    details = {"prompt_tokens_details": {"cached_tokens": 900}}
    told = chunks(
        stitcher.feed(b"data: " + orjson.dumps({"choices": [], "usage": usage | details}) + b"\n\n")
    )
    assert sofar.prompt_tokens is not None
    assert told[0]["usage"] == {
        "prompt_tokens": sofar.prompt_tokens,
        "completion_tokens": 20,
        "total_tokens": sofar.prompt_tokens + 20,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b'data: {"error":{"message":"engine died"}}\n\n', id="an error"),
        pytest.param(
            b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n', id="an abort"
        ),
    ],
)
def test_an_engine_that_gives_up_is_not_passed_on(event: bytes) -> None:
    request = a_request(CHAT, max_tokens=20, min_tokens=20)
    sofar = broken(OURS, CHAT, request, 6)
    stitcher = StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, OURS), LIMIT)
    assert stitcher.feed(event + b"data: [DONE]\n\n") == b""
    assert stitcher.over
    assert stitcher.error == event
    assert stitcher.progress() == sofar, "the next target can go on from here"


def test_a_tool_call_after_the_seam_is_passed_on() -> None:
    request = a_request(CHAT, tools=[{"type": "function"}], max_tokens=30)
    sofar = broken(VLLM, CHAT, request, 4)
    stitcher = StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, VLLM), LIMIT)
    call = [{"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": ""}}]
    chunk = {"id": "other", "choices": [{"index": 0, "delta": {"tool_calls": call}, "finish_reason": None}]}
    (told,) = chunks(stitcher.feed(b"data: " + orjson.dumps(chunk) + b"\n\n"))
    assert told["choices"][0]["delta"] == {"tool_calls": call}
    assert told["id"] == sofar.id
    assert stitcher.progress().tool_call


def test_what_cannot_be_read_is_passed_on_and_ends_the_chances() -> None:
    request = a_request(CHAT, max_tokens=20, min_tokens=20)
    sofar = broken(OURS, CHAT, request, 6)
    stitcher = StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, OURS), LIMIT)
    assert stitcher.feed(b"data: [1,\n\n") == b"data: [1,\n\n"
    assert stitcher.progress().strange


def test_a_stream_beyond_its_limit_ends_but_is_not_continued_again() -> None:
    request = a_request(CHAT, max_tokens=20, min_tokens=20)
    sofar = broken(OURS, CHAT, request, 6)
    stitcher = StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, OURS), limit_bytes=10)
    assert not stitcher.progress().done
    assert stitcher.progress().lost


# The end of a stream that was complete


@pytest.mark.parametrize(
    ("events", "asked", "finishes", "usage"),
    [
        pytest.param(-1, {"include_usage": True}, 0, 0, id="only the end mark is missing"),
        pytest.param(-2, {"include_usage": True}, 0, 1, id="usage and end mark are missing"),
        pytest.param(-1, {}, 0, 0, id="no usage was asked for"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
def test_closing(path: bytes, events: int, asked: dict[str, Any], finishes: int, usage: int) -> None:
    request = a_request(path, max_tokens=8, min_tokens=8, **({"stream_options": asked} if asked else {}))
    whole = undisturbed(VLLM, path, request)
    end = closing(path, request, broken(VLLM, path, request, events), VLLM)
    assert end is not None
    assert end.endswith(b"data: [DONE]\n\n")
    assert sum(1 for chunk in chunks(end) for choice in chunk["choices"]) == finishes
    assert [chunk["usage"] for chunk in chunks(end)] == ([chunks(whole)[-1]["usage"]] if usage else [])


def test_an_answer_that_may_not_get_longer_is_ended() -> None:
    request = a_request(CHAT, max_tokens=3)
    sofar = StreamProgress(id="x", role_sent=True, text=" a b c", tokens=3, output_ids=None)
    end = closing(CHAT, request, sofar, VLLM)
    assert end is not None
    (last,) = chunks(end)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert (last["id"], last["object"]) == ("x", "chat.completion.chunk")


@pytest.mark.parametrize(
    ("sofar", "end"),
    [
        pytest.param(StreamProgress(text="a", tokens=1), None, id="something is left to be made"),
        pytest.param(StreamProgress(), None, id="nothing has been said"),
        pytest.param(
            StreamProgress(finish_reason="stop", strange=True), None, id="a stream that cannot be read"
        ),
        pytest.param(StreamProgress(finish_reason="stop", lost=True), None, id="a stream that is lost"),
        pytest.param(StreamProgress(finish_reason="stop", failed=True), None, id="a stream that has failed"),
        pytest.param(StreamProgress(finish_reason="stop", done=True), b"", id="nothing is missing"),
    ],
)
def test_closing_what_is_not_to_be_closed(sofar: StreamProgress, end: bytes | None) -> None:
    assert closing(CHAT, a_request(CHAT, max_tokens=5), sofar, VLLM) == end


def test_one_of_several_choices_is_not_the_answer() -> None:
    assert closing(CHAT, a_request(CHAT, n=2), StreamProgress(finish_reason="stop"), VLLM) is None


# Token ids that were not requested

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"token_ids":[1,2]', ',"token_ids":[1]', '\\",\\"token_ids\\":[1]', 'token_ids"', '{"token_ids":null}']
)


@given(text=TEXTS, ids=st.lists(st.integers(0, 2**31), max_size=5), spaced=st.booleans(), first=st.booleans())
@example(text="", ids=[], spaced=True, first=True)
def test_stripping_takes_the_ids_and_nothing_else(
    text: str, ids: list[int], spaced: bool, first: bool
) -> None:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    without = {"id": "x", "choices": [choice]}
    told = {"token_ids": ids, **choice} if first else {**choice, "token_ids": ids}
    chunk = {"id": "x", "prompt_token_ids": None, "choices": [told], "prompt_token_ids ": 1}
    assert stripped(Strip.IDS, [chunk], spaced) == [without | {"prompt_token_ids ": 1}]


@given(text=TEXTS, spaced=st.booleans(), details=st.booleans(), together=st.booleans())
def test_stripping_takes_the_counts_and_nothing_else(
    text: str, spaced: bool, details: bool, together: bool
) -> None:
    one = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}}], "z": 1}
    usage = {"prompt_tokens": 3, **({"prompt_tokens_details": {"cached_tokens": 1}} if details else {})}
    last = {"id": "x", "choices": [], "usage": usage}
    counted, without = one | {"usage": usage}, one | {"usage": None}
    events = [one, counted, last] if together else [counted]
    assert stripped(Strip.COUNTS, events, spaced) == ([one, without, last] if together else [without])
    assert stripped(Strip.USAGE, events, spaced) == ([one, without] if together else [without])
    assert stripped(Strip.USAGE, [last], spaced) == []


def stripped(strip: Strip, told: list[dict[str, Any]], spaced: bool) -> list[dict[str, Any]]:
    dump = (lambda chunk: json.dumps(chunk).encode()) if spaced else orjson.dumps
    take = stripper(strip)
    assert take is not None
    return chunks(take(b": note\n\n" + b"".join(b"data: " + dump(chunk) + b"\n\n" for chunk in told)))


@pytest.mark.parametrize("strip", [Strip.IDS, Strip.COUNTS, Strip.USAGE])
def test_stripping_leaves_other_bytes_as_they_are(strip: Strip) -> None:
    events = b': ping\n\ndata: {"a": "\\"token_ids\\":[1]"}\n\ndata: [DONE]\n\n'
    take = stripper(strip)
    assert take is not None
    assert take(events) is events


def test_what_need_not_be_stripped_is_not_looked_at() -> None:
    assert stripper(Strip.NOTHING) is None


def test_an_event_that_is_nothing_but_counts_leaves_no_byte() -> None:
    take = stripper(Strip.USAGE)
    assert take is not None
    assert take(b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n') == b""


def test_an_event_that_never_ends_breaks_the_leg() -> None:
    request = a_request(CHAT)
    merger = StreamMerger(
        CHAT, request, StreamProgress(), resume(CHAT, request, StreamProgress(), VLLM), 1000
    )
    assert merger.feed(b"data: " + b"x" * 900) == b""
    assert not merger.over
    assert merger.feed(b"x" * 200) == b""
    assert merger.over
    assert b"event_too_long" in merger.error


# The invariant of a seam


def a_leg(sofar: StreamProgress, **more: Any) -> StreamMerger:
    request = a_request(CHAT, temperature=0, max_tokens=20, **more)
    return StreamMerger(CHAT, request, sofar, resume(CHAT, request, sofar, VLLM), LIMIT)


def said(text: str, ids: list[int] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    return b"data: " + orjson.dumps({"id": "y", "choices": [choice | more]}) + b"\n\n"


# "ab", " ", "cd". With a stop string of three characters two more have been made; it goes on behind the second token.
SEEN = StreamProgress(
    id="x",
    role_sent=True,
    text="ab cd",
    tokens=3,
    events=4,
    context_ids=(8,),
    output_ids=(1, 2, 3),
    positions=(1, 2, 1, 2, 3, 1, 3, 5, 1),
)


@pytest.mark.parametrize(
    ("more", "events", "text", "refused"),
    [
        pytest.param({}, [said("ef", [4], prompt_token_ids=[8, 1, 2, 3])], "ef", None, id="the rest"),
        pytest.param(
            {}, [said("ef", [4], prompt_token_ids=[8, 1, 2])], "", Reason.MISMATCH, id="another prompt"
        ),
        pytest.param({}, [said("e", list(range(18)))], "", Reason.MISMATCH, id="more tokens than were left"),
        pytest.param({"stop": "zzz"}, [said("ef", [3])], "ef", None, id="nothing to repeat"),
        pytest.param(
            {"stop": "zz"}, [said("d", [3]), said("ef", [4])], "ef", None, id="what it repeats is taken off"
        ),
        pytest.param({"stop": "zz"}, [said("def", [3, 4])], "ef", None, id="part of an event"),
        pytest.param({"stop": "zz"}, [said("x", [3])], "", Reason.MISMATCH, id="another text"),
        pytest.param({"stop": "zz"}, [said("", [3], "stop")], "", Reason.MISMATCH, id="an early end"),
    ],
)
def test_a_leg_that_is_no_continuation_is_refused(
    more: dict[str, Any], events: list[bytes], text: str, refused: Reason | None
) -> None:
    merger = a_leg(SEEN, **more)
    got = b"".join(map(merger.feed, events))
    assert text_of(got) == text
    assert merger.refused is refused
    assert merger.over is (refused is not None)


@pytest.mark.parametrize(
    ("prompt_ids", "inexact"),
    [
        pytest.param([8, 1, 2, 3], None, id="the very tokens"),
        pytest.param([8, 1, 2], None, id="the last one is made again"),
        pytest.param([8, 5, 3], Reason.RETOKENIZED, id="others"),
        pytest.param([7, 1, 2, 3], Reason.RETOKENIZED, id="another prompt"),
        pytest.param(None, Reason.RETOKENIZED, id="not reported"),
    ],
)
@pytest.mark.parametrize(
    ("mode", "temperature"),
    [
        pytest.param(Continue.AUTO, 1.0, id="sampled"),
        pytest.param(Continue.AUTO, 0, id="greedy"),
        pytest.param(Continue.EXACT, 1.0, id="sampled, exact"),
        pytest.param(Continue.EXACT, 0, id="greedy, exact"),
    ],
)
def test_ids_prove_that_text_was_read_into_the_same_tokens(
    prompt_ids: list[int] | None, inexact: Reason | None, mode: Continue, temperature: float
) -> None:
    """A greedy stream of other tokens would be another one, so it ends."""
    goes_on = mode is Continue.AUTO and temperature > 0
    request = a_request(CHAT, temperature=temperature, tools=[{"type": "function"}])
    resumption = resume(CHAT, request, SEEN, VLLM, mode)
    assert resumption.way is ResumeMethod.TEXT
    merger = StreamMerger(CHAT, request, SEEN, resumption, LIMIT)
    delta = {"index": 0, "delta": {"content": "ef"}, "finish_reason": None, "token_ids": [4]}
    event = {"id": "y", "choices": [delta], "prompt_token_ids": prompt_ids}
    got = merger.feed(b"data: " + orjson.dumps(event) + b"\n\n")
    assert merger.inexact is (inexact if goes_on else None)
    assert merger.refused is (None if goes_on else inexact)
    assert text_of(got) == ("" if merger.refused else "ef")
    if inexact is None:
        assert list(merger.progress().output_ids or ()) == [*(prompt_ids or ())[1:], 4]


def test_a_stop_string_across_a_seam_of_text_ends_the_response() -> None:
    request = a_request(CHAT, stop=["d ef"])
    resumption = resume(CHAT, request, SEEN, EngineKind.SGLANG)
    merger = StreamMerger(CHAT, request, SEEN, resumption, LIMIT)
    deltas = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in (" e", "fg", "h")]
    told = [merger.feed(b"data: " + orjson.dumps({"choices": [one]}) + b"\n\n") for one in deltas]
    assert [text_of(one) for one in told] == [" e", "", ""]
    assert [one["finish_reason"] for one in chunks(told[1])[0]["choices"]] == ["stop"]
    assert chunks(told[1])[0]["choices"][0]["stop_reason"] == "d ef"
    assert told[1].endswith(b"data: [DONE]\n\n")
    assert merger.over


def test_the_prompt_that_vllm_sends_as_text_is_taken_off() -> None:
    text = "a text that is long enough to be known"
    sofar = replace(SEEN, text=text, positions=(3, len(text), 0))
    merger = a_leg(sofar)
    assert text_of(merger.feed(said("user says: a text, please" + text + "é and", [4]))) == "é and"
