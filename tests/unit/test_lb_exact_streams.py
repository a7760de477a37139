"""What the client has read is a prefix of what the undisturbed engine says, and then comes the rest or an error."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.http.sse import EventBuffer
from lb.stream.first_request import prepare
from lb.stream.resume_request import resume
from lb.stream.resume_rules import NotResumable, Reason
from lb.stream.stream_merge import StreamMerger, closing, stripper
from lb.stream.transcript import StreamProgress, Transcript
from tests.clouds.schedules import examples
from tests.unit.byte_engine import Engine

VLLM, UNKNOWN = EngineKind.VLLM, EngineKind.UNKNOWN
LIMIT = 1 << 20
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def a_request(path: bytes, **more: Any) -> dict[str, Any]:
    says = {"messages": [{"role": "user", "content": "a日 b"}]} if path == CHAT else {"prompt": "a日 b"}
    asked: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 40}
    return {**asked, "stream_options": {"include_usage": True}, **says, **more}


def read(events: bytes) -> dict[str, Any]:
    """What a client makes of a stream."""
    chunks = [orjson.loads(block[6:]) for block in events.split(b"\n\n") if block.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        "text": "".join(
            (choice.get("delta") or {}).get("content") or choice.get("text") or "" for choice in choices
        ),
        "ends": [(one["finish_reason"], one.get("stop_reason")) for one in choices if one["finish_reason"]],
        "usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")],
        "roles": [role for one in choices if (role := one.get("delta", {}).get("role"))],
        "ids": [token for one in choices for token in one.get("token_ids") or ()],
        "done": events.count(b"data: [DONE]"),
        "names": len({(chunk["id"], chunk["created"]) for chunk in chunks}),
        "kinds": {chunk["object"] for chunk in chunks},
    }


class Client:
    """A client of a load balancer whose targets die after so many bytes. `refused` is why its stream ended as an error."""

    def __init__(
        self, engine: Engine, path: bytes, request: dict[str, Any], mode: Continue = Continue.AUTO
    ) -> None:
        self.engine, self.path, self.request, self.mode = engine, path, request, mode
        self.got = b""
        self.refused: Reason | None = None
        self.inexact: list[Reason] = []
        self.legs: list[dict[str, Any]] = []

    def run(self, cuts: list[int], pieces: int = 50, first: EngineKind = VLLM) -> None:
        ready = prepare(self.path, self.request, first, self.mode)
        said = self.engine.stream(self.path, {**self.request, **ready.fields}, 0)
        strip, gate, journal = stripper(ready.strip), EventBuffer(LIMIT), Transcript(False, LIMIT)
        for at in range(0, min(cuts[0], len(said)), pieces):
            whole = gate.feed(said[at : min(at + pieces, cuts[0])])
            journal.add(whole)
            self.got += strip(whole) if strip is not None else whole
        if cuts[0] < len(said):
            self._go_on(journal.read(), cuts[1:], pieces)

    def _go_on(self, sofar: StreamProgress, cuts: list[int], pieces: int) -> None:
        while (end := closing(self.path, self.request, sofar, VLLM)) is None:
            try:
                resumption = resume(self.path, self.request, sofar, VLLM, self.mode)
            except NotResumable as error:
                self.refused = error.reason
                return
            body = orjson.loads(resumption.body)
            self.legs.append(body)
            said = self.engine.stream(resumption.path, body, len(self.legs))
            merger = StreamMerger(self.path, self.request, sofar, resumption, LIMIT)
            cut = cuts.pop(0) if cuts else len(said)
            for at in range(0, min(cut, len(said)), pieces):
                self.got += merger.feed(said[at : min(at + pieces, cut)])
            if merger.inexact is not None:
                self.inexact.append(merger.inexact)
            sofar = merger.progress()
            self.refused = merger.refused
            if self.refused is not None or cut >= len(said):
                return
        self.got += end


ENGINES = st.builds(
    Engine,
    groups=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    trims=st.booleans(),
    ends=st.sampled_from([0.0, 0.02]),
)
OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 60)},
    optional={
        "stop": st.lists(st.text("ab \n.xé日", min_size=1, max_size=5), min_size=1, max_size=2),
        "include_stop_str_in_output": st.just(True),
        "frequency_penalty": st.sampled_from([0.5, -0.25, 1.0]),
        "repetition_penalty": st.just(1.0),
        "logit_bias": st.just({"1": 2.0, "3": -100.0}),
        "min_tokens": st.just(1),
        "tools": st.just(TOOLS),
        "return_token_ids": st.just(True),
    },
)
CUTS = st.lists(st.integers(0, 6000), min_size=1, max_size=4)


PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
MODES = pytest.mark.parametrize("mode", [Continue.AUTO, Continue.EXACT], ids=["auto", "exact"])


@PATHS
@MODES
@settings(max_examples=examples(150))
@given(
    engine=ENGINES,
    more=OPTIONS,
    cuts=CUTS,
    pieces=st.sampled_from([7, 64, 1 << 20]),
    first=st.sampled_from([VLLM, VLLM, VLLM, UNKNOWN]),
)
def test_a_client_reads_what_the_undisturbed_engine_says_or_an_error(
    engine: Engine,
    path: bytes,
    more: dict[str, Any],
    cuts: list[int],
    pieces: int,
    mode: Continue,
    first: EngineKind,
) -> None:
    request = a_request(path, **more)
    expected = read(engine.stream(path, request, 0))
    client = Client(engine, path, request, mode)
    client.run(cuts, pieces, first)
    got = read(client.got)
    if client.inexact:
        assert mode is Continue.AUTO
        assert set(client.inexact) == {Reason.RETOKENIZED}
        return
    assert expected["text"].startswith(got["text"])
    if first is UNKNOWN and not got["usage"]:  # an engine that was not asked to count
        expected["usage"] = []
    if client.refused is None:
        assert got == expected
    else:
        assert not got["done"]
        assert client.refused in ALLOWED


def test_ids_that_come_again_with_white_space_are_not_sent_twice() -> None:
    engine = Engine(groups=(1,), trims=False, ends=0.0)
    more = {"max_tokens": 5, "tools": TOOLS, "min_tokens": 1, "logit_bias": {"1": 2.0, "3": -100.0}}
    request = a_request(CHAT, stop=["a"], return_token_ids=True, **more)
    client = Client(engine, CHAT, request, Continue.EXACT)
    client.run([1015])  # the white space has come, and the last token has not
    assert len(client.legs) == 1
    assert read(client.got) == read(engine.stream(CHAT, request, 0))


ALLOWED = {Reason.RETOKENIZED, Reason.UNCOUNTED, Reason.PENALTIES, Reason.MISMATCH}


def test_a_stop_string_in_the_prompt_does_not_end_a_stream_that_was_cut_within_a_character() -> None:
    request = a_request(COMPLETIONS, max_tokens=21, stop=["日"])
    engine = Engine(groups=(2, 4))
    client = Client(engine, COMPLETIONS, request, Continue.EXACT)
    client.run([1351], 7)
    assert (client.refused, read(client.got)) == (None, read(engine.stream(COMPLETIONS, request, 0)))
    assert client.legs


@PATHS
@settings(max_examples=examples(200))
@given(engine=ENGINES, more=OPTIONS, cuts=CUTS)
def test_a_greedy_stream_whose_ids_are_known_is_always_whole(
    engine: Engine, path: bytes, more: dict[str, Any], cuts: list[int]
) -> None:
    more.pop("tools", None)
    request = a_request(path, **more)
    client = Client(engine, path, request, Continue.EXACT)
    client.run(cuts)
    assert client.refused is None
    assert read(client.got) == read(engine.stream(path, request, 0))
