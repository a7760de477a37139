"""An empty database for a test of the store: SQLite in a file and, where $SKYSERVE_TEST_POSTGRES_URL names a server,
PostgreSQL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy as sa

POSTGRES = "SKYSERVE_TEST_POSTGRES_URL"
KINDS = ("sqlite", "postgres")


def empty_database(kind: str, folder: Path) -> str:
    """The URL of one. Skips the test where there is no PostgreSQL."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'state.db'}"
    given = os.environ.get(POSTGRES)
    if not given:
        pytest.skip(f"{POSTGRES} is not set")
    name = f"skyserve_test_{os.getpid()}"  # tests of other processes run beside this one
    server = sa.create_engine(given, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    server.dispose()
    return sa.make_url(given).set(database=name).render_as_string(hide_password=False)
