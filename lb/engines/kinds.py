"""Which engine runs behind a target, and what load it reports. Pure: what to request, and how to read the response.

An `Adapter` knows where an engine reports its load and reads it. `detection` finds the adapter by polling; no one has
to configure it. What each engine reports, current names first:

    SGLang        /v1/loads, a snapshot for routers that needs no flag; before it /get_load; last its gauges, which
                  are written every 40 decode steps only and stay up for seconds after the last request
    vLLM          /metrics; of its waiting requests only those that wait for capacity count, where it reports them
                  apart: those deferred for another reason (LoRA, KV transfer) do not mean that there is room
    our engine    as vLLM, known by its /version
    TGI           /metrics, without gauges until the first request, so it is known by /info as well
    trtllm-serve  /prometheus/metrics; its own /metrics are records that vanish when read: never used for load
    Triton        /metrics on the same port (its OpenAI frontend) or on 8002
    llama.cpp     /metrics if it was started with --metrics (a scrape restarts its averages per second, as anyone's
                  does), else /slots, which report no waiting requests
    others        nothing: the balancer counts by itself

Nothing here raises on any input: garbage makes its metric unknown, and an engine that reports neither running nor
waiting requests reports nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from lb.core.admission import EngineLoad
from lb.engines.prometheus_text import MOST, Gauge, Page, mean, total

MAX_BODY_BYTES = 1024 * 1024
TRITON_METRICS_PORT = 8002
_UNREADY = (429, 500, 502, 503, 504)


class EngineKind(str, Enum):
    """What decides how a stream is continued and where load is read."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    TRTLLM = "trtllm"
    TRITON = "triton"
    LLAMACPP = "llamacpp"
    SKYSERVE = "skyserve"
    UNKNOWN = "unknown"


def kind_named(name: str) -> EngineKind:
    """Return the kind of that name; UNKNOWN for one that is not known here."""
    try:
        return EngineKind(name)
    except ValueError:
        return EngineKind.UNKNOWN


def common_kind(names: Iterable[str]) -> EngineKind:
    """Return the kind that all engines are that are known; UNKNOWN if they differ, or none is."""
    kinds = {kind_named(name) for name in names} - {EngineKind.UNKNOWN}
    return kinds.pop() if len(kinds) == 1 else EngineKind.UNKNOWN


class Fetched(NamedTuple):
    """The response to a GET. Status 0: there was none."""

    status: int
    body: bytes


NO_RESPONSE = Fetched(0, b"")


class LoadQuery(NamedTuple):
    """A path of a target, on another port of its host if `port` is given."""

    path: str
    port: int | None = None


