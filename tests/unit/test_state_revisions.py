"""A database of each earlier revision, with rows in every table, is brought to the shape of this release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from policies.goals import UpdateMode
from policies.model import CapacityType, EndReason, Offer, ReplicaState, Role, Zone
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state import revisions
from skyserve_cli.state.database import Database
from skyserve_cli.state.opening import NewerDatabaseError
from skyserve_cli.state.revisions import NEWEST, known_revisions, revision_of, stamp, upgrade
from skyserve_cli.state.store import Store
from skyserve_cli.state.tables import metadata
from skyserve_cli.state.values import EventRecord
from tests.unit.databases import KINDS, empty_database

NOW = 1_800_000_000.0
REVISIONS = sorted(known_revisions())

SPEC = spec_to_json(
    ServiceSpec(
        "chat",
        "run",
        resources=(
            ResourceChoice(accelerator="A100", accelerator_count=1.0),
            ResourceChoice(accelerator="L4", accelerator_count=1.0, use_spot=True),
        ),
    )
)

#: Rows as release 0.2.0 had them, and what each later revision added.
ROWS: dict[str, list[dict[str, Any]]] = {
    "identity": [{"id": 1, "owner": "0a1b2c3d"}],
    "services": [
        {
            "name": "chat", "incarnation": "11aa22bb", "created_at": NOW - 9000.0, "version": 2,
            "update_mode": "blue_green", "down": False, "purge": False, "wanted": 2, "target": 3, "notes": "waits for L4",
            "next_replica_id": 8, "memory": {"placement": {"zones": ["a", {"b": 1.5}]}, "scaling": {}, "rollout": {}},
            "lb_port": 30007, "folded_usd": 12.5, "folded_on_demand_usd": 40.25,
        },
        {
            "name": "old", "incarnation": "33cc44dd", "created_at": 1.0, "version": 1, "update_mode": "rolling",
            "down": True, "purge": True, "wanted": 2, "target": 0, "notes": "", "next_replica_id": 5, "memory": {}, "lb_port": 30008,
            "folded_usd": 0.0, "folded_on_demand_usd": 0.0,
        },
    ],
    "versions": [
        {
            "service": service, "version": version, "created_at": NOW - 9000.0, "replica_hash": digest, "spec": SPEC,
            "sealed_secrets": sealed,
        }
        for service, version, digest, sealed in (
            ("chat", 1, "same", b"\x00sealed\xff"), ("chat", 2, "same", b""), ("old", 1, "other", b""),
        )
    ],
    "replicas": [
        {
            "service": "chat", "id": 6, "version": 1, "state": "GONE", "since": NOW - 3600.0, "created_at": NOW - 7300.0,
            "cloud": "aws", "region": "us-east-1", "zone": "use1-az1", "instance_type": "g6.xlarge",
            "accelerator": "L4", "accelerator_count": 1.0, "capacity_type": "spot", "price_usd_hour": 0.5,
            "on_demand_usd_hour": 2.0, "instance_id": "i-6", "endpoint": None, "launched_at": NOW - 7200.0,
            "ready_at": None, "drain_by": None, "preempt_at": None, "ended_at": NOW - 3600.0, "end_reason": "PREEMPTED",
            "message": "reclaimed", "role": "replica", "choice": 1,
        },
        {
            "service": "chat", "id": 7, "version": 2, "state": "READY", "since": NOW - 60.0, "created_at": NOW - 3600.0,
            "cloud": "aws", "region": "us-east-1", "zone": "use1-az2", "instance_type": "g6.xlarge",
            "accelerator": "L4", "accelerator_count": 1.0, "capacity_type": "spot", "price_usd_hour": 0.5,
            "on_demand_usd_hour": 2.0, "instance_id": "i-7", "endpoint": "http://10.0.0.7:8000",
            "launched_at": NOW - 3600.0, "ready_at": NOW - 60.0, "drain_by": None, "preempt_at": NOW + 90.0,
            "ended_at": None, "end_reason": None, "message": "é ok", "role": "replica", "choice": 1,
        },
    ],
    "kills": [{"service": "chat", "replica_id": 7}],
    "events": [
        {"at": NOW - 3600.0, "service": "chat", "replica_id": 6, "kind": "Preempted", "state": "GONE", "message": "m"},
        {"at": NOW - 60.0, "service": "chat", "replica_id": None, "kind": "scale", "state": "3", "message": "é"},
    ],
    "fingerprints": [{"key": "sealing.key", "value": "ab"}],
}  # fmt: skip
ADDED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "0008": [
        (
            "demand",
            {
                "service": "chat",
                "span": 1,
                "minute": 29_000_000,
                "requests": 90.0,
                "prompt_tokens": 4000.0,
                "response_tokens": 900.0,
                "late": 1.0,
                "ready": 2.0,
            },
        )
    ],
    "0009": [("series", {"service": "chat", "span": 60, "at": 1_740_000_000, "samples": b"\x00"})],
    "0010": [
        ("outbox", {"destination": "ops", "at": NOW, "attempts": 3, "message": {"text": "é"}}),
        (
            "alarms",
            {"service": "chat", "kind": "short", "since": NOW, "notified_at": None, "announced": True},
        ),
    ],
    "0011": [
        (
            "tokens",
            {
                "name": "ada",
                "digest": "ab" * 32,
                "role": "viewer",
                "services": ["chat"],
                "created_at": NOW,
                "created_by": "owner",
                "revoked_at": None,
            },
        )
    ],
    "0012": [],
    "0013": [
        (
            "usage",
            {
                "service": "chat",
                "day": 20_000,
                "key": "ada",
                "model": "m",
                "source": "s",
                "requests": 1,
                "tokens_in": 2,
                "tokens_out": 3,
            },
        )
    ],
}


def migrate(url: str, revision: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, revision)
    engine.dispose()


def fill(url: str, revision: str) -> None:
    """All rows, in the tables of that revision as they are, not as this release describes them."""
    engine = sa.create_engine(url, json_serializer=json.dumps)
    tables = sa.MetaData()
    tables.reflect(engine)
    added = [one for number, changes in ADDED.items() if number <= revision for one in changes]
    with engine.begin() as connection:
        for name, rows in ROWS.items():
            connection.execute(tables.tables[name].insert(), rows)
        for table, values in added:
            connection.execute(tables.tables[table].insert(), [values])
    engine.dispose()


def shape(url: str) -> dict[str, Any]:
    """Everything the database itself has of its tables, by table: columns in any order, keys, indexes, and the rows."""
    engine = sa.create_engine(url)
    with engine.connect() as c:
        look = sa.inspect(c)
        found = {
            name: (
                {each["name"]: {**each, "type": str(each["type"])} for each in look.get_columns(name)},
                look.get_pk_constraint(name)["constrained_columns"],
                sorted(str(each) for each in look.get_foreign_keys(name)),
                sorted(str(each) for each in look.get_indexes(name)),
                [dict(row) for row in c.execute(sa.text(f"SELECT * FROM {name}")).mappings()],  # noqa: S608
            )
            for name in look.get_table_names()
        }
    engine.dispose()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_database_is_as_one_that_went_through_all_revisions(kind: str, tmp_path: Path) -> None:
    url = empty_database(kind, tmp_path)
    Store(Database(url)).close()
    new = shape(url)
    (tmp_path / "other").mkdir()
    url = empty_database(kind, tmp_path / "other")
    migrate(url, "head")
    assert shape(url) == new
    engine = sa.create_engine(url)
    with engine.connect() as c:
        assert compare_metadata(MigrationContext.configure(c, opts={"compare_type": True}), metadata) == []
        assert revision_of(c) == NEWEST
    engine.dispose()


def test_a_database_from_before_the_first_release_is_refused_with_what_to_do(tmp_path: Path) -> None:
    url = empty_database("sqlite", tmp_path)
    engine = sa.create_engine(url)
    with engine.begin() as c:
        stamp(c)
        c.execute(sa.text("UPDATE alembic_version SET version_num = '0006'"))
        with pytest.raises(
            NewerDatabaseError, match=r"before 0\.2\.0 \(revision 0006\); start the controller of 0\.2\.0"
        ):
            upgrade(c)
    engine.dispose()


def test_the_newest_revision_is_the_last_of_the_scripts() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(revisions.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [NEWEST]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_an_earlier_revision_are_still_right(revision: str, kind: str, tmp_path: Path) -> None:
    url = empty_database(kind, tmp_path)
    migrate(url, revision)
    fill(url, revision)
    store = Store(Database(url))

    assert store.database.owner() == "0a1b2c3d"
    (chat,) = store.services()
    assert [row.name for row in store.services(down=True)] == ["chat", "old"]
    assert (chat.incarnation, chat.version, chat.update_mode) == ("11aa22bb", 2, UpdateMode.BLUE_GREEN)
    assert (chat.down, chat.target, chat.notes, chat.lb_port) == (False, 3, "waits for L4", 30007)
    assert chat.wanted == 2
    assert (chat.memory.next_replica_id, chat.memory.placement) == (8, {"zones": ["a", {"b": 1.5}]})
    assert (chat.killed, chat.same_replicas) == (frozenset({7}), frozenset({1}))

    zone = Zone("aws", "us-east-1", "use1-az2")
    (ready,) = chat.replicas
    assert ready.offer == Offer(zone, "g6.xlarge", "L4", 1.0, CapacityType.SPOT, 0.5, 2.0, choice=1)
    assert (ready.id, ready.version, ready.state, ready.role) == (7, 2, ReplicaState.READY, Role.REPLICA)
    assert (ready.instance_id, ready.endpoint, ready.message) == ("i-7", "http://10.0.0.7:8000", "é ok")
    assert (ready.launched_at, ready.ready_at, ready.preempt_at) == (NOW - 3600.0, NOW - 60.0, NOW + 90.0)
    gone = store.replicas("chat")[0]
    assert (gone.state, gone.end_reason, gone.ended_at) == (
        ReplicaState.GONE,
        EndReason.PREEMPTED,
        NOW - 3600.0,
    )

    assert store.version("chat", 1).sealed_secrets == b"\x00sealed\xff"
    assert store.version("chat", 2).spec == SPEC
    assert store.spent(NOW)["chat"].usd == pytest.approx(12.5 + 0.5 + 0.5)
    assert store.spent(NOW)["chat"].usd_on_demand == pytest.approx(40.25 + 4.0)
    assert [line.record for line in store.events("chat")] == [
        EventRecord("Preempted", "m", 6, "GONE"), EventRecord("scale", "é", None, "3"),
    ]  # fmt: skip

    store.set_down("chat", purge=False, now=NOW)
    assert store.services()[0].down
    assert store.events("chat")[-1].seq == 3
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_all_revisions_with_rows_are_covered(kind: str, tmp_path: Path) -> None:
    """A revision that adds a table or a column which must be filled is to be added to ADDED."""
    url = empty_database(kind, tmp_path)
    migrate(url, "head")
    fill(url, REVISIONS[-1])
    engine = sa.create_engine(url)
    tables = sa.MetaData()
    tables.reflect(engine)
    with engine.connect() as connection:
        empty = [
            name
            for name, table in tables.tables.items()
            if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0
        ]
    engine.dispose()
    assert empty == []
