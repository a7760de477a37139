"""The port of a scaler."""

from __future__ import annotations

from typing import Protocol

from policies.model import Json, Observation


class Scaler(Protocol):
    """Decides the number of replicas that should be serving."""

    def target(self, observation: Observation, memory: Json) -> tuple[int, Json]:
        """The wanted number (over-provisioning not included) and what to remember. Pure."""
        ...
