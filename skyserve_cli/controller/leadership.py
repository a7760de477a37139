"""Which controller of a database leads: this one or another.

`Leadership` takes the lease (`state.lease`) and renews it three times in its time to live. What it allows, it allows from
the time at which the last renewal was *sent*, on a clock of this host that nobody can set and that counts suspension: so
a controller that was frozen, asleep or cut off stops by itself before another one may begin. Two things do not depend on
any clock: a commit is refused by the database once another term has begun, and a table of an earlier term by the agents.

A cloud can do neither. Launches are harmless at any time, for their tokens make them the same launch; what terminates
something needs half of the lease left, which no call that has just begun outlives in practice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.clock import Clock
from skyserve_cli.controller.ports import CallKind
from skyserve_cli.home import Home
from skyserve_cli.state.lease import Lease
from skyserve_cli.state.store import Store

log = logging.getLogger(__name__)

TTL_S = 6.0
RENEW_EVERY_S = TTL_S / 3
STANDBY_POLL_S = 1.0
CLOCK_READ_WITHIN_S = 1.0


class NotLeadingError(Exception):
    """Another controller of this database leads, and only it takes orders."""


class Leadership:
    """Of one process. Thread-safe as far as its attributes are single values; `step` is called by one thread.

    `holder` tells controllers apart; one that has ended and comes back under the same name goes on at once.
    """

    def __init__(self, store: Store, holder: str, about: str, steady: Clock, ttl_s: float = TTL_S) -> None:
        self._store = store
        self._holder = holder
        self._about = about
        self._steady = steady
        self._ttl_s = ttl_s
        self._valid_until = float("-inf")
        self._lease: Lease | None = None  # as last seen
        self._unchanged_since = 0.0
        self._read_at = (0.0, steady.now())  # the database's clock, and ours at that time
        self.epoch = 0
        self.is_over = False

    def step(self) -> None:
        """Take the lease, or renew it, if that can be. Raises SQLAlchemyError if the database cannot be reached."""
        sent_at = self._steady.now()
        if self.epoch:
            renewed = self._store.renew_lease(self.epoch, ttl_s=self._ttl_s)
            if renewed is None:
                self._lose()
                self._see(self._store.lease(), sent_at)
                return
            self._hold(renewed, sent_at)
            return
        self._see(self._store.lease(), sent_at)
        unrenewed = self._unrenewed(sent_at)
        if not (
            self._lease is None or not self._lease.is_live or self._lease.holder == self._holder or unrenewed
        ):
            return
        taken = self._store.take_lease(self._holder, self._about, ttl_s=self._ttl_s, unrenewed=unrenewed)
        if taken is None:  # another one was faster
            return
        self.epoch = taken.epoch
        self._hold(taken, sent_at)
        log.info("this controller leads epoch=%d", taken.epoch)

    def release(self) -> None:
        """Let the next controller begin at once."""
        self._valid_until = float("-inf")
        if self.epoch and not self.is_over:
            self.is_over = True
            self._store.release_lease(self.epoch)

    @property
    def leads(self) -> bool:
        """Whether a term of this controller has begun, and no other that it knows of."""
        return bool(self.epoch) and not self.is_over

    def left_s(self) -> float:
        """How much longer no other controller can lead; not positive if one may."""
        return self._valid_until - self._steady.now()

    def may_terminate(self) -> bool:
        """Whether something may be removed now that no row speaks of."""
        return self.allows(CallKind.TERMINATE)

    def allows(self, kind: CallKind) -> bool:
        """Whether a call to a cloud may begin now."""
        return self.leads and self.left_s() > (self._ttl_s / 2 if kind is CallKind.TERMINATE else 0.0)

    def lost(self) -> None:
        """The database or an agent has said so."""
        if self.leads:
            self._lose()

    def database_now(self) -> float:
        """The time by the database's clock, which all its controllers share; UNIX seconds."""
        there, here = self._read_at
        return there + self._steady.now() - here

    def to_json(self) -> dict[str, Any]:
        """`leads`: this controller. `leader` is for people, and empty if there is none."""
        lease = self._lease
        leader = "" if lease is None or not lease.holder else lease.about
        return {"leads": self.leads, "epoch": 0 if lease is None else lease.epoch, "leader": leader}

    def refuse_unless_leading(self) -> None:
        """Raises NotLeadingError."""
        if not self.leads:
            leader = self.to_json()["leader"]
            elsewhere = (
                f"{leader} leads; run the command there"
                if leader
                else "no controller leads at the moment; try again"
            )
            raise NotLeadingError(f"this controller stands by: {elsewhere}")

    def _unrenewed(self, now: float) -> Lease | None:
        return self._lease if now - self._unchanged_since > self._ttl_s else None

    def _see(self, lease: Lease, sent_at: float) -> None:
        self._follow(lease, sent_at)
        known = self._lease
        if known is None or not lease.is_same_term_as(known):
            self._unchanged_since = self._steady.now()
            if lease.is_live and (known is None or known.epoch != lease.epoch):
                log.info("this controller stands by; %s leads", lease.about)
        self._lease = lease

    def _hold(self, lease: Lease, sent_at: float) -> None:
        self._lease = lease
        self._valid_until = sent_at + self._ttl_s
        self._follow(lease, sent_at)

    def _follow(self, lease: Lease, sent_at: float) -> None:
        """Read the database's clock, unless the response took so long that it says little."""
        now = self._steady.now()
        if now - sent_at < CLOCK_READ_WITHIN_S or not self._read_at[0]:
            self._read_at = (lease.read_at, now)

    def _lose(self) -> None:
        self.is_over = True
        self._lease = None
        self._valid_until = float("-inf")
        log.warning("another controller has taken over; epoch %d is over", self.epoch)


class LeaseKeeper(threading.Thread):
    """Calls `step` for as long as the process lives. `begun` is called when the term begins, `over` when it has ended."""

    def __init__(self, leadership: Leadership, begun: Callable[[], None], over: Callable[[], None]) -> None:
        super().__init__(name="lease", daemon=True)
        self._leadership = leadership
        self._begun = begun
        self._over = over
        self._stopping = threading.Event()
        self._why = ""

    def run(self) -> None:
        was_leading = False
        while not self._stopping.is_set():
            try:
                self._leadership.step()
            except SQLAlchemyError as error:
                if str(error.__cause__) != self._why:  # once, not with every try
                    self._why = str(error.__cause__)
                    log.warning("the lease cannot be read or renewed: %s", self._why)
            else:
                self._why = ""
            if self._leadership.leads and not was_leading:
                was_leading = True
                self._begun()
            if self._leadership.is_over:
                self._over()
                return
            self._stopping.wait(RENEW_EVERY_S if was_leading else STANDBY_POLL_S)

    def stop(self) -> None:
        """Renew no more. Returns when a step that is under way has ended, or after a second."""
        self._stopping.set()
        self.join(timeout=1.0)


def holder_of(home: Home) -> str:
    """The same for every process of one home on one host since it was started, and for no other. One process at a time has
    the home's lock, so the one that finds its own name in the lease knows that the other one has ended."""
    found = home.root.stat()
    parts = [socket.gethostname(), _line("/proc/sys/kernel/random/boot_id"), _line("/etc/machine-id")]
    parts += [str(home.root), str(found.st_dev), str(found.st_ino)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def about(home: Home) -> str:
    """Who we are, for people."""
    return f"the controller on {socket.gethostname()} (process {os.getpid()}, home {home.root})"


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
