"""The load reports of engines, read from pages and responses as they write them, and which engine it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.core.admission import EngineLoad
from lb.engines.kinds import (
    MAX_BODY_BYTES,
    NO_RESPONSE,
    TRITON_METRICS_PORT,
    Adapter,
    EngineKind,
    Fetched,
    LoadQuery,
    detection,
    page_adapter,
    parse_llamacpp_slots,
    parse_sglang_get_load,
    parse_sglang_loads,
)

METRICS = LoadQuery("/metrics")
NOT_FOUND = Fetched(404, b'{"detail":"Not Found"}')

VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9604.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 5.052943e+06
"""
VLLM_BEFORE_REASONS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
# TYPE vllm:num_requests_swapped gauge
vllm:num_requests_swapped{model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 1.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
"""
VLLM_TWO_ENGINES = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 6.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6
"""
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 24.0
# TYPE sglang:num_running_reqs_offline_batch gauge
sglang:num_running_reqs_offline_batch{engine_type="unified",model_name="m",tp_rank="0"} 99.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.73
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 3.0
"""
SGLANG_RANKS_AND_PRIORITIES = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",pp_rank="0",priority="",tp_rank="0"} 5.0
sglang:num_running_reqs{dp_rank="0",pp_rank="0",priority="1",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",pp_rank="0",priority="7",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",pp_rank="1",priority="",tp_rank="0"} 5.0
sglang:num_running_reqs{dp_rank="1",pp_rank="0",priority="",tp_rank="0"} 2.0
sglang:num_queue_reqs{attn_dp_rank="9",dp_rank="0",priority=""} 1.0
sglang:num_queue_reqs{attn_dp_rank="9",dp_rank="1",priority=""} 4.0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.1
sglang:token_usage{dp_rank="1",tp_rank="0"} 0.3
"""
TGI = """\
# TYPE tgi_request_count counter
tgi_request_count 253
# TYPE tgi_queue_size gauge
tgi_queue_size 5
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 8
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 2048
"""
TRTLLM = """\
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 3.0
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 2.0
# TYPE trtllm_num_requests_completed_total counter
trtllm_num_requests_completed_total{engine_type="trtllm",model_name="m"} 77.0
# TYPE trtllm_max_num_active_requests gauge
trtllm_max_num_active_requests{engine_type="trtllm",model_name="m"} 64.0
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.125
"""
TRITON = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.6
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 2000
"""
LLAMACPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""
LLAMACPP_OLD = LLAMACPP + "# TYPE llamacpp:kv_cache_usage_ratio gauge\nllamacpp:kv_cache_usage_ratio 0.5\n"
LLAMACPP_NO_METRICS = Fetched(
    501,
    b'{"error":{"code":501,"message":"This server does not support metrics endpoint. Start it with `--metrics`",'
    b'"type":"not_supported_error"}}',
)
TGI_INFO = json.dumps(
    {"model_id": "m", "max_concurrent_requests": 128, "max_best_of": 2, "max_stop_sequences": 4}
).encode()
RANK = {
    "dp_rank": 0,
    "num_running_reqs": 6,
    "num_waiting_reqs": 2,
    "num_waiting_uncached_tokens": 810,
    "max_total_num_tokens": 60000,
    "max_running_requests": 256,
    "token_usage": 0.5,
}


def sglang_loads(*ranks: dict[str, Any]) -> bytes:
    return json.dumps({"timestamp": "t", "version": "0.5.23", "loads": list(ranks)}).encode()


def read_page(page: str | bytes) -> tuple[EngineKind, EngineLoad | None]:
    body = page.encode() if isinstance(page, str) else page
    adapter = page_adapter(Fetched(200, body), METRICS)
    assert adapter is not None
    return adapter.kind, adapter.read(Fetched(200, body))


@pytest.mark.parametrize(
    ("page", "kind", "load"),
    [
        pytest.param(VLLM, EngineKind.VLLM, EngineLoad(12, 2, 0.25), id="vllm: only who waits for capacity"),
        pytest.param(VLLM_BEFORE_REASONS, EngineKind.VLLM, EngineLoad(3, 1, 0.5), id="vllm: its older names"),
        pytest.param(
            VLLM_TWO_ENGINES, EngineKind.VLLM, EngineLoad(7, 6, 0.4), id="vllm: two engines, added up"
        ),
        pytest.param(SGLANG, EngineKind.SGLANG, EngineLoad(24, 3, 0.73), id="sglang: one rank"),
        pytest.param(
            SGLANG.replace("sglang:", "sglang_"),
            EngineKind.SGLANG,
            EngineLoad(24, 3, 0.73),
            id="sglang: underscores",
        ),
        pytest.param(
            SGLANG_RANKS_AND_PRIORITIES,
            EngineKind.SGLANG,
            EngineLoad(7, 5, 0.2),
            id="sglang: ranks are added, priorities and pipeline stages are not",
        ),
        pytest.param(TGI, EngineKind.TGI, EngineLoad(8, 5), id="tgi"),
        pytest.param(TRTLLM, EngineKind.TRTLLM, EngineLoad(3, 2, 0.125, 64), id="trtllm-serve"),
        pytest.param(TRITON, EngineKind.TRITON, EngineLoad(4, 3, 0.6, 512), id="triton"),
        pytest.param(LLAMACPP, EngineKind.LLAMACPP, EngineLoad(4, 1), id="llama.cpp"),
        pytest.param(LLAMACPP_OLD, EngineKind.LLAMACPP, EngineLoad(4, 1, 0.5), id="llama.cpp: older"),
        pytest.param(
            "# TYPE tgi_request_count counter\n",
            EngineKind.TGI,
            None,
            id="an idle engine without gauges tells nothing",
        ),
    ],
)
def test_pages(page: str, kind: EngineKind, load: EngineLoad | None) -> None:
    found, read = read_page(page)
    assert found is kind
    if read is not None and read.kv_usage is not None:
        read = replace(read, kv_usage=round(read.kv_usage, 9))  # a mean may end in ...0001
    assert read == load


RUNNING = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running"


@pytest.mark.parametrize(
    ("sample", "running"),
    [
        pytest.param(" 7\n", 7, id="no labels"),
        pytest.param("\t7\n", 7, id="a tab"),
        pytest.param('{a="b"} 7.0 1712345678000\n', 7, id="a time stamp"),
        pytest.param('{a="} 9 {"} 7\n', 7, id="braces in a label"),
        pytest.param('{a="x"}7\n', 7, id="no space"),
        pytest.param(" 7", 7, id="no line end"),
        pytest.param(" 7\r\n", 7, id="carriage return"),
        pytest.param(" 7e0\n", 7, id="an exponent"),
        pytest.param(" NaN\n", None, id="NaN"),
        pytest.param(" +Inf\n", None, id="infinity"),
        pytest.param(" -1\n", None, id="negative"),
        pytest.param(" 1e300\n", None, id="absurd"),
        pytest.param(" seven\n", None, id="a word"),
        pytest.param("\n", None, id="no value"),
        pytest.param(" \n", None, id="only a space"),
        pytest.param('{a="x" 7\n', None, id="an open brace"),
        pytest.param('{engine="0"} 7\nvllm:num_requests_running{engine="1"} NaN\n', None, id="one of two is NaN"),
    ],
)  # fmt: skip
def test_samples(sample: str, running: int | None) -> None:
    _, load = read_page(f"vllm:num_requests_waiting 1\n{RUNNING}{sample}")
    assert load == EngineLoad(running, 1)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [("0", 0.0), ("1", 1.0), ("1.004", 1.0), ("42", None), ("NaN", None), ("-0.1", None)],
)
def test_a_share_is_between_0_and_1(usage: str, expected: float | None) -> None:
    _, load = read_page(f"{RUNNING} 7\nvllm:kv_cache_usage_perc {usage}\n")
    assert load == EngineLoad(7, None, expected)


def test_only_lines_that_begin_with_the_name_count() -> None:
    page = f'other{{x="\\nvllm:num_requests_running 9"}} 1\n# vllm:num_requests_running 8\n{RUNNING} 7\n'
    assert read_page(page)[1] == EngineLoad(7, None)


def test_an_engine_that_tells_neither_running_nor_waiting_tells_nothing() -> None:
    assert read_page("# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n")[1] is None


def test_a_body_that_is_too_long_is_not_read() -> None:
    adapter = page_adapter(Fetched(200, VLLM.encode()), METRICS)
    assert adapter is not None
    assert adapter.read(Fetched(200, VLLM.encode().ljust(MAX_BODY_BYTES))) is not None
    assert adapter.read(Fetched(200, VLLM.encode().ljust(MAX_BODY_BYTES + 1))) is None
    assert adapter.read(Fetched(503, VLLM.encode())) is None


@pytest.mark.parametrize(
    ("body", "load"),
    [
        pytest.param(sglang_loads(RANK), EngineLoad(6, 2, 0.5, 256), id="one rank"),
        pytest.param(
            sglang_loads(RANK, RANK | {"num_waiting_reqs": 0, "token_usage": 0.0}),
            EngineLoad(12, 2, 0.25, 512),
            id="two ranks",
        ),
        pytest.param(
            sglang_loads({"num_running_reqs": 1, "num_waiting_reqs": 0}), EngineLoad(1, 0), id="the least"
        ),
        pytest.param(
            sglang_loads(RANK | {"max_running_requests": 0}), EngineLoad(6, 2, 0.5), id="no limit told"
        ),
        pytest.param(sglang_loads(), None, id="no rank yet"),
        pytest.param(sglang_loads(RANK, {"dp_rank": 1}), None, id="one rank of two is silent"),
        pytest.param(sglang_loads(RANK | {"num_waiting_reqs": True}), None, id="true is no number"),
        pytest.param(sglang_loads(RANK | {"num_waiting_reqs": "2"}), None, id="a text is no number"),
        pytest.param(sglang_loads(RANK | {"num_running_reqs": float("nan")}), None, id="NaN"),
        pytest.param(sglang_loads(RANK | {"num_running_reqs": -1}), None, id="negative"),
        pytest.param(
            b'{"workers":[],"loads":[{"worker":"http://a:1","load":3}],"total_workers":1}',
            None,
            id="SGLang's gateway says other things at this path",
        ),
        pytest.param(b'{"loads":{"0":1}}', None, id="not a list"),
        pytest.param(b'{"loads":[1,2]}', None, id="not objects"),
        pytest.param(b"[]", None, id="a list"),
        pytest.param(b"<html>", None, id="no JSON"),
        pytest.param(b"[" * 200_000, None, id="deeper than anybody reads"),
        pytest.param(b'{"loads":[{"num_running_reqs":' + b"9" * 5000 + b"}]}", None, id="a very long number"),
    ],
)
def test_sglang_loads(body: bytes, load: EngineLoad | None) -> None:
    assert parse_sglang_loads(body) == load


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":900}]', EngineLoad(3, 2)),
        (b'[{"num_reqs":5,"num_waiting_reqs":2},{"num_reqs":1,"num_waiting_reqs":0}]', EngineLoad(4, 2)),
        (b'{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":0}', EngineLoad(5, 0)),
        (b'{"load":5}', None),
        (b"5.0", None),
        (b"[]", None),
    ],
)
def test_sglang_before_v1_loads(body: bytes, load: EngineLoad | None) -> None:
    assert parse_sglang_get_load(body) == load


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]', EngineLoad(1, None, None, 2)),
        (b'[{"id":0,"state":0},{"id":1,"state":1},{"id":2,"state":1}]', EngineLoad(2, None, None, 3)),
        (b'[{"id":0}]', None),
        (b"[]", None),
        (b'{"error":{"code":501}}', None),
    ],
)
def test_llamacpp_slots(body: bytes, load: EngineLoad | None) -> None:
    assert parse_llamacpp_slots(body) == load


@given(st.binary(max_size=300), st.sampled_from([VLLM, SGLANG, TRITON, TGI, LLAMACPP]), st.integers(0, 600))
def test_no_garbage_raises(garbage: bytes, page: str, at: int) -> None:
    body = page.encode()
    body = body[:at] + garbage + body[at:]
    adapter = page_adapter(Fetched(200, body), METRICS)
    if adapter is not None:
        load = adapter.read(Fetched(200, body))
        for number in () if load is None else (load.running, load.pending, load.max_running):
            assert number is None or number >= 0
        assert load is None or load.kv_usage is None or 0.0 <= load.kv_usage <= 1.0
    for parse in (parse_sglang_loads, parse_sglang_get_load, parse_llamacpp_slots):
        parse(garbage)


# --- finding out


def found_by(server: dict[str | LoadQuery, Fetched | bytes]) -> tuple[Adapter | None, list[LoadQuery]]:
    """What `detection` makes of a server that responds on these paths, and its requests."""
    answers = {
        LoadQuery(path) if isinstance(path, str) else path: Fetched(200, said)
        if isinstance(said, bytes)
        else said
        for path, said in server.items()
    }
    asked: list[LoadQuery] = []
    questions = detection()
    ask = next(questions)
    while True:
        asked.append(ask)
        try:
            ask = questions.send(answers.get(ask, NOT_FOUND if ask.port is None else NO_RESPONSE))
        except StopIteration as answer:
            return answer.value, asked


LOADS = "/v1/loads?include=core"
TRITON_PORT = LoadQuery("/metrics", TRITON_METRICS_PORT)


@pytest.mark.parametrize(
    ("server", "kind", "asks"),
    [
        pytest.param({LOADS: sglang_loads(RANK)}, EngineKind.SGLANG, LoadQuery(LOADS), id="sglang"),
        pytest.param(
            {LOADS: sglang_loads(RANK), "/metrics": SGLANG.encode()},
            EngineKind.SGLANG,
            LoadQuery(LOADS),
            id="sglang prefers its loads to its gauges",
        ),
        pytest.param(
            {"/metrics": SGLANG.encode(), "/get_load": b'[{"num_reqs":1,"num_waiting_reqs":0}]'},
            EngineKind.SGLANG,
            LoadQuery("/get_load"),
            id="an older sglang too",
        ),
        pytest.param(
            {"/get_load": b'[{"num_reqs":1,"num_waiting_reqs":0}]'},
            EngineKind.SGLANG,
            LoadQuery("/get_load"),
            id="an older sglang without metrics",
        ),
        pytest.param(
            {LOADS: Fetched(401, b""), "/get_load": Fetched(401, b""), "/metrics": SGLANG.encode()},
            EngineKind.SGLANG,
            METRICS,
            id="sglang that wants a key, but not for its metrics",
        ),
        pytest.param(
            {"/metrics": VLLM.encode(), "/version": b'{"version":"0.33.0"}'},
            EngineKind.VLLM,
            METRICS,
            id="vllm",
        ),
        pytest.param(
            {"/metrics": VLLM.encode(), "/version": b'{"version":"skyserve-engine","profile":"l4-8b"}'},
            EngineKind.SKYSERVE,
            METRICS,
            id="our engine",
        ),
        pytest.param({"/metrics": TGI.encode()}, EngineKind.TGI, METRICS, id="tgi"),
        pytest.param(
            {"/metrics": b"", "/info": TGI_INFO}, EngineKind.TGI, METRICS, id="tgi before its first request"
        ),
        pytest.param(
            {"/metrics": b'[{"numActiveRequests":1}]', "/prometheus/metrics": TRTLLM.encode()},
            EngineKind.TRTLLM,
            LoadQuery("/prometheus/metrics"),
            id="trtllm-serve",
        ),
        pytest.param(
            {"/metrics": b"[]"}, EngineKind.TRTLLM, None, id="trtllm-serve without Prometheus is not emptied"
        ),
        pytest.param(
            {"/metrics": TRITON.encode()}, EngineKind.TRITON, METRICS, id="triton's openai frontend"
        ),
        pytest.param(
            {"/v2": b'{"name":"triton","version":"2.60.0"}', TRITON_PORT: TRITON.encode()},
            EngineKind.TRITON,
            TRITON_PORT,
            id="triton with its metrics on a port of their own",
        ),
        pytest.param(
            {"/v2": b'{"name":"triton"}', TRITON_PORT: VLLM.encode()},
            EngineKind.TRITON,
            TRITON_PORT,
            id="triton with vllm inside",
        ),
        pytest.param({"/v2": b'{"name":"triton"}'}, EngineKind.TRITON, None, id="triton, that port closed"),
        pytest.param({"/metrics": LLAMACPP.encode()}, EngineKind.LLAMACPP, METRICS, id="llama.cpp"),
        pytest.param(
            {"/metrics": LLAMACPP_NO_METRICS, "/slots": b'[{"id":0,"is_processing":false}]'},
            EngineKind.LLAMACPP,
            LoadQuery("/slots"),
            id="llama.cpp without --metrics",
        ),
        pytest.param(
            {"/metrics": LLAMACPP_NO_METRICS, "/slots": LLAMACPP_NO_METRICS},
            EngineKind.LLAMACPP,
            None,
            id="llama.cpp that tells nothing",
        ),
        pytest.param({"/api/version": b'{"version":"0.20"}'}, EngineKind.UNKNOWN, None, id="ollama"),
        pytest.param(
            {"/metrics": b"# TYPE http_requests_total counter\nhttp_requests_total 1\n"},
            EngineKind.UNKNOWN,
            None,
            id="a server with metrics that is no engine",
        ),
        pytest.param(
            {"/metrics": b'# TYPE up gauge\nup{job="vllm:x",by="tgi_y"} 1\n'},
            EngineKind.UNKNOWN,
            None,
            id="names of engines in labels",
        ),
        pytest.param(
            {LOADS: b'{"loads":[{"worker":"http://a:1","load":3}]}'},
            EngineKind.UNKNOWN,
            None,
            id="sglang's gateway",
        ),
    ],
)
def test_detection(
    server: dict[str | LoadQuery, Fetched | bytes], kind: EngineKind, asks: LoadQuery | None
) -> None:
    adapter, _ = found_by(server)
    assert adapter is not None
    assert (adapter.kind, adapter.query) == (kind, asks)


@pytest.mark.parametrize(
    ("server", "questions"),
    [
        pytest.param({LOADS: NO_RESPONSE}, 1, id="nobody answers: nothing more is asked"),
        pytest.param({"/metrics": NO_RESPONSE}, 7, id="it left in between"),
        pytest.param({"/metrics": Fetched(503, b"Loading model")}, 7, id="it is loading"),
    ],
)
def test_what_cannot_be_told_yet(server: dict[str | LoadQuery, Fetched | bytes], questions: int) -> None:
    adapter, asked = found_by(server)
    assert adapter is None
    assert len(asked) == questions


def test_an_engine_is_found_with_few_questions() -> None:
    assert len(found_by({LOADS: sglang_loads(RANK)})[1]) == 1
    assert len(found_by({"/metrics": VLLM.encode()})[1]) == 3
    assert len(found_by({"/metrics": LLAMACPP.encode()})[1]) == 2


@given(st.lists(st.tuples(st.sampled_from([0, 200, 404, 500, 501]), st.binary(max_size=60)), max_size=12))
def test_detection_ends_whatever_is_answered(answers: list[tuple[int, bytes]]) -> None:
    questions = detection()
    next(questions)
    for status, body in answers:
        try:
            questions.send(Fetched(status, body))
        except StopIteration:
            break
    else:
        assert len(answers) < 8
