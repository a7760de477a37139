"""Copies, removals in steps, and logs that are cut."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from policies.goals import UpdateMode
from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Zone
from skyserve_cli.controller.persistence.housekeeping import Housekeeper, cut
from skyserve_cli.controller.references import path_of
from skyserve_cli.controller.upload_part import remove_unused
from skyserve_cli.controller.uploads.content_store import ContentStore
from skyserve_cli.controller.uploads.folder import manifest_of
from skyserve_cli.state import copies, prune
from skyserve_cli.state.copies import KEPT_COPIES, NoRoomError, copy_of_day
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

DAY_S = 86400.0
NOW = 1_800_000_000.0
OFFER = Offer(Zone("aws", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 1.0, 3.0)


class Clock:
    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> float:
        return self.at


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def store(database: Path) -> Store:
    store = Store(Database(f"sqlite:///{database}"))
    store.put_service(
        "chat", {}, replica_hash="h", sealed_secrets=b"", lb_port=1, target=0, mode=None, now=0.0
    )
    return store


def commit(store: Store, at: float, changed: list[Replica], lines: int) -> None:
    story = [EventRecord("note", f"line {number}") for number in range(lines)]
    store.commit(
        "chat",
        now=at,
        changed=changed,
        memory=Memory(next_replica_id=9999),
        target=0,
        notes="",
        records=story,
    )


def ended(number: int) -> Replica:
    return Replica(
        number,
        1,
        OFFER,
        ReplicaState.GONE,
        1.0,
        1.0,
        "i",
        launched_at=0.0,
        ended_at=3600.0,
        end_reason=EndReason.PREEMPTED,
    )


# --- copies ----------------------------------------------------------------------------------------------------


def test_a_copy_a_day_and_seven_of_them(store: Store, database: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backups"
    made = [copy_of_day(database, folder, NOW + day * DAY_S) for day in range(KEPT_COPIES + 2)]
    assert copy_of_day(database, folder, NOW + (KEPT_COPIES + 1) * DAY_S) is None
    assert sorted(folder.iterdir()) == sorted(path for path in made[2:] if path is not None)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_copy_is_made_while_others_write_and_holds_what_was_committed(store: Store, database: Path) -> None:
    engine = sa.create_engine(store.database.url)
    with engine.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        writer.exec_driver_sql("UPDATE services SET notes = 'not committed'")
        made = copy_of_day(database, database.parent / "backups", NOW)
        writer.exec_driver_sql("ROLLBACK")
    engine.dispose()
    assert made is not None
    (row,) = Store(Database(f"sqlite:///{made}")).services()
    assert (row.name, row.notes) == ("chat", "")


def test_what_a_killed_controller_left_of_a_copy_is_removed_with_the_next_one(
    store: Store, database: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "backups"
    copy_of_day(database, folder, NOW)
    (folder / ".state-2020-01-01.db.draft").write_bytes(b"half")
    copy_of_day(database, folder, NOW + DAY_S)
    assert len(list(folder.iterdir())) == 2


def test_no_copy_on_a_disk_that_is_nearly_full(
    store: Store, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_FREE_BYTES", shutil.disk_usage(tmp_path).total)
    with pytest.raises(NoRoomError, match="MiB are free"):
        copy_of_day(database, tmp_path / "backups", NOW)
    assert list((tmp_path / "backups").iterdir()) == []


# --- removal in steps ------------------------------------------------------------------------------------------


def test_a_long_story_goes_in_steps_between_which_others_write(store: Store) -> None:
    lines = prune.STEP_ROWS * 3 + 7
    commit(store, 10.0, [], lines)
    before = len(store.events("chat", limit=100_000))
    written: list[int] = []

    def pause() -> None:
        written.append(len(written))
        other = threading.Thread(
            target=store.append_event, args=(EventRecord("note", "meanwhile"),), kwargs={"now": NOW}
        )
        other.start()
        other.join(30)
        assert not other.is_alive()

    assert store.prune_events(before=NOW, keep=5, pause=pause) == before - 5
    assert len(store.events("chat", limit=100_000)) == 5
    assert len(written) == 4
    assert [line.record.message for line in store.events("")] == ["meanwhile"] * 4


def test_no_step_removes_more_than_it_may(store: Store) -> None:
    commit(store, 10.0, [ended(number) for number in range(1, prune.STEP_ROWS + 51)], 0)
    cost = store.spent(NOW)["chat"]
    left: list[int] = []

    def pause() -> None:
        left.append(len(store.replicas("chat", limit=10_000)))
        assert store.spent(NOW)["chat"].usd == pytest.approx(cost.usd)

    assert store.archive_replicas(before=NOW, keep=20, pause=pause) == prune.STEP_ROWS + 30
    assert left == [50, 20]
    assert store.spent(NOW)["chat"].usd_on_demand == pytest.approx(cost.usd_on_demand)
    assert [one.id for one in store.replicas("chat", limit=10_000)] == list(range(531, 551))


def test_a_removal_that_is_interrupted_is_finished_by_the_next(store: Store) -> None:
    commit(store, 10.0, [], prune.STEP_ROWS * 2)

    class Interrupted(Exception):
        pass

    def stop() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        store.prune_events(before=NOW, keep=1, pause=stop)
    assert len(store.events("chat", limit=100_000)) == prune.STEP_ROWS + 1
    store.prune_events(before=NOW, keep=1)
    assert len(store.events("chat", limit=100_000)) == 1


# --- logs ------------------------------------------------------------------------------------------------------


def test_a_log_is_cut_while_its_writer_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    with path.open("ab", buffering=0) as writer:
        for part in (b"a" * 100, b"b" * 100, b"c" * 100):
            writer.write(part)
            assert cut(path, largest=99)
        writer.write(b"d")
        assert not cut(path, largest=99)
    found = {one.name: one.read_bytes()[:1] for one in tmp_path.iterdir()}
    assert found == {"agent.log": b"d", "agent.log.1": b"c", "agent.log.2": b"b"}
    assert path.read_bytes() == b"d"
    assert stat.S_IMODE((tmp_path / "agent.log.1").stat().st_mode) == 0o600


# --- the thread ------------------------------------------------------------------------------------------------


def test_a_round_does_what_is_due_and_reports_a_trouble_once(
    store: Store, database: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    agents = tmp_path / "lb"
    (agents / "chat").mkdir(parents=True)
    with (agents / "chat" / "agent.log").open("wb") as log:
        os.truncate(log.fileno(), 17 << 20)
    (tmp_path / "backups").write_text("a file where the folder should be")
    supervisor = Housekeeper(store, clock, clock, tmp_path / "backups", agents)
    supervisor.round()
    supervisor.round()
    assert (agents / "chat" / "agent.log").stat().st_size == 0
    assert caplog.text.count("File exists") == 1
    (tmp_path / "backups").unlink()
    supervisor.round()
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["state-2027-01-15.db"]
    store.close()


def test_rows_are_removed_once_an_hour(store: Store, tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Housekeeper(store, clock, clock, tmp_path / "backups", tmp_path / "lb")
    supervisor.round()
    commit(store, NOW - 40 * DAY_S, [], 1500)
    supervisor.round()
    assert len(store.events("chat", limit=100_000)) > 1500
    clock.at += 3600.0
    supervisor.round()
    assert len(store.events("chat", limit=100_000)) == 1000
    store.close()


# --- uploaded files --------------------------------------------------------------------------------------------


def test_files_of_every_version_of_a_service_that_is_up_stay(store: Store, tmp_path: Path) -> None:
    """Those of a service that is down, and those of no version, are removed after a day."""
    uploads, made = ContentStore(tmp_path / "uploads"), {}
    for name in ("first", "second", "gone", "never"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a").write_text(name)
        made[name] = manifest_of(folder, "workdir", {})
        uploads.announce(made[name])
        uploads.add([(part, name.encode()) for part in made[name].parts()])
        assert uploads.announce(made[name]) == []
    for service, name, mode in (
        ("search", "first", None),
        ("search", "second", UpdateMode.ROLLING),
        ("old", "gone", None),
    ):
        spec = {"workdir": made[name].reference}
        store.put_service(
            service, spec, replica_hash="h", sealed_secrets=b"", lb_port=2, target=0, mode=mode, now=0.0
        )
    store.set_down("old", purge=True, now=1.0)
    clock = Clock()
    clock.at = time.time()
    tidy = partial(remove_unused, store, uploads)
    supervisor = Housekeeper(store, clock, clock, tmp_path / "backups", tmp_path / "lb", tidy=tidy)
    supervisor.round()
    assert all(Path(path_of(tmp_path / "uploads", one.reference)).exists() for one in made.values())
    clock.at += 2 * DAY_S
    supervisor.round()
    left = {name for name, one in made.items() if Path(path_of(tmp_path / "uploads", one.reference)).exists()}
    assert left == {"first", "second"}
    assert len(list((tmp_path / "uploads" / "parts").iterdir())) == 2
    store.close()
