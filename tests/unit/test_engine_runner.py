"""The engine on a real clock: quiet when idle, loud when it crashes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from skyserve_cli.engine.errors import EngineDown
from skyserve_cli.engine.metrics import Telemetry
from skyserve_cli.engine.model import EngineModel, Request, RequestRefused, TokenOutput
from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.engine.runner import EngineRunner, Mailbox
from skyserve_cli.engine.server import serve
from skyserve_cli.engine.text import Language


class BrokenModel(EngineModel):
    def begin(self, now: float) -> float:
        raise ZeroDivisionError("a defect")


def start(model: EngineModel, speed: float = 1000.0) -> EngineRunner:
    runner = EngineRunner(model, Telemetry(model, "m"), speed, time.monotonic)
    runner.start()
    return runner


def request(name: str, **more: Any) -> Request:
    return Request(name, tuple(range(300, 340)), **({"max_tokens": 20, "ignore_eos": True} | more))


async def drain(mailbox: Mailbox) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    open_requests = set(mailbox.ids)
    while open_requests:
        taken = await asyncio.wait_for(mailbox.take(), 10)
        assert taken
        outputs += taken
        open_requests -= {output.request_id for output in taken if output.finish}
    return outputs


async def test_all_tokens_of_a_call_arrive_in_its_mailbox() -> None:
    runner = start(EngineModel(L4_8B, Language()))
    first = runner.submit([request("a"), request("b", seed=1)])
    second = runner.submit([request("c")])
    outputs = await drain(first)
    assert {output.request_id for output in outputs} == {"a", "b"}
    assert len(outputs) == 40
    assert len(await drain(second)) == 20
    await runner.stop()


async def test_an_idle_runner_has_no_timer() -> None:
    loop = asyncio.get_running_loop()
    before = {id(timer) for timer in loop._scheduled}  # type: ignore[attr-defined]
    model = EngineModel(L4_8B, Language())
    runner = start(model)
    await drain(runner.submit([request("a")]))
    for _ in range(10):
        await asyncio.sleep(0)
    iterations = model.counters.iterations
    timers = [t for t in loop._scheduled if id(t) not in before and not t.cancelled()]  # type: ignore[attr-defined]
    assert timers == []
    assert len(loop._ready) == 0  # type: ignore[attr-defined]
    await drain(runner.submit([request("b")]))  # and it wakes up again
    assert model.counters.iterations > iterations
    await runner.stop()


async def test_a_process_that_was_stopped_does_not_burst_to_catch_up() -> None:
    now = 0.0  # stands still but for the jump
    model = EngineModel(L4_8B, Language())
    runner = EngineRunner(model, Telemetry(model, "m"), 50.0, lambda: now)
    runner.start()
    mailbox = runner.submit([request("a", max_tokens=5_000)])
    assert len(await mailbox.take()) == 1
    now = 60.0  # 3,000 virtual seconds: time for more than 40,000 tokens
    taken = sum([len(await mailbox.take()) for _ in range(3)])
    assert 50 < taken < 100  # the lag that is caught up: 0.1 s, 5 virtual seconds
    await runner.stop()


async def test_a_refused_call_leaves_nothing_behind() -> None:
    model = EngineModel(L4_8B, Language())
    runner = start(model)
    with pytest.raises(RequestRefused):
        runner.submit([request("a"), request("b", max_tokens=10**6)])
    assert list(model.live()) == []
    await runner.stop()


async def test_a_closed_mailbox_takes_its_requests_along() -> None:
    model = EngineModel(L4_8B, Language())
    runner = start(model, speed=1.0)
    mailbox = runner.submit([request("a"), request("b")])
    runner.close(mailbox)
    assert list(model.live()) == []
    await runner.stop()


async def test_a_defect_reaches_every_caller() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    runner = start(BrokenModel(L4_8B, Language()))
    mailbox = runner.submit([request("a")])
    for _ in range(2):
        with pytest.raises(EngineDown, match="a defect"):
            await asyncio.wait_for(mailbox.take(), 10)
    assert not runner.alive
    with pytest.raises(EngineDown):
        runner.submit([request("b")])
    assert len(reported) == 1


def test_a_speed_that_is_not_positive_is_refused() -> None:
    model = EngineModel(L4_8B, Language())
    with pytest.raises(ValueError, match="speed"):
        EngineRunner(model, Telemetry(model, "m"), 0.0, time.monotonic)
    with pytest.raises(ValueError, match="speed"):
        serve("l4-8b", "127.0.0.1", 0, speed=0.0)
