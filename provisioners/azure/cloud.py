"""The `azure` cloud: a provisioner over Azure's virtual machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from provisioners import rented
from provisioners.azure.machines import AzureMachines, AzureSettings
from provisioners.catalog.model import Catalog
from provisioners.own_address import OwnAddresses


class Section(rented.Section, Protocol):
    """What config.yaml says about `azure`. `subnets` are ids of the user's own, by region."""

    subscription_id: str
    subnets: Mapping[str, str]
    arm_url: str | None
    identity: str | None


class AzureProvisioner(rented.RentedProvisioner):
    """Credentials are found as azure-identity finds them: the environment, a managed identity, `az login`."""

    name: ClassVar[str] = "azure"

    def __init__(
        self, section: Section, catalog: Catalog, secret: bytes, own: OwnAddresses | None = None
    ) -> None:
        settings = AzureSettings(
            section.subscription_id,
            regions=section.regions or (),
            use_private_ip=section.use_private_ip,
            subnet_ids=section.subnets,
            arm_url=section.arm_url,
            identity=section.identity,
        )
        super().__init__(AzureMachines(settings), section, catalog, secret, own=own)
