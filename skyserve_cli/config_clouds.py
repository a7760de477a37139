"""The sections of clouds in `config.yaml`, for the clouds that come with the product."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from ipaddress import ip_network
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from provisioners.remote.ssh_config import SshRoute, way_of
from skyserve_cli import config_checks
from skyserve_cli.config_section import CloudConfig, Strict

if TYPE_CHECKING:
    from provisioners.offers.reservations import Reservations

_TLS = "load balancers and probes reach replicas by TLS; for replicas to come"


_AZURE_ID = r"(?i)^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\."
_RESERVED = "capacity that is reserved for you, by names of your own; it is used before anything is rented"

T = TypeVar("T")


class SshConfig(CloudConfig):
    tls: bool = Field(default=True, description=_TLS)
    pools: dict[str, Any] = Field(
        default={}, min_length=1, validate_default=True, description="your own hosts, by pool"
    )


class RentedConfig(CloudConfig):
    """What every cloud has that rents machines; `provisioners.assembly.Section`."""

    regions: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="the only ones to look at"
    )
    use_private_ip: bool = Field(default=False, description="machines are reached inside their network")
    image: str | dict[str, str] | None = Field(
        default=None, description="the cloud's own name of the image to boot, or one for each region"
    )
    disk_gb: int | None = Field(default=None, ge=10, le=65536, description="of the boot disk")
    sources: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="CIDR blocks that may reach machines, beside the load balancers; by default this host's address",
    )
    tls: bool = Field(default=True, description=_TLS)
    labels: dict[str, str] = Field(default={}, description="tags of all that is made")
    bastion: str | dict[str, Any] | None = Field(
        default=None,
        description="the host by which machines are reached over ssh: a mapping with host, user, port, identity_file (or ssh_agent: "
        "true), known_hosts, host_key, certificate_file and passphrase_file",
    )
    proxy_command: str | None = Field(
        default=None,
        description="a command whose input and output are the connection to sshd: %h, %p, %r, %i, %g and %z stand for address, port, "
        "user, the machine's id, its region and zone",
    )
    dead_man_minutes: int | None = Field(
        default=None,
        ge=0,
        le=43200,
        description="a machine without a visit of a controller and without traffic for so long ends itself; 0: never; "
        "by default 4320, and 720 until its replica was ready",
    )

    @property
    def way(self) -> SshRoute:
        """How machines are reached over ssh."""
        return way_of(self.bastion, self.proxy_command, "")

    @model_validator(mode="after")
    def _has_a_way(self) -> Self:
        _ = self.way  # its ValueError names the problem
        return self

    @property
    def places(self) -> Collection[str]:
        """The regions and zones for which subnets are named: the only ones that are used, if there are any."""
        return ()

    @field_validator("sources")
    @classmethod
    def _are_blocks(cls, sources: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for source in sources or ():
            ip_network(source, strict=False)  # its ValueError says which, and why
        return sources


class ReservationConfig(Strict):
    """What every cloud's reservations have; `provisioners.offers.reservations.Reservation`."""

    zone: str = Field(description="the one that it is in, as `serve catalog` writes it")
    instance_type: str = Field(description="of its machines")
    count: int = Field(default=1, ge=1, le=10000, description="of its machines")
    usd_hour: float = Field(
        default=0.0,
        ge=0,
        le=10000,
        description="what a machine costs beyond the reservation, which is paid for",
    )
    until: datetime | None = Field(default=None, description="when it ends, with a time zone")

    _until = field_validator("until")(config_checks.with_time_zone)


class AwsReservation(ReservationConfig):
    id: str = Field(
        pattern=r"^(cr-[0-9a-f]+|arn:aws[a-z-]*:resource-groups:\S+)$",
        description="cr-…, or the ARN of a resource group of several",
    )
    kind: Literal["reservation", "capacity_block"] = Field(
        default="reservation", description="capacity_block: of a Capacity Block for ML"
    )


class GcpReservation(ReservationConfig):
    id: str = Field(
        pattern=r"^(projects/[a-z0-9.:-]+/reservations/)?[a-z][a-z0-9-]{0,62}$",
        description="its name, or projects/PROJECT/reservations/NAME of a shared one",
    )
    kind: Literal["reservation", "bound"] = Field(
        default="reservation",
        description="bound: machines live as long as it does (RESERVATION_BOUND, of A3 Ultra, A4 and newer)",
    )


class AzureReservation(ReservationConfig):
    id: str = Field(
        pattern=rf"{_AZURE_ID}Compute/capacityReservationGroups/[^/]+$",
        description="of the capacity reservation group",
    )
    kind: Literal["reservation"] = "reservation"


Names = Annotated[dict[str, T], BeforeValidator(config_checks.names_of_reservations)]


