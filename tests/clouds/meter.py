"""What a fake cloud bills, in virtual time. A rate is a function that returns what is billed per hour now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

MACHINE_USD_HOUR = 4.0
DISK_USD_HOUR = 0.03
ADDRESS_USD_HOUR = 0.005


@dataclass(slots=True)
class Meter:
    """`hours` lets time pass; `usd` is what that has cost."""

    rate: Callable[[], float]
    advance: Callable[[float], None]
    usd: float = field(default=0.0)

    def hours(self, count: int) -> None:
        for _ in range(count):
            before = self.rate()
            self.advance(3600.0)
            self.usd += (before + self.rate()) / 2
