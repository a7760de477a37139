"""Who may read the page: a code that works once becomes a session. Pure; `now` is UNIX seconds.

Codes are kept in memory for a minute. Of sessions only digests are kept, in a file of the home, so that a page goes on after the
controller was killed, and a copy of that file opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import NamedTuple

CODE_S = 60.0
SESSION_S = 12 * 3600.0
MOST_CODES = 16
MOST_SESSIONS = 64


class Session(NamedTuple):
    """`until` is UNIX seconds, `name` that of a token, or of the owner."""

    until: float
    name: str


class Sessions:
    """`draw` returns a new secret. `kept` are the sessions by their digests."""

    def __init__(self, draw: Callable[[], str], kept: Mapping[str, Session] | None = None) -> None:
        self._draw = draw
        self._codes: dict[str, Session] = {}
        self._sessions = dict(kept or {})

    def new_code(self, name: str, now: float) -> str:
        """Return a code for `enter`, which opens a session for `name`. Of more than MOST_CODES the oldest stop working."""
        code = self._draw()
        self._codes[_digest(code)] = Session(now + CODE_S, name)
        while len(self._codes) > MOST_CODES:
            del self._codes[next(iter(self._codes))]
        return code

    def enter(self, code: str, now: float) -> str | None:
        """Return the secret of a new session; None if the code is unknown, too old, or was used before."""
        found = self._codes.pop(_digest(code), None)
        if found is None or now > found.until:
            return None
        secret = self._draw()
        self._sessions[_digest(secret)] = Session(now + SESSION_S, found.name)
        self._sessions = {key: session for key, session in self._sessions.items() if session.until > now}
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key])]
        return secret

    def name_of(self, secret: str, now: float) -> str | None:
        """Return whose session this secret is of; None if there is none, or it has expired."""
        found = self._sessions.get(_digest(secret)) if secret else None
        return found.name if found is not None and found.until > now else None

    def kept(self) -> dict[str, Session]:
        """Return what `kept` of the next `Sessions` is to be."""
        return dict(self._sessions)


def action_token(secret: str) -> str:
    """Return what every request that acts must have in a header: only scripts of the page can read it."""
    return hmac.new(secret.encode(), b"skyserve dashboard action", hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
