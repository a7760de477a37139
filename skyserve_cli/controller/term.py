"""A controller's term: what begins when it leads, and the start of the program again when its term is over."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.persistence.key_fingerprints import ForeignKeysError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.ticker import catch_up
from skyserve_cli.home import Home
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store

log = logging.getLogger("skyserve.controller")

#: In the environment of a process that has started again: its database was there a moment ago, so it is waited for.
AGAIN = "SKYSERVE_CONTROLLER_AGAIN"


class Term:
    """What begins when this controller leads. Called on the thread that renews the lease."""

    def __init__(
        self,
        home: Home,
        store: Store,
        clock: SystemClock,
        stop: Callable[[], object],
        again: Callable[[], object],
        begins: Sequence[Callable[[], object]],
    ) -> None:
        """`begins` are called in order, `stop` if the keys of the home are not those of the database, `again` if the term is over."""
        self._home = home
        self._store = store
        self._clock = clock
        self._stop = stop
        self._again = again
        self._begins = begins
        self.failure: Exception | None = None

    def begin(self) -> None:
        try:
            fingerprints.check_or_record(self._store, self._home)
            catch_up(self._clock, self._store)
        except (LeaseLostError, SQLAlchemyError):  # another term has started, or will
            log.exception("the term ends before it has started")
            self._again()
        except ForeignKeysError as error:
            self.failure = error
            self._stop()
        else:
            for begin in self._begins:
                begin()


def begin_again() -> None:
    """Execute the same program in place of this one, whichever thread is doing what.

    What this process knew is of a term that is over, so nothing of it stays but its number; and what waits for a
    database that does not respond would keep an orderly stop waiting, too.
    """
    logging.shutdown()
    os.environ[AGAIN] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves
