"""What Azure's error codes mean for the next step: one pure table.

Codes are those of Azure Resource Manager and of its Compute and Network providers, as their documentation and the
peers that launch machines there (Karpenter for Azure, dstack, SkyPilot) name them. The HTTP status alone says little:
a zone without room and a used-up quota are both 409, and an allocation that fails after it was accepted comes as a
status of the machine, with no HTTP error at all. So the code decides, then the wording of the codes that stand for
several things, and the status only where the code is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.model import CapacityType, FailureKind, Zone
from provisioners.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    TransientError,
)

CLOUD = "azure"

QUOTA_RETRY_S = 30 * 60.0  # somebody else's machines may end
NO_QUOTA_RETRY_S = 60 * 60.0  # a limit of 0 stays 0 until a person asks for more

_CAPACITY, _QUOTA, _AUTH = FailureKind.CAPACITY, FailureKind.QUOTA, FailureKind.AUTH
_CONFIG, _TRANSIENT = FailureKind.CONFIG, FailureKind.TRANSIENT


@dataclass(frozen=True, slots=True)
class Meaning:
    """What to do about a code. `advice` is a sentence for people; `retry_after_s` is for what is asked again later."""

    kind: FailureKind
    advice: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What Azure answered. `status` is None where there was no answer, or none by HTTP."""

    code: str
    status: int | None
    message: str
    retry_after_s: float | None = None


_NO_ROOM = "Azure has no room for {market} machines of this size here now: another zone or region may have"
_LOGIN = "the credentials were refused: sign in again (`az login`) or renew the service principal's secret"
_ROLE = "a permission is missing: give the identity the action named here, or the role Contributor"
_SUBSCRIPTION = "the subscription cannot be used: check that its id is right and that it is active"
_REGISTER = "register the resource provider named here: `az provider register --namespace ...`"
_IMAGE = "there is no such image here: check `image` (publisher:offer:sku:version, or a resource id)"
_TERMS = "the image's terms must be accepted once: `az vm image terms accept --urn ...`"
_ORDER = "Azure refuses the order as it is"
_LATER = "Azure could not do it now; the same order is sent again"
_SLOW = "too many requests; the same order is sent again when Azure allows"
_BUSY = "Azure is still busy with an earlier change of the same thing"
_DIED = "Azure broke off the creation of the machine"

