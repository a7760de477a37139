"""This agent's certificate: whether it is valid, and a line in the log before it expires.

The controller replaces certificates every 10 days, and each is valid for 30. One that expires in less than WARN_BEFORE_S has not been
replaced for 10 days at least: the controller does not run, or does not reach this agent.
"""

from __future__ import annotations

import logging

from lb.core.log_limit import LogLimit
from lb.regions.identity import EXPIRED, Identity

WARN_BEFORE_S = 10 * 86400.0
WARN_EVERY_S = 86400.0
EXPIRING = "expiring"

_log = logging.getLogger("lb.regions")


class OwnCertificate:
    """Raises OSError for files that cannot be read."""

    def __init__(self, identity: Identity) -> None:
        self._unix_time_s = identity.unix_time_s
        self._expires_at = identity.expires_at()
        self._logged = LogLimit(WARN_EVERY_S)

    @property
    def left_s(self) -> float | None:
        """Return in how many seconds it expires, negative once it has; None if it is not known."""
        return None if self._expires_at is None else self._expires_at - self._unix_time_s()

    @property
    def state(self) -> str:
        """Return EXPIRED, EXPIRING within WARN_BEFORE_S, or "" for one that is valid for longer."""
        left_s = self.left_s
        if left_s is None or left_s > WARN_BEFORE_S:
            return ""
        return EXPIRED if left_s < 0 else EXPIRING

    def look(self, now: float) -> None:
        """Log once a day if it expires soon, or has expired."""
        state = self.state
        if state and self._logged.left_out(state, now) is not None:
            _log.warning(
                "certificate for peers state=%s days_left=%.1f why=%r",
                state,
                (self.left_s or 0.0) / 86400,
                "the controller replaces it every 10 days, if it runs and reaches this agent",
            )
