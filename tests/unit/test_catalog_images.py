"""The lint of the catalog: every type that is offered boots a default image with the driver that its accelerators need.

What a type needs is written here again, by the vendors' facts, and compared with the image that the provisioner picks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.aws.image import IMAGES as AWS_IMAGES
from provisioners.azure.translate import IMAGES as AZURE_IMAGES
from provisioners.azure.translate import image_reference
from provisioners.gcp.translate import image_of
from provisioners.offers.catalog import Shape, packaged
from provisioners.port.accelerator_names import ACCELERATORS, Vendor, vendor
from provisioners.port.errors import RefusedError
from provisioners.port.image_family import ImageFamily, image_family
from provisioners.port.vm import MachineOrder, default_image

#: The generation of NVIDIA's chips by accelerator, oldest first; its open kernel modules begin with Turing, its driver 570 is the
#: first with Blackwell, 580 the last with Volta and older.
GENERATIONS = {
    "Volta": ("V100", "V100-32GB"),
    "Turing": ("T4", "T4g"),
    "Ampere": ("A10", "A10G", "A100", "A100-80GB"),
    "Ada": ("L4", "L40", "L40S"),
    "Hopper": ("GH200", "H100", "H100-MEGA", "H200"),
    "Blackwell": ("B200", "B300", "GB200", "RTX-PRO-6000"),
}
TYPES = sorted(
    {row.shape.name: row.shape for row in packaged().rows}.values(),
    key=lambda shape: (shape.cloud, shape.name),
)


def order_of(cloud: str, instance_type: str, accelerator: str | None, count: float = 1.0) -> MachineOrder:
    return MachineOrder(
        token="own1-chat-1-0123456789",
        owner="own1",
        service="chat",
        replica_id=1,
        rank=0,
        num_nodes=1,
        zone=Zone(cloud, "here", "here-1"),
        instance_type=instance_type,
        capacity_type=CapacityType.SPOT,
        public_key="ssh-ed25519 AAAA controller",
        accelerator=accelerator,
        accelerator_count=count if accelerator else 0.0,
    )


PICKS: Mapping[str, Callable[[MachineOrder], str]] = {
    "aws": lambda order: default_image(order, AWS_IMAGES),
    "gcp": lambda order: image_of(order, "p"),
    "azure": lambda order: default_image(order, AZURE_IMAGES),
}


def picked(shape: Shape) -> str:
    return PICKS[shape.cloud](order_of(shape.cloud, shape.name, shape.accelerator, shape.accelerator_count))


@pytest.mark.parametrize("shape", TYPES, ids=lambda shape: shape.name)
def test_the_default_image_of_a_type_in_the_catalog_fits_it(shape: Shape) -> None:
    image = picked(shape)
    assert "arm64" not in image, "no type with an Arm processor is in the catalog"
    if shape.accelerator is None:
        assert "ubuntu" in image
        assert not any(part in image for part in ("nvidia", "hpc"))
        return
    if vendor(shape.accelerator) is Vendor.AMD:
        assert "-rocm" in image
        return
    generation = next(name for name, held in GENERATIONS.items() if shape.accelerator in held)
    if shape.cloud == "aws":
        assert ("-proprietary-" in image) == (generation == "Volta")
        assert ("-oss-" in image) == (generation != "Volta")
    elif shape.cloud == "gcp":
        assert "-nvidia-580" in image
    else:
        assert image == "microsoft-dsvm:ubuntu-hpc:2204:latest"
        assert generation not in ("Volta", "Blackwell"), "its driver is not known to have them"
        assert "_A10_" not in shape.name, "it needs the driver GRID"


def test_every_accelerator_of_the_catalog_has_a_maker_and_a_generation() -> None:
    known = {name for held in GENERATIONS.values() for name in held}
    assert {name for name in packaged().accelerators if vendor(name) is Vendor.NVIDIA} <= known
    assert {name for name in ACCELERATORS if vendor(name) is not Vendor.NVIDIA} == {"MI300X"}


@pytest.mark.parametrize(
    ("cloud", "machine_type", "accelerator", "family"),
    [
        ("aws", "g5.xlarge", "A10G", ImageFamily.CUDA),
        ("aws", "g5g.xlarge", "T4g", ImageFamily.CUDA_ARM64),
        ("aws", "g4dn.xlarge", "T4", ImageFamily.CUDA),
        ("aws", "g6f.xlarge", "L4", ImageFamily.GRID),
        ("aws", "gr6f.4xlarge", "L4", ImageFamily.GRID),
        ("aws", "gr6.4xlarge", "L4", ImageFamily.CUDA),
        ("aws", "p3.2xlarge", "V100", ImageFamily.CUDA_LEGACY),
        ("aws", "p4de.24xlarge", "A100-80GB", ImageFamily.CUDA),
        ("aws", "p6e-gb200.36xlarge", "GB200", ImageFamily.CUDA_ARM64),
        ("aws", "trn2.48xlarge", "Trainium2", ImageFamily.OTHER),
        ("aws", "m7g.large", None, ImageFamily.PLAIN_ARM64),
        ("aws", "c7gn.large", None, ImageFamily.PLAIN_ARM64),
        ("aws", "t4g.micro", None, ImageFamily.PLAIN_ARM64),
        ("aws", "a1.large", None, ImageFamily.PLAIN_ARM64),
        ("aws", "t3.micro", None, ImageFamily.PLAIN),
        ("gcp", "c4a-standard-4", None, ImageFamily.PLAIN_ARM64),
        ("gcp", "t2a-standard-1", None, ImageFamily.PLAIN_ARM64),
        ("gcp", "t2d-standard-1", None, ImageFamily.PLAIN),
        ("gcp", "c4-standard-4", None, ImageFamily.PLAIN),
        ("gcp", "a4x-highgpu-4g", "GB200", ImageFamily.CUDA_ARM64),
        ("gcp", "a4-highgpu-8g", "B200", ImageFamily.CUDA),
        ("gcp", "n1-standard-8", "V100", ImageFamily.CUDA_LEGACY),
        ("gcp", "ct5lp-hightpu-1t", "tpu-v5e", ImageFamily.OTHER),
        ("azure", "Standard_D2ps_v5", None, ImageFamily.PLAIN_ARM64),
        ("azure", "Standard_E4pds_v6", None, ImageFamily.PLAIN_ARM64),
        ("azure", "Standard_B2pts_v2", None, ImageFamily.PLAIN_ARM64),
        ("azure", "Standard_D2as_v5", None, ImageFamily.PLAIN),
        ("azure", "Standard_B2s", None, ImageFamily.PLAIN),
        ("azure", "Standard_NC40ads_H100_v5", "H100", ImageFamily.CUDA),
        ("azure", "Standard_ND96isr_MI300X_v5", "MI300X", ImageFamily.ROCM),
        ("azure", "Standard_ND128isr_NDR_GB200_v6", "GB200", ImageFamily.CUDA_ARM64),
        ("azure", "Standard_NV36ads_A10_v5", "A10", ImageFamily.GRID),
        ("azure", "Standard_NV36adms_A10_v5", "A10", ImageFamily.GRID),
        ("meadow", "anything", "L4", ImageFamily.CUDA),
    ],
)
def test_what_kind_of_image_a_type_needs(
    cloud: str, machine_type: str, accelerator: str | None, family: ImageFamily
) -> None:
    assert image_family(cloud, machine_type, accelerator) is family
    assert Shape(cloud, machine_type, accelerator, 1, 4, 16).image_family is family


@pytest.mark.parametrize(
    ("cloud", "instance_type", "accelerator", "part"),
    [
        ("aws", "p3.2xlarge", "V100", "/x86_64/base-proprietary-nvidia-driver"),
        ("aws", "g5g.xlarge", "T4g", "/arm64/base-oss-nvidia-driver"),
        ("aws", "m7g.large", None, "/arm64/"),
        ("gcp", "c4a-standard-4", None, "-arm64"),
        ("gcp", "a4x-highgpu-4g", "GB200", "-arm64-with-nvidia"),
        ("gcp", "a4x-highgpu-4g", None, "-arm64-with-nvidia"),
        ("azure", "Standard_D2ps_v5", None, ":server-arm64:"),
    ],
)
def test_a_type_that_a_user_names_gets_an_image_for_its_processor(
    cloud: str, instance_type: str, accelerator: str | None, part: str
) -> None:
    assert part in PICKS[cloud](order_of(cloud, instance_type, accelerator))


@pytest.mark.parametrize(
    ("cloud", "instance_type", "accelerator"),
    [
        ("aws", "g6f.xlarge", "L4"),
        ("aws", "trn2.48xlarge", "Trainium2"),
        ("azure", "Standard_NV36ads_A10_v5", "A10"),
        ("azure", "Standard_NC6s_v3", "V100"),
        ("azure", "Standard_ND128isr_NDR_GB200_v6", "GB200"),
    ],
)
def test_a_type_without_a_fitting_image_is_refused_in_a_sentence(
    cloud: str, instance_type: str, accelerator: str
) -> None:
    with pytest.raises(RefusedError, match=f"{instance_type} needs an image of the family") as refused:
        PICKS[cloud](order_of(cloud, instance_type, accelerator))
    assert (refused.value.kind, refused.value.scope) == (FailureKind.REFUSED, Scope.TYPE)
    assert f"clouds.{cloud}.image" in str(refused.value)


@pytest.mark.parametrize("image", AZURE_IMAGES.values())
def test_azures_default_images_can_be_ordered(image: str) -> None:
    assert image_reference(image)["version"] == "latest"
