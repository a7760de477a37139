"""Durations and points in time as options take them; see `provisioners.durations`."""

from __future__ import annotations

from datetime import datetime

from provisioners.durations import seconds_of
from skyserve_cli.output import WrongUsage


def seconds(option: str, text: str) -> float:
    """Raise WrongUsage, with the name of the option."""
    found = seconds_of(text)
    if found is None:
        raise WrongUsage(f"{option} takes a duration such as 10s, 2m or 24h (got {text!r})")
    return found


def instant(option: str, text: str, now: float) -> float:
    """UNIX seconds of a duration before `now`, or of a time: ``2026-11-23T14:00:05``, ``2026-11-23 14:00``, ``14:05`` (today).

    A time without a zone is local. Raises WrongUsage, with the name of the option.
    """
    text = text.strip()
    ago_s = seconds_of(text)
    if ago_s is not None:
        return now - ago_s
    today = datetime.fromtimestamp(now).astimezone().date().isoformat()
    for written in (text, f"{today}T{text}"):
        try:
            return datetime.fromisoformat(written).timestamp()
        except ValueError:
            continue
    raise WrongUsage(
        f"{option} takes a duration such as 10s, 2m or 24h, or a time such as 14:05 or 2026-11-23T14:05 (got {text!r})"
    )
