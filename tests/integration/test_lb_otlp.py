"""Traces leave the process over OTLP, in the background, to the endpoint in the environment."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lb.observe.access_log import RequestRecord
from lb.observe.tracing import tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra 'otel' is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Stores the exports."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.received: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.paths.append(self.path)
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    yield it
    it.close()


def test_finished_requests_reach_the_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracer = tracing("chat", "eu-1", {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}, lambda: 10**18)
    assert tracer is not None
    told = tracer.begin("")
    tracer.finished(RequestRecord("r1", "POST", "/v1/chat/completions", 200, 0.5, span=told))
    tracer.close()
    assert set(collector.paths) == {"/v1/traces"}
    resources = [one for request in collector.received for one in request.resource_spans]
    (span,) = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert (span.name, span.span_id.hex()) == ("POST /v1/chat/completions", told.split("-")[2])
    names = {pair.key: pair.value.string_value for pair in resources[0].resource.attributes}
    assert (names["service.name"], names["skyserve.service"]) == ("skyserve-lb", "chat")


def test_a_collector_that_is_away_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracer = tracing("chat", "eu-1", environment, lambda: 10**18)
    assert tracer is not None
    for number in range(3000):  # more than are kept
        tracer.finished(RequestRecord(f"r{number}", "GET", "/", 200, 0.1))
    tracer.close()
