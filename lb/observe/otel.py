"""Spans of requests with the OpenTelemetry SDK; loaded by `lb.observe.tracing` when traces are enabled.

A span is made when its request is over, from its facts, so that nothing is paid for while it runs. Only its ids
are drawn at the beginning, since targets must name it as their parent. Attributes follow OpenTelemetry's
conventions for HTTP and generative AI, the latencies vLLM's; none of them holds a prompt, a response, a query, an
address of a client or a key.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from lb.observe.access_log import RequestRecord, without_query

FLUSH_MS = 5000

# Paths with a name of their own; another path would make a span's name unbounded.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_W3C = TraceContextTextMapPropagator()
_ROOT = Context()


class OtelTracer:
    """`lb.observe.tracing.Tracing` on a provider of its own: the process' global one is left alone."""

    def __init__(
        self, service: str, region: str, processor: SpanProcessor, wall_ns: Callable[[], int]
    ) -> None:
        ours = {"service.name": "skyserve-lb", "skyserve.service": service, "cloud.region": region}
        named = OTELResourceDetector().detect().attributes  # the environment comes first
        self._ids = _DrawnIds()
        self._provider = TracerProvider(
            resource=Resource.create({**{name: value for name, value in ours.items() if value}, **named}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("skyserve.lb")
        self._wall_ns = wall_ns

    def begin(self, traceparent: str) -> str:
        parent = _context(traceparent)
        above = _span_context(parent)
        trace_id = above.trace_id if above.is_valid else self._ids.generate_trace_id()
        decision = self._provider.sampler.should_sample(parent, trace_id, "", SpanKind.SERVER).decision
        sampled = decision is Decision.RECORD_AND_SAMPLE
        span_id = self._ids.generate_span_id()
        return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"

    def finished(self, facts: RequestRecord) -> None:
        drawn = _span_context(_context(facts.span or self.begin(facts.traceparent)))
        if not drawn.trace_flags.sampled:
            return
        path = without_query(facts.path)
        end_ns = self._wall_ns()
        self._ids.drawn = drawn
        span = self._tracer.start_span(
            f"{facts.method} {path}" if path in _OPERATIONS else facts.method,
            context=_context(facts.traceparent),
            kind=SpanKind.SERVER,
            attributes=_attributes(facts, path),
            start_time=end_ns - round(facts.duration_s * 1e9),
        )
        self._ids.drawn = None
        # A client that leaves has changed its mind; a refused request is the client's error. Neither is ours.
        if facts.status >= 500 or (facts.error and facts.status < 400 and facts.error != "client_gone"):
            span.set_status(Status(StatusCode.ERROR, facts.error or None))
        span.end(end_ns)

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


def exporting_tracer(service: str, region: str, wall_ns: Callable[[], int]) -> OtelTracer:
    """Exports in a thread of its own, in batches, to the endpoint in the environment; drops what there is no room for."""
    return OtelTracer(service, region, BatchSpanProcessor(OTLPSpanExporter()), wall_ns)


class _DrawnIds(RandomIdGenerator):
    """Gives the span that is being made the ids that were drawn for it."""

    drawn: trace.SpanContext | None = None

    def generate_span_id(self) -> int:
        return self.drawn.span_id if self.drawn is not None else super().generate_span_id()

    def generate_trace_id(self) -> int:
        return self.drawn.trace_id if self.drawn is not None else super().generate_trace_id()


def _context(traceparent: str) -> Context:
    """Empty if there is none or it is not one."""
    return _W3C.extract({"traceparent": traceparent}, _ROOT) if traceparent else _ROOT


def _span_context(context: Context) -> trace.SpanContext:
    return trace.get_current_span(context).get_span_context()


def _attributes(facts: RequestRecord, path: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue | None] = {
        "http.request.method": facts.method,
        "url.path": path,
        "http.response.status_code": facts.status or None,
        "http.response.body.size": facts.bytes_out,
        "error.type": facts.error or (str(facts.status) if facts.status >= 500 else None),
        "gen_ai.operation.name": _OPERATIONS.get(path),
        "gen_ai.request.id": facts.id,
        "gen_ai.request.model": facts.model or None,
        "gen_ai.usage.input_tokens": facts.tokens_in,
        "gen_ai.usage.output_tokens": facts.tokens_out,
        "gen_ai.latency.time_in_queue": facts.queued_s,
        "gen_ai.latency.time_to_first_token": facts.ttft_s,
        "skyserve.policy": facts.policy or None,
        "skyserve.target": facts.target_id or None,
        "skyserve.tenant": facts.tenant or None,
        "skyserve.attempts": facts.attempts,
        "skyserve.continuations": facts.continued,
        "skyserve.inexact": facts.inexact or None,
    }
    return {name: _clean(value) for name, value in attributes.items() if value is not None}


def _clean(value: AttributeValue) -> AttributeValue:
    """JSON can spell half a surrogate pair; the exporter could not, and would lose all spans of its batch."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
