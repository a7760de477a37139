"""What Lambda rents: types and prices from memory of its public price list, hence approximate; regions from its API's schema.

Which region has room for a type changes by the hour, and the API says so at every launch, so every type is listed everywhere.
us-south-1 is left out: the firewall does not work there, and engines would be open to any address.
"""

from __future__ import annotations

from collections.abc import Iterable

from provisioners.offers.catalog.model import Listing, Origin, Price, Quality, Shape

NAME = "lambda"
_READ_AT = 1_760_000_000.0  # October 2025
_ORIGIN = Origin("https://lambda.ai/pricing, from memory", _READ_AT, Quality.APPROXIMATE)

REGIONS = (
    *("us-east-1", "us-east-2", "us-east-3", "us-midwest-1", "us-midwest-2", "us-south-2", "us-south-3"),
    *("us-west-1", "us-west-2", "us-west-3", "europe-central-1", "me-west-1"),
    *("asia-northeast-1", "asia-northeast-2", "asia-south-1", "australia-east-1"),
)

#: Type: accelerator, count, virtual CPUs, memory in GiB, USD per hour.
_TYPES = {
    "gpu_1x_a10": ("A10", 1, 30, 200, 0.75),
    "gpu_1x_a100_sxm4": ("A100", 1, 30, 200, 1.29),
    "gpu_8x_a100": ("A100", 8, 124, 1800, 10.32),
    "gpu_8x_a100_80gb_sxm4": ("A100-80GB", 8, 240, 1800, 14.32),
    "gpu_1x_gh200": ("GH200", 1, 64, 432, 1.49),
    "gpu_1x_h100_pcie": ("H100", 1, 26, 200, 2.49),
    "gpu_1x_h100_sxm5": ("H100", 1, 26, 225, 3.29),
    "gpu_2x_h100_sxm5": ("H100", 2, 52, 450, 6.38),
    "gpu_4x_h100_sxm5": ("H100", 4, 104, 900, 12.36),
    "gpu_8x_h100_sxm5": ("H100", 8, 208, 1800, 23.92),
    "gpu_1x_b200_sxm6": ("B200", 1, 26, 360, 4.99),
    "gpu_8x_b200_sxm6": ("B200", 8, 208, 2900, 39.92),
}


def listings() -> Iterable[Listing]:
    for name, (accelerator, count, vcpus, memory_gib, usd_hour) in _TYPES.items():
        shape = Shape(NAME, name, accelerator, float(count), float(vcpus), float(memory_gib))
        for region in REGIONS:
            yield Listing(shape, region, Price(usd_hour, _ORIGIN), {region: None})
