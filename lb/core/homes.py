"""Which target has a resource that it made: a stored response, a conversation, a batch, a file. Pure.

Such state is on one replica, and a request that names it by its id has to go there. The ids are learned from responses that
are passed on. The list is bounded by memory and age, since what it has forgotten can be looked up: a target that has the
resource serves it at its path (see `lb.proxy.home_finder`).

*Tenants.* An id is known for the API key that made the resource. What another key learns under the same id, by choosing the
id of a resource itself, changes nothing for the first.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

MAX_BYTES = 16 * 1024 * 1024
MAX_AGE_S = 24 * 3600.0
_ENTRY_BYTES = 320  # of the objects of an entry, besides its texts


class Absence(Enum):
    """Why no target is known to have a resource."""

    GONE = "no target has it"
    SILENT = "targets that may have it do not respond"
    UNKNOWN = "targets do not tell"


Found = str | Absence  # the id of the target that has it


class _Home(NamedTuple):
    target_id: str
    learned_at: float


class Homes:
    """The targets by (tenant, id). Beyond `max_bytes` those are forgotten that were used longest ago."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._homes: OrderedDict[tuple[str, str], _Home] = OrderedDict()  # used longest ago first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._homes)

    def learn(self, tenant: str, resource_id: str, target_id: str, now: float) -> None:
        """The target has the resource; it replaces the one known before."""
        key = (tenant, resource_id)
        self._forget(key)
        self._homes[key] = _Home(target_id, now)
        self.size_bytes += _size(key, target_id)
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._homes)))

    def find(self, tenant: str, resource_id: str, now: float) -> str | None:
        """Return the target that has the resource, which may have left the table; None if that is not known."""
        key = (tenant, resource_id)
        home = self._homes.get(key)
        if home is None:
            return None
        if now - home.learned_at > self._max_age_s:
            self._forget(key)
            return None
        self._homes.move_to_end(key)
        return home.target_id

    def _forget(self, key: tuple[str, str]) -> None:
        home = self._homes.pop(key, None)
        if home is not None:
            self.size_bytes -= _size(key, home.target_id)


def _size(key: tuple[str, str], target_id: str) -> int:
    return _ENTRY_BYTES + len(key[0]) + len(key[1]) + len(target_id)
