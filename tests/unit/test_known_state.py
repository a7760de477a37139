"""A home that knows its own state: a database that is gone, older, another one or damaged is seen before anything is done."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyserve_cli.controller.persistence import state_watch
from skyserve_cli.controller.persistence.known_state import (
    KnownState,
    go_on_with,
    read_known,
    way_out,
    why_gone,
    why_other,
    write_known,
)
from skyserve_cli.controller.persistence.opening import CannotOpenError, opened
from skyserve_cli.controller.persistence.state_watch import CHECK_EVERY_S, StateWatch
from skyserve_cli.home import Home
from skyserve_cli.state.copies import copies, copy_of_day, copy_to
from skyserve_cli.state.store import Store
from tests.unit.databases import KINDS, empty_database
from tests.unit.test_state_opening import damage, fill

DAY = 1_800_000_000.0
HAD = KnownState("ab12", 40, ("0f0f",))


def put(store: Store, name: str) -> None:
    store.put_service(name, {}, replica_hash="", sealed_secrets=b"", lb_port=1, target=0, mode=None, now=DAY)


@dataclass
class Time:
    at: float = DAY

    def now(self) -> float:
        return self.at


@dataclass
class World:
    """A controller's database in a home, and the watch over it."""

    home: Home
    time: Time = field(default_factory=Time)

    def __post_init__(self) -> None:
        self.store = opened(self.home)
        self.owner = self.store.database.owner()
        put(self.store, "chat")
        self.watch = StateWatch(self.home, self.store.database, self.owner, self.time, self.time)

    @property
    def file(self) -> Path:
        return self.home.root / "state.db"

    def trouble(self) -> str:
        """As a controller looks at each renewal."""
        return self.watch.trouble(None) or self.watch.trouble(self.store.database.lease())

    def remove(self) -> None:
        for end in ("", "-wal", "-shm"):
            self.file.with_name(f"state.db{end}").unlink(missing_ok=True)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    return home


@pytest.fixture
def world(home: Home) -> Iterator[World]:
    world = World(home)
    yield world
    world.store.close()


@pytest.mark.parametrize(
    ("known", "owner", "changes", "why"),
    [
        pytest.param(None, "", 0, "", id="a first start"),
        pytest.param(None, "ab12", 7, "", id="a home of an earlier release"),
        pytest.param(KnownState("", 0), "", 0, "", id="a home that had none yet"),
        pytest.param(HAD, "ab12", 40, "", id="the same"),
        pytest.param(HAD, "ab12", 41, "", id="written since: a controller was killed, or another one led"),
        pytest.param(
            HAD, "ab12", 39, "older than the one that this home had: 1 later", id="a copy of before"
        ),
        pytest.param(HAD, "", 0, r"is empty, and this home had one \(owner ab12\)", id="a new one"),
        pytest.param(HAD, "cd34", 99, r"another one .*\(owner cd34, not ab12\)", id="of another home"),
        pytest.param(HAD, "0f0f", 99, r"another one .*\(owner 0f0f, not ab12\)", id="that of before"),
    ],
)
def test_why_it_is_not_the_one(known: KnownState | None, owner: str, changes: int, why: str) -> None:
    said = why_other(known, owner, changes)
    assert bool(said) is bool(why)
    assert re.search(why, said)


@pytest.mark.parametrize(
    ("owner", "then"),
    [
        pytest.param("ab12", KnownState("ab12", 3, ("0f0f",)), id="the same"),
        pytest.param("cd34", KnownState("cd34", 3, ("ab12", "0f0f")), id="another"),
        pytest.param("0f0f", KnownState("0f0f", 3, ("ab12",)), id="the one before"),
    ],
)
def test_owners_of_before_are_kept(owner: str, then: KnownState) -> None:
    assert HAD.followed_by(owner, 3) == then


def test_a_first_owner_has_none_before() -> None:
    assert KnownState("", 0).followed_by("ab12", 1) == KnownState("ab12", 1)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"owner": "a", "changes": null, "former": []}'])
def test_a_file_that_cannot_be_read_is_as_none(home: Home, content: str) -> None:
    home.known_state.write_text(content)
    assert read_known(home) is None
    go_on_with(home, "ab12", 3)
    assert read_known(home) == KnownState("ab12", 3)


@pytest.mark.parametrize(
    ("names", "command", "what"),
    [
        pytest.param([], "serve controller restore FILE --force", "a backup", id="nothing"),
        pytest.param(
            ["state-2026-11-27.db", "state-2026-11-28.db"],
            "state-2026-11-28.db --force",
            "the newest copy",
            id="copies",
        ),
        pytest.param(
            ["state-2026-11-28.db", "rescued-2026-11-28T101010Z.db"],
            "rescued-2026-11-28T101010Z.db --force",
            "the state as it was last",
            id="what a controller saved",
        ),
    ],
)
def test_the_way_out_names_the_best_file(home: Home, names: list[str], command: str, what: str) -> None:
    home.backups.mkdir()
    for name in names:
        (home.backups / name).touch()
    assert f"{command}` restores {what}" in way_out(home)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        pytest.param("", "", id="a new home"),
        pytest.param("sealing.key", "", id="keys: given to a new home, too"),
        pytest.param("lb/chat/agent.json", "whose load balancers are there", id="a load balancer"),
        pytest.param(
            "local/instances/t/x", "whose machines of the local cloud are there", id="a local machine"
        ),
        pytest.param("backups/state-2026-11-28.db", "whose copies are there", id="a copy"),
    ],
)
def test_what_shows_that_there_was_a_database(home: Home, left: str, said: str) -> None:
    file = home.root / "state.db"
    if left:
        (home.root / left).parent.mkdir(parents=True, exist_ok=True)
        (home.root / left).touch()
    assert bool(why_gone(home, file)) is bool(said)
    assert said in why_gone(home, file)
    if said:
        with pytest.raises(CannotOpenError, match="had a database") as raised:
            opened(home)
        assert raised.value.is_final
        assert not file.exists()
    opened(home, knows=False).close()
    assert why_gone(home, file) == ""


