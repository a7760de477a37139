"""How attempts fail, by what follows from it."""

from __future__ import annotations

import errno
from enum import Enum

from lb.core.targets import Blame

RETRY_STATUSES = frozenset({502, 503, 504})


class Failure(str, Enum):
    """Before the first byte the request goes elsewhere; after it a stream may be continued."""

    UNREACHABLE = "unreachable"  # no connection: the request has run nowhere
    LOCAL = "local"  # no connection, for want of something of ours: descriptors, ports, memory, a name server
    STALE = "stale"  # a reused connection ended before the first byte
    DIED = "died"  # a connection of our own ended before the response had started (or, if whole, ended)
    MALFORMED = "malformed"  # what it sends is not HTTP
    IDLE = "idle"  # no byte for too long in the middle of a response
    STALLED = "stalled"  # a stream without an event for too long
    UNFIT = "unfit"  # it does not continue what another has started
    GAVE_UP = "gave_up"  # the engine reports in the middle of a stream that it stops
    SHORT = "short"  # a stream that ends in good order before its response is complete
    EMPTY = "empty"  # 200, and nothing, where a model has to send something
    REFUSED = "refused"  # it returned 502, 503 or 504
    SILENT = "silent"  # no response within the time to first byte, or no more of it and a failed probe


BLAME = {
    Failure.UNREACHABLE: Blame.EJECT,
    Failure.LOCAL: Blame.NONE,
    Failure.STALE: Blame.NONE,
    Failure.DIED: Blame.DIED,
    Failure.MALFORMED: Blame.TROUBLE,  # a strange request may have provoked it
    Failure.IDLE: Blame.TROUBLE,
    Failure.STALLED: Blame.TROUBLE,
    Failure.UNFIT: Blame.NONE,
    Failure.GAVE_UP: Blame.TROUBLE,
    Failure.SHORT: Blame.TROUBLE,
    Failure.EMPTY: Blame.TROUBLE,
    Failure.REFUSED: Blame.TROUBLE,
    Failure.SILENT: Blame.EJECT,
}


# Errors of a connect that are due to this host and not to the target.
_LOCAL_ERRORS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EADDRNOTAVAIL,
    }
)


def is_local(error: BaseException) -> bool:
    """Return True if a connect failed for a reason on our side: then the target is not to blame.

    A name that does not resolve counts as ours (`socket.gaierror`, whose numbers are not those of `errno`).
    """
    return isinstance(error, OSError) and (type(error).__name__ == "gaierror" or error.errno in _LOCAL_ERRORS)


def described(error: BaseException) -> str:
    """Return an error in a word and a number, as logs show it: `ConnectionRefusedError errno=111`."""
    why = getattr(error, "verify_message", "")
    if why:  # of a certificate: nothing was sent
        return f"wrong certificate ({why})"
    number = getattr(error, "errno", None)
    return type(error).__name__ if number is None else f"{type(error).__name__} errno={number}"
