"""The `aws` cloud: a provisioner over EC2 instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from provisioners import assembly
from provisioners.assembly import cheapest_trials, reserved_trials
from provisioners.aws.machines import AwsMachines, AwsSettings
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.reservations import Reservations
from provisioners.own_address import OwnAddresses
from provisioners.port.vm import Finding


class AwsSection(assembly.VmSection, Protocol):
    """The `aws` section of config.yaml."""

    profile: str | None
    vpc: str | None
    subnets: Mapping[str, Sequence[str]]
    encrypted: bool
    kms_key: str | Mapping[str, str] | None
    instance_profile: str | None
    reservations: Reservations


class AwsProvisioner(assembly.VmCloudProvisioner):
    """Credentials are found as boto3 finds them: the environment, a profile, the instance's role."""

    name: ClassVar[str] = "aws"

    def __init__(
        self,
        section: AwsSection,
        catalog: Catalog,
        secret: bytes,
        own: OwnAddresses | None = None,
        folder: Path | None = None,
    ) -> None:
        self._ec2 = machines_of(section)
        super().__init__(self._ec2, section, catalog, secret, own=own, folder=folder, subnets=section.subnets)

    def check(self) -> Sequence[Finding]:
        """Check credentials, permissions and capacity by launches that are not carried out.

        The cheapest machine with an accelerator is tried in each region, spot and on demand, and one in each reservation.
        """
        types = {row.shape.name for row in self._catalog.rows if row.shape.accelerator is not None}
        rows = self._catalog.rows
        return self._ec2.check([*cheapest_trials(rows), *reserved_trials(rows)], types)


def machines_of(section: AwsSection) -> AwsMachines:
    """EC2 as the section describes it."""
    settings = AwsSettings(
        regions=section.regions,
        profile=section.profile,
        use_private_ip=section.use_private_ip,
        vpc=section.vpc,
        subnets=section.subnets,
        encrypted=section.encrypted,
        kms_key=section.kms_key,
        labels=section.labels,
        image=section.image,
        instance_profile=section.instance_profile,
        reservations=section.reservations,
    )
    return AwsMachines(settings)
