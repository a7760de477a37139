"""Which controller of a database leads: this one or another.

`Leadership` takes the lease (`state.lease`) and renews it three times in its time to live. What it allows, it allows from
the time at which the last renewal was *sent*, on a clock of this host that cannot be set and that counts suspension: so
a controller that was frozen, asleep or cut off stops by itself before another one may begin. Two things do not depend on
any clock: a commit is refused by the database once another term has started, and a table of an earlier term by the agents.

A cloud can do neither. Launches are harmless at any time, for their tokens make them the same launch; what terminates
something needs half of the lease left, which no call that has just started outlives in practice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.ports import OperationKind
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.home import Home
from skyserve_cli.state.lease import NO_TERM, ControllerLease
from skyserve_cli.state.store import Store

log = logging.getLogger(__name__)

TTL_S = 6.0
RENEW_EVERY_S = TTL_S / 3
STANDBY_POLL_S = 1.0
CLOCK_READ_WITHIN_S = 1.0
RESPONSE_WITHIN_S = TTL_S / 2
STUCK_AFTER_STEPS = 30  # a minute


class NotLeadingError(RejectedError):
    """Another controller of this database leads, and only it takes orders."""

    status = 409


class Leadership:
    """Of one process. Thread-safe as far as its attributes are single values; `step` is called by one thread.

    `holder` identifies a controller; one that has exited and comes back under the same name goes on at once. `unfit` is called
    before the lease is taken, `astray` at each step as well: with None before the database is queried, and with the lease as it was
    read. They return why this controller must not lead, or lead on; "" if it may.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        about: str,
        steady: Clock,
        ttl_s: float = TTL_S,
        *,
        unfit: Callable[[], str] = lambda: "",
        astray: Callable[[ControllerLease | None], str] = lambda lease: "",
    ) -> None:
        self._unfit = unfit
        self._astray = astray
        self._why_unfit = ""
        self._is_astray = False
        self._store = store
        self._holder = holder
        self._about = about
        self._steady = steady
        self._ttl_s = ttl_s
        self._valid_until = float("-inf")
        self._lease: ControllerLease | None = None  # as last seen
        self._unchanged_since = 0.0
        self._read_at = (0.0, steady.now())  # the database's clock, and ours at that time
        self.epoch = 0
        self.is_over = False

    def step(self) -> None:
        """Take the lease, or renew it, if that can be. Raises SQLAlchemyError if the database cannot be reached."""
        self.query()()

    def query(self) -> Callable[[], None]:
        """Return what `step` reads from the database.

        Nothing is so before the function that is returned has been called: a response that comes too late is dropped.
        """
        sent_at = self._steady.now()
        astray = self._astray(None)
        if self.epoch and astray:
            return partial(self._stop_leading, astray)
        if self.epoch:
            renewed = self._store.database.renew_lease(self.epoch, ttl_s=self._ttl_s)
            if renewed is None or self._why_unfit:
                return partial(self._on_lost, self._store.database.lease())
            astray = self._astray(renewed)
            if astray:
                return partial(self._stop_leading, astray)
            return partial(self._hold, renewed, sent_at)
        seen = self._store.database.lease()
        since = self._unchanged_since if self._is_known(seen) else sent_at
        unrenewed = seen if sent_at - since > self._ttl_s else None
        if not seen.is_live or seen.holder == self._holder or unrenewed is not None:
            astray = astray or self._astray(seen)
            why = astray or self._unfit()
            if why:
                return partial(self._stand_aside, why, seen, sent_at, is_astray=bool(astray))
            taken = self._store.take_lease(self._holder, self._about, ttl_s=self._ttl_s, unrenewed=unrenewed)
            if taken is not None:
                return partial(self._begin, taken, sent_at)
        return partial(self._see, seen, sent_at)

    def release(self) -> None:
        """Let the next controller begin at once."""
        self._valid_until = float("-inf")
        if self.epoch and not self.is_over:
            self.is_over = True
            self._store.database.release_lease(self.epoch)

    @property
    def leads(self) -> bool:
        """Whether a term of this controller has started, and no other that it knows of."""
        return bool(self.epoch) and not self.is_over and not self._why_unfit

    def left_s(self) -> float:
        """Return how much longer no other controller can lead; not positive if one may."""
        return self._valid_until - self._steady.now()

    def may_terminate(self) -> bool:
        """Return whether something may be removed now that no row speaks of."""
        return self.allows(OperationKind.TERMINATE)

    def allows(self, kind: OperationKind) -> bool:
        """Return whether a call to a cloud may begin now."""
        return self.leads and self.left_s() > (self._ttl_s / 2 if kind is OperationKind.TERMINATE else 0.0)

    def lost(self) -> None:
        """The database has said so."""
        if self.leads:
            self._on_lost(None)

    def reconnect(self) -> None:
        """Give the connection up on which a query is not responded to."""
        self._store.database.reconnect_lease()

    def database_now(self) -> float:
        """Return the time by the database's clock, which all its controllers share; UNIX seconds."""
        there, here = self._read_at
        return there + self._steady.now() - here

    def to_json(self) -> dict[str, Any]:
        """Return who leads, for people and programs.

        `leads`: this controller. `leader` is empty if there is none; `unfit` is why this one must not lead, and `astray` whether that is
        because the database is not as it was.
        """
        lease = self._lease
        leader = "" if lease is None or not lease.holder else lease.about
        epoch = 0 if lease is None else lease.epoch
        return {
            "leads": self.leads,
            "epoch": epoch,
            "leader": leader,
            "unfit": self._why_unfit,
            "astray": self._is_astray,
        }

    def refuse_unless_leading(self) -> None:
        """Raise NotLeadingError."""
        if self._why_unfit:
            raise NotLeadingError(f"this controller must not lead: {self._why_unfit}")
        if not self.leads:
            leader = self.to_json()["leader"]
            elsewhere = (
                f"{leader} leads; run the command there"
                if leader
                else "no controller leads at the moment; try again"
            )
            raise NotLeadingError(f"this controller stands by: {elsewhere}")

    def _is_known(self, lease: ControllerLease) -> bool:
        return self._lease is not None and lease.is_same_term_as(self._lease)

    def _see(self, lease: ControllerLease, sent_at: float) -> None:
        self._follow(lease, sent_at)
        if not self._is_known(lease):
            self._unchanged_since = self._steady.now()
            if lease.is_live and (self._lease is None or self._lease.epoch != lease.epoch):
                log.info("this controller stands by; %s leads", lease.about)
        self._lease = lease

    def _stand_aside(self, why: str, lease: ControllerLease, sent_at: float, *, is_astray: bool) -> None:
        if why != self._why_unfit:
            log.error("this controller must not lead: %s", why)
        self._why_unfit, self._is_astray = why, is_astray
        self._see(lease, sent_at)

    def _stop_leading(self, why: str) -> None:
        """The term goes on, as no other controller has one, but nothing is done in it. It ends if the reason does."""
        if why != self._why_unfit:
            log.error("this controller must not lead: %s", why)
        self._store.database.fence(NO_TERM)
        self._valid_until = float("-inf")
        self._why_unfit, self._is_astray = why, True

    def _begin(self, lease: ControllerLease, sent_at: float) -> None:
        self.epoch, self._why_unfit, self._is_astray = lease.epoch, "", False
        self._hold(lease, sent_at)
        log.info("this controller leads epoch=%d", lease.epoch)

    def _hold(self, lease: ControllerLease, sent_at: float) -> None:
        self._lease = lease
        self._valid_until = sent_at + self._ttl_s
        self._follow(lease, sent_at)

    def _follow(self, lease: ControllerLease, sent_at: float) -> None:
        """Read the database's clock, unless the response took so long that it shows little."""
        now = self._steady.now()
        if now - sent_at < CLOCK_READ_WITHIN_S or not self._read_at[0]:
            self._read_at = (lease.read_at, now)

    def _on_lost(self, lease: ControllerLease | None) -> None:
        self.is_over = True
        self._lease = lease
        self._valid_until = float("-inf")
        leader = "another controller" if lease is None else lease.about
        log.warning("epoch %d is over; %s leads", self.epoch, leader)


