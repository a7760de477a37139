"""Which image a machine on EC2 boots: found by a public SSM parameter of its publisher, never an id in our code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from policies.model import Scope, Zone
from provisioners.aws.api import AwsApi, RegionMemo
from provisioners.aws.errors import CLOUD
from provisioners.port.errors import InvalidRequestError, RefusedError
from provisioners.port.image_family import ImageFamily
from provisioners.port.vm import MachineOrder, default_image, in_region

# AWS's deep learning base image: Ubuntu 22.04 with NVIDIA's driver, Docker and its GPU runtime.
_GPU = "/aws/service/deeplearning/ami/{arch}/base-{driver}-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_PLAIN = "/aws/service/canonical/ubuntu/server/22.04/stable/current/{arch}/hvm/ebs-gp2/ami-id"

#: The SSM parameter of the image of each family.
IMAGES: Mapping[ImageFamily, str] = MappingProxyType(
    {
        ImageFamily.PLAIN: _PLAIN.format(arch="amd64"),
        ImageFamily.PLAIN_ARM64: _PLAIN.format(arch="arm64"),
        ImageFamily.CUDA: _GPU.format(arch="x86_64", driver="oss"),
        ImageFamily.CUDA_ARM64: _GPU.format(arch="arm64", driver="oss"),
        ImageFamily.CUDA_LEGACY: _GPU.format(arch="x86_64", driver="proprietary"),
    }
)


class Image(NamedTuple):
    """An AMI of a region. `disk_gb` is the least that its boot disk can have."""

    id: str
    root_device: str
    disk_gb: int


class AwsImages:
    """Thread-safe.

    A parameter is read once per process and region: a launch that is sent again after AWS has published a new image should
    still have the parameters it had.
    """

    def __init__(self, api: AwsApi, memo: RegionMemo, default: str | Mapping[str, str] | None) -> None:
        self._api = api
        self._memo = memo
        self._default = default

    def of(self, order: MachineOrder) -> Image:
        """Return the order's image, the user's default, or the publisher's newest, in this order."""
        region = order.zone.region
        wanted = order.image or in_region(self._default, region) or default_image(order, IMAGES)
        found: Image = self._memo.get(region, ("image", wanted), partial(self._find, order.zone, wanted))
        return found

    def _find(self, zone: Zone, wanted: str) -> Image:
        region = zone.region
        if wanted.startswith("/"):
            reply = self._api.request(region, "GetParameter", {"Name": wanted}, service="ssm")
            image_id = str(reply["Parameter"]["Value"])
        elif wanted.startswith("ami-"):
            image_id = wanted
        else:
            raise InvalidRequestError(
                f"image {wanted!r} is neither an AMI (ami-…) nor an SSM parameter (/…)", cloud=CLOUD
            )
        reply = self._api.request(region, "DescribeImages", {"ImageIds": [image_id]})
        if not reply.get("Images"):
            raise RefusedError(
                f"there is no image {image_id} in {region}; another region is next",
                cloud=CLOUD,
                code="InvalidAMIID.NotFound",
                zone=zone,
                scope=Scope.REGION,
            )
        described = reply["Images"][0]
        root = described.get("RootDeviceName") or "/dev/sda1"
        sizes = {
            mapping.get("DeviceName"): mapping.get("Ebs", {}).get("VolumeSize", 0)
            for mapping in described.get("BlockDeviceMappings", ())
        }
        return Image(image_id, root, int(sizes.get(root) or 0))
