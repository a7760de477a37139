"""The watched file of API keys: changes as people and Kubernetes make them, and files that cannot be used."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lb.agent.keys_file import KeysFile
from lb.config.key_limits import KeyLimits, Price
from lb.config.options import Access, ApiKey
from lb.config.schema import Table
from lb.core.api_keys import Admission, ApiKeyStore, Unauthorized
from tests.integration.lb_harness import World, world


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def digest(name: str) -> str:
    return hashlib.sha256(f"of-{name}-0123456789".encode()).hexdigest()


def entries(*names: str, **more: object) -> str:
    return json.dumps([{"name": name, "sha256": digest(name), **more} for name in names])


def old(path: Path, text: str) -> None:
    """Write a file that was last changed long ago, in one step."""
    draft = path.with_name("draft")
    draft.write_text(text)
    os.utime(draft, (1e9, 1e9))
    draft.replace(path)


class Watched:
    """A file and the names in force."""

    def __init__(self, path: Path, *of_table: ApiKey) -> None:
        self.changes = 0
        self.file = KeysFile(self._changed)
        self.table = Table("chat", "1", access=Access(of_table, keys_file=str(path)))
        self.file.extended(self.table)

    def _changed(self) -> None:
        self.changes += 1

    def look(self) -> Sequence[str]:
        """Return the names after one look, which may take several ticks."""
        while self.file.tick() is not None:
            pass
        return self.names()

    def names(self) -> Sequence[str]:
        return [key.name for key in self.file.extended(self.table).access.keys]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_keys_are_added_changed_and_revoked(path: Path) -> None:
    path.write_text(entries("ada", "bob"))
    watched = Watched(path)
    assert watched.names() == ["ada", "bob"]  # before a client can come
    path.write_text(entries("ada", "eve"))
    assert watched.look() == ["ada", "eve"]
    path.write_text(entries("ada", "eve", weight=2))
    watched.look()
    assert {key.weight for key in watched.file._keys} == {2.0}
    path.write_text("[]")
    assert watched.look() == []
    assert watched.changes == 3


def test_a_file_that_is_as_it_was_changes_nothing(path: Path) -> None:
    old(path, entries("ada"))
    watched = Watched(path)
    watched.look()
    path.touch()
    watched.look()
    path.write_text(" " + entries("ada"))  # other bytes, the same keys
    assert watched.look() == ["ada"]
    assert watched.changes == 0


def test_a_second_change_at_the_same_instant_and_of_the_same_size_is_seen(path: Path) -> None:
    path.write_text(entries("ada"))
    found = path.stat()
    watched = Watched(path)
    path.write_text(entries("bob"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert watched.look() == ["bob"]


def test_a_mounted_secret_is_replaced_by_another_link(tmp_path: Path) -> None:
    """As the kubelet does it: keys.json -> ..data/keys.json, and ..data -> a folder per version, renamed over."""

    def publish(version: str, text: str) -> None:
        folder = tmp_path / version
        folder.mkdir()
        (folder / "keys.json").write_text(text)
        os.utime(folder / "keys.json", (1e9, 1e9))
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("..2026_1", entries("ada"))
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    watched = Watched(tmp_path / "keys.json")
    assert watched.names() == ["ada"]
    publish("..2026_2", entries("bob"))
    assert watched.look() == ["bob"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param('[{"name": "ada"}]', "entry 1 (line 1): has neither key nor sha256", id="a wrong entry"),
        pytest.param(entries("ada")[:-1], "expected a comma or the end of the list", id="half written"),
        pytest.param("", "expected a JSON list", id="empty"),
        pytest.param(None, "No such file or directory", id="removed"),
    ],
)
def test_a_file_that_cannot_be_used_keeps_the_last_good_keys_and_says_so_once(
    path: Path, text: str | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    old(path, entries("ada"))
    watched = Watched(path)
    if text is None:
        path.rename(path.with_name("away"))
    else:
        path.write_text(text)
    for _ in range(3):
        assert watched.look() == ["ada"]
    assert problem in watched.file.problem
    assert str(path) in watched.file.problem
    assert [one.levelno for one in caplog.records].count(logging.WARNING) == 1
    if text is None:
        path.with_name("away").rename(path)  # the same file is back, as it was
    else:
        path.write_text(entries("ada", "bob"))
    assert watched.look() == (["ada"] if text is None else ["ada", "bob"])
    assert watched.file.problem == ""


def test_a_budget_of_dollars_without_prices_is_a_problem(path: Path) -> None:
    key = {"name": "ada", "sha256": digest("ada"), "models": {"m": {"usd_per_month": 5}}}
    path.write_text(json.dumps([key]))
    watched = Watched(path)
    assert watched.names() == ["ada"]
    assert "usd_per_month of 'ada' needs an entry \"*\" in load_balancer.prices" in watched.file.problem
    priced = replace(watched.table, access=replace(watched.table.access, prices=(("*", Price(1.0, 2.0)),)))
    watched.file.extended(priced)
    assert watched.file.problem == ""


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    watched = Watched(tmp_path / "pipe")
    assert watched.look() == []
    assert "is no file" in watched.file.problem


def test_ten_thousand_keys_are_read_in_slices(path: Path) -> None:
    path.write_text(entries("ada"))
    watched = Watched(path)
    path.write_text(entries(*(f"k{number}" for number in range(10_000))))
    ticks = 1
    while watched.file.tick() is not None:
        ticks += 1
        assert len(watched.file) == 1  # all at once, or none
    assert ticks >= 100
    assert len(watched.names()) == 10_000


def test_the_keys_of_the_table_go_before_those_of_the_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(entries("ada", "bob"))
    watched = Watched(path, ApiKey("ada", digest("another")))
    assert watched.names() == ["ada", "bob"]
    assert watched.file.extended(watched.table).access.keys[0].sha256 == digest("another")
    watched.look()
    assert caplog.text.count("1 keys are left out") == 1


def test_without_a_file_that_can_be_read_everybody_is_refused() -> None:
    store = ApiKeyStore(Access(keys_file="/nowhere"), 0.0)
    assert isinstance(store.admit_head(((b"x-api-key", b"of-ada-0123456789"),), 0.0), Unauthorized)


def test_a_table_without_the_file_forgets_its_keys(path: Path) -> None:
    path.write_text(entries("ada"))
    watched = Watched(path)
    plain = Table("chat", "2")
    assert watched.file.extended(plain) is plain
    assert watched.look() == ["ada"]  # and knows them again where the file is named again


def test_a_tenant_keeps_its_levels_over_a_change_and_others_cost_nothing() -> None:
    keys = tuple(
        ApiKey(f"k{number}", digest(f"k{number}"), KeyLimits(requests_per_minute=2.0))
        for number in range(1000)
    )
    store = ApiKeyStore(Access(keys), 0.0)
    credentials = ((b"x-api-key", b"of-k7-0123456789"),)
    for _ in range(2):
        assert isinstance(store.admit_head(credentials, 0.0), Admission)
    assert list(store._tenants) == ["k7"]
    store.apply(Access(keys[5:]), 0.0)
    assert not isinstance(store.admit_head(credentials, 0.0), Admission)
    store.apply(Access(keys[:5]), 0.0)
    assert isinstance(store.admit_head(credentials, 0.0), Unauthorized)


async def test_an_agent_serves_the_keys_of_its_file(w: World, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(entries("ada"))
    agent, target = await w.agent(), await w.target("a")
    await agent.push(target.json, access={"keys": [], "keys_file": str(path)}, limits={"hold_s": 0.0})

    async def status(name: str) -> int:
        found = await agent.text("/", headers={"Authorization": f"Bearer of-{name}-0123456789"})
        return int(found[0])

    async def becomes(name: str, wanted: int) -> None:
        for _ in range(200):
            if await status(name) == wanted:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{name} never got {wanted}")

    assert (await status("ada"), await status("bob")) == (200, 401)
    path.write_text(entries("bob"))
    await becomes("bob", 200)
    assert await status("ada") == 401
    path.write_text("[")
    for _ in range(200):
        if "keys_problem" in (stats := await agent.request("GET", "/-/stats")):
            break
        await asyncio.sleep(0.02)
    assert "entry 1 (line 1): no JSON" in stats["keys_problem"]
    assert await status("bob") == 200
    metrics = await agent.request("GET", "/-/metrics")
    assert 'skyserve_lb_keys_file_broken{region="",service="default"} 1.0' in metrics
    assert 'skyserve_lb_keys_file_keys{region="",service="default"} 1.0' in metrics
    table = await agent.request("GET", "/-/targets")
    assert table["access"] == {"keys": [], "overrides": False, "keys_file": str(path)}
