"""The lease: a row that names the controller that may write, and until when.

A term begins with a new `epoch`, which never falls; it is at least the time, so that a database that is new, or was restored
from a copy, is not behind what its controllers have pushed to load balancers before. Every transaction of a controller first reads the row and goes on only
if the epoch is still its own (`verify`), so a controller that was frozen, or cut off from the database, cannot write after
another one has taken over, however late it notices. That makes the epoch a fencing token (Kleppmann, "How to do distributed
locking", 2016).

`expires_at` is on the database's clock, which all controllers share. It may be set, too: a controller that has watched the row for a
whole time to live by its own steady clock, and has seen no renewal, may take it, independent of `expires_at`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import tables as t

_HERE = t.lease.c.id == 1
#: Each database's own clock, in UNIX seconds.
_CLOCKS: Mapping[str, sa.ColumnElement[float]] = {
    "sqlite": (sa.func.julianday("now", type_=sa.Float) - 2440587.5) * 86400.0,
    "postgresql": sa.func.extract("epoch", sa.func.clock_timestamp()).cast(sa.Float),
}
#: What a store may be fenced with before its first term: no row has this epoch.
NO_TERM = 0


class LeaseLostError(Exception):
    """Another controller of this database leads; nothing was written."""


@dataclass(frozen=True, slots=True)
class ControllerLease:
    """The row, the database's time at which it was read, and `Database.changes` then. Instants are UNIX seconds."""

    holder: str
    about: str
    epoch: int
    renewals: int
    expires_at: float
    read_at: float
    changes: int

    @property
    def is_live(self) -> bool:
        """Whether a controller holds it."""
        return bool(self.holder) and self.expires_at > self.read_at

    def is_same_term_as(self, other: ControllerLease) -> bool:
        """Return whether it has not even been renewed between the two."""
        return (self.epoch, self.renewals) == (other.epoch, other.renewals)


class LeaseTable:
    """The statements, for one database. `clock` replaces the database's own, in virtual time."""

    def __init__(self, dialect: str, clock: Callable[[], float] | None = None) -> None:
        row = t.lease.c
        now = _CLOCKS[dialect] if clock is None else sa.bindparam("now", callable_=clock, type_=sa.Float)
        ends_at = now + sa.bindparam("ttl_s", type_=sa.Float)
        changes = sa.select(t.changes.c.count).scalar_subquery()
        columns = (
            row.holder, row.about, row.epoch, row.renewals, row.expires_at, now.label("read_at"), changes.label("changes"),
        )  # fmt: skip
        update = t.lease.update().where(_HERE)
        seconds, following = sa.cast(now, sa.BigInteger), row.epoch + 1
        is_free = sa.or_(
            row.expires_at <= now,
            row.holder.in_(("", sa.bindparam("holder"))),
            sa.and_(row.epoch == sa.bindparam("seen_epoch"), row.renewals == sa.bindparam("seen_renewals")),
        )
        term = {
            "holder": sa.bindparam("holder"),
            "about": sa.bindparam("about"),
            "epoch": sa.case((following > seconds, following), else_=seconds),
            "renewals": 0,
            "expires_at": ends_at,
        }
        mine = row.epoch == sa.bindparam("mine")
        self._read = sa.select(*columns).where(_HERE)
        self._take = update.where(is_free).values(term).returning(*columns)
        renewed = {"renewals": row.renewals + 1, "expires_at": ends_at}
        self._renew = update.where(mine).values(renewed).returning(*columns)
        self._release = update.where(mine).values({"holder": "", "expires_at": 0.0})

    def read(self, c: Connection) -> ControllerLease:
        return ControllerLease(*c.execute(self._read).one())

    def take(
        self, c: Connection, holder: str, about: str, ttl_s: float, unrenewed: ControllerLease | None
    ) -> ControllerLease | None:
        """Begin a term: if no controller holds the lease, if it was the same holder's, or if it still is as in `unrenewed`.

        Returns the row; None if another controller holds it.
        """
        seen = (-1, -1) if unrenewed is None else (unrenewed.epoch, unrenewed.renewals)
        values = {
            "holder": holder,
            "about": about,
            "ttl_s": ttl_s,
            "seen_epoch": seen[0],
            "seen_renewals": seen[1],
        }
        row = c.execute(self._take, values).first()
        return None if row is None else ControllerLease(*row)

    def renew(self, c: Connection, epoch: int, ttl_s: float) -> ControllerLease | None:
        """None if the term is over, because another one has started."""
        row = c.execute(self._renew, {"mine": epoch, "ttl_s": ttl_s}).first()
        return None if row is None else ControllerLease(*row)

    def release(self, c: Connection, epoch: int) -> None:
        """End the term, if it is not over: the next controller need not wait."""
        c.execute(self._release, {"mine": epoch})


#: Shared, so that no term begins before the transaction is over; SQLite has one writer at a time anyway.
_EPOCH = sa.select(t.lease.c.epoch).where(_HERE).with_for_update(read=True)


def verify(c: Connection, epoch: int) -> None:
    """Raise LeaseLostError unless the term of this epoch goes on. First thing in a transaction that writes."""
    if c.execute(_EPOCH).scalar_one() != epoch:
        raise LeaseLostError(LeaseLostError.__doc__)
