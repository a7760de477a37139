"""Requests as policies see them, with some fields changed, and choices, to be compared."""

from __future__ import annotations

from typing import Any, Final

from policies.routing.base import Choice, RequestView

_FIELDS: Final = (
    "id",
    "method",
    "path",
    "body_bytes",
    "prompt",
    "scope",
    "session",
    "max_tokens",
    "due_at",
    "ttft_s",
    "tpot_s",
)


def changed(view: RequestView, **more: Any) -> RequestView:
    """Return the same request, but for these fields."""
    return RequestView(**{name: getattr(view, name) for name in _FIELDS} | more)


def facts(choice: Choice | None) -> tuple[object, ...]:
    """Return all that there is to a choice, to be compared."""
    assert choice is not None
    return (
        choice.target_id,
        choice.because,
        choice.terms,
        choice.scored,
        choice.matched_bytes,
        choice.wait,
        choice.put_off_s,
        choice.late,
        choice.first_s,
    )