_TABLE: Mapping[str, Meaning] = MappingProxyType(
    {
        "AllocationFailed": Meaning(_CAPACITY, _NO_ROOM),
        "ZonalAllocationFailed": Meaning(_CAPACITY, _NO_ROOM),
        "OverconstrainedAllocationRequest": Meaning(_CAPACITY, _NO_ROOM),
        "OverconstrainedZonalAllocationRequest": Meaning(_CAPACITY, _NO_ROOM),
        "SkuNotAvailable": Meaning(_CAPACITY, _NO_ROOM),
        "CapacityNotAvailable": Meaning(_CAPACITY, _NO_ROOM),
        "SpotEvicted": Meaning(
            _CAPACITY, "Azure took the spot machine back before it ran"
        ),  # ours: see `azure`
        "QuotaExceeded": Meaning(_QUOTA, "", QUOTA_RETRY_S),
        "ResourceQuotaExceeded": Meaning(_QUOTA, "", QUOTA_RETRY_S),
        "PublicIPCountLimitReached": Meaning(_QUOTA, "", QUOTA_RETRY_S),
        "PublicIPAddressCountLimitReached": Meaning(_QUOTA, "", QUOTA_RETRY_S),
        "SubnetIsFull": Meaning(_QUOTA, "", QUOTA_RETRY_S),
        "InvalidAuthenticationToken": Meaning(_AUTH, _LOGIN),
        "InvalidAuthenticationTokenTenant": Meaning(_AUTH, _LOGIN),
        "ExpiredAuthenticationToken": Meaning(_AUTH, _LOGIN),
        "AuthenticationFailed": Meaning(_AUTH, _LOGIN),
        "CredentialUnavailable": Meaning(_AUTH, _LOGIN),  # ours: no credentials were found at all
        "AuthorizationFailed": Meaning(_AUTH, _ROLE),
        "LinkedAuthorizationFailed": Meaning(_AUTH, _ROLE),
        "RequestDisallowedByPolicy": Meaning(_AUTH, "a policy of the organisation forbids it"),
        "ScopeLocked": Meaning(_AUTH, "a lock forbids it: remove the lock named here"),
        "SubscriptionNotFound": Meaning(_AUTH, _SUBSCRIPTION),
        "InvalidSubscriptionId": Meaning(_AUTH, _SUBSCRIPTION),
        "DisabledSubscription": Meaning(_AUTH, _SUBSCRIPTION),
        "ReadOnlyDisabledSubscription": Meaning(_AUTH, _SUBSCRIPTION),
        "MissingSubscriptionRegistration": Meaning(_AUTH, _REGISTER),
        "SubscriptionNotRegistered": Meaning(_AUTH, _REGISTER),
        "ImageNotFound": Meaning(_CONFIG, _IMAGE),
        "PlatformImageNotFound": Meaning(_CONFIG, _IMAGE),
        "GalleryImageNotFound": Meaning(_CONFIG, _IMAGE),
        "MarketplacePurchaseEligibilityFailed": Meaning(_CONFIG, _TERMS),
        "ResourcePurchaseValidationFailed": Meaning(_CONFIG, _TERMS),
        "PropertyChangeNotAllowed": Meaning(
            _CONFIG, "a machine of that name exists and was ordered differently"
        ),
        "NoRegisteredProviderFound": Meaning(_CONFIG, "there is no such region"),
        "LocationNotAvailableForResourceType": Meaning(_CONFIG, "there is no such region"),
        "AvailabilityZoneNotSupported": Meaning(_CONFIG, "the region has no such zone"),
        "InvalidAvailabilityZone": Meaning(_CONFIG, "the region has no such zone"),
        "TooManyRequests": Meaning(_TRANSIENT, _SLOW, 10.0),
        "SubscriptionRequestsThrottled": Meaning(_TRANSIENT, _SLOW, 30.0),
        "Conflict": Meaning(_TRANSIENT, _BUSY, 10.0),
        "AnotherOperationInProgress": Meaning(_TRANSIENT, _BUSY, 10.0),
        "OperationPreempted": Meaning(_TRANSIENT, _BUSY, 10.0),
        "ReferencedResourceNotProvisioned": Meaning(_TRANSIENT, _BUSY, 5.0),
        "ResourceGroupBeingDeleted": Meaning(_TRANSIENT, _BUSY, 30.0),
        "InUse": Meaning(_TRANSIENT, _BUSY, 10.0),
        "PublicIPAddressCannotBeDeleted": Meaning(_TRANSIENT, _BUSY, 10.0),
        "InUseSubnetCannotBeDeleted": Meaning(_TRANSIENT, _BUSY, 10.0),
        "NicInUse": Meaning(_TRANSIENT, _BUSY, 10.0),
        "NicReservedForAnotherVm": Meaning(
            _TRANSIENT, _BUSY, 180.0
        ),  # Azure keeps a lost VM's card for 3 minutes
        "VMStartTimedOut": Meaning(_TRANSIENT, _DIED, 30.0),
        "OSProvisioningTimedOut": Meaning(_TRANSIENT, _DIED, 30.0),
        "OSProvisioningInternalError": Meaning(_TRANSIENT, _DIED, 30.0),
        "RetryableError": Meaning(_TRANSIENT, _LATER),
        "InternalServerError": Meaning(_TRANSIENT, _LATER),
        "InternalExecutionError": Meaning(_TRANSIENT, _LATER),
        "InternalOperationError": Meaning(_TRANSIENT, _LATER),
        "NetworkingInternalOperationError": Meaning(_TRANSIENT, _LATER),
        "ServerTimeout": Meaning(_TRANSIENT, _LATER),
        "GatewayTimeout": Meaning(_TRANSIENT, _LATER),
        "ServiceUnavailable": Meaning(_TRANSIENT, _LATER),
        "Unreachable": Meaning(_TRANSIENT, "no answer from Azure; the same order is sent again"),  # ours
    }
)

_BY_STATUS: Mapping[int, Meaning] = MappingProxyType(
    {
        401: Meaning(_AUTH, _LOGIN),
        403: Meaning(_AUTH, _ROLE),
        408: Meaning(_TRANSIENT, _LATER),
        409: Meaning(_TRANSIENT, _BUSY, 10.0),
        412: Meaning(_TRANSIENT, _BUSY),
        429: Meaning(_TRANSIENT, _SLOW, 10.0),
    }
)

