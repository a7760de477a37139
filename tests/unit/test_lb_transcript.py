"""The journal knows what the client has received, in the words of every engine, and stays within its bound."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.http.body_framing import LAST_CHUNK, chunk
from lb.stream.kept_events import KeptEvents, PlainEvents
from lb.stream.transcript import START, ProgressTally, StreamProgress, Transcript
from tests.unit.stream_engines import MODEL, stream

KEPT: list[Callable[[], KeptEvents]] = [PlainEvents]
with suppress(ImportError):
    from lb.proxy._fast_path import PackedEvents

    KEPT.append(PackedEvents)
LIMIT = 1 << 20
ASKED: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 12, "min_tokens": 12}
HELLO = ASKED | {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = ASKED | {"prompt": "Hello"}


def event(chunk: Any) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def journal_of(
    *pieces: bytes, chunked: bool = False, limit_bytes: int = LIMIT, kept: KeptEvents | None = None
) -> Transcript:
    journal = Transcript(chunked, limit_bytes, kept=kept)
    for piece in pieces:
        journal.add(piece)
    return journal


def told(*chunks: dict[str, Any]) -> StreamProgress:
    return journal_of(*map(event, chunks)).read()


def delta(**fields: Any) -> dict[str, Any]:
    """A chat chunk with this delta; ids and finish reason go to its choice."""
    own = {name: fields.pop(name) for name in ("token_ids", "finish_reason", "index") if name in fields}
    return {"id": "x", "choices": [{"index": 0, "delta": fields, **own}]}


@pytest.mark.parametrize(
    ("kind", "path", "body", "ids"),
    [
        pytest.param(EngineKind.SKYSERVE, CHAT, HELLO, True, id="our chat"),
        pytest.param(EngineKind.SKYSERVE, COMPLETIONS, PROMPT, True, id="our completion"),
        pytest.param(EngineKind.VLLM, CHAT, HELLO, True, id="vllm chat"),
        pytest.param(EngineKind.VLLM, COMPLETIONS, PROMPT, True, id="vllm completion"),
        pytest.param(EngineKind.SGLANG, COMPLETIONS, PROMPT, True, id="sglang completion"),
        pytest.param(EngineKind.SGLANG, CHAT, HELLO, False, id="sglang chat"),
        pytest.param(EngineKind.LLAMACPP, CHAT, HELLO, False, id="llama.cpp chat"),
        pytest.param(EngineKind.TGI, COMPLETIONS, PROMPT, False, id="tgi completion"),
    ],
)
def test_every_engine_is_understood(kind: EngineKind, path: bytes, body: dict[str, Any], ids: bool) -> None:
    asked = body | {"stream_options": {"include_usage": True}} | ({"return_token_ids": True} if ids else {})
    events = stream(kind, path, asked, leg=3)
    sofar = journal_of(*events).read()
    for kept in KEPT:
        assert journal_of(*map(chunk, filter(None, events)), chunked=True, kept=kept()).read() == sofar
    assert (sofar.created, sofar.model, sofar.role_sent) == (1003, MODEL, path == CHAT)
    assert (sofar.tokens, sofar.finish_reason, sofar.done, sofar.usage_reported) == (12, "length", True, True)
    assert len(sofar.text.split()) > 8
    assert not sofar.silent
    assert (sofar.strange, sofar.failed, sofar.lost) == (False, False, False)
    if ids:
        assert sofar.context_ids is not None
        assert sofar.output_ids is not None
        assert sofar.prompt_tokens == len(sofar.context_ids)
        assert len(sofar.output_ids) == 12
    half = journal_of(*events[:6]).read()
    assert sofar.text.startswith(half.text)
    assert 0 < half.tokens < 12
    assert not half.done
    assert half.finish_reason is None


@given(
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    framed=st.booleans(),
    limit=st.sampled_from([3000, LIMIT]),
    kept=st.sampled_from(KEPT),
)
def test_neither_cuts_nor_framing_nor_folding_change_what_is_read(
    cuts: list[int], framed: bool, limit: int, kept: Callable[[], KeptEvents]
) -> None:
    events = stream(EngineKind.VLLM, CHAT, HELLO | {"return_token_ids": True}, leg=1)
    raw = b"".join(map(chunk, events)) + LAST_CHUNK if framed else b"".join(events)
    marks = sorted({min(cut, len(raw)) for cut in cuts})
    pieces = [raw[start:end] for start, end in zip([0, *marks], [*marks, len(raw)], strict=True)]
    journal = journal_of(*pieces, chunked=framed, limit_bytes=limit, kept=kept())
    assert journal.read() == journal_of(*events).read()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param(
            [delta(role="assistant", content="")], {"role_sent": True, "silent": True}, id="role only"
        ),
        pytest.param([delta(reasoning_content="hm")], {"reasoning": True, "silent": False}, id="reasoning"),
        pytest.param([delta(reasoning="hm")], {"reasoning": True}, id="reasoning by its newer name"),
        pytest.param(
            [delta(tool_calls=[{"index": 0}])], {"tool_call": True, "silent": False}, id="a tool call"
        ),
        pytest.param([delta(function_call={"name": "f"})], {"tool_call": True}, id="a function call"),
        pytest.param(
            [delta(content="a", tool_calls=None)], {"tool_call": False, "text": "a"}, id="no tool call"
        ),
        pytest.param(
            [delta(audio={"id": "1"})], {"strange": True, "silent": False}, id="a delta of no known kind"
        ),
        pytest.param([delta(content="a", index=1)], {"strange": True}, id="another choice"),
        pytest.param([{"choices": [{}, {}]}], {"strange": True}, id="two choices at once"),
        pytest.param([{"choices": ["a"]}], {"strange": True}, id="a choice that is no object"),
        pytest.param([delta(content=["a"])], {"strange": True}, id="text that is no text"),
        pytest.param([delta(content="a", token_ids=["b"])], {"strange": True}, id="ids that are no numbers"),
        pytest.param([{"error": {"message": "died"}}], {"failed": True}, id="an error"),
        pytest.param([delta(finish_reason="abort")], {"failed": True}, id="an abort"),
        pytest.param(
            [delta(content="a", token_ids=[1]), delta(content="b")],
            {"output_ids": None, "tokens": 2},
            id="ids that stop coming",
        ),
        pytest.param(
            [delta(content="a"), delta(content="b")], {"tokens": 2, "output_ids": None}, id="no ids"
        ),
        pytest.param(
            [delta(content="abc") | {"usage": {"prompt_tokens": 9, "completion_tokens": 5}}],
            {"tokens": 5, "prompt_tokens": 9, "usage_reported": False},
            id="running usage counts better than events",
        ),
        pytest.param(
            [{"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}],
            {"usage_reported": True, "cached_tokens": 4},
            id="the last usage",
        ),
        pytest.param([delta(content="a") | {"usage": None}], {"usage": None, "text": "a"}, id="usage null"),
    ],
)
def test_what_is_noticed(chunks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    sofar = told(*chunks)
    assert {name: getattr(sofar, name) for name in expected} == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"data: {\n\n",
        b"data: [1]\n\n",
        b"data: 5\n\n",
        b'data: {"choices":5}\n\n',
        b'data: {"choices":{"a":1}}\n\n',
    ],
)
def test_what_is_no_chunk_is_strange(raw: bytes) -> None:
    assert journal_of(raw).read().strange


def test_broken_framing_is_strange() -> None:
    assert journal_of(b"zz\r\ndata: 1\n\n\r\n", chunked=True).read().strange


def test_an_unfinished_event_has_not_been_said() -> None:
    sofar = journal_of(event(delta(content="a")), b'data: {"choices":[{"delta":{"content":"b"}}]}\n').read()
    assert (sofar.text, sofar.events) == ("a", 1)


def test_reading_does_not_end_the_journal() -> None:
    journal = journal_of(event(delta(content="a")))
    assert journal.read() == journal.read()
    journal.add(event(delta(content="b")))
    assert journal.read().text == "ab"


@pytest.mark.parametrize("kept", KEPT)
def test_a_long_stream_is_folded_and_stays_readable(kept: Callable[[], KeptEvents]) -> None:
    journal = Transcript(chunked=False, limit_bytes=100_000, kept=kept())
    one = event(delta(content=" word", token_ids=[7]) | {"model": "m" * 200})
    for _ in range(2000):
        journal.add(one)
        assert kept_bytes(journal) <= 100_000
    sofar = journal.read()
    assert 2000 * len(one) > 5 * 100_000
    assert sofar.text == " word" * 2000
    assert sofar.output_ids is not None
    assert len(sofar.output_ids) == 2000
    assert not sofar.lost


def kept_bytes(journal: Transcript) -> int:
    reading = journal._reading
    return journal._kept.raw_bytes + (reading.size_bytes if reading is not None else 0)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("limit", [20_000, LIMIT])
def test_what_was_kept_elsewhere_is_joined(kept: Callable[[], KeptEvents], limit: int) -> None:
    """As a forwarding does it: parts of a stream come in their order, the transcript is read in between."""
    one, other = Transcript(chunked=False, limit_bytes=limit, kept=kept()), Transcript(False, LIMIT)
    for number in range(600):
        passing, piece = kept(), event(delta(content=f" {number}", token_ids=[number]))
        if number % 7:
            passing.add(piece)
            one.join(passing)
        else:
            one.add(piece)
        other.add(piece)
        if number % 200 == 100:
            assert one.read() == other.read()
    assert one.read() == other.read()
    assert one.held_bytes < 20 * 600


@pytest.mark.parametrize("kept", KEPT)
def test_of_a_stream_that_is_lost_nothing_is_kept(kept: Callable[[], KeptEvents]) -> None:
    journal = Transcript(chunked=False, limit_bytes=2000, kept=kept())
    passing = kept()
    passing.add(event(delta(content="a" * 5000)))
    journal.join(passing)
    assert (journal.lost, journal.held_bytes) == (True, 0)
    passing.add(event(delta(content="a")))
    journal.join(passing)
    assert (journal.read().lost, journal.held_bytes) == (True, 0)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(event(delta(content="a" * 100)), id="too much text"),
        pytest.param(b"data: " + b"a" * 100, id="an event that never ends"),
    ],
)
def test_beyond_its_limit_a_stream_is_lost(one: bytes) -> None:
    journal = Transcript(chunked=False, limit_bytes=2000)
    for _ in range(100):
        journal.add(one)
    assert journal.lost
    assert journal.read().lost
    assert kept_bytes(journal) == 0


def test_a_second_leg_goes_on_counting() -> None:
    first = told(delta(content="a", token_ids=[1]), delta(content="b", token_ids=[2]))
    tally = ProgressTally(first)
    tally.chunk(delta(content="c", token_ids=[3]))
    assert (tally.progress().text, list(tally.progress().output_ids or ()), tally.tokens) == (
        "abc",
        [1, 2, 3],
        3,
    )
    tally.chunk(delta(content="d"))
    assert (tally.progress().output_ids, tally.tokens) == (None, 4), "without ids, events are counted"


def test_a_second_leg_from_text_has_ids_of_its_own() -> None:
    first = told(delta(content="a", token_ids=[1]) | {"prompt_token_ids": [8, 9]})
    tally = ProgressTally(first, from_text=True)
    tally.chunk(delta(content="b", token_ids=[2]) | {"prompt_token_ids": [8, 9, 5]})
    sofar = tally.progress()
    assert (list(sofar.context_ids or ()), list(sofar.output_ids or ())) == ([8, 9, 5], [2])
    assert (sofar.tokens, sofar.prompt_tokens) == (2, 2)


def test_an_answer_begun_anew_counts_from_zero() -> None:
    tally = ProgressTally(told(delta(role="assistant", token_ids=[1, 2])), START)
    tally.chunk(delta(content="b", token_ids=[2]))
    assert (tally.tokens, tally.progress().role_sent) == (1, True)
