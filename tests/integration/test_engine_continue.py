"""An engine process is killed in the middle of a response, and another one goes on: exactly, by ids and by text."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lb.config.options import Continue
from lb.engines.kinds import EngineKind
from lb.http.api_paths import CHAT, COMPLETIONS
from lb.http.sse import EventBuffer, EventReader, is_readable
from lb.stream.first_request import prepare
from lb.stream.resume_request import ResumeMethod, ResumeRequest, resume
from lb.stream.stream_merge import StreamMerger, closing, stripper
from lb.stream.transcript import StreamProgress, Transcript

pytestmark = pytest.mark.long

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
ENGINE = [
    sys.executable,
    "-m",
    "skyserve_cli.engine",
    "--port",
    "0",
    "--speed",
    "5",
    "--seed",
    "5",
    "--model",
    "m",
]
KIND = EngineKind.SKYSERVE
LIMIT = 1 << 20
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[bytes, dict[str, Any]] = {
    CHAT: USAGE | {"messages": [{"role": "user", "content": "Tell me about the lake."}], "seed": 11},
    COMPLETIONS: USAGE | {"prompt": "The lake, the wood <|im_end|>, Grüße:", "seed": 3},
}


@dataclass(frozen=True, slots=True)
class Engine:
    process: subprocess.Popen[str]
    port: int

    def kill(self) -> None:
        self.process.kill()  # SIGKILL: no farewell
        self.process.wait()

    def stream(self, path: bytes, body: bytes) -> Iterator[bytes]:
        """The response as it comes; ends without a word when the engine is gone."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("POST", path.decode(), body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert is_readable((answer.getheader("Content-Type") or "").encode(), b"")
            while piece := answer.read1(300):
                yield piece
        except (http.client.IncompleteRead, ConnectionError):
            return
        finally:
            connection.close()


@contextmanager
def engine() -> Iterator[Engine]:
    process = subprocess.Popen(ENGINE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://[\d.]+:(\d+)", said)
        assert found, said
        yield Engine(process, int(found[1]))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def survivor() -> Iterator[Engine]:
    with engine() as one:
        yield one


def broken_off(
    path: bytes, request: dict[str, Any], mode: Continue, events: int
) -> tuple[bytes, StreamProgress]:
    """What a client has got from an engine that was killed after a number of events, and its progress."""
    ready = prepare(path, request, KIND, mode)
    strip, gate, journal, got = (
        stripper(ready.strip),
        EventBuffer(LIMIT),
        Transcript(chunked=False, limit_bytes=LIMIT),
        b"",
    )
    with engine() as victim:
        for piece in victim.stream(path, json.dumps(request | dict(ready.fields)).encode()):
            whole = gate.feed(piece)
            journal.add(whole)
            got += strip(whole) if strip is not None else whole
            if got.count(b"\n\n") >= events:
                victim.kill()
                break
    return got, journal.read()


def go_on(
    path: bytes, request: dict[str, Any], sofar: StreamProgress, resumption: ResumeRequest, on: Engine
) -> bytes:
    stitcher = StreamMerger(path, request, sofar, resumption, LIMIT)
    return b"".join([stitcher.feed(piece) for piece in on.stream(resumption.path, resumption.body)])


def chunks(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(data) for data in EventReader().feed(events) if data != b"[DONE]"]


def said(events: bytes) -> dict[str, Any]:
    seen = chunks(events)
    choices = [choice for chunk in seen for choice in chunk["choices"]]
    usage = seen[-1]["usage"] | {"prompt_tokens_details": None}
    return {
        "text": "".join(
            choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
        ),
        "ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "finishes": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "roles": sum("role" in choice.get("delta", {}) for choice in choices),
        "names": len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in seen}),
        "usage": usage,
        "done": events.count(b"data: [DONE]\n\n"),
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("more", "mode", "way"),
    [
        pytest.param(
            {"max_tokens": 60, "min_tokens": 40}, Continue.AUTO, ResumeMethod.TOKENS, id="by tokens"
        ),
        pytest.param(
            {"max_tokens": 60, "ignore_eos": True}, Continue.AUTO, ResumeMethod.TOKENS, id="to the last token"
        ),
        pytest.param({"max_tokens": None}, Continue.AUTO, ResumeMethod.TOKENS, id="without a limit"),
        pytest.param(
            {"max_tokens": 90, "min_tokens": 30, "stop": [" the", "o m", ". "]},
            Continue.AUTO,
            ResumeMethod.TOKENS,
            id="stop strings",
        ),
        pytest.param(
            {"max_tokens": 40, "min_tokens": 30, "return_token_ids": True},
            Continue.AUTO,
            ResumeMethod.TOKENS,
            id="the client's ids",
        ),
    ],
)
def test_the_answer_is_the_undisturbed_one(
    path: bytes, more: dict[str, Any], mode: Continue, way: ResumeMethod, survivor: Engine
) -> None:
    request = ASKED[path] | more
    whole = said(b"".join(survivor.stream(path, json.dumps(request).encode())))
    got, sofar = broken_off(path, request, mode, events=12)
    assert 5 < sofar.tokens < whole["usage"]["completion_tokens"]
    resumption = resume(path, request, sofar, KIND, mode)
    assert resumption.way is way
    stitched = said(got + go_on(path, request, sofar, resumption, survivor))
    if way is ResumeMethod.TEXT:  # several tokens that came in one event are counted as one
        stitched["usage"] = whole["usage"]
    assert stitched == whole


def test_three_engines_die_in_one_answer(survivor: Engine) -> None:
    request = ASKED[CHAT] | {"max_tokens": 80, "ignore_eos": True}
    whole = said(b"".join(survivor.stream(CHAT, json.dumps(request).encode())))
    got, sofar = broken_off(CHAT, request, Continue.AUTO, events=10)
    for _ in range(2):
        resumption = resume(CHAT, request, sofar, KIND)
        stitcher, before = StreamMerger(CHAT, request, sofar, resumption, LIMIT), got.count(b"\n\n")
        with ExitStack() as stack:
            victim = stack.enter_context(engine())
            for piece in victim.stream(resumption.path, resumption.body):
                got += stitcher.feed(piece)
                if got.count(b"\n\n") >= before + 10:
                    victim.kill()
                    break
        assert stitcher.progress().tokens > sofar.tokens
        sofar = stitcher.progress()
    assert closing(CHAT, request, sofar, KIND) is None
    got += go_on(CHAT, request, sofar, resume(CHAT, request, sofar, KIND), survivor)
    assert said(got) == whole


def test_an_engine_that_dies_before_its_first_word(survivor: Engine) -> None:
    request = ASKED[CHAT] | {"max_tokens": 20, "min_tokens": 20}
    whole = said(b"".join(survivor.stream(CHAT, json.dumps(request).encode())))
    got, sofar = broken_off(CHAT, request, Continue.AUTO, events=12)
    role = got[: got.index(b"\n\n") + 2]
    journal = Transcript(chunked=False, limit_bytes=LIMIT)
    journal.add(role)
    sofar = journal.read()
    resumption = resume(CHAT, request, sofar, KIND)
    assert resumption.way is ResumeMethod.RESTART
    assert said(role + go_on(CHAT, request, sofar, resumption, survivor)) == whole