Parse = Callable[[bytes], "EngineLoad | None"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Where an engine of this kind reports its load. `query` is None if it does not."""

    kind: EngineKind
    query: LoadQuery | None
    parse: Parse

    def read(self, fetched: Fetched) -> EngineLoad | None:
        """Return the load; None if the response does not have it."""
        if fetched.status != 200 or len(fetched.body) > MAX_BODY_BYTES:
            return None
        return self.parse(fetched.body)


# --- gauges


def _gauges(*names: str) -> tuple[Gauge, ...]:
    return tuple(Gauge(name.encode()) for name in names)


_VLLM = Page(
    running=_gauges("vllm:num_requests_running"),
    pending=(
        Gauge(b"vllm:num_requests_waiting_by_reason", where=b'reason="capacity"'),
        Gauge(b"vllm:num_requests_waiting"),
    ),
    kv_usage=_gauges("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    engine_label=b"engine",
)
_SGLANG = Page(
    running=_gauges("sglang:num_running_reqs", "sglang_num_running_reqs"),
    pending=_gauges("sglang:num_queue_reqs", "sglang_num_queue_reqs"),
    kv_usage=_gauges("sglang:token_usage", "sglang_token_usage"),
    engine_label=b"dp_rank",
)
_TGI = Page(running=_gauges("tgi_batch_current_size"), pending=_gauges("tgi_queue_size"))
_TRTLLM = Page(
    running=_gauges("trtllm_num_requests_running"),
    pending=_gauges("trtllm_num_requests_waiting"),
    kv_usage=_gauges("trtllm_kv_cache_utilization"),
    max_running=_gauges("trtllm_max_num_active_requests"),
)
_TRITON = Page(
    running=(Gauge(b"nv_trt_llm_request_metrics", where=b'request_type="scheduled"'),),
    pending=(Gauge(b"nv_trt_llm_request_metrics", where=b'request_type="waiting"'),),
    kv_usage=(Gauge(b"nv_trt_llm_kv_cache_block_metrics", where=b'kv_cache_block_type="fraction"'),),
    max_running=(Gauge(b"nv_trt_llm_request_metrics", where=b'request_type="max"'),),
)
_LLAMACPP = Page(
    running=_gauges("llamacpp:requests_processing"),
    pending=_gauges("llamacpp:requests_deferred"),
    kv_usage=_gauges("llamacpp:kv_cache_usage_ratio"),
)


# --- JSON


def parse_sglang_loads(body: bytes) -> EngineLoad | None:
    """SGLang's /v1/loads: one object for each data-parallel rank."""
    response = _json(body)
    ranks = response.get("loads") if isinstance(response, dict) else None
    running = total(_of_all(ranks, "num_running_reqs"))
    pending = total(_of_all(ranks, "num_waiting_reqs"))
    if running is None or pending is None:
        return None  # SGLang's gateway has this path too, but reports other things there
    usage = mean(_of_all(ranks, "token_usage"))
    return EngineLoad(running, pending, usage, total(_of_all(ranks, "max_running_requests")) or None)


def parse_sglang_get_load(body: bytes) -> EngineLoad | None:
    """SGLang's older /get_load: a list of ranks, or one object; `num_reqs` has the waiting ones in it."""
    response = _json(body)
    ranks = [response] if isinstance(response, dict) else response
    requests, pending = total(_of_all(ranks, "num_reqs")), total(_of_all(ranks, "num_waiting_reqs"))
    if requests is None or pending is None:
        return None
    return EngineLoad(max(0, requests - pending), pending)


def parse_llamacpp_slots(body: bytes) -> EngineLoad | None:
    """llama.cpp's /slots: `is_processing`, in older versions `state` (0 is idle)."""
    slots = _json(body)
    if not isinstance(slots, list) or not slots:
        return None
    busy = 0
    for slot in slots:
        state = slot.get("is_processing", slot.get("state")) if isinstance(slot, dict) else None
        if not isinstance(state, int):
            return None
        busy += bool(state)
    return EngineLoad(busy, None, None, len(slots))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _of_all(ranks: object, key: str) -> Sequence[float]:
    """The number every rank has under `key`; none at all if one of them has none."""
    if not isinstance(ranks, list):
        return ()
    values = []
    for rank in ranks:
        value = rank.get(key) if isinstance(rank, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST:
            return ()
        values.append(value)
    return values


def _no_load(_: bytes) -> EngineLoad | None:
    return None


# --- finding out

_LOADS = LoadQuery("/v1/loads?include=core")
_GET_LOAD = LoadQuery("/get_load")
_METRICS = LoadQuery("/metrics")
_PROMETHEUS_METRICS = LoadQuery("/prometheus/metrics")
_TRITON_METRICS = LoadQuery("/metrics", TRITON_METRICS_PORT)
_SLOTS = LoadQuery("/slots")

_SGLANG_LOADS = Adapter(EngineKind.SGLANG, _LOADS, parse_sglang_loads)
_SGLANG_GET_LOAD = Adapter(EngineKind.SGLANG, _GET_LOAD, parse_sglang_get_load)
_LLAMACPP_SLOTS = Adapter(EngineKind.LLAMACPP, _SLOTS, parse_llamacpp_slots)

_PAGES = (  # by the prefix of its metrics
    (b"vllm:", EngineKind.VLLM, _VLLM),
    (b"sglang:", EngineKind.SGLANG, _SGLANG),
    (b"sglang_", EngineKind.SGLANG, _SGLANG),
    (b"trtllm_", EngineKind.TRTLLM, _TRTLLM),
    (b"nv_trt_llm_", EngineKind.TRITON, _TRITON),
    (b"tgi_", EngineKind.TGI, _TGI),
    (b"llamacpp:", EngineKind.LLAMACPP, _LLAMACPP),
)


def _mute(kind: EngineKind) -> Adapter:
    return Adapter(kind, None, _no_load)


def detection() -> Generator[LoadQuery, Fetched, Adapter | None]:
    """Detects the engine of a target: yields what to GET, is sent what came (NO_RESPONSE if nothing did).

    Returns the adapter, one of kind UNKNOWN for a server that is none of these engines, or None if it cannot be
    known yet: the target does not respond, or is not ready.
    """
    responses: list[Fetched] = []

    def query(what: LoadQuery) -> Generator[LoadQuery, Fetched, Fetched]:
        responses.append((yield what))
        return responses[-1]

    loads = yield from query(_LOADS)
    if not loads.status:
        return None
    if _SGLANG_LOADS.read(loads):
        return _SGLANG_LOADS

    metrics = yield from query(_METRICS)
    engine = page_adapter(metrics, _METRICS)
    if engine is not None and engine.kind is EngineKind.VLLM:
        version = yield from query(LoadQuery("/version"))
        return replace(engine, kind=EngineKind.SKYSERVE) if b'"skyserve-engine"' in version.body else engine
    if engine is not None and engine.kind is not EngineKind.SGLANG:
        return engine
    old_loads = yield from query(_GET_LOAD)
    if _SGLANG_GET_LOAD.read(old_loads):
        return _SGLANG_GET_LOAD
    if engine is not None:
        return engine  # its /v1/loads may need a key, its metrics never do

    page = yield from query(_PROMETHEUS_METRICS)
    engine = page_adapter(page, _PROMETHEUS_METRICS)
    if engine is not None and engine.kind is EngineKind.TRTLLM:
        return engine
    if metrics.status == 200 and isinstance(_json(metrics.body), list):
        return _mute(EngineKind.TRTLLM)  # no other engine has JSON there

    info = yield from query(LoadQuery("/info"))
    if info.status == 200 and b'"max_best_of"' in info.body and b'"max_concurrent_requests"' in info.body:
        return Adapter(EngineKind.TGI, _METRICS, _TGI.parse)
    slots = yield from query(_SLOTS)
    if _LLAMACPP_SLOTS.read(slots):
        return _LLAMACPP_SLOTS
    if metrics.status == 501 and b"metrics endpoint" in metrics.body:
        return _mute(EngineKind.LLAMACPP)
    server = yield from query(LoadQuery("/v2"))
    if server.status == 200 and b'"triton"' in server.body:
        engine = page_adapter((yield _TRITON_METRICS), _TRITON_METRICS)  # or another engine's inside
        return replace(engine, kind=EngineKind.TRITON) if engine else _mute(EngineKind.TRITON)

    unready = any(not response.status or response.status in _UNREADY for response in responses)
    return None if unready else _mute(EngineKind.UNKNOWN)


def page_adapter(page: Fetched, query: LoadQuery) -> Adapter | None:
    """Return the adapter for a Prometheus page that `query` brought; None if it is no page of a known engine."""
    if page.status != 200 or len(page.body) > MAX_BODY_BYTES:
        return None
    for prefix, kind, gauges in _PAGES:
        if page.body.startswith(prefix) or b"\n" + prefix in page.body or b"# TYPE " + prefix in page.body:
            return Adapter(kind, query, gauges.parse)
    return None
