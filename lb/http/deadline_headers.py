"""The deadlines that a client sends with a request: `X-SLO-TTFT-MS` and `X-SLO-TPOT-MS`, milliseconds. They are passed on to targets."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile(rb"[0-9]{1,8}(?:\.[0-9]{1,3})?")
_LONGEST_MS: Final = 86_400_000.0
PROBLEM: Final = "X-SLO-TTFT-MS and X-SLO-TPOT-MS are milliseconds: numbers above 0 and up to 86400000."


def read_deadline(ttft: bytes, tpot: bytes) -> tuple[float, float] | None:
    """Return the seconds until the first byte and between two tokens, 0 where the header is missing (b""); None if one makes no sense."""
    ttft_s, tpot_s = _seconds(ttft), _seconds(tpot)
    return None if ttft_s is None or tpot_s is None else (ttft_s, tpot_s)


def _seconds(value: bytes) -> float | None:
    if not value:
        return 0.0
    if not _NUMBER.fullmatch(value):
        return None
    milliseconds = float(value)
    return milliseconds / 1000.0 if 0.0 < milliseconds <= _LONGEST_MS else None
