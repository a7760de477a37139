"""The controller's database, opened; if that fails, one sentence with what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from skyserve_cli.controller.persistence.known_state import read_known, way_out, why_gone, why_other
from skyserve_cli.controller.persistence.moved import why_not_to_start
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.home import Home
from skyserve_cli.state.copies import copies
from skyserve_cli.state.database import Database
from skyserve_cli.state.opening import DamagedDatabaseError, NewerDatabaseError, sqlite_file
from skyserve_cli.state.store import Store


class CannotOpenError(Exception):
    """The database cannot be used now; the text gives the reason and what to do."""

    is_final: ClassVar[bool] = False


class UnusableError(CannotOpenError):
    """As it is, it never can be."""

    is_final = True


def opened(home: Home, *, knows: bool = True) -> Store:
    """Return the store of this home. Raises CannotOpenError.

    With `knows` a database is refused that is not the one which this home had, or an earlier copy of it, or a new one in a home that
    had one.
    """
    reason = why_not_to_start(home)
    if reason is not None:
        raise UnusableError(reason)
    try:
        if knows:
            _insist_on_file(home)
        store = Store(Database(home.database_url))
    except DamagedDatabaseError as error:
        raise UnusableError(f"{error}; {_cure(home)}") from error
    except NewerDatabaseError as error:
        raise UnusableError(
            f"{error}; install that release again, or restore a backup from before it with "
            f"`serve controller restore FILE --force`"
        ) from error
    except (ArgumentError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise UnusableError(f"$SKYSERVE_DB is no usable database URL: {reason}") from error
    except SQLAlchemyError as error:
        where = make_url(home.database_url).render_as_string(hide_password=True)
        raise CannotOpenError(
            f"the database {where} cannot be opened: {sentence_of(error)}; {_hint(home)}"
        ) from error
    return _insisted_on(store, home) if knows else store


def _insist_on_file(home: Home) -> None:
    """Raise CannotOpenError if a database would be made where there was one. None is made then."""
    file = sqlite_file(make_url(home.database_url))
    why = "" if file is None else why_gone(home, file)
    if why:
        raise UnusableError(why)


def _insisted_on(store: Store, home: Home) -> Store:
    """Raise CannotOpenError, and close the store, if it is not the one of this home."""
    database = store.database
    try:
        why = why_other(read_known(home), database.known_owner(), database.changes())
    except SQLAlchemyError as error:
        store.close()
        raise CannotOpenError(f"the database cannot be read: {sentence_of(error)}; {_hint(home)}") from error
    if why:
        store.close()
        raise UnusableError(f"the database {why}; {way_out(home)}")
    return store


def _cure(home: Home) -> str:
    newest = next(iter(copies(home.backups)), None)
    if newest is None:
        return f"there is no copy in {home.backups}; restore a backup with `serve controller restore FILE --force`"
    return f"restore the newest copy with `serve controller restore {newest} --force`"


def _hint(home: Home) -> str:
    file = sqlite_file(make_url(home.database_url))
    if file is None:
        return "start the database server, or correct SKYSERVE_DB"
    return f"check the permissions and the free space of {Path(file).parent}"
