"""Backups: all of a home in one file, and a home from it, on either database."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import sqlalchemy as sa

from policies.goals import UpdateMode
from policies.model import CapacityType, Memory, Offer, Replica, ReplicaState, Zone
from skyserve_cli.controller.backup import archive as backups
from skyserve_cli.controller.backup.archive import BackupError, read_backup, restore, write_backup
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.controller.reconcile.adoption import read_restored
from skyserve_cli.controller.secret_box import seal_of
from skyserve_cli.home import Home
from skyserve_cli.state.copies import copy_of_day
from skyserve_cli.state.export import IDS_LEFT_OUT
from skyserve_cli.state.values import EventRecord
from tests.unit.databases import KINDS, empty_database

NOW = 1_800_000_000.0
SECRETS = {"TOKEN": "hunter2"}
OFFER = Offer(Zone("aws", "r", "z"), "m", "L4", 1.0, CapacityType.SPOT, 0.1 + 0.2, 3.0, choice=1)
REPLICA = Replica(
    4, 1, OFFER, ReplicaState.READY, NOW, NOW, "i-4", "http://10.0.0.4:1", launched_at=NOW, message="é"
)


def make_home(root: Path, url: str | None = None) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(root), **({"SKYSERVE_DB": url} if url else {})})
    home.create()
    return home


def fill(home: Home) -> str:
    """One service with a replica, secrets and a story; returns the owner."""
    store = opened(home)
    owner = store.database.owner()
    sealed = seal_of(home).close(SECRETS)
    store.put_service(
        "chat",
        {"run": "é"},
        replica_hash="h",
        sealed_secrets=sealed,
        lb_port=30001,
        target=2,
        mode=None,
        now=NOW,
    )
    memory = Memory(next_replica_id=5, placement={"zones": [1, 2.5, None]})
    store.commit(
        "chat",
        now=NOW,
        changed=[REPLICA],
        memory=memory,
        target=2,
        notes="n",
        records=[EventRecord("note", "x", 4)],
    )
    store.close()
    home.machine_secret()
    home.config.write_text("controller: {tick_seconds: 0.5}\n")
    return owner


def insist_it_is_the_same(home: Home, owner: str) -> None:
    store = opened(home)
    assert store.database.owner() == owner
    (row,) = store.services()
    assert (row.replicas, row.notes, row.lb_port) == ((REPLICA,), "n", 30001)
    assert row.memory.placement == {"zones": [1, 2.5, None]}
    assert seal_of(home).open(store.version("chat", 1).sealed_secrets) == SECRETS
    told = [(line.seq, line.record.message) for line in store.events("chat")]
    assert told == [(1, "up: version 1"), (2, "x")]
    # Nothing collides with what the rows have used.
    assert row.memory.next_replica_id == 5 + IDS_LEFT_OUT
    assert store.put_service(
        "chat", {}, replica_hash="h", sealed_secrets=b"", lb_port=1, target=0, mode=UpdateMode.ROLLING, now=NOW
    ) == 2  # fmt: skip
    assert store.events("chat")[-1].seq == 3
    store.close()


@pytest.mark.parametrize("passphrase", [None, "correct horse"], ids=["open", "sealed"])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", ["sqlite"])
def test_a_home_is_made_again_elsewhere(
    source: str, target: str, passphrase: str | None, tmp_path: Path
) -> None:
    old = make_home(tmp_path / "old")
    owner = fill(old)
    file = tmp_path / "backup"
    write_backup(old, file, passphrase, NOW)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (b"machines.key" in file.read_bytes()) is (passphrase is None)

    url = empty_database(target, tmp_path) if target == "postgres" else None
    new = make_home(tmp_path / "new", url)
    assert restore(new, read_backup(file, passphrase), force=False, now=NOW) is None
    assert (new.machine_secret(), new.config.read_text()) == (old.machine_secret(), old.config.read_text())
    assert read_restored(new.restored) == {"chat": 5}
    assert stat.S_IMODE((new.root / "sealing.key").stat().st_mode) == 0o600
    insist_it_is_the_same(new, owner)


def test_from_postgres_to_a_file(tmp_path: Path) -> None:
    old = make_home(tmp_path / "old", empty_database("postgres", tmp_path))
    owner = fill(old)
    write_backup(old, tmp_path / "backup", None, NOW)
    new = make_home(tmp_path / "new")
    restore(new, read_backup(tmp_path / "backup", None), force=False, now=NOW)
    insist_it_is_the_same(new, owner)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_only_replaced_by_force(kind: str, tmp_path: Path) -> None:
    url = empty_database(kind, tmp_path) if kind == "postgres" else None
    home = make_home(tmp_path / "home", url)
    owner = fill(home)
    write_backup(home, tmp_path / "backup", None, NOW)
    store = opened(home)
    store.set_down("chat", purge=True, now=NOW)
    store.close()
    found = read_backup(tmp_path / "backup", None)
    with pytest.raises(BackupError, match=r"sealing.key.*with --force"):
        restore(home, found, force=False, now=NOW)
    store = opened(home)
    assert store.services()[0].down
    store.close()
    home.config.write_text("{}\n")
    aside = restore(home, found, force=True, now=NOW)
    assert aside is not None
    assert (aside / "config.yaml").read_text() == "{}\n"
    assert (aside / "state.db").exists() is (kind == "sqlite")
    insist_it_is_the_same(home, owner)


def test_a_backup_is_made_while_a_controller_writes(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    fill(home)
    engine = sa.create_engine(home.database_url)
    with engine.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        writer.exec_driver_sql("UPDATE services SET notes = 'not committed'")
        write_backup(home, tmp_path / "backup", None, NOW)
        writer.exec_driver_sql("ROLLBACK")
    engine.dispose()
    assert read_backup(tmp_path / "backup", None).rows["services"][0]["notes"] == "n"


def test_a_daily_copy_is_restored_with_the_keys_of_the_home(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    owner = fill(home)
    copy = copy_of_day(home.root / "state.db", home.backups, NOW)
    assert copy is not None
    (home.root / "state.db").write_bytes(b"damaged")
    before = copy.read_bytes()
    key = home.sealing_keys()[0]
    restore(home, read_backup(copy, None), force=True, now=NOW)
    assert home.sealing_keys()[0] == key
    assert copy.read_bytes() == before
    assert not list(home.backups.glob("*-wal"))
    insist_it_is_the_same(home, owner)


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "passphrase", "says"),
    [
        pytest.param("none", None, "is sealed; give its passphrase", id="no passphrase"),
        pytest.param("none", "wrong", "the passphrase does not open", id="another passphrase"),
        pytest.param("cut", "right", "the passphrase does not open", id="a sealed one, cut"),
        pytest.param("text", None, "is no backup", id="no backup"),
        pytest.param("empty", None, "is no backup", id="an empty file"),
        pytest.param("newer", None, "made by release 9.9", id="of a newer format"),
        pytest.param("copy", None, "try an older copy", id="a damaged copy"),
    ],
)
def test_what_cannot_be_read(damage: str, passphrase: str | None, says: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    fill(home)
    file = tmp_path / "backup"
    write_backup(home, file, "right", NOW)
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-100])
        case "text":
            file.write_text("just words" * 100)
        case "empty":
            file.write_bytes(b"")
        case "newer":
            import zipfile

            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("manifest.json", json.dumps({"format": 2, "version": "9.9"}))
        case "copy":
            shutil.copyfile(home.root / "state.db", file)
            with file.open("r+b") as out:
                out.seek(100)
                out.write(b"\xff" * 20_000)
    with pytest.raises(BackupError, match=says):
        read_backup(file, passphrase)


def test_rows_of_a_newer_release_change_nothing(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    owner = fill(home)
    write_backup(home, tmp_path / "backup", None, NOW)
    found = read_backup(tmp_path / "backup", None)
    newer = backups.Backup(found.made_at, "0999", found.rows, found.files)
    with pytest.raises(BackupError, match=r"newer release \(revision 0999\)"):
        restore(home, newer, force=True, now=NOW)
    store = opened(home)
    assert (store.database.owner(), store.services()[0].replicas) == (owner, (REPLICA,))
    store.close()
    assert not home.restored.exists()


def test_nothing_to_back_up(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="nothing to back up"):
        write_backup(make_home(tmp_path / "home"), tmp_path / "backup", None, NOW)
    assert not (tmp_path / "backup").exists()
