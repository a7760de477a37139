"""The port of a placement policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from policies.model import Event, Json, Observation, Offer, Replica


class Place(NamedTuple):
    """One decided launch: where, and why there."""

    offer: Offer
    why: str


class PlacementPolicy(Protocol):
    """Decides where replicas go. Pure; what it remembers is JSON in `memory`."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        """What the events teach. `replicas` are as they were before the events. Only capacity errors and
        preemptions say something about a zone; quota and permission errors say where not to ask."""
        ...

    def place(self, count: int, observation: Observation, memory: Json) -> tuple[Sequence[Place], Json]:
        """At most `count` places for new replicas, fewer where nothing has room now."""
        ...
