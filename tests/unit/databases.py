"""An empty database for a test of the store: SQLite in a file and, where $SKYSERVE_TEST_POSTGRES_URL names a server,
PostgreSQL."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy as sa

POSTGRES = "SKYSERVE_TEST_POSTGRES_URL"
KINDS = ("sqlite", "postgres")
#: Ends the connections of tests before this one.
_OTHERS = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid != pg_backend_pid()"
)


def empty_database(kind: str, folder: Path) -> str:
    """The URL of one. Skips the test where there is no PostgreSQL."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'state.db'}"
    given = os.environ.get(POSTGRES)
    if not given:
        pytest.skip(f"{POSTGRES} is not set")
    url = _database(given)
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(_OTHERS)
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()
    return url.render_as_string(hide_password=False)


@cache
def _database(given: str) -> sa.URL:
    """The one of this process, beside which others run tests. A database is some three hundred files, and its schema a few."""
    name = f"skyserve_test_{os.getpid()}"
    server = sa.create_engine(given, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    server.dispose()
    return sa.make_url(given).set(database=name)
