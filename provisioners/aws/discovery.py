"""What an AWS account can have: instance types with accelerators, and those of the catalog, by region, zone and quota."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from policies.model import CapacityType
from provisioners.aws.api import AwsApi, Reply
from provisioners.aws.errors import CLOUD, quota_of
from provisioners.offers.catalog.discovered import RegionalType
from provisioners.offers.catalog.model import Shape
from provisioners.port.accelerator_names import canonical
from provisioners.port.errors import AuthError

_ACCELERATED = ("p*", "g*", "inf*", "trn*", "dl*")  # families; "*" is EC2's own wildcard
_TYPES_PAGE = 100  # the most that DescribeInstanceTypes takes
_QUOTAS_PAGE = 100
_MIB = 1024.0

# EC2 has one name for models that differ in memory.
_LARGER: Mapping[tuple[str, int], str] = {("A100", 80): "A100-80GB", ("V100", 32): "V100-32GB"}
_NAMES: Mapping[str, str] = {"RTX PRO Server 6000": "RTX-PRO-6000", "RTX PRO 6000": "RTX-PRO-6000"}
_MARKETS: Mapping[CapacityType, str] = {CapacityType.SPOT: "spot", CapacityType.ON_DEMAND: "on-demand"}


def offerings_in(
    api: AwsApi, region: str, plain_types: Sequence[str], notes: list[str]
) -> Iterator[RegionalType]:
    """Yield the offerings of a region; `plain_types` are those without accelerators to look for.

    What could not be determined is added to `notes`.
    """
    names = {"Name": "instance-type", "Values": [*_ACCELERATED, *plain_types]}
    zones: dict[str, list[str]] = {}
    by_zone = {"LocationType": "availability-zone-id", "Filters": [names]}
    for one in api.pages(region, "DescribeInstanceTypeOfferings", "InstanceTypeOfferings", by_zone):
        zones.setdefault(one["InstanceType"], []).append(one["Location"])
    quotas = _quotas(api, region, notes)
    filters = {"Filters": [names]}
    for info in api.pages(region, "DescribeInstanceTypes", "InstanceTypes", filters, page=_TYPES_PAGE):
        shape = shape_of(info)
        if shape is None or (shape.accelerator is None and shape.name not in plain_types):
            continue
        closed = {market: why for market in CapacityType if (why := _closed(info, market, quotas, region))}
        yield RegionalType(shape, region, tuple(sorted(zones.get(shape.name, ()))), closed)


def shape_of(info: Reply) -> Shape | None:
    """Of an entry of DescribeInstanceTypes.

    None for machines of another architecture than x86-64, and for bare metal that has no accelerators.
    """
    if "x86_64" not in info.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]):
        return None
    accelerator, count = _accelerator(info)
    return Shape(
        CLOUD,
        info["InstanceType"],
        accelerator,
        count,
        float(info["VCpuInfo"]["DefaultVCpus"]),
        info["MemoryInfo"]["SizeInMiB"] / _MIB,
    )


def _accelerator(info: Reply) -> tuple[str | None, float]:
    """Name and number. A part of a GPU counts as that part."""
    for gpu in info.get("GpuInfo", {}).get("Gpus", ()):
        name = str(gpu["Name"])
        gib = round(gpu.get("MemoryInfo", {}).get("SizeInMiB", 0) / _MIB)
        name = _LARGER.get((name, gib)) or _NAMES.get(name) or canonical(name)
        return name, float(gpu.get("Count") or gpu.get("LogicalGpuCount") or 1) * float(
            gpu.get("GpuPartitionSize") or 1
        )
    devices = [
        *info.get("NeuronInfo", {}).get("NeuronDevices", ()),
        *info.get("InferenceAcceleratorInfo", {}).get("Accelerators", ()),
    ]
    return (canonical(str(devices[0]["Name"])), float(devices[0]["Count"])) if devices else (None, 0.0)


def _closed(info: Reply, market: CapacityType, quotas: Mapping[str, float], region: str) -> str:
    """Return why the market is closed to the account; "" if it is not, or if that is not known."""
    name, vcpus = info["InstanceType"], info["VCpuInfo"]["DefaultVCpus"]
    if _MARKETS[market] not in info.get("SupportedUsageClasses", _MARKETS.values()):
        return f"AWS does not sell {name} as {_MARKETS[market]}"
    quota = quota_of(name, market)
    limit = None if quota is None else quotas.get(quota.code)
    if quota is None or limit is None or limit >= vcpus:
        return ""
    return f"the quota {quota.name} ({quota.code}) is {limit:g} vCPUs in {region}, and {name} has {vcpus}"


def _quotas(api: AwsApi, region: str, notes: list[str]) -> dict[str, float]:
    """VCPUs by code; none if they may not be read."""
    params = {"ServiceCode": "ec2"}
    try:
        listed = api.pages(
            region, "ListServiceQuotas", "Quotas", params, page=_QUOTAS_PAGE, service="service-quotas"
        )
        return {quota["QuotaCode"]: float(quota["Value"]) for quota in listed}
    except AuthError as error:
        notes.append(f"quotas of {region}: {error}")
        return {}
