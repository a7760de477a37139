"""Three real vLLM for all tests of this folder, started once."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.real_engines import folder, has_vllm, vllm_engine

START_TIMEOUT_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/engines/"):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(3600))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_urls() -> AsyncIterator[tuple[str, ...]]:
    """Two replicas, and the one to which nothing happens: those of SKYSERVE_ENGINE_URLS, or new ones."""
    if running := os.environ.get("SKYSERVE_ENGINE_URLS"):
        yield tuple(running.split(","))
        return
    if not has_vllm():
        pytest.skip(f"no vLLM in {folder()}: run scripts/real_engines.sh")
    async with Fleet(vllm_engine(), 3, START_TIMEOUT_S) as fleet:
        yield tuple(engine.url for engine in fleet.engines)
