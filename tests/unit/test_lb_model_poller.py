"""When targets are polled for their models, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from lb.config.schema import Readiness, Table, Target
from lb.core.targets import Key, TargetTable
from lb.engines.kinds import Fetched
from lb.engines.model_poller import (
    AGAIN_AFTER_S,
    MOST_AT_ONCE,
    POLL_EVERY_S,
    POLL_UNLISTED_EVERY_S,
    ModelPoller,
)

STEP_S = 0.25


def listing(*names: str) -> Fetched:
    return Fetched(200, json.dumps({"data": [{"id": name} for name in names]}).encode())


class World:
    """A table, its poller, and what the targets respond."""

    def __init__(self, *ids: str) -> None:
        self.now = 0.0
        self.table = TargetTable(self.wire(*ids), 0.0)
        self.responses: dict[str, Fetched | Exception] = {}
        self.polls: list[tuple[float, str]] = []
        self.changes = 0
        self.gate: asyncio.Event | None = None
        self.poller = ModelPoller(self.table, self.fetch, lambda: self.now, self.changed)

    def wire(self, *ids: str, draining: str = "") -> Table:
        return Table(
            "s",
            "1",
            tuple(
                Target(
                    one, f"http://{one}:1", state=Readiness.DRAINING if one == draining else Readiness.READY
                )
                for one in ids
            ),
        )

    def key(self, target_id: str) -> Key:
        key = self.table.key(target_id)
        assert key is not None
        return key

    async def fetch(self, target: Target, path: str, timeout_s: float) -> Fetched:
        assert path == "/v1/models"
        self.polls.append((self.now, target.id))
        if self.gate is not None:
            await self.gate.wait()
        response = self.responses.get(target.id, listing("a"))
        if isinstance(response, Exception):
            raise response
        return response

    def changed(self) -> None:
        self.changes += 1

    async def run(self, for_s: float) -> None:
        for _ in range(round(for_s / STEP_S)):
            self.poller.poll_due()
            await settle()
            self.now += STEP_S

    def polled(self, target_id: str) -> list[float]:
        return [at for at, one in self.polls if one == target_id]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_target_that_joins_is_polled_at_once_and_then_about_every_half_minute() -> None:
    w = World("x")
    await w.run(1.0)
    w.table.apply(w.wire("x", "y"), w.now)
    joined = w.now
    await w.run(10 * POLL_EVERY_S)
    times = w.polled("y")
    assert times[0] == joined
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(0.8 * POLL_EVERY_S <= gap <= 1.2 * POLL_EVERY_S + STEP_S for gap in gaps)
    assert w.polled("x")[3] - w.polled("x")[2] != gaps[2]  # each at times of its own


@pytest.mark.parametrize(
    ("response", "serves"),
    [
        pytest.param(listing("a"), True, id="lists it"),
        pytest.param(listing("b"), False, id="lists another"),
        pytest.param(Fetched(404, b"{}"), None, id="no such path"),
        pytest.param(Fetched(405, b""), None, id="no such method"),
        pytest.param(Fetched(501, b""), None, id="not implemented"),
        pytest.param(Fetched(401, b"{}"), None, id="wants a key"),
        pytest.param(Fetched(200, b"<html>"), None, id="not JSON"),
        pytest.param(Fetched(200, b'{"data":[]}'), None, id="an empty list"),
    ],
)
async def test_what_a_response_says(response: Fetched, serves: bool | None) -> None:
    w = World("x")
    w.responses["x"] = response
    await w.run(2.0)
    assert w.table.models.serves("x", "a") is serves
    assert len(w.polls) == 1
    assert w.table.models.mixed is False  # it has been polled


async def test_a_target_that_lists_none_is_polled_more_seldom() -> None:
    w = World("x")
    w.responses["x"] = Fetched(404, b"")
    await w.run(10 * POLL_UNLISTED_EVERY_S)
    assert 9 <= len(w.polls) <= 13


@pytest.mark.parametrize(
    "failure", [OSError("refused"), TimeoutError(), Fetched(503, b"loading"), Fetched(429, b"")]
)
async def test_a_target_that_says_nothing_is_polled_soon_again_and_keeps_its_list(
    failure: Fetched | Exception,
) -> None:
    w = World("x")
    w.responses["x"] = failure
    await w.run(8.0)
    assert w.polled("x")[:4] == [0.0, 0.25, 0.75, 1.75]
    assert w.table.models.mixed is True  # it may serve anything
    w.responses["x"] = listing("a")
    await w.run(POLL_EVERY_S)
    w.responses["x"] = failure
    await w.run(2 * POLL_EVERY_S)
    assert w.table.models.serves("x", "a") is True


async def test_a_readmitted_target_is_polled_at_once() -> None:
    w = World("x", "y")
    await w.run(1.0)
    w.table.eject(w.key("x"), w.now)
    w.responses["x"] = listing("b")
    await w.run(1.0)
    assert len(w.polled("x")) == 1
    assert w.table.renew(w.key("x"))
    at = w.now
    await w.run(STEP_S)
    assert w.polled("x")[1] == at
    assert w.table.models.serves("x", "b") is True
    assert w.changes == 1


async def test_a_wrong_model_polls_its_target_at_once_but_at_most_once_a_second() -> None:
    w = World("x", "y")
    await w.run(5.0)
    w.poller.wrong_model(w.key("x"))
    at = w.now
    for _ in range(12):
        await w.run(STEP_S)
        w.poller.wrong_model(w.key("x"))
    assert w.polled("x")[1] == at
    gaps = [after - before for before, after in zip(w.polled("x")[1:], w.polled("x")[2:], strict=False)]
    assert gaps
    assert all(gap >= AGAIN_AFTER_S for gap in gaps)
    assert len(w.polled("y")) == 1


async def test_a_wrong_model_during_a_poll_asks_for_another() -> None:
    w = World("x")
    w.gate = asyncio.Event()
    await w.run(STEP_S)
    w.poller.wrong_model(w.key("x"))
    w.gate.set()
    await w.run(2.0)
    assert len(w.polls) == 2


async def test_a_missing_model_polls_all_targets_every_five_seconds_at_most() -> None:
    w = World("x", "y")
    for _ in range(80):
        await w.run(STEP_S)
        w.poller.missing_model()
    assert [len(w.polled(one)) for one in "xy"] == [4, 4]


async def test_it_says_so_when_a_target_serves_more_models() -> None:
    w = World("x")
    await w.run(1.0)
    assert w.changes == 0
    w.responses["x"] = listing("a", "lora")
    await w.run(2 * POLL_EVERY_S)
    assert w.changes == 1
    assert w.table.models.serves("x", "lora") is True


async def test_a_draining_target_is_left_alone() -> None:
    w = World("x", "y")
    w.table.apply(w.wire("x", "y", draining="x"), 0.0)
    await w.run(2 * POLL_EVERY_S)
    assert w.polled("x") == []


async def test_a_poll_of_a_target_that_left_is_cancelled_and_tells_nothing() -> None:
    w = World("x", "y")
    w.gate = asyncio.Event()
    await w.run(STEP_S)
    w.table.apply(w.wire("y"), w.now)
    await w.run(STEP_S)
    w.gate.set()
    await w.run(STEP_S)
    assert w.table.models.serves("y", "a") is True
    assert w.table.models.serves("x", "a") is None


async def test_not_all_at_once() -> None:
    w = World(*(f"t{n}" for n in range(3 * MOST_AT_ONCE)))
    w.gate = asyncio.Event()
    await w.run(STEP_S)
    assert len(w.polls) == MOST_AT_ONCE
    w.gate.set()
    await w.run(1.0)
    assert len(w.polls) == 3 * MOST_AT_ONCE


async def test_stopping_ends_what_is_under_way() -> None:
    w = World("x")
    w.gate = asyncio.Event()
    w.poller.poll_due()
    await settle()
    assert len(w.polls) == 1
    await w.poller.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
