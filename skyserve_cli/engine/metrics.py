"""What the engine reports to Prometheus, under vLLM's names and labels, so that routers need no special case.

Gauges and counters are read from the model when they are scraped and cost nothing in between. Durations are
seconds of this process's clock, that is divided by `speed`: they are what clients see.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyserve_cli.engine.kv import BLOCK_TOKENS
from skyserve_cli.engine.model import EngineModel

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_WHOLE_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)


class Telemetry:
    """The metrics of one engine."""

    def __init__(self, model: EngineModel, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ModelCollector(model, model_name))

        def histogram(name: str, help_text: str, buckets_s: tuple[float, ...]) -> Histogram:
            family = Histogram(name, help_text, _LABELS, buckets=buckets_s, registry=self._registry)
            return family.labels(model_name, "0")

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS_S
        )
        self.token_gap = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of one request.", _GAP_BUCKETS_S
        )
        self.whole_request = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE_BUCKETS_S
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ModelCollector(Collector):
    def __init__(self, model: EngineModel, model_name: str) -> None:
        self._model = model
        self._labels = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        model, counters = self._model, self._model.counters
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", model.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for room.", model.waiting)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests waiting, by reason.", labels=(*_LABELS, "reason")
        )
        by_reason.add_metric((*self._labels, "capacity"), model.waiting)
        by_reason.add_metric((*self._labels, "deferred"), 0)
        yield by_reason
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", model.kv_usage)
        for name, help_text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            ("num_preemptions", "Requests preempted because the KV cache was full.", counters.preemptions),
            ("prompt_tokens", "Prompt tokens of requests that got a first token.", counters.prompt_tokens),
            ("prompt_tokens_cached", "Those that were found, not computed.", counters.cached_prompt_tokens),
            ("generation_tokens", "Tokens generated.", counters.generated_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in counters.finished.items():
            success.add_metric((*self._labels, reason.value), count)
        yield success
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "KV cache.", labels=("engine", "block_size", "num_gpu_blocks")
        )
        config.add_metric(("0", str(BLOCK_TOKENS), str(model.cache.capacity)), 1)
        yield config

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, help_text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge
