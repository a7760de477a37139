"""What `serve check` says of Azure: credentials, permissions, providers, quotas. Nothing is changed by looking."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from provisioners.azure.client import Arm
from provisioners.errors import AuthError, ProvisionError
from provisioners.machines import Finding

ACTIONS = (
    "Microsoft.Resources/subscriptions/resourceGroups/read",
    "Microsoft.Resources/subscriptions/resourceGroups/write",
    "Microsoft.Resources/subscriptions/resourceGroups/delete",
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/disks/read",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Compute/sshPublicKeys/read",
    "Microsoft.Compute/sshPublicKeys/write",
    "Microsoft.Compute/sshPublicKeys/delete",
    "Microsoft.Compute/skus/read",
    "Microsoft.Compute/locations/usages/read",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Network/virtualNetworks/write",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Network/networkSecurityGroups/read",
    "Microsoft.Network/networkSecurityGroups/write",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Network/publicIPAddresses/join/action",
)

_PROVIDERS = ("Microsoft.Compute", "Microsoft.Network")
_SPOT_CORES = "lowPriorityCores"
_GPU_FAMILIES = ("standardnc", "standardnd", "standardnv")
_SUBSCRIPTION_API = "2022-12-01"
_PERMISSIONS_API = "2022-04-01"


def findings(arm: Arm, regions: Sequence[str]) -> Iterator[Finding]:
    """In this order: credentials (the last line if they are of no use), permissions, providers, quotas by region."""
    credentials = _credentials(arm)
    yield credentials
    if not credentials.ok:
        return
    yield _told("permissions", lambda: _permissions(arm))
    for namespace in _PROVIDERS:
        yield _told(f"provider {namespace}", lambda name=namespace: _provider(arm, name))
    for region in regions:
        yield _told(f"spot quota in {region}", lambda name=region: _spot_quota(arm, name))
        yield _told(f"GPU quota in {region}", lambda name=region: _gpu_quota(arm, name))
        yield _told(f"GPU sizes in {region}", lambda name=region: _gpu_sizes(arm, name))


def missing_actions(granted: Sequence[Mapping[str, Any]], wanted: Sequence[str] = ACTIONS) -> list[str]:
    """Which of `wanted` no permission gives. A permission gives what its `actions` match and its `notActions` do not;
    "*" stands for any text, slashes included, and case does not count."""
    return [action for action in wanted if not any(_gives(permission, action) for permission in granted)]


def _gives(permission: Mapping[str, Any], action: str) -> bool:
    def fits(patterns: Sequence[str] | None) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns or ())

    return fits(permission.get("actions")) and not fits(permission.get("notActions"))


def _told(what: str, look: Any) -> Finding:
    """A look that Azure refuses is a finding, too."""
    try:
        message = look()
    except ProvisionError as error:
        return Finding(what, ok=False, message=error.message)
    return Finding(what, ok=not message, message=message)


def _credentials(arm: Arm) -> Finding:
    try:
        told = arm.get("", _SUBSCRIPTION_API)
    except AuthError as error:
        return Finding("credentials", ok=False, message=error.message)
    except ProvisionError as error:
        return Finding("credentials", ok=False, message=f"Azure cannot be asked: {error.message}")
    name, state = told.get("displayName", arm.subscription_id), told.get("state", "")
    if state not in ("Enabled", "Warned", "PastDue"):
        return Finding(
            "credentials", ok=False, message=f"subscription {name!r} is {state.lower() or 'unusable'}"
        )
    return Finding("credentials", ok=True)


def _permissions(arm: Arm) -> str:
    told = arm.get("/providers/Microsoft.Authorization/permissions", _PERMISSIONS_API)
    missing = missing_actions(told.get("value", []))
    if not missing:
        return ""
    return (
        f"missing: {', '.join(missing)}; give the identity the role Contributor on the subscription, or these"
    )


def _provider(arm: Arm, namespace: str) -> str:
    state = arm.call(lambda: arm.resources.providers.get(namespace)).registration_state or "NotRegistered"
    if state == "Registered":
        return ""
    return f"is {state}: `az provider register --namespace {namespace}`"


def _spot_quota(arm: Arm, region: str) -> str:
    usages = arm.call(lambda: list(arm.compute.usage.list(region)))
    spot = next((usage for usage in usages if (usage.name.value or "").lower() == _SPOT_CORES.lower()), None)
    if spot is None or spot.limit > spot.current_value:
        return ""
    return (
        f"{_SPOT_CORES} is used up ({spot.current_value} of {spot.limit} vCPUs): "
        "ask for more in the portal (Usage + quotas)"
    )


def _gpu_quota(arm: Arm, region: str) -> str:
    usages = arm.call(lambda: list(arm.compute.usage.list(region)))
    families = [usage for usage in usages if (usage.name.value or "").lower().startswith(_GPU_FAMILIES)]
    if not families or any(usage.limit > usage.current_value for usage in families):
        return ""
    names = ", ".join(sorted(usage.name.value or "" for usage in families))
    return f"no on-demand vCPUs are left in any GPU family ({names}): ask for more in the portal (Usage + quotas)"


def _gpu_sizes(arm: Arm, region: str) -> str:
    skus = arm.call(lambda: list(arm.compute.resource_skus.list(filter=f"location eq '{region}'")))
    sizes = [
        sku
        for sku in skus
        if sku.resource_type == "virtualMachines" and (sku.family or "").lower().startswith(_GPU_FAMILIES)
    ]
    if any(not _is_closed(sku.restrictions or ()) for sku in sizes):
        return ""
    if not sizes:
        return "the region has no GPU sizes"
    return "every GPU size is closed to this subscription: ask for access in the portal (Usage + quotas)"


def _is_closed(restrictions: Sequence[Any]) -> bool:
    """Closed in the whole region; a size that is closed in one zone may be had in another."""
    return any(
        restriction.reason_code == "NotAvailableForSubscription" and restriction.type == "Location"
        for restriction in restrictions
    )
