"""The seconds of `serve --timeout`, for the command that runs below it."""

from __future__ import annotations

from contextvars import ContextVar

_given: ContextVar[float | None] = ContextVar("timeout", default=None)


def give_time(seconds: float | None) -> None:
    _given.set(seconds)


def time_given() -> float | None:
    """Return None where there is no limit."""
    return _given.get()
