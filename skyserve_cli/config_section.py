"""What the sections of all clouds in `config.yaml` share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class CloudConfig(Strict):
    """What every cloud has."""

    enabled: bool = True
    poll_seconds: float | None = Field(
        default=None,
        gt=0.05,
        le=600,
        description="how often the cloud is listed; by default 10, on Azure 30 while no machine comes or goes",
    )
