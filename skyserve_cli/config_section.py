"""What the sections of all clouds in `config.yaml` share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from provisioners.offers.egress import Rates


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class EgressConfig(Strict):
    """Your prices of traffic that leaves a region, in USD per GB, in place of list prices."""

    near: float = Field(ge=0, le=100, description="to a region of the same cloud on the same continent")
    far: float = Field(ge=0, le=100, description="to a region of the same cloud on another continent")
    internet: float = Field(ge=0, le=100, description="to another cloud, or to hosts of your own")

    @property
    def rates(self) -> Rates:
        return Rates(self.near, self.far, self.internet)


def _one_price(value: Any) -> Any:
    """A number is the price to everywhere."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"near": value, "far": value, "internet": value} if is_number else value


class CloudConfig(Strict):
    """What every cloud has."""

    enabled: bool = True
    poll_seconds: float | None = Field(
        default=None,
        gt=0.05,
        le=600,
        description="how often the cloud is listed; by default 10, on Azure 30 while no machine comes or goes",
    )
    egress_usd_per_gb: Annotated[EgressConfig | None, BeforeValidator(_one_price)] = Field(
        default=None,
        description="what traffic out of its regions costs you: one price, or near, far and internet; by default list prices",
    )
