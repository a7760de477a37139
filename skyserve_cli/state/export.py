"""All rows of a database as lines of JSON, and back: between machines, and between SQLite and PostgreSQL.

The tables are taken as they are, not as this release describes them, so a database of an earlier revision is exported as it
is, and loaded into tables of its own revision, which are then upgraded as any other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state.revisions import known_revisions, upgrade

#: Rows that belong to the database in which they are: its revision, and which controller is running on it.
_NOT_EXPORTED = frozenset({"alembic_version", "lease"})
#: Tables of parts from other packages begin with this: the program that restores may not have the part.
_OF_PARTS = "part_"
_BATCH = 500

#: What a backup cannot know was launched after it, and may at most have been: ids go on above.
IDS_LEFT_OUT = 1000

Rows = Callable[[str], Iterable[Mapping[str, Any]]]


class UnknownRevisionError(Exception):
    """The rows are of a revision that this program does not know."""


def tables_of(c: Connection) -> list[str]:
    return sorted(table.name for table in _reflected(c).sorted_tables)


def rows_of(c: Connection, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, in the order of its primary key; bytes as base64."""
    table = _reflected(c).tables[name]
    query = sa.select(table).order_by(*table.primary_key.columns)
    for row in c.execute(query).mappings():
        yield {column.name: _to_json(column, row[column.name]) for column in table.columns}


def has_rows(c: Connection) -> bool:
    """Return whether there is a service that would be lost."""
    services = _reflected(c).tables.get("services")
    return services is not None and c.execute(sa.select(services).limit(1)).first() is not None


def drop_all(c: Connection) -> None:
    everything = sa.MetaData()
    everything.reflect(c)
    everything.drop_all(c)


def load(c: Connection, revision: str, tables: Iterable[str], rows: Rows) -> dict[str, int]:
    """Make the tables of that revision in an empty database, and fill them.

    Replica ids go on IDS_LEFT_OUT higher. Returns, by service, the first id that the rows did not know. Raises
    UnknownRevisionError.
    """
    if revision not in known_revisions():
        raise UnknownRevisionError(revision)
    upgrade(c, revision)
    present = _reflected(c).tables
    for name in tables:
        table = present[name]
        c.execute(table.delete())  # what the migration itself has inserted
        remaining = iter(rows(name))
        while batch := list(islice(remaining, _BATCH)):
            c.execute(
                table.insert(),
                [{key: _from_json(table.columns[key], value) for key, value in row.items()} for row in batch],
            )
        _continue_sequence(c, table)
    services = present["services"]
    first = {str(name): int(number) for name, number in c.execute(
        sa.select(services.c.name, services.c.next_replica_id)
    )}  # fmt: skip
    c.execute(services.update().values(next_replica_id=services.c.next_replica_id + IDS_LEFT_OUT))
    return first


def _reflected(c: Connection) -> sa.MetaData:
    found = sa.MetaData()
    found.reflect(c, only=lambda name, _: name not in _NOT_EXPORTED and not name.startswith(_OF_PARTS))
    return found


def _to_json(column: sa.Column[Any], value: Any) -> Any:
    if isinstance(column.type, sa.LargeBinary) and value is not None:
        return base64.b64encode(value).decode()
    return value


def _from_json(column: sa.Column[Any], value: Any) -> Any:
    if isinstance(column.type, sa.LargeBinary) and value is not None:
        return base64.b64decode(value)
    return value


def _continue_sequence(c: Connection, table: sa.Table) -> None:
    """PostgreSQL counts in a sequence, which does not see the numbers of inserted rows."""
    if c.dialect.name != "postgresql" or table.name != "events":
        return
    last = c.execute(sa.select(sa.func.max(table.c.seq))).scalar()
    if last is not None:
        c.execute(sa.text("SELECT setval(pg_get_serial_sequence('events', 'seq'), :last)"), {"last": last})


def line_of(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
