"""One rendering of the services for all who ask at once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest

from skyserve_cli.controller.api.snapshot import OLDEST_S, SLOW_S, Rendered, Snapshots


@dataclass
class World:
    time: float = 100.0
    count: int = 1
    rendered: int = 0

    def now(self) -> float:
        return self.time

    def changes(self) -> int:
        return self.count

    def content(self) -> dict[str, int]:
        self.rendered += 1
        return {"rendered": self.rendered}


async def test_many_who_ask_at_once_share_one_rendering() -> None:
    world = World()
    snapshots = Snapshots(world.changes, world)
    found = await asyncio.gather(*(snapshots.get("all", world.content) for _ in range(200)))
    assert (world.rendered, len(set(found))) == (1, 1)


async def test_it_is_rendered_again_after_a_change_or_when_it_is_too_old_and_each_kind_by_itself() -> None:
    world = World()
    snapshots = Snapshots(world.changes, world)

    async def get(kind: str = "all") -> Rendered:
        return await snapshots.get(kind, world.content)

    first = await get()
    world.time += OLDEST_S / 2
    assert await get() == first
    world.count += 1
    second = await get()
    assert second.etag != first.etag
    world.time += OLDEST_S
    third = await get()
    assert third.etag != second.etag
    assert (await get("ended")).etag != third.etag


async def test_equal_content_has_an_equal_etag() -> None:
    world = World()
    snapshots = Snapshots(world.changes, world)
    first = await snapshots.get("all", lambda: [1])
    world.count += 1
    assert (await snapshots.get("all", lambda: [1])).etag == first.etag


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyserve_cli.controller.api.snapshot.SLOW_S", 0.01)


@pytest.mark.usefixtures("impatient")
async def test_one_that_is_slow_to_make_is_not_waited_for_where_an_old_one_will_do() -> None:
    world, responds = World(), threading.Event()
    snapshots = Snapshots(world.changes, world)
    first = await snapshots.get("all", world.content, may_be_old=True)
    world.time += 60.0

    def slow() -> dict[str, int]:
        responds.wait(30.0)
        return world.content()

    assert await snapshots.get("all", slow, may_be_old=True) is first
    assert snapshots.age_s(first) == 60.0
    world.time += SLOW_S
    many = await asyncio.gather(*(snapshots.get("all", slow, may_be_old=True) for _ in range(100)))
    assert set(many) == {first}
    waits = asyncio.create_task(snapshots.get("all", slow))  # takes no old one
    responds.set()
    second = await waits
    assert (second.body, world.rendered) == (b'{"rendered":3}', 3), "one was under way for the hundred"
    assert await snapshots.get("all", world.content, may_be_old=True) == second


@pytest.mark.usefixtures("impatient")
async def test_an_old_one_does_for_no_failure_and_never_for_the_first_request() -> None:
    world = World()
    snapshots = Snapshots(world.changes, world)

    def fails() -> dict[str, int]:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        await snapshots.get("all", fails, may_be_old=True)
    await snapshots.get("all", world.content)
    world.time += OLDEST_S
    with pytest.raises(OSError, match="away"):
        await snapshots.get("all", fails, may_be_old=True)


async def test_what_is_not_there_takes_no_place() -> None:
    world = World()
    snapshots = Snapshots(world.changes, world)

    def missing() -> dict[str, int]:
        raise LookupError

    for name in ("ghost", "ghoul"):
        with pytest.raises(LookupError):
            await snapshots.get(name, missing)
    assert (snapshots._locks, snapshots._last) == ({}, {})
    await snapshots.get("all", world.content)
    world.count += 1
    with pytest.raises(LookupError):
        await snapshots.get("all", missing)
    assert snapshots._last.keys() == {"all"}, "the last one may be shown while the database is slow"
