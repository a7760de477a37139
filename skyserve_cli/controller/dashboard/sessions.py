"""Who may read the page: a code that works once becomes a session. Pure; `now` is UNIX seconds.

Codes are kept in memory for a minute. Of sessions only digests are kept, in a file of the home, so that a page goes on after the
controller was killed, and a copy of that file opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping

CODE_S = 60.0
SESSION_S = 12 * 3600.0
MOST_CODES = 16
MOST_SESSIONS = 64


class Sessions:
    """`draw` returns a new secret. `kept` are the digests of sessions and when they end."""

    def __init__(self, draw: Callable[[], str], kept: Mapping[str, float] | None = None) -> None:
        self._draw = draw
        self._codes: dict[str, float] = {}
        self._sessions = dict(kept or {})

    def new_code(self, now: float) -> str:
        """Return a code for `enter`. Of more than MOST_CODES the oldest stop working."""
        code = self._draw()
        self._codes[_digest(code)] = now + CODE_S
        while len(self._codes) > MOST_CODES:
            del self._codes[next(iter(self._codes))]
        return code

    def enter(self, code: str, now: float) -> str | None:
        """Return the secret of a new session; None if the code is unknown, too old, or was used before."""
        until = self._codes.pop(_digest(code), None)
        if until is None or now > until:
            return None
        secret = self._draw()
        self._sessions[_digest(secret)] = now + SESSION_S
        self._sessions = {key: end for key, end in self._sessions.items() if end > now}
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key])]
        return secret

    def knows(self, secret: str, now: float) -> bool:
        """Return whether the secret is that of a session that has not ended."""
        return bool(secret) and self._sessions.get(_digest(secret), 0.0) > now

    def kept(self) -> dict[str, float]:
        """Return what `kept` of the next `Sessions` is to be."""
        return dict(self._sessions)


def action_token(secret: str) -> str:
    """Return what every request that acts must have in a header: only scripts of the page can read it."""
    return hmac.new(secret.encode(), b"skyserve dashboard action", hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
