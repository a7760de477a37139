"""A state that cannot be written: what the controller does meanwhile, and what it reports."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from policies.model import ProbeFailed, ReplicaState
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.unit.test_controller_reconciler import World, a_replica

S = ReplicaState
FULL = OperationalError(
    "UPDATE services SET secret = 's3cr3t'", {}, Exception("database or disk is full\nmore")
)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.up()
    world.has(a_replica(1), a_replica(2))
    yield world
    world.store.close()


def _full(*_: Any, **__: Any) -> None:
    raise FULL


@pytest.mark.parametrize(
    "what", ["commit_all", "services"], ids=["it cannot be written", "it cannot be read"]
)
def test_it_is_said_once_and_is_over_when_it_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    reconciler = world.reconciler()
    world.lists(*(world.instance_of(a_replica(number)) for number in (1, 2)))
    reconciler.tick()
    assert reconciler.store_health.to_json() == {"ok": True, "since": world.time, "why": ""}
    good_at = world.time
    with monkeypatch.context() as broken, caplog.at_level(logging.INFO):
        broken.setattr(world.store, what, _full)
        for _ in range(5):
            world.time += 1.0
            world.happens(ProbeFailed(1, "no"))
            reconciler.tick()
        told = reconciler.store_health.to_json()
    assert told == {"ok": False, "since": good_at, "why": "database or disk is full"}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "the state cannot be read or written: database or disk is full"
    ]
    assert "s3cr3t" not in caplog.text
    world.time += 1.0
    world.happens(ProbeFailed(1, "no"))
    reconciler.tick()
    assert reconciler.store_health.to_json() == {"ok": True, "since": world.time, "why": ""}
    assert world.fleet() == "1:NOT_READY 2:READY"


@pytest.mark.parametrize("is_full", [True, False], ids=["still full", "a quiet turn after it"])
def test_a_turn_that_writes_nothing_does_not_show_that_it_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    reconciler = world.reconciler()
    world.lists(*(world.instance_of(a_replica(number)) for number in (1, 2)))
    reconciler.tick()
    with monkeypatch.context() as broken:
        broken.setattr(world.store, "commit_all", _full)
        world.happens(ProbeFailed(1, "no"))
        reconciler.tick()
        if is_full:
            broken.setattr(world.store, "try_to_write", _full)
        reconciler.tick()
        assert reconciler.store_health.to_json()["ok"] is not is_full


def test_a_nearly_full_disk_is_not_taken_for_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(Database(f"sqlite:///{tmp_path / 'state.db'}"))
    store.try_to_write()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(SQLAlchemyError) as raised:
        store.try_to_write()
    assert sentence_of(raised.value) == "database or disk is full"
    store.close()
