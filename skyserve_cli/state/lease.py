"""The lease: a row that says which controller may write, and until when.

A term begins with a new `epoch`, which never falls; it is at least the time, so that a database that is new, or was restored
from a copy, is not behind what its controllers have told load balancers before. Every transaction of a controller first reads the row and goes on only
if the epoch is still its own (`verify`), so a controller that was frozen, or cut off from the database, cannot write after
another one has taken over, however late it notices. That makes the epoch a fencing token (Kleppmann, "How to do distributed
locking", 2016).

`expires_at` is on the database's clock, which all controllers share. It may be set, too: whoever has watched the row for a
whole time to live by its own steady clock, and has seen no renewal, may take it whatever `expires_at` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from skyserve_cli.state import tables as t

_HERE = t.lease.c.id == 1
_COLUMNS = (t.lease.c.holder, t.lease.c.about, t.lease.c.epoch, t.lease.c.renewals, t.lease.c.expires_at)
#: What a store may be fenced with before its first term: no row has this epoch.
NO_TERM = 0


class LeaseLostError(Exception):
    """Another controller of this database leads; nothing was written."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The row, and the database's time at which it was read. Instants are UNIX seconds."""

    holder: str
    about: str
    epoch: int
    renewals: int
    expires_at: float
    read_at: float

    @property
    def is_live(self) -> bool:
        """Whether somebody holds it."""
        return bool(self.holder) and self.expires_at > self.read_at


class LeaseTable:
    """The statements, for one database. `clock` replaces the database's own, in virtual time."""

    def __init__(self, dialect: str, clock: Callable[[], float] | None = None) -> None:
        self._dialect = dialect
        self._clock = clock

    def read(self, c: Connection) -> Lease:
        row = c.execute(sa.select(*_COLUMNS, self._now().label("read_at")).where(_HERE)).one()
        return Lease(*row)

    def take(
        self, c: Connection, holder: str, about: str, ttl_s: float, unrenewed: Lease | None
    ) -> Lease | None:
        """Begin a term: if nobody holds the lease, if it was the same holder's, or if it still is as in `unrenewed`.
        Returns the row; None if another controller holds it."""
        now = self._now()
        free = sa.or_(t.lease.c.expires_at <= now, t.lease.c.holder.in_(("", holder)))
        if unrenewed is not None:
            same = sa.and_(t.lease.c.epoch == unrenewed.epoch, t.lease.c.renewals == unrenewed.renewals)
            free = sa.or_(free, same)
        seconds, following = sa.cast(now, sa.BigInteger), t.lease.c.epoch + 1
        epoch = sa.case((following > seconds, following), else_=seconds)
        values = {
            "holder": holder,
            "about": about,
            "epoch": epoch,
            "renewals": 0,
            "expires_at": now + ttl_s,
        }
        return self._update(c, free, values)

    def renew(self, c: Connection, epoch: int, ttl_s: float) -> Lease | None:
        """None if the term has ended, because another one has begun."""
        values = {"renewals": t.lease.c.renewals + 1, "expires_at": self._now() + ttl_s}
        return self._update(c, t.lease.c.epoch == epoch, values)

    def release(self, c: Connection, epoch: int) -> None:
        """End the term, if it has not ended: the next controller need not wait."""
        self._update(c, t.lease.c.epoch == epoch, {"holder": "", "expires_at": 0.0})

    def _update(
        self, c: Connection, where: sa.ColumnElement[bool], values: Mapping[str, object]
    ) -> Lease | None:
        statement = t.lease.update().where(_HERE, where).values(values)
        row = c.execute(statement.returning(*_COLUMNS, self._now().label("read_at"))).first()
        return None if row is None else Lease(*row)

    def _now(self) -> sa.ColumnElement[float]:
        """The database's clock, in UNIX seconds."""
        if self._clock is not None:
            return sa.literal(self._clock(), sa.Float)
        if self._dialect == "sqlite":
            return (sa.func.julianday("now", type_=sa.Float) - 2440587.5) * 86400.0
        return sa.func.extract("epoch", sa.func.clock_timestamp()).cast(sa.Float)


#: Shared, so that no term begins before the transaction has ended; SQLite has one writer at a time anyway.
_EPOCH = sa.select(t.lease.c.epoch).where(_HERE).with_for_update(read=True)


def verify(c: Connection, epoch: int) -> None:
    """Raise LeaseLostError unless the term of this epoch goes on. First thing in a transaction that writes."""
    if c.execute(_EPOCH).scalar_one() != epoch:
        raise LeaseLostError(LeaseLostError.__doc__)
