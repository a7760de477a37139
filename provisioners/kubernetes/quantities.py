"""Amounts as Kubernetes writes them (`500m`, `16Gi`, `2`), and instants. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_SUFFIXES = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"([+-]?[0-9]*\.?[0-9]+)(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i)?)")


def amount(text: str | float | None) -> float:
    """Return the number: cores, bytes, or pieces. 0 for what cannot be read."""
    found = _QUANTITY.fullmatch(str(text if text is not None else "").strip())
    if found is None:
        return 0.0
    number, exponent, suffix = found.groups()
    return float(number) * (10.0 ** int(exponent) if exponent else _SUFFIXES[suffix or ""])


def unix_s(timestamp: str | None) -> float | None:
    """Return the UNIX seconds of an RFC 3339 timestamp; None for none."""
    if not timestamp:
        return None
    text = re.sub(r"(\.\d{6})\d+", r"\1", timestamp.replace("Z", "+00:00"))
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def rfc3339(at: float) -> str:
    """Return an instant as the API takes it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
