"""Durations as people write them: `500ms`, `10s`, `2m`, `1.5h`, `7d`; a bare number is seconds. Pure."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration, or None if the text is not one."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNIT_S[match[2]]