# "... exceeding approved standardNCASv3_T4Family Cores quota. Additional details - ..., Location: eastus, Current
# Limit: 0, Current Usage: 0, Additional Required: 4, ..."
_QUOTA_NAME = re.compile(r"exceeding (?:the )?(?:approved )?(?P<name>[\w .-]+?) quota", re.IGNORECASE)
_QUOTA_LIMIT = re.compile(r"Current Limit: (?P<limit>\d+)", re.IGNORECASE)
_QUOTA_NEED = re.compile(r"New Limit Required: (?P<need>\d+)", re.IGNORECASE)
_NOT_OFFERED = re.compile(
    r"NotAvailableForSubscription|not available (?:for|to) your (?:current )?subscription", re.I
)


def meaning(
    code: str, status: int | None, message: str, capacity_type: CapacityType | None = None
) -> Meaning:
    """What Azure's answer means. `message` decides only where one code stands for several things."""
    market = "" if capacity_type is None else capacity_type.value.replace("_", "-")
    known = _TABLE.get(code)
    if code == "SkuNotAvailable" and _NOT_OFFERED.search(message):
        advice = (
            "the size is not open to this subscription here: ask for access in the portal (Usage + quotas)"
        )
        return Meaning(_QUOTA, advice, NO_QUOTA_RETRY_S)
    if (known is not None and known.kind is _QUOTA) or (known is None and _is_quota(code, message)):
        return _quota(code, message)
    if known is not None:
        return Meaning(known.kind, known.advice.format(market=market or "such"), known.retry_after_s)
    if code == "OperationNotAllowed":
        return Meaning(_CONFIG, _ORDER)  # a 409, but no conflict that passes
    if status is None or status >= 500:
        return Meaning(_TRANSIENT, _LATER)
    return _BY_STATUS.get(status, Meaning(_CONFIG, _ORDER))


def error_of(
    failure: Failure, now: float, zone: Zone | None = None, capacity_type: CapacityType | None = None
) -> ProvisionError:
    """The error to raise (`from` the SDK's). `now` (UNIX seconds) dates `retry_at` of a quota."""
    means = meaning(failure.code, failure.status, failure.message, capacity_type)
    code = failure.code or (f"HTTP {failure.status}" if failure.status else "")
    said = f"{code}: {_first_sentences(failure.message)}" if failure.message else code
    text = f"{means.advice} ({said})" if said else means.advice
    common = {"cloud": CLOUD, "code": failure.code}
    retry_after_s = failure.retry_after_s if failure.retry_after_s is not None else means.retry_after_s
    match means.kind:
        case FailureKind.CAPACITY:
            return CapacityError(text, zone=zone, **common)
        case FailureKind.QUOTA:
            return QuotaError(
                text, zone=zone, retry_at=now + (means.retry_after_s or QUOTA_RETRY_S), **common
            )
        case FailureKind.AUTH:
            return AuthError(text, zone=zone, **common)
        case FailureKind.CONFIG:
            return InvalidRequestError(text, zone=zone, **common)
        case FailureKind.TRANSIENT:
            return TransientError(
                text, zone=zone, retry_after_s=1.0 if retry_after_s is None else retry_after_s, **common
            )


def _is_quota(code: str, message: str) -> bool:
    return code in ("OperationNotAllowed", "") and _QUOTA_NAME.search(message) is not None


def _quota(code: str, message: str) -> Meaning:
    named, limit, need = (
        _QUOTA_NAME.search(message),
        _QUOTA_LIMIT.search(message),
        _QUOTA_NEED.search(message),
    )
    name = named["name"] if named else code
    to = f" to {need['need']} or more" if need else ""
    retry_s = NO_QUOTA_RETRY_S if limit and limit["limit"] == "0" else QUOTA_RETRY_S
    return Meaning(
        _QUOTA, f"the quota {name!r} is used up: ask for it to be raised{to} (Usage + quotas)", retry_s
    )


def _first_sentences(message: str, limit: int = 300) -> str:
    """Azure's texts run on for paragraphs; what matters comes first."""
    flat = " ".join(message.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
