"""The revision of a database, and how it is brought to the shape of this release.

Alembic is imported where tables have to change only: a controller that starts finds them right, or finds none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state.opening import NewerDatabaseError

if TYPE_CHECKING:
    from alembic.config import Config

#: The one that `migrations/` ends with, whose tables are those of `tables`.
NEWEST = "0013"
_OLDEST = "0007"  # that of release 0.2.0
_TABLE = "alembic_version"


def revision_of(c: Connection) -> str | None:
    """Return the revision of the tables; None: there are none, or they are of no release."""
    if not sa.inspect(c).has_table(_TABLE):
        return None
    found = c.execute(sa.text(f"SELECT version_num FROM {_TABLE}")).scalar()  # noqa: S608 - a constant
    return None if found is None else str(found)


def stamp(c: Connection) -> None:
    """Record that the tables, which were made new, are of the newest revision."""
    c.execute(sa.text(f"CREATE TABLE {_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    c.execute(sa.text(f"INSERT INTO {_TABLE} VALUES (:revision)"), {"revision": NEWEST})  # noqa: S608 - a constant


def upgrade(c: Connection, revision: str = NEWEST) -> None:
    """Bring the tables to a revision. Raises NewerDatabaseError if theirs is unknown here."""
    from alembic import command

    current = revision_of(c)
    if current is not None and current < _OLDEST:
        raise NewerDatabaseError(
            f"the database has the shape of a release before 0.2.0 (revision {current}); start the controller of 0.2.0 on it first"
        )
    if current is not None and current not in known_revisions():
        raise NewerDatabaseError(
            f"the database has the shape of a newer release (revision {current}; this one knows up to {NEWEST})"
        )
    config = _config()
    config.attributes["connection"] = c
    command.upgrade(config, revision)


def known_revisions() -> frozenset[str]:
    """Return all revisions that this release can bring to its own."""
    from alembic.script import ScriptDirectory

    return frozenset(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config
