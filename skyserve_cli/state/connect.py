"""How a database is opened: what SQLite needs so that a committed intent is on the disk, and JSON by orjson."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection

#: PostgreSQL, and libpq: a server that is cut off is noticed within seconds, and a controller that is frozen in a
#: transaction does not hold its locks for longer than a lease lasts. What the URL says itself goes first.
_POSTGRES_ARGUMENTS = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,  # ms
}
#: No statement waits for longer, neither for a lock nor for the server's disk: the tick and the API say so instead. Reading
#: a large history takes seconds.
STATEMENT_S = 30
_POSTGRES_SETTINGS = (
    "SET idle_in_transaction_session_timeout = '6s'; "
    f"SELECT set_config('statement_timeout', '{STATEMENT_S}s', false) WHERE current_setting('statement_timeout') = '0'"
)

_WAL_TRIES = 200
_WAL_PAUSE_S = 0.05


def connected(
    url: URL, *, in_memory: bool, durable: bool = True, insist: Callable[[], None] = lambda: None
) -> sa.Engine:
    """Return the engine behind a URL. `insist` is called before each new connection to a file, and raises sqlite3.Error to refuse it.

    Of a database `in_memory` there is one connection for all, handed from thread to thread: another would be another
    database. Not `durable`: SQLite need not have written a commit to the disk when it returns; the next durable one, or a
    checkpoint, does.
    """
    if in_memory:
        engine = sa.create_engine(
            url,
            json_serializer=_to_json,
            json_deserializer=_from_json,
            poolclass=sa.pool.QueuePool,
            pool_size=1,
            max_overflow=0,
            connect_args={"check_same_thread": False},
        )
    elif url.drivername == "postgresql+psycopg":
        arguments = {name: value for name, value in _POSTGRES_ARGUMENTS.items() if name not in url.query}
        engine = sa.create_engine(
            url,
            json_serializer=_to_json,
            json_deserializer=_from_json,
            connect_args=arguments,
            pool_pre_ping=True,
        )
        sa.event.listen(engine, "connect", _prepare_postgres)
    else:
        engine = sa.create_engine(url, json_serializer=_to_json, json_deserializer=_from_json)
    if url.get_backend_name() == "sqlite":
        sa.event.listen(engine, "do_connect", lambda *_: insist())
        sa.event.listen(engine, "connect", _prepare_sqlite if durable else _prepare_undurable)
        sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_postgres(connection: Any, _record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_POSTGRES_SETTINGS)
    connection.commit()


def without_limit(c: Connection) -> None:
    """Let the statements of this transaction take their time: a change of the tables rewrites large ones."""
    if c.dialect.name == "postgresql":
        c.execute(sa.text("SET LOCAL statement_timeout = 0"))


def _to_json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _from_json(text: str) -> Any:
    """Damaged text is an empty object, so that a row which cannot be read leaves all others readable."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _begin_sqlite(connection: Connection) -> None:
    """A reader sees one state of the database, also while others write.

    A writer waits for its turn before it reads, so what it decides on is still so when it writes. Python's driver by itself
    begins a transaction neither for a SELECT nor for a CREATE TABLE.
    """
    writes = connection.get_execution_options().get("writes", False)
    connection.connection.cursor().execute("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=10000")
    _write_ahead(cursor)
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _prepare_undurable(connection: Any, record: Any) -> None:
    _prepare_sqlite(connection, record)
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=2000")  # a renewal that waits for longer is late in any case
    cursor.close()


def _write_ahead(cursor: Any) -> None:
    """Change to WAL mode, for which SQLite wants the file for itself and does not wait until it has it.

    Processes that start at once would refuse each other.
    """
    for tries_left in reversed(range(_WAL_TRIES)):
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if tries_left == 0:
                raise
            time.sleep(_WAL_PAUSE_S)
        else:
            return
