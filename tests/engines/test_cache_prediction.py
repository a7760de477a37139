"""What a load balancer predicts of the caches of four real vLLM, whose events it follows; 100 requests for each of SKYSERVE_ENGINE_SAMPLES."""

from __future__ import annotations

import argparse
import os

import pytest

from benchmarks.cache_prediction import measure
from benchmarks.chaos.real_engines import folder, has_vllm

REQUESTS = 100 * int(os.environ.get("SKYSERVE_ENGINE_SAMPLES", "5"))


async def test_predictions_are_right_with_lost_events_and_after_a_restart() -> None:
    if not has_vllm():
        pytest.skip(f"no vLLM in {folder()}: run scripts/real_engines.sh")
    options = argparse.Namespace(
        requests=REQUESTS,
        engines=4,
        blocks=128,
        talks=48,
        parallel=4,
        policy="gorgo",
        disturbed=REQUESTS // 4,
    )
    assert await measure(options) == 0
