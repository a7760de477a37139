"""One rendering of the services for all who ask at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from skyserve_cli.controller.api.snapshot import OLDEST_S, Rendered, Snapshots


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
