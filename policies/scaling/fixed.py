"""A fixed size."""

from __future__ import annotations

from policies.model import Json, Observation
from policies.scaling.base import Size


class Fixed:
    """Always `min_replicas`."""

    def target(self, observation: Observation, memory: Json) -> Size:
        return Size(observation.goal.scaling.min_replicas, {})
