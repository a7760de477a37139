"""A fixed size."""

from __future__ import annotations

from policies.model import Json, Observation


class Fixed:
    """Always `min_replicas`."""

    def target(self, observation: Observation, memory: Json) -> tuple[int, Json]:
        return observation.goal.scaling.min_replicas, {}
