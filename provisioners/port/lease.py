"""The lease of a rented machine: how long it runs without a controller. Pure.

A machine counts the minutes of its running time since it was last needed, and terminates itself when they exceed its lease
(`ssh_keys.user_data`). What renews the lease:

    visit     a controller that is logged in on the machine
    traffic   a successful response of the replica, or a request that the load balancer served; for `most_s` at most,
              counted from the last visit

Until the replica has responded for the first time the lease is the shorter `first_s`: a machine that never was of use
is not kept over a weekend. Minutes are counted, and no clock is read, because a machine's clock may be wrong until
the network has set it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

LEASE_S = 4320 * 60  # three days: a weekend of a laptop that runs the controller
FIRST_S = 720 * 60
MOST_S = 7 * 24 * 3600
WARN_SHARE = 0.5  # of the lease that is left when a warning is due


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Seconds of running time without a visit or traffic until the machine terminates.

    `first_s` until its replica has responded, `lease_s` from then on. Traffic alone keeps it for `most_s`.
    """

    lease_s: int
    first_s: int
    most_s: int = MOST_S


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one machine, as its controller knows it.

    `visited_at` is when (UNIX seconds) the last visit ended, and `why` the reason that there is no other since; None: a
    controller is visiting it. `lease_s` and `most_s` are as the machine reported them.
    """

    lease_s: float
    most_s: float
    visited_at: float | None = None
    why: str = ""

    def left_s(self, now: float) -> float:
        """Return the seconds until the machine terminates if it has no traffic."""
        return self.lease_s if self.visited_at is None else max(0.0, self.visited_at + self.lease_s - now)

    def most_left_s(self, now: float) -> float:
        """Return the seconds until the machine terminates even if it has traffic."""
        most_s = max(self.most_s, self.lease_s)
        return most_s if self.visited_at is None else max(0.0, self.visited_at + most_s - now)

    def is_short(self, now: float) -> bool:
        """Return whether a warning is due."""
        return self.visited_at is not None and self.left_s(now) <= WARN_SHARE * self.lease_s


def terms_of(minutes: int | None, token: str, *, serves_at_once: bool = False) -> LeaseTerms | None:
    """Return the terms of a machine: `minutes` is the setting (None: the defaults; 0: no lease, None is returned).

    `serves_at_once`: there is no replica on it to wait for. Each lease is up to a tenth longer or shorter, by the machine's token,
    so that the machines of a fleet without a controller do not all terminate at one instant.
    """
    if minutes == 0:
        return None
    share = hashlib.sha256(f"lease {token}".encode()).digest()[0] / 255.0
    factor = 0.9 + 0.2 * share
    lease_s = LEASE_S if minutes is None else 60 * minutes
    first_s = FIRST_S if minutes is None and not serves_at_once else lease_s
    return LeaseTerms(round(lease_s * factor), round(first_s * factor), round(max(MOST_S, lease_s) * factor))


def shortest_s(minutes: int | None) -> int:
    """Return the shortest lease that a setting gives, without the tenth (`terms_of`); 0: there are no leases."""
    return FIRST_S if minutes is None else 60 * minutes
