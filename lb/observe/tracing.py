"""Traces, for those who want them: one span per request, exported over OTLP by the extra `otel`.

They are on when OpenTelemetry's own environment variables set where to
(`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) and its packages are installed. Its other
variables hold as everywhere: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SDK_DISABLED` and so on. Without them there is no tracer, nothing of
OpenTelemetry is imported, and a client's `traceparent` goes to the target as it came.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from lb.observe.access_log import RequestRecord

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
PROTOCOL = "http/protobuf"

_log = logging.getLogger("lb.observe.tracing")


class Tracing(Protocol):
    """What the data plane knows of a tracer. None of it blocks or raises."""

    def begin(self, traceparent: str) -> str:
        """Return the `traceparent` that targets are sent, so that what they do becomes part of the request's span.

        `traceparent` is the client's; empty or unreadable begins a trace. The result belongs into
        `RequestRecord.span`.
        """
        ...

    def finished(self, facts: RequestRecord) -> None:
        """The request is over: its span is made now and exported in the background."""
        ...

    def close(self) -> None:
        """Export the rest, for a few seconds at most. This one blocks."""
        ...


def tracing(
    service: str, region: str, environment: Mapping[str, str], wall_ns: Callable[[], int]
) -> Tracing | None:
    """Return the tracer that the environment requests, or None. `wall_ns` is the time since 1970 in nanoseconds."""
    if not any(environment.get(name) for name in ENDPOINT_VARIABLES):
        return None
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    protocols = {environment.get(name) for name in PROTOCOL_VARIABLES} - {None, "", PROTOCOL}
    if protocols:
        _log.warning("no traces why=%r", f"the OTLP protocol must be {PROTOCOL}, not {protocols.pop()}")
        return None
    try:
        # Loading the SDK takes a quarter of a second: only for who uses it.
        otel = importlib.import_module("lb.observe.otel")
    except ImportError as error:
        _log.warning("no traces why=%r", f"{error.name} is not installed; the extra 'otel' has it")
        return None
    tracer: Tracing = otel.exporting_tracer(service, region, wall_ns)
    return tracer
