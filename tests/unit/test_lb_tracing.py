"""Traces and the access log: what they tell of a request, and what they must not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from lb.observe.access_log import AccessLog, RequestRecord
from lb.observe.tracing import tracing

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra 'otel' is not installed")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from lb.observe.otel import OtelTracer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
NOT_SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"
NOW_NS = 1_700_000_000_000_000_000
FACTS = RequestRecord(
    id="r1",
    method="POST",
    path="/v1/chat/completions",
    status=200,
    duration_s=1.5,
    tenant="alice",
    model="llama",
    policy="least_load",
    target_id="7",
    attempts=2,
    continued=1,
    queued_s=0.25,
    ttft_s=0.5,
    bytes_out=1000,
    tokens_in=12,
    tokens_out=34,
    traceparent=PARENT,
)


class Traced:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer("chat", "eu-1", SimpleSpanProcessor(self._exporter), lambda: NOW_NS)

    def span(self, facts: RequestRecord) -> ReadableSpan:
        self.tracer.finished(facts)
        (span,) = self._exporter.get_finished_spans()
        return span

    def spans(self) -> int:
        return len(self._exporter.get_finished_spans())


def test_a_request_is_one_span_below_its_clients() -> None:
    span = Traced().span(FACTS)
    assert span.name == "POST /v1/chat/completions"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert (span.start_time, span.end_time) == (NOW_NS - 1_500_000_000, NOW_NS)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["skyserve.service"] == "chat"
    assert span.resource.attributes["cloud.region"] == "eu-1"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.body.size": 1000,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "skyserve.policy": "least_load",
        "skyserve.target": "7",
        "skyserve.tenant": "alice",
        "skyserve.attempts": 2,
        "skyserve.continuations": 1,
    }


def test_targets_are_told_the_span_that_is_made_later() -> None:
    traced = Traced()
    told = traced.tracer.begin(PARENT)
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", told)
    assert told != PARENT
    span = traced.span(FACTS._replace(span=told))
    assert f"{span.context.span_id:016x}" == told.split("-")[2]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"ff-{TRACE}-00f067aa0ba902b7-01", f"00-{'0' * 32}-{'0' * 16}-01"]
)
def test_without_a_trace_of_the_clients_one_begins(traceparent: str) -> None:
    traced = Traced()
    told = traced.tracer.begin(traceparent)
    span = traced.span(FACTS._replace(traceparent=traceparent, span=told))
    assert span.parent is None
    assert told == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


def test_two_requests_have_two_traces() -> None:
    traced = Traced()
    first, second = traced.tracer.begin(""), traced.tracer.begin("")
    assert first.split("-")[1] != second.split("-")[1]


def test_what_the_client_does_not_sample_is_not_sampled() -> None:
    traced = Traced()
    assert traced.tracer.begin(NOT_SAMPLED).endswith("-00")
    traced.tracer.finished(FACTS._replace(traceparent=NOT_SAMPLED))
    assert traced.spans() == 0


def test_the_environments_sampler_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
    traced = Traced()
    assert traced.tracer.begin("").endswith("-00")
    span = traced.span(FACTS)  # its parent is sampled
    assert span.resource.attributes["service.name"] == "front-door"


ENDS = {
    "answered": (200, "", StatusCode.UNSET),
    "the client's error": (401, "unauthorized", StatusCode.UNSET),
    "the client left": (200, "client_gone", StatusCode.UNSET),
    "the client left before anything": (0, "client_gone", StatusCode.UNSET),
    "nobody could": (503, "no_target_ready", StatusCode.ERROR),
    "the target's own error": (500, "", StatusCode.ERROR),
    "cut": (200, "cut", StatusCode.ERROR),
}


@pytest.mark.parametrize("case", ENDS)
def test_which_ends_are_errors(case: str) -> None:
    status, error, expected = ENDS[case]
    span = Traced().span(FACTS._replace(status=status, error=error))
    assert span.status.status_code is expected
    assert ("error.type" in (span.attributes or {})) == bool(error or status >= 500)


def test_what_no_engine_told_is_left_out_and_other_paths_are_not_names() -> None:
    span = Traced().span(RequestRecord("r2", "GET", "/users/42", 404, 0.01))
    assert span.name == "GET"
    assert not [name for name in (span.attributes or {}) if name.startswith("gen_ai.usage")]


def test_a_name_that_is_no_unicode_text_does_no_harm() -> None:
    facts = FACTS._replace(model="half \ud800")
    assert (Traced().span(facts).attributes or {})["gen_ai.request.model"] == "half ?"
    assert json.loads(access_log(1.0).line(facts))["model"] == "half \ud800"


def access_log(now: float) -> AccessLog:
    return AccessLog(lambda: now, lambda lines: None, lambda flush: None)


def test_neither_traces_nor_the_log_hold_a_query() -> None:
    facts = FACTS._replace(path="/v1/chat/completions?key=hush")
    span = Traced().span(facts)
    assert "hush" not in span.to_json()
    assert b"hush" not in access_log(1.0).line(facts)


def test_the_access_log_is_one_line_of_json_per_request() -> None:
    facts = FACTS._replace(
        model='two\nlines "quoted"', status=502, error="no_target_answered", tokens_in=None
    )
    line = access_log(1_700_000_000.1234).line(facts)
    assert line.count(b"\n") == line.endswith(b"\n") == 1
    assert json.loads(line) == {
        "time": 1_700_000_000.123,
        "id": "r1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 502,
        "error": "no_target_answered",
        "tenant": "alice",
        "model": 'two\nlines "quoted"',
        "target": "7",
        "attempts": 2,
        "continued": 1,
        "inexact": None,
        "ms": 1500.0,
        "queued_ms": 250.0,
        "ttft_ms": 500.0,
        "bytes": 1000,
        "tokens_in": None,
        "tokens_out": 34,
        "reserved": None,
        "charged": None,
        "charge": None,
    }


def test_the_lines_of_one_moment_are_written_together() -> None:
    written: list[bytes] = []
    soon: list[Callable[[], None]] = []
    log = AccessLog(lambda: 1.0, written.append, soon.append)
    for name in ("first", "second"):
        log.add(FACTS._replace(id=name))
    assert written == []
    soon.pop()()
    assert soon == []
    log.add(FACTS._replace(id="\u2028third"))
    soon.pop()()
    lines = [[json.loads(line)["id"] for line in piece.splitlines()] for piece in written]
    assert lines == [["first", "second"], ["\u2028third"]]
    assert all(piece.isascii() for piece in written)


SILENT = {
    "nothing said": {},
    "empty endpoint": {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    "disabled": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    "no exporter": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    "grpc": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
}


@pytest.mark.parametrize("case", SILENT)
def test_when_there_is_no_tracer(case: str) -> None:
    assert tracing("chat", "eu-1", SILENT[case], lambda: NOW_NS) is None


def test_without_traces_nothing_of_opentelemetry_is_loaded() -> None:
    program = (
        "import sys; from lb.observe.tracing import tracing; assert tracing('s', 'r', {}, lambda: 0) is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