class LeaseRenewer(threading.Thread):
    """Steps for as long as the process runs.

    `started` is called when the term begins, `over` when it is over, or when this process cannot go on with it: `turn` is
    a number that changes with every tick, and None between two. `doing` says what the tick is doing.

    No query has this thread wait for longer than RESPONSE_WITHIN_S: a server that takes a query and does not respond must not
    keep a controller from noticing that it leads no more.
    """

    def __init__(
        self,
        leadership: Leadership,
        started: Callable[[], None],
        over: Callable[[], None],
        turn: Callable[[], int | None] = lambda: None,
        doing: Callable[[], str] = lambda: "a tick goes on",
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self._leadership = leadership
        self._on_term = started
        self._over = over
        self._turn = turn
        self._doing = doing
        self._stuck: tuple[int | None, int] = (None, 0)  # the tick that goes on, and for how many steps
        self._stopping = threading.Event()
        self._why = ""

    def run(self) -> None:
        was_leading = False
        while not self._stopping.is_set():
            self._step()
            if self._leadership.leads and not was_leading:
                was_leading = True
                self._on_term()
            if self._leadership.is_over or self._is_stuck():
                self._over()
                return
            self._stopping.wait(RENEW_EVERY_S if was_leading and not self._why else STANDBY_POLL_S)

    def stop(self) -> None:
        """Renew no more. Returns when a step that is under way is over, or after a second."""
        self._stopping.set()
        self.join(timeout=1.0)

    def _step(self) -> None:
        responses: queue.SimpleQueue[Callable[[], None] | Exception] = queue.SimpleQueue()

        def query() -> None:
            try:
                responses.put(self._leadership.query())
            except Exception as error:  # noqa: BLE001 - raised, or logged, by the thread that waits
                responses.put(error)

        threading.Thread(target=query, name="lease query", daemon=True).start()
        try:
            response = responses.get(timeout=RESPONSE_WITHIN_S)
        except queue.Empty:
            self._leadership.reconnect()
            self._trouble(f"no response within {RESPONSE_WITHIN_S:g} s")
            return
        if not isinstance(response, Exception):
            self._why = ""
            response()
        elif isinstance(response, SQLAlchemyError):
            self._trouble(sentence_of(response))
        else:
            log.error("the lease", exc_info=response)

    def _trouble(self, why: str) -> None:
        if why != self._why:  # once, not with every try
            self._why = why
            log.warning("the lease cannot be read or renewed: %s", why)

    def _is_stuck(self) -> bool:
        """Return whether one tick has gone on for many steps, all of which the database has responded to.

        Steps are counted, not seconds, in which this process may have been stopped.
        """
        turn = self._turn()
        known, steps = self._stuck
        is_same = turn is not None and turn == known and not self._why
        self._stuck = (turn, steps + 1 if is_same else 0)
        if self._stuck[1] < STUCK_AFTER_STEPS:
            return False
        log.error(
            "%s; the lease could be renewed all the time, so this controller begins again", self._doing()
        )
        return True


def holder_of(home: Home) -> str:
    """Return the same for every process of one home on one host since it was started, and for no other.

    One process at a time has the home's lock, so the one that finds its own name in the lease knows that the other one has
    ended.
    """
    found = home.root.stat()
    parts = [socket.gethostname(), _line("/proc/sys/kernel/random/boot_id"), _line("/etc/machine-id")]
    parts += [str(home.root), str(found.st_dev), str(found.st_ino)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def about(home: Home) -> str:
    """Return who we are, for people."""
    return f"the controller on {socket.gethostname()} (process {os.getpid()}, home {home.root})"


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
