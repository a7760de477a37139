"""The thread that makes backups: rounds in virtual time against a bucket in memory, which fails on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyserve_cli.buckets.port import BucketError, Stored
from skyserve_cli.config_backup import BackupConfig
from skyserve_cli.controller.backup.archive import BackupError, parse_backup
from skyserve_cli.controller.backup.uploader import BackupUploader, the_newest
from skyserve_cli.home import Home
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.unit.databases import KINDS, empty_database
from tests.unit.test_controller_backup import NOW, REPLICA, fill, make_home

DAY_S = 86400.0
URL = "s3://box-1/home"


class Clock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> float:
        return self.at


class MemoryBucket:
    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.why = ""

    def _fail(self) -> None:
        if self.why:
            raise BucketError(f"{URL}: {self.why}")

    def put(self, name: str, content: bytes) -> None:
        self._fail()
        self.there[name] = content

    def get(self, name: str) -> bytes:
        return self.there[name]

    def objects(self) -> list[Stored]:
        self._fail()
        return [Stored(name, len(content)) for name, content in self.there.items()]

    def delete(self, name: str) -> None:
        self.there.pop(name, None)


class World:
    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.home: Home = make_home(folder / "home", url)
        self.owner = fill(self.home)
        self.store = Store(Database(self.home.database_url))
        self.clock, self.bucket = Clock(), MemoryBucket()
        self.passphrase = folder / "passphrase"
        self.passphrase.write_text("correct horse\n")
        self.uploader = self.another()

    def another(self) -> BackupUploader:
        config = BackupConfig(to=URL, passphrase_file=self.passphrase, keep=3)
        return BackupUploader(self.home, config, lambda: self.bucket, self.store, self.clock)

    def run(self, seconds: float, uploader: BackupUploader | None = None) -> None:
        """Rounds of a minute."""
        for _ in range(int(seconds // 60)):
            (uploader or self.uploader).round()
            self.clock.at += 60.0

    def events(self) -> list[str]:
        return [line.record.message for line in self.store.events("") if line.record.kind == "backup"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_backup_a_day_of_either_database_and_no_more_than_are_kept(kind: str, tmp_path: Path) -> None:
    world = World(tmp_path, empty_database(kind, tmp_path) if kind == "postgres" else None)
    world.bucket.there = {"notes.txt": b"mine", "skyserve-ffff-20200101T000000Z.backup": b"of another home"}
    world.run(5.5 * DAY_S)
    names = sorted(set(world.bucket.there) - {"notes.txt", "skyserve-ffff-20200101T000000Z.backup"})
    assert names == [f"skyserve-{world.owner}-2027011{day}T080000Z.backup" for day in (8, 9)] + [
        f"skyserve-{world.owner}-20270120T080000Z.backup"
    ]
    assert len(world.bucket.there) == 5
    newest = world.bucket.there[names[-1]]
    assert b"machines.key" not in newest
    found = parse_backup(newest, "correct horse", "x")
    assert found.rows["replicas"][0]["id"] == REPLICA.id
    assert set(found.files) == {"sealing.key", "machines.key", "config.yaml"}
    assert len(world.events()) == 6
    assert f"is in {URL}" in world.events()[0]


def test_a_bucket_that_is_away_is_one_event_and_tried_again(world: World) -> None:
    world.bucket.why = "AccessDenied"
    world.run(3600.0)
    assert world.events() == [f"no backup is made: {URL}: AccessDenied"]
    view = world.uploader.view()
    assert (view["newest_at"], view["overdue"]) == (None, False)
    assert "AccessDenied" in view["why"]
    world.run(3 * DAY_S)
    assert world.uploader.view()["overdue"]
    world.bucket.why = ""
    world.run(3700.0)
    assert len(world.events()) == 2
    assert (world.uploader.view()["overdue"], world.uploader.view()["why"]) == (False, "")


def test_the_next_controller_reads_the_bucket_and_makes_none_twice(world: World) -> None:
    world.run(120.0)
    second = world.another()
    world.run(DAY_S / 2, second)
    assert len(world.bucket.there) == 1
    assert second.view()["newest_at"] == NOW
    world.run(DAY_S / 2, second)
    assert len(world.bucket.there) == 2


def test_without_its_passphrase_nothing_leaves_the_host(world: World) -> None:
    world.passphrase.unlink()
    world.run(120.0)
    assert world.bucket.there == {}
    assert "passphrase: No such file or directory" in world.uploader.view()["why"]
    world.passphrase.write_text("\n")
    world.run(600.0)
    assert world.bucket.there == {}
    assert "has no passphrase on its first line" in world.uploader.view()["why"]


@pytest.mark.long
def test_the_newest_is_chosen_unless_there_are_several_homes(world: World) -> None:
    with pytest.raises(BackupError, match="there is no backup in s3://box-1/home"):
        the_newest(world.bucket, URL)
    world.run(2.5 * DAY_S)
    assert the_newest(world.bucket, URL).made_at == NOW + 2 * DAY_S
    world.bucket.there["skyserve-ffff-20200101T000000Z.backup"] = b""
    with pytest.raises(BackupError, match=r"several homes .*name one: s3://box-1/home/skyserve-"):
        the_newest(world.bucket, URL)
