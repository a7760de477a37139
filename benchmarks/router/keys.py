"""The API keys of clients: what `--keys` says, the keys themselves, and how our agent is given them.

Every request of the load generator has a key, also where no proxy checks any; with N keys they come in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

MOST = 1_000_000  # that have six digits, as load.c writes them
_LIMITS = {"requests_per_minute": 1_000_000_000, "tokens_per_minute": 1_000_000_000_000}  # not reached


def client_key(number: int) -> str:
    """Return a key, as load.c has it in the head of requests."""
    return f"benchmark-key-{number:06d}"


@dataclass(frozen=True, slots=True)
class Keys:
    """How many API keys our agent knows (0: it requires none), and whether they have limits."""

    count: int = 0
    limited: bool = False

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Raises ValueError."""
        if text in _NAMED:
            return _NAMED[text]
        count = int(text) if text.isascii() and text.isdigit() else 0
        if not 1 <= count <= MOST:
            raise ValueError(f"{text!r} is not none, open, limited or a number from 1 to {MOST}")
        return cls(count, limited=True)

    def __str__(self) -> str:
        return next((name for name, keys in _NAMED.items() if keys == self), f"{self.count} limited")

    @property
    def in_turn(self) -> int:
        """How many different keys the requests have."""
        return max(1, self.count)

    def for_extras(self) -> Keys:
        return self if self.count else LIMITED

    def access(self) -> dict[str, Any]:
        """Return the part `access` of a table (`lb.config.options.Access`)."""
        limits = _LIMITS if self.limited else {}
        return {
            "keys": [
                {
                    "name": f"client-{number}",
                    "sha256": sha256(client_key(number).encode()).hexdigest(),
                    **limits,
                }
                for number in range(self.count)
            ]
        }


NO_KEYS = Keys()
LIMITED = Keys(1, limited=True)
_NAMED = {"none": NO_KEYS, "open": Keys(1), "limited": LIMITED}
