"""The seconds of `serve --timeout`, and a line for what a command waits for without the controller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from skyserve_cli.output import inform

NOTICE_AFTER_S = 1.5

_given: ContextVar[float | None] = ContextVar("timeout", default=None)


def give_time(seconds: float | None) -> None:
    _given.set(seconds)


def time_given() -> float | None:
    """Return None where there is no limit."""
    return _given.get()


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say what this context waits for, if it takes long."""
    timer = threading.Timer(NOTICE_AFTER_S, inform, [f"waiting for {what}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
