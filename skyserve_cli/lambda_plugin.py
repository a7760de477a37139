"""The cloud `lambda`, added by the route that any package can take (docs/plugins.md)."""

from __future__ import annotations

from pydantic import Field

from policies.model import CapacityType
from provisioners.lambda_labs.api import LambdaApi
from provisioners.lambda_labs.machines import LambdaMachines
from provisioners.lambda_labs.prices import NAME, listings
from provisioners.plugins import CloudPlugin, Setup
from skyserve_cli.config_clouds import RentedConfig

_AWS_REGIONS = frozenset({"us-east-1", "us-east-2", "us-west-1", "us-west-2"})  # of the same names and places


class LambdaConfig(RentedConfig):
    api_key_file: str = Field(
        default="~/.lambda_cloud/lambda_keys", description="has the API key, alone or as `api_key = …`"
    )
    url: str = Field(
        default="https://cloud.lambda.ai/api/v1", pattern=r"^https?://", description="of the Cloud API"
    )


def _machines(setup: Setup) -> LambdaMachines:
    section: LambdaConfig = setup.section
    api = LambdaApi(section.url, section.api_key_file, now=setup.now, sleep=setup.sleep)
    regions = frozenset(listing.region for listing in setup.catalog.listings)
    return LambdaMachines(api, regions, now=setup.now)


PLUGIN = CloudPlugin(
    name=NAME,
    machines=_machines,
    listings=listings,
    section=LambdaConfig,
    markets=frozenset({CapacityType.ON_DEMAND}),
    route53_region=lambda region: region if region in _AWS_REGIONS else None,
)
