"""The `gcp` cloud: a provisioner over Compute Engine instances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Protocol

from provisioners import assembly
from provisioners.gcp.machines import GcpMachines
from provisioners.gcp.termination import COMPUTE_URL, terminate_script
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.reservations import Reservations
from provisioners.own_address import OwnAddresses


class GcpSection(assembly.VmSection, Protocol):
    """The `gcp` section of config.yaml."""

    project: str | None
    network: str | None
    subnets: Mapping[str, str]
    manage_firewall: bool
    shielded: bool
    os_login: bool | str
    kms_key: str | Mapping[str, str] | None
    endpoint: str | None
    billing_api_key: str | None
    service_account: str | None
    dead_man_service_account: str | None
    reservations: Reservations


class GcpProvisioner(assembly.VmCloudProvisioner):
    """Credentials are the application default ones.

    `gcloud auth application-default login`, a key file, the service account of the instance.
    """

    name: ClassVar[str] = "gcp"

    def __init__(
        self,
        section: GcpSection,
        catalog: Catalog,
        secret: bytes,
        own: OwnAddresses | None = None,
        folder: Path | None = None,
    ) -> None:
        script = ""
        if section.dead_man_service_account is not None:
            script = terminate_script(section.endpoint or COMPUTE_URL)
        super().__init__(
            machines_of(section),
            section,
            catalog,
            secret,
            own=own,
            folder=folder,
            terminate_script=script,
            subnets=section.subnets,
        )


def machines_of(section: GcpSection) -> GcpMachines:
    """Compute Engine as the section describes it."""
    return GcpMachines(
        section.project,
        endpoint=section.endpoint,
        network=section.network,
        subnets=section.subnets,
        manage_firewall=section.manage_firewall,
        use_private_ip=section.use_private_ip,
        regions=section.regions or (),
        shielded=section.shielded,
        os_login=str(section.os_login).lower(),
        kms_key=section.kms_key,
        billing_api_key=section.billing_api_key,
        service_account=section.service_account,
        dead_man_account=section.dead_man_service_account,
        reservations=section.reservations,
    )
