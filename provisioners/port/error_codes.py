"""What a cloud's error codes mean for the next decision: the form of the tables, one of which each cloud has. Pure.

A row is for some codes, where the message fits its pattern, and says what to do (`kind`), what else that is about (`scope`)
and where the knowledge comes from (`source`). The first row that fits decides. A table lists known codes: a request refused
for a reason that no row names is refused *there*, for other zones, types and regions may take the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from policies.model import CapacityType, FailureKind, Scope


@dataclass(frozen=True)
class ErrorCode:
    """`codes` are separated by spaces; none: any.

    `scope` None is the usual one of the kind. `closes_region`: the region is not open to us at all, so it is left out until
    a person has acted. `retry_s` is for what may be tried again.
    """

    codes: str
    kind: FailureKind
    advice: str
    source: str
    pattern: str = ""  # searched in the message, in any case
    scope: Scope | None = None
    market: CapacityType | None = None
    retry_s: float | None = None
    closes_region: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.codes.split())

    def fits(self, message: str, market: CapacityType | None) -> bool:
        """Of a row whose code fits."""
        return (self.market is None or self.market is market) and (
            not self.pattern or re.search(self.pattern, message, re.IGNORECASE | re.DOTALL) is not None
        )


class ErrorTable:
    """A table of rows, looked up by code. `spell` makes one spelling of a code's several."""

    def __init__(self, rows: Sequence[ErrorCode], spell: Callable[[str], str] = str) -> None:
        self.rows = tuple(rows)
        self._spell = spell
        self._by_code: dict[str, list[ErrorCode]] = {}
        every = {spell(name) for row in rows for name in row.names}
        for code in every:
            self._by_code[code] = [
                row for row in rows if not row.names or code in {spell(name) for name in row.names}
            ]
        self._of_any = [row for row in rows if not row.names]

    def find(self, code: str, message: str, market: CapacityType | None) -> ErrorCode | None:
        rows = self._by_code.get(self._spell(code), self._of_any)
        return next((row for row in rows if row.fits(message, market)), None)