class AwsConfig(RentedConfig):
    reservations: Names[AwsReservation] = Field(default={}, description=_RESERVED)
    profile: str | None = Field(default=None, description="of the AWS configuration files")
    vpc: str | None = Field(default=None, description="id or name of the network to use")
    subnets: Annotated[dict[str, tuple[str, ...]], BeforeValidator(config_checks.subnets_of_aws)] = Field(
        default={}, description="ids of your own (one or a list), by zone id or region: no others are used"
    )
    encrypted: bool = Field(default=False, description="disks are encrypted, by the account's default key")
    kms_key: Annotated[
        str | dict[str, str] | None,
        BeforeValidator(
            config_checks.like(
                r"alias/\S+|arn:aws[a-z-]*:kms:\S+|mrk-[0-9a-f]{32}|[0-9a-f-]{36}",
                "alias/NAME, an ARN or an id",
            )
        ),
    ] = Field(
        default=None,
        description="id, ARN or alias of the KMS key that encrypts disks, or one for each region",
    )
    instance_profile: str | None = Field(
        default=None, min_length=1, description="name or ARN of the instance profile of replicas"
    )

    @property
    def places(self) -> Collection[str]:
        return self.subnets

    _labels = field_validator("labels")(config_checks.labels_of_aws)


class GcpConfig(RentedConfig):
    reservations: Names[GcpReservation] = Field(default={}, description=_RESERVED)
    project: str | None = Field(default=None, description="its id; by default that of the credentials")
    network: str | None = Field(
        default=None,
        description="the one to use instead of one of our own: its name, or projects/PROJECT/global/networks/NAME",
    )
    subnets: dict[str, str] = Field(
        default={},
        description="paths of your own (projects/PROJECT/regions/REGION/subnetworks/NAME), by region: no others are used",
    )
    manage_firewall: bool = Field(
        default=True, description="make the firewall rules of machines; false: they are yours to make"
    )
    shielded: bool = Field(default=False, description="instances boot with Secure Boot, vTPM and monitoring")
    os_login: Annotated[bool | Literal["auto"], BeforeValidator(config_checks.os_login)] = Field(
        default="auto",
        description="true leaves OS Login as the project has it, false turns it off on our machines, auto does so unless the "
        "organisation requires it",
    )
    kms_key: Annotated[
        str | dict[str, str] | None,
        BeforeValidator(
            config_checks.like(
                r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+(/cryptoKeyVersions/\d+)?",
                "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/NAME",
            )
        ),
    ] = Field(
        default=None, description="path of the Cloud KMS key that encrypts disks, or one for each region"
    )
    endpoint: str | None = Field(default=None, description="another address of Google's APIs")
    billing_api_key: str | None = Field(default=None, description="for live spot prices", repr=False)
    service_account: str | None = Field(
        default=None,
        pattern=r"^[^@\s]+@[^@\s]+$",
        description="email address of the service account of replicas",
    )
    dead_man_service_account: str | None = Field(
        default=None,
        pattern=r"^[^@\s]+@[^@\s]+$",
        description="email address of the service account by which a machine deletes itself when its lease is over",
    )

    @property
    def places(self) -> Collection[str]:
        return self.subnets

    _network = field_validator("network")(config_checks.network_of_gcp)
    _subnets = field_validator("subnets")(config_checks.subnets_of_gcp)
    _labels = field_validator("labels")(config_checks.labels_of_gcp)

    @model_validator(mode="after")
    def _has_rules(self) -> GcpConfig:
        if not self.manage_firewall and self.network is None and not self.subnets:
            raise ValueError("manage_firewall: false is for a network of yours: set network or subnets")
        return self


_IDENTITY = rf"{_AZURE_ID}ManagedIdentity/userAssignedIdentities/[^/]+$"


class AzureConfig(RentedConfig):
    reservations: Names[AzureReservation] = Field(default={}, description=_RESERVED)
    subscription_id: str = Field(description="`az account show --query id` prints it")
    subnets: Annotated[
        dict[str, str],
        BeforeValidator(
            config_checks.like(
                rf"{_AZURE_ID}Network/virtualNetworks/[^/]+/subnets/[^/]+",
                "/subscriptions/…/virtualNetworks/NETWORK/subnets/NAME",
            )
        ),
    ] = Field(default={}, description="ids of your own, by region: no others are used")
    disk_encryption_set: Annotated[
        str | dict[str, str] | None,
        BeforeValidator(
            config_checks.like(
                rf"{_AZURE_ID}Compute/diskEncryptionSets/[^/]+", "/subscriptions/…/diskEncryptionSets/NAME"
            )
        ),
    ] = Field(default=None, description="id of the disk encryption set of disks, or one for each region")
    cloud: Literal["public", "us_government", "china"] = Field(
        default="public", description="which of Azure's clouds: its login, its tokens, its address"
    )
    arm_url: str | None = Field(
        default=None, description="address of Resource Manager, if not that of `cloud`"
    )
    identity: str | None = Field(
        default=None,
        pattern=_IDENTITY,
        description="id of the user-assigned identity of replicas",
    )
    dead_man_identity: str | None = Field(
        default=None,
        pattern=_IDENTITY,
        description="id of the user-assigned identity by which a machine deletes itself when its lease is over",
    )

    @property
    def places(self) -> Collection[str]:
        return self.subnets

    _labels = field_validator("labels")(config_checks.labels_of_azure)


SECTIONS: Mapping[str, type[CloudConfig]] = MappingProxyType(
    {
        "ssh": SshConfig,
        "aws": AwsConfig,
        "gcp": GcpConfig,
        "azure": AzureConfig,
    }
)


def reservations_of(section: CloudConfig | None) -> Reservations:
    """Of a cloud's section."""
    if isinstance(section, AwsConfig | GcpConfig | AzureConfig):
        return section.reservations
    return {}
