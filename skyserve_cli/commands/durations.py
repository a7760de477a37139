"""Durations as people write them: ``500ms``, ``10s``, ``2m``, ``1.5h``, ``7d``; a bare number is seconds."""

from __future__ import annotations

import re

from skyserve_cli.output import WrongUsage

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(option: str, text: str) -> float:
    """Raises WrongUsage, with the name of the option."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise WrongUsage(f"{option} takes a duration such as 10s, 2m or 24h (got {text!r})")
    return float(match[1]) * _UNIT_S[match[2]]
