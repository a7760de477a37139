"""The clouds of Azure: which Resource Manager, which audience of tokens and which login belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from azure.core import AzureClouds
from azure.identity import AzureAuthorityHosts
from azure.mgmt.core.tools import get_arm_endpoints


@dataclass(frozen=True, slots=True)
class Sovereign:
    """`setting` makes the SDK request tokens for the right audience, which the address of Resource Manager alone does not.

    `authority` is the host of the login.
    """

    setting: AzureClouds
    authority: str

    @property
    def arm_url(self) -> str:
        return str(get_arm_endpoints(self.setting)["resource_manager"]).rstrip("/")


CLOUDS: Mapping[str, Sovereign] = MappingProxyType(
    {
        "public": Sovereign(AzureClouds.AZURE_PUBLIC_CLOUD, AzureAuthorityHosts.AZURE_PUBLIC_CLOUD),
        "us_government": Sovereign(AzureClouds.AZURE_US_GOVERNMENT, AzureAuthorityHosts.AZURE_GOVERNMENT),
        "china": Sovereign(AzureClouds.AZURE_CHINA_CLOUD, AzureAuthorityHosts.AZURE_CHINA),
    }
)
