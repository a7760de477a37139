"""The section `teams` of `config.yaml`: what the services of each team may use together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.goals import Quota
from skyserve_cli.config_section import Strict

TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class TeamConfig(Strict):
    max_gpus: int | None = Field(
        default=None, ge=0, description="accelerators of all replicas together. null: no limit"
    )
    max_replicas: int | None = Field(default=None, ge=0, description="replicas together. null: no limit")
    max_usd_hour: float | None = Field(
        default=None,
        gt=0,
        description="what the machines of all services may cost together, USD per hour. null: no limit",
    )
    max_usd_month: float | None = Field(
        default=None,
        gt=0,
        description="when the machines have cost this many USD in a calendar month (UTC), no replica is launched until the next. "
        "null: no limit",
    )

    @property
    def quota(self) -> Quota:
        return Quota(self.max_gpus, self.max_replicas, self.max_usd_hour, self.max_usd_month)
