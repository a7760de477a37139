"""Stores what load balancers have counted, every ten seconds, on a thread of its own, and reads the totals that they want.

A controller that is killed loses the seconds since the last slot. One that cannot write keeps the slots of the last minutes. Of what
API keys have used nothing is lost: agents report it to the next controller again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.reconcile.usage_buffer import service_totals
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.samples import Slot
from skyserve_cli.state.series import RINGS
from skyserve_cli.state.store import Store
from skyserve_cli.state.usage import StoredUsage, day_of, is_open

log = logging.getLogger(__name__)

SLOT_S = RINGS[0].span_s
MOST_UNWRITTEN = 30
USAGE_ROWS = 1000  # of one transaction
TOTALS_EVERY_S = 60.0  # of one service
MOST_TOTALS = 100_000  # keys and models of one service
#: The totals of a service are read at most in one part of this many of the time, however long that takes.
TOTALS_SHARE = 20
TOTALS_KEPT_S = 600.0  # after the last report that wants them


class SeriesRecorder(threading.Thread):
    """`clock` is the one that dates rows."""

    def __init__(self, store: Store, book: TrafficBuffer, clock: Clock) -> None:
        super().__init__(name="series", daemon=True)
        self._store = store
        self._book = book
        self._clock = clock
        self._stopping = threading.Event()
        self._unwritten: OrderedDict[int, dict[str, Slot]] = OrderedDict()
        self._wanted_at: dict[str, float] = {}  # when an agent of the service has last wanted totals
        self._read_at: dict[
            str, tuple[float, float]
        ] = {}  # its totals, and the seconds until they are read again

    def run(self) -> None:
        while not self._stopping.wait(SLOT_S - self._clock.now() % SLOT_S):
            self.round()

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=10.0)

    def round(self) -> None:
        """Store the slot that is complete, and those that could not be stored before."""
        taken = self._book.take()
        at = int((self._clock.now() - SLOT_S / 2) // SLOT_S) * SLOT_S  # a timer may be early by a little
        if taken:
            self._unwritten[at] = taken
        while len(self._unwritten) > MOST_UNWRITTEN:
            self._unwritten.popitem(last=False)
        try:
            while self._unwritten:
                first = next(iter(self._unwritten))
                self._store.put_series(first, self._unwritten[first])
                del self._unwritten[first]
        except (SQLAlchemyError, LeaseLostError) as error:  # the next round tries again
            log.warning("numbers of load balancers are not stored: %s", type(error).__name__)
            return
        self._store_usage()
        self._read_totals()

    def _store_usage(self) -> None:
        """Store all rows of usage that have come, at most USAGE_ROWS in one transaction."""
        now = self._clock.now()
        while taken := self._book.usage.take(USAGE_ROWS):
            rows = [
                StoredUsage(*key, row.requests, row.tokens_in, row.tokens_out) for key, row in taken.items()
            ]
            taken_days = [row for row in rows if is_open(row.day, now)]
            if len(taken_days) < len(rows):
                late = next(row for row in rows if not is_open(row.day, now))
                log.warning(
                    "%d rows of usage are left out, of service %s among others: day %d is too far from today",
                    len(rows) - len(taken_days),
                    late.service,
                    late.day,
                )
            try:
                self._store.put_usage(taken_days)
            except (SQLAlchemyError, LeaseLostError) as error:
                self._book.usage.put_back(taken)
                log.warning("usage of API keys is not stored: %s", type(error).__name__)
                return

    def _read_totals(self) -> None:
        """Put the totals of the services whose agents want them into the buffer, and forget those that no agent wants any more."""
        now, usage = self._clock.now(), self._book.usage
        wanting = usage.take_wanting()
        self._wanted_at |= dict.fromkeys(wanting, now)
        for service in [one for one, at in self._wanted_at.items() if now - at > TOTALS_KEPT_S]:
            usage.put_totals(service, None)
            del self._wanted_at[service]
            self._read_at.pop(service, None)
        for service in sorted(wanting):
            if self._is_time(service, now):
                self._read_totals_of(service, now)

    def _is_time(self, service: str, now: float) -> bool:
        """Return whether the totals of the service are old, or those of another day."""
        held, (read_at, pause_s) = self._book.usage.totals(service), self._read_at.get(service, (now, 0.0))
        return held is None or held.day != day_of(now) or not 0 <= now - read_at < pause_s

    def _read_totals_of(self, service: str, now: float) -> None:
        today = day_of(now)
        try:
            rows = self._store.usage_totals(service, today, MOST_TOTALS + 1)
        except SQLAlchemyError as error:
            log.warning("totals of API keys of service %s are not read: %s", service, type(error).__name__)
            return
        if len(rows) > MOST_TOTALS:
            cut = rows.pop().key  # whole keys only: an agent adds up the models of a key
            rows = [row for row in rows if row.key != cut]
            log.warning(
                "service %s has more than %d totals of API keys and models: keys from %r on are left out",
                service,
                MOST_TOTALS,
                cut,
            )
        self._book.usage.put_totals(service, service_totals(today, rows))
        self._read_at[service] = now, max(TOTALS_EVERY_S, TOTALS_SHARE * (self._clock.now() - now))
