"""Streams of a real vLLM that are cut at random places are exact, end with an error, or are reported as inexact.

SKYSERVE_ENGINE_SAMPLES is the number of streams per cell and number of cuts; SKYSERVE_TEST_SEED draws others.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from benchmarks.chaos.real_streams import CELLS, Cell, Ending, Kind, Plan, run
from benchmarks.chaos.stream_apis import Api

SAMPLES = int(os.environ.get("SKYSERVE_ENGINE_SAMPLES", "5"))
SEED = int(os.environ.get("SKYSERVE_TEST_SEED", "1"))
EXACT = {
    Kind.PLAIN,
    Kind.CHARACTER,
    Kind.STOP,
    Kind.STOP_LATER,
    Kind.REPETITION,
    Kind.MIN_TOKENS,
    Kind.MULTI_TURN,
}


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.asyncio(loop_scope="session")
async def test_no_cut_stream_is_silently_another_one(cell: Cell, vllm_urls: tuple[str, ...]) -> None:
    samples = await run(Plan(cells=(cell,), samples=SAMPLES, seed=SEED, engines=vllm_urls))
    bad = [
        (sample.id, sample.cuts, sample.why)
        for sample in samples
        if sample.ending in (Ending.OTHER, Ending.BROKEN)
    ]
    assert not bad
    if cell.kind in EXACT and cell.api in (Api.CHAT, Api.COMPLETIONS):
        assert Counter(sample.ending for sample in samples) == {Ending.EXACT: len(samples)}


@pytest.mark.asyncio(loop_scope="session")
async def test_whole_replicas_that_are_cut_off_every_second_break_no_stream(
    vllm_urls: tuple[str, ...],
) -> None:
    cells = (Cell(Api.CHAT, Kind.PLAIN), Cell(Api.COMPLETIONS, Kind.PLAIN))
    plan = Plan(
        cells, 2 * SAMPLES, cuts=(1,), tokens=600, parallel=16, whole_replicas=True, engines=vllm_urls
    )
    samples = await run(plan)
    assert not [sample.why for sample in samples if sample.ending in (Ending.OTHER, Ending.BROKEN)]
    assert any(sample.legs > 1 for sample in samples)
