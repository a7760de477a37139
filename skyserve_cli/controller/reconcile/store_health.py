"""Whether the controller's state could be read and written in its last turn. Written by the tick, read by the API.

A full disk or a database that is away stops no endpoint, but what the controller says then is as old as its last commit.
So it says so, once in the log, and first of all in `serve status`.
"""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

log = logging.getLogger(__name__)


class StoreHealth:
    """`now` are instants of the controller's clock."""

    def __init__(self, now: float) -> None:
        self._good_at = now
        self._why = ""
        self._failed = False  # in this turn

    def begin(self) -> None:
        """A turn begins."""
        self._failed = False

    def failed(self, error: SQLAlchemyError) -> None:
        """Something could not be read or written. Logged when it is another reason than the last one."""
        why = sentence_of(error)
        self._failed = True
        if why != self._why:
            self._why = why
            log.error("the state cannot be read or written: %s", why)

    @property
    def is_unproven(self) -> bool:
        """Whether an earlier turn failed and this one has not: only a write can show that the trouble is over."""
        return bool(self._why) and not self._failed

    def end(self, now: float) -> None:
        """The turn is over."""
        if self._failed:
            return
        self._good_at = now
        if self._why:
            log.info("the state can be read and written again")
            self._why = ""

    def to_json(self) -> dict[str, Any]:
        """`since` is when the state was last read and written as it should be; `why` is empty if that is so now."""
        return {"ok": not self._why, "since": self._good_at, "why": self._why}


def sentence_of(error: SQLAlchemyError) -> str:
    """Return what the database said, without the statement and its values."""
    said = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return said.strip().partition("\n")[0][:300] or type(error).__name__
