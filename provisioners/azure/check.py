"""The findings of `serve check` on Azure: credentials, permissions, providers, quotas. Nothing is changed by looking."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from provisioners import permissions
from provisioners.azure.api import Arm
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import Finding, Level

ACTIONS: tuple[str, ...] = tuple(json.loads(permissions.text_of("azure"))["Actions"])

_PROVIDERS = ("Microsoft.Compute", "Microsoft.Network")
_SPOT_CORES = "lowPriorityCores"  # of all spot machines of a region; 3 to 10 in a new subscription
_FEWEST_CORES = 4  # of Standard_NC4as_T4_v3
_GPU_FAMILIES = ("standardnc", "standardnd", "standardnv")
_SUBSCRIPTION_API = "2022-12-01"
_PERMISSIONS_API = "2022-04-01"


def findings(arm: Arm, regions: Sequence[str]) -> Iterator[Finding]:
    """In this order: credentials (the last line if they are of no use), permissions, providers, quotas by region."""
    credentials = _credentials(arm)
    yield credentials
    if not credentials.ok:
        return
    yield _finding_of("permissions", lambda: _permissions(arm))
    for namespace in _PROVIDERS:
        yield _finding_of(f"provider {namespace}", partial(_provider, arm, namespace))
    yield from _by_region(arm, regions)


def missing_actions(granted: Sequence[Mapping[str, Any]], wanted: Sequence[str] = ACTIONS) -> list[str]:
    """Return which of `wanted` no permission gives.

    A permission gives what its `actions` match and its `notActions` do not; "*" stands for any text, slashes included, and
    case does not count.
    """
    return [action for action in wanted if not any(_gives(permission, action) for permission in granted)]


def _gives(permission: Mapping[str, Any], action: str) -> bool:
    def fits(patterns: Sequence[str] | None) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns or ())

    return fits(permission.get("actions")) and not fits(permission.get("notActions"))


def _by_region(arm: Arm, regions: Sequence[str]) -> Iterator[Finding]:
    """Notes about each region; what keeps machines out of every region is missing."""
    looks = (("spot quota", _spot_quota), ("GPU quota", _gpu_quota), ("GPU sizes", _gpu_sizes))
    is_closed: dict[str, bool] = {}
    for region in regions:
        found = {
            what: _finding_of(f"{what} in {region}", partial(look, arm, region), Level.NOTE)
            for what, look in looks
        }
        yield from found.values()
        has_quota = any(found[what].level is Level.FINE for what in ("spot quota", "GPU quota"))
        is_closed[region] = found["GPU sizes"].level is not Level.FINE or not has_quota
    if is_closed and all(is_closed.values()):
        message = f"no size with a GPU is available in {', '.join(is_closed)}"
        yield Finding("GPUs", Level.MISSING, message)


def _finding_of(what: str, look: Callable[[], str], level: Level = Level.MISSING) -> Finding:
    """Return the finding of a look, which returns a problem ("" for none). A look that Azure refuses is one, too."""
    try:
        message = look()
    except ProvisionError as error:
        return Finding(what, level, error.message)
    return Finding(what, level if message else Level.FINE, message)


def _credentials(arm: Arm) -> Finding:
    try:
        response = arm.get("", _SUBSCRIPTION_API)
    except AuthError as error:
        return Finding("credentials", Level.MISSING, message=error.message)
    except ProvisionError as error:
        return Finding("credentials", Level.MISSING, message=f"Azure cannot be reached: {error.message}")
    name, state = response.get("displayName", arm.subscription_id), response.get("state", "")
    if state not in ("Enabled", "Warned", "PastDue"):
        return Finding(
            "credentials", Level.MISSING, message=f"subscription {name!r} is {state.lower() or 'unusable'}"
        )
    return Finding("credentials", Level.FINE)


def _permissions(arm: Arm) -> str:
    response = arm.get("/providers/Microsoft.Authorization/permissions", _PERMISSIONS_API)
    missing = missing_actions(response.get("value", []))
    if not missing:
        return ""
    return (
        f"missing: {', '.join(missing)}; give the identity the role that `serve check --policy azure` prints, or "
        "Contributor on the subscription"
    )


def _provider(arm: Arm, namespace: str) -> str:
    state = arm.call(lambda: arm.resources.providers.get(namespace)).registration_state or "NotRegistered"
    if state == "Registered":
        return ""
    return f"is {state}: `az provider register --namespace {namespace}`"


def _spot_quota(arm: Arm, region: str) -> str:
    usages = arm.call(lambda: list(arm.compute.usage.list(region)))
    spot = next((usage for usage in usages if (usage.name.value or "").lower() == _SPOT_CORES.lower()), None)
    if spot is None or spot.limit - spot.current_value >= _FEWEST_CORES:
        return ""
    return (
        f"{spot.current_value} of {spot.limit} vCPUs of {_SPOT_CORES} are used, and the smallest size with a GPU has "
        f"{_FEWEST_CORES}: ask for more in the portal (Usage + quotas)"
    )


def _gpu_quota(arm: Arm, region: str) -> str:
    usages = arm.call(lambda: list(arm.compute.usage.list(region)))
    families = [usage for usage in usages if (usage.name.value or "").lower().startswith(_GPU_FAMILIES)]
    if not families or any(usage.limit - usage.current_value >= _FEWEST_CORES for usage in families):
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
    """Closed in the whole region; a size that is closed in one zone may be open in another."""
    return any(
        restriction.reason_code == "NotAvailableForSubscription" and restriction.type == "Location"
        for restriction in restrictions
    )
