"""Durations as people write them: ``500ms``, ``10s``, ``2m``, ``1.5h``, ``7d``; a bare number is seconds. And points in time."""

from __future__ import annotations

import re
from datetime import datetime

from skyserve_cli.output import WrongUsage

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(option: str, text: str) -> float:
    """Raise WrongUsage, with the name of the option."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise WrongUsage(f"{option} takes a duration such as 10s, 2m or 24h (got {text!r})")
    return float(match[1]) * _UNIT_S[match[2]]


def instant(option: str, text: str, now: float) -> float:
    """UNIX seconds of a duration before `now`, or of a time: ``2026-11-23T14:00:05``, ``2026-11-23 14:00``, ``14:05`` (today).

    A time without a zone is local. Raises WrongUsage, with the name of the option.
    """
    text = text.strip()
    if _DURATION.fullmatch(text):
        return now - seconds(option, text)
    today = datetime.fromtimestamp(now).astimezone().date().isoformat()
    for written in (text, f"{today}T{text}"):
        try:
            return datetime.fromisoformat(written).timestamp()
        except ValueError:
            continue
    raise WrongUsage(
        f"{option} takes a duration such as 10s, 2m or 24h, or a time such as 14:05 or 2026-11-23T14:05 (got {text!r})"
    )
