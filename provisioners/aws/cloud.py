"""The `aws` cloud: a provisioner over EC2 instances."""

from __future__ import annotations

from typing import ClassVar, Protocol

from provisioners.aws.machines import AwsMachines, AwsSettings
from provisioners.catalog.model import Catalog
from provisioners.rented import ANYWHERE, Rent, RentedProvisioner


class Section(Protocol):
    """What config.yaml says about `aws`."""

    regions: tuple[str, ...] | None
    profile: str | None
    vpc: str | None
    use_private_ip: bool
    image: str | None
    disk_gb: int | None
    sources: tuple[str, ...] | None
    labels: dict[str, str]
    dead_man_minutes: int


class AwsProvisioner(RentedProvisioner):
    """Credentials are found as boto3 finds them: the environment, a profile, the instance's role."""

    name: ClassVar[str] = "aws"

    def __init__(self, section: Section, catalog: Catalog, secret: bytes) -> None:
        settings = AwsSettings(
            regions=section.regions,
            profile=section.profile,
            use_private_ip=section.use_private_ip,
            vpc=section.vpc,
            image=section.image,
        )
        if section.regions is not None:
            catalog = Catalog(tuple(one for one in catalog.listings if one.region in section.regions))
        super().__init__(
            AwsMachines(settings),
            catalog,
            secret,
            Rent(
                section.image,
                section.disk_gb,
                section.sources or ANYWHERE,
                section.labels,
                60 * section.dead_man_minutes,
            ),
        )
