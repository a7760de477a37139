"""The outbox: notifications that are stored until their destination has received them, and what was decided about them.

A notification is stored in the transaction that stores the decision to send it, and removed after the destination has confirmed
it. A process that is killed between the two sends it again, so each arrives at least once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from skyserve_cli.state import tables as t
from skyserve_cli.state.database import Database

#: Notifications of one destination; older ones are dropped.
MOST_WAITING = 1000

_O = t.outbox.c


class Alarm(NamedTuple):
    """What was decided about one kind of alarm of one service. Instants are UNIX seconds.

    `since` is from when its condition holds (None: it does not), `notified_at` when the last notification of it was decided on,
    `announced` whether that one said that the condition holds.
    """

    since: float | None
    notified_at: float | None
    announced: bool


#: (service, kind); the service is empty for messages about the controller.
Key = tuple[str, str]


class Waiting(NamedTuple):
    """A notification in the outbox of a destination."""

    seq: int
    attempts: int
    message: Mapping[str, Any]


class Outbox:
    """The transactions on notifications, one for each method."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def alarms(self) -> dict[Key, Alarm]:
        with self._database.reading() as c:
            rows = c.execute(sa.select(t.alarms)).all()
        return {(row.service, row.kind): Alarm(row.since, row.notified_at, row.announced) for row in rows}

    def put_notifications(
        self, alarms: Mapping[Key, Alarm], messages: Sequence[tuple[str, Mapping[str, Any]]], *, now: float
    ) -> int:
        """Replace the alarms, and store (destination, message) in the outbox.

        Returns how many notifications were dropped because their destination has not received MOST_WAITING newer ones.
        """
        with self._database.writing() as c:
            c.execute(t.alarms.delete())
            if alarms:
                c.execute(
                    t.alarms.insert(),
                    [{"service": s, "kind": k, **alarm._asdict()} for (s, k), alarm in alarms.items()],
                )
            if messages:
                c.execute(
                    t.outbox.insert(),
                    [{"destination": to, "at": now, "message": dict(message)} for to, message in messages],
                )
            return sum(_cut(c, to) for to in sorted({to for to, _ in messages}))

    def next_notification(self, destination: str) -> Waiting | None:
        """Return the one to send next: the first of those that have failed least often. None: all were received."""
        query = sa.select(_O.seq, _O.attempts, _O.message).where(_O.destination == destination)
        with self._database.reading() as c:
            row = c.execute(query.order_by(_O.attempts, _O.seq).limit(1)).first()
        return None if row is None else Waiting(*row)

    def notification_received(self, seq: int) -> None:
        with self._database.writing() as c:
            c.execute(t.outbox.delete().where(_O.seq == seq))

    def notification_failed(self, seq: int) -> None:
        with self._database.writing() as c:
            c.execute(t.outbox.update().where(_O.seq == seq).values(attempts=_O.attempts + 1))

    def waiting_notifications(self) -> dict[str, int]:
        """Return how many wait, by destination; none where all were received."""
        query = sa.select(_O.destination, sa.func.count()).group_by(_O.destination)
        with self._database.reading() as c:
            return {row[0]: row[1] for row in c.execute(query)}

    def forget_destinations(self, kept: Collection[str]) -> int:
        """Remove the notifications of destinations that are no longer configured. Returns how many."""
        with self._database.writing() as c:
            return int(c.execute(t.outbox.delete().where(_O.destination.not_in(sorted(kept)))).rowcount)


def _cut(c: sa.Connection, destination: str) -> int:
    """Remove the oldest beyond MOST_WAITING."""
    newest = sa.select(_O.seq).where(_O.destination == destination).order_by(_O.seq.desc())
    last = c.execute(newest.offset(MOST_WAITING).limit(1)).scalar()
    if last is None:
        return 0
    return int(c.execute(t.outbox.delete().where(_O.destination == destination, _O.seq <= last)).rowcount)
