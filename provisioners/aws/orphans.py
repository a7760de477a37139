"""Resources on EC2 with the owner's tag that belong to no machine: volumes, network cards, spot requests.

Machines take theirs with them, so there should be none. A volume that is new may be on its way to its instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from provisioners.aws.api import AwsApi, Reply
from provisioners.aws.health_checks import SERVICE, HealthChecks
from provisioners.aws.translate import tags_of
from provisioners.port.vm import OWNER_TAG, TOKEN_TAG, OrphanedResource

_YOUNG_S = 60.0

# "Amazon EBS pricing", us-east-1; other regions cost up to twice that.
_USD_GB_MONTH: Mapping[str, float] = MappingProxyType(
    {"gp3": 0.08, "gp2": 0.1, "io1": 0.125, "io2": 0.125, "st1": 0.045, "sc1": 0.015, "standard": 0.05}
)
_REMOVALS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {  # the call, its parameter, the code for one that is gone
        "volume": ("DeleteVolume", "VolumeId", "InvalidVolume.NotFound"),
        "network-interface": (
            "DeleteNetworkInterface",
            "NetworkInterfaceId",
            "InvalidNetworkInterfaceID.NotFound",
        ),
        "spot-request": (
            "CancelSpotInstanceRequests",
            "SpotInstanceRequestIds",
            "InvalidSpotInstanceRequestID.NotFound",
        ),
        HealthChecks.kind: ("DeleteHealthCheck", "HealthCheckId", "NoSuchHealthCheck"),
    }
)


def orphans_in(api: AwsApi, region: str, owner: str, now: float) -> Iterator[OrphanedResource]:
    """Yield those that are attached to nothing, whosever they were: the caller knows which machines live."""

    def listed(action: str, items: str, state: str, *states: str) -> Iterator[Reply]:
        filters = [{"Name": f"tag:{OWNER_TAG}", "Values": [owner]}, {"Name": state, "Values": [*states]}]
        return api.pages(region, action, items, {"Filters": filters})

    for volume in listed("DescribeVolumes", "Volumes", "status", "available", "error"):
        born = volume["CreateTime"].timestamp()
        if born < now - _YOUNG_S:
            usd_month = _USD_GB_MONTH.get(volume["VolumeType"], 0.1) * volume["Size"]
            yield OrphanedResource("volume", volume["VolumeId"], region, _token_of(volume), born, usd_month)
    for card in listed("DescribeNetworkInterfaces", "NetworkInterfaces", "status", "available"):
        token = _token_of({"Tags": card["TagSet"]})
        yield OrphanedResource("network-interface", card["NetworkInterfaceId"], region, token, usd_month=0.0)
    for request in listed("DescribeSpotInstanceRequests", "SpotInstanceRequests", "state", "open", "active"):
        request_id, token = request["SpotInstanceRequestId"], _token_of(request)
        yield OrphanedResource("spot-request", request_id, region, token, usd_month=0.0)


def owners_in(api: AwsApi, region: str) -> list[str]:
    """Return whose instances, volumes, security groups and keys there are."""
    tagged = {"Filters": [{"Name": "tag-key", "Values": [OWNER_TAG]}]}
    reservations = api.pages(region, "DescribeInstances", "Reservations", tagged)
    found: list[Reply] = [one for reservation in reservations for one in reservation["Instances"]]
    found += api.pages(region, "DescribeVolumes", "Volumes", tagged)
    found += api.pages(region, "DescribeSecurityGroups", "SecurityGroups", tagged)
    found += api.request(region, "DescribeKeyPairs", tagged).get("KeyPairs", ())
    return sorted({owner for one in found if (owner := tags_of(one).get(OWNER_TAG))})


def remove(api: AwsApi, orphan: OrphanedResource) -> None:
    """Already gone is success. EC2 refuses to delete attached resources, so a wrong guess does no harm."""
    action, parameter, gone = _REMOVALS[orphan.kind]
    value = [orphan.id] if parameter.endswith("Ids") else orphan.id
    service = SERVICE if orphan.kind == HealthChecks.kind else "ec2"
    api.call(orphan.region, action, {parameter: value}, service=service, unless=(gone,))


def _token_of(described: Reply) -> str:
    return tags_of(described).get(TOKEN_TAG, "")
