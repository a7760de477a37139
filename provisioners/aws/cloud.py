"""The `aws` cloud: a provisioner over EC2 instances."""

from __future__ import annotations

from typing import ClassVar, Protocol

from provisioners import rented
from provisioners.aws.machines import AwsMachines, AwsSettings
from provisioners.catalog.model import Catalog
from provisioners.own_address import OwnAddresses


class Section(rented.Section, Protocol):
    """What config.yaml says about `aws`."""

    profile: str | None
    vpc: str | None


class AwsProvisioner(rented.RentedProvisioner):
    """Credentials are found as boto3 finds them: the environment, a profile, the instance's role."""

    name: ClassVar[str] = "aws"

    def __init__(
        self, section: Section, catalog: Catalog, secret: bytes, own: OwnAddresses | None = None
    ) -> None:
        settings = AwsSettings(
            regions=section.regions,
            profile=section.profile,
            use_private_ip=section.use_private_ip,
            vpc=section.vpc,
            image=section.image,
        )
        super().__init__(AwsMachines(settings), section, catalog, secret, own=own)