def test_a_known_home_is_enough(home: Home) -> None:
    write_known(home, HAD)
    assert "is gone, and this home had a database; " in why_gone(home, home.root / "state.db")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", ["older", "empty", "another"])
def test_a_database_of_another_state_is_refused(home: Home, kind: str, known: str, tmp_path: Path) -> None:
    home = Home(home.root, empty_database(kind, tmp_path))
    if known != "empty":
        store = opened(home)
        owner = store.database.owner()
        put(store, "chat")
        store.close()
        write_known(home, KnownState(owner if known == "older" else "ab12", 1000))
    else:
        opened(home).close()  # a database without an owner
        write_known(home, HAD)
    with pytest.raises(CannotOpenError, match=known) as raised:
        opened(home)
    assert raised.value.is_final
    assert "serve controller adopt" in str(raised.value)
    opened(home, knows=False).close()


# --- while a controller runs --------------------------------------------------------------------------------


def test_what_is_known_follows(world: World) -> None:
    assert world.trouble() == ""
    first = read_known(world.home)
    assert first is not None
    put(world.store, "more")
    assert world.trouble() == ""
    second = read_known(world.home)
    assert second is not None
    assert (second.owner, second.changes > first.changes) == (world.owner, True)


def test_a_deleted_file_is_seen_and_what_was_open_is_saved(world: World) -> None:
    assert world.trouble() == ""
    world.remove()
    put(world.store, "written-to-no-name")
    assert "state.db was deleted while the controller ran" in world.trouble()
    world.watch.close()
    (saved,) = world.home.backups.glob("rescued-*.db")
    assert saved.stat().st_mode & 0o777 == 0o600
    assert str(saved) in world.trouble()
    with closing(sqlite3.connect(saved)) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM services")}
    assert names == {"chat", "written-to-no-name"}
    assert not world.file.exists()  # no query has made another one


def test_another_file_in_its_place_is_not_opened(world: World, tmp_path: Path) -> None:
    copy_to(world.file, tmp_path / "old.db")
    put(world.store, "more")
    assert world.trouble() == ""
    (tmp_path / "old.db").replace(world.file)
    assert "was replaced while the controller ran" in world.trouble()
    world.store.database.engine.dispose()
    with pytest.raises(Exception, match="was replaced while it was open"):
        world.store.services()


def test_a_file_that_was_set_back_in_place_is_older(world: World, tmp_path: Path) -> None:
    copy_to(world.file, tmp_path / "old.db")
    put(world.store, "more")
    assert world.trouble() == ""
    with closing(sqlite3.connect(world.file)) as now, closing(sqlite3.connect(tmp_path / "old.db")) as old:
        old.backup(now)
    assert "the database is older than the one that this home had" in world.trouble()


def test_a_file_that_comes_back_is_no_trouble(world: World) -> None:
    away = world.file.with_name("away.db")
    world.file.rename(away)
    assert "was deleted" in world.trouble()
    world.watch.close()
    away.rename(world.file)
    assert world.trouble() == ""


def test_a_damaged_page_is_found_within_the_hour(home: Home) -> None:
    fill(opened(home))
    world = World(home)
    with closing(sqlite3.connect(world.file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = world.file.stat().st_size
    with world.file.open("r+b") as file:  # a page that no query reads
        file.seek(size - 4096)
        file.write(os.urandom(4096))
    world.watch.check()
    assert "damaged" not in world.trouble()
    world.time.at += CHECK_EVERY_S
    world.watch.check()
    assert "state.db is damaged" in world.trouble()
    world.store.close()


def test_a_query_that_meets_damage_has_the_file_read_at_once(home: Home) -> None:
    fill(opened(home))
    world = World(home)
    assert world.trouble() == ""
    with closing(sqlite3.connect(world.file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(world.file)
    world.store.database.engine.dispose()
    with pytest.raises(Exception, match=r"malformed|not a database"):
        world.store.version("s1", 1)
    world.watch.check()
    assert "state.db is damaged" in world.trouble()
    world.store.close()


def test_no_copy_is_made_of_a_file_that_is_gone(world: World) -> None:
    world.remove()
    with pytest.raises(sqlite3.Error):
        copy_of_day(world.file, world.home.backups, DAY)
    assert not world.file.exists()
    assert not copies(world.home.backups)


def test_a_full_disk_is_borne(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_watch, "write_known", full)
    assert world.trouble() == ""
    assert read_known(world.home) is None
