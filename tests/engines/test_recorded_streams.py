"""What a real vLLM responds now has the shape of what was recorded, by which the quick tests judge our engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.engines.record import record
from tests.unit.test_engine_recorded import RECORDED, shape


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_still_responds_as_recorded(vllm_urls: tuple[str, ...]) -> None:
    now = await asyncio.to_thread(record, vllm_urls[-1])
    for name, case in RECORDED.items():
        assert now[name]["status"] == case["status"], name
        if "body" in case:
            assert shape(json.loads(now[name]["body"])) == shape(json.loads(case["body"])), name
        else:
            # How many tokens an event has depends on the moment, so an event between others may be missing.
            assert _shapes(now[name]["events"]) <= _shapes(case["events"]), name


def _shapes(events: list[str]) -> set[str]:
    """The kinds of events."""
    return {str(shape(json.loads(data))) for data in events if data != "[DONE]"}
