"""What Compute Engine's error codes mean for the next decision: one pure table.

A refusal comes as an HTTP error with a `reason` (`quotaExceeded`), or minutes later as the `code` of an operation that
was accepted (`QUOTA_EXCEEDED`). Both are spelled alike here: lower case, without underscores. The first row that fits
decides; what no row knows is judged by its HTTP status, and what has none is worth another try.

The reasons are those of Google's API reference ("Handling API errors", "Troubleshooting VM creation"); that
UNSUPPORTED_OPERATION is said of a spot machine which is preempted while it is being made is an observation of SkyPilot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from policies.model import CapacityType, FailureKind, Zone
from provisioners.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    TransientError,
)

CLOUD = "gcp"
ALREADY_EXISTS = "alreadyExists"

QUOTA_RETRY_S = 1800.0  # somebody has to ask for more, or to give something back
THROTTLED_RETRY_S = 15.0
RETRY_S = 3.0

_K = FailureKind


@dataclass(frozen=True, slots=True)
class _Row:
    codes: frozenset[str]  # none: any
    kind: FailureKind
    says: str  # the sentence; {message}, {market}, {quota}, {region} and {permission} are filled in
    pattern: str = ""  # in the message
    capacity_type: CapacityType | None = None

    def fits(self, code: str, message: str, capacity_type: CapacityType) -> bool:
        return (
            (not self.codes or code in self.codes)
            and (self.capacity_type is None or self.capacity_type is capacity_type)
            and re.search(self.pattern, message, re.IGNORECASE) is not None
        )


def _row(
    codes: str, kind: FailureKind, says: str, pattern: str = "", only: CapacityType | None = None
) -> _Row:
    return _Row(frozenset(codes.split()), kind, says, pattern, only)


_NO_ROOM = "there is no {market} capacity: another zone or machine type may have some ({message})"
_NOT_OFFERED = "the machine type or accelerator is not offered there: take another zone or type ({message})"
_THROTTLED = "Compute Engine throttles our requests: tried again a little later ({message})"
_HICCUP = "Compute Engine did not answer properly: tried again ({message})"
_LOG_IN = (
    "the credentials are not accepted: log in again with `gcloud auth application-default login` ({message})"
)
_REFUSED = "the credentials do not allow it: grant the permission {permission} ({message})"
_WRONG = "Compute Engine refuses the order as wrong: {message}"

TABLE = (
    # stock-outs first: they also come dressed as 503
    _row(
        "zoneresourcepoolexhausted zoneresourcepoolexhaustedwithdetails resourcepoolexhausted stockout"
        " insufficientcapacity vmmincountnotreached",
        _K.CAPACITY,
        _NO_ROOM,
    ),
    _row("", _K.CAPACITY, _NO_ROOM, r"does not have enough resources|resource pool exhausted"),
    _row(
        "unsupportedoperation",
        _K.CAPACITY,
        "it was preempted while it was being made ({message})",
        only=CapacityType.SPOT,
    ),
    _row(
        "ipspaceexhausted ipspaceexhaustedwithdetails",
        _K.CAPACITY,
        "the subnetwork of {region} has no free address: enlarge it, or use another region ({message})",
    ),
    _row(
        "",
        _K.CAPACITY,
        _NOT_OFFERED,
        r"(machine ?types?|accelerator ?types?)\b.*(does not exist|not found|not available|not supported in)",
    ),
    # throttling comes as 429, and as 403; the quota of requests per minute is no quota of machines
    _row(
        "ratelimitexceeded userratelimitexceeded resourceoperationrateexceeded operationrateexceeded"
        " toomanyrequests concurrentlimitexceeded",
        _K.TRANSIENT,
        _THROTTLED,
    ),
    _row("quotaexceeded", _K.TRANSIENT, _THROTTLED, r"quer(y|ies) per|requests per|per minute"),
    _row(
        "quotaexceeded limitexceeded",
        _K.QUOTA,
        "the project's quota {quota} is used up in all regions: ask for more of it under IAM & Admin > Quotas, or use"
        " another cloud ({message})",
        r"globally|all[ _]regions",
    ),
    _row(
        "quotaexceeded limitexceeded",
        _K.QUOTA,
        "the project's quota {quota} is used up in {region}: ask for more of it under IAM & Admin > Quotas, or use"
        " another region ({message})",
    ),
    _row(
        "accessnotconfigured servicedisabled",
        _K.AUTH,
        "the Compute Engine API is not enabled: `gcloud services enable compute.googleapis.com` ({message})",
    ),
    _row(
        "forbidden billingdisabled billingnotenabled accountdisabled",
        _K.AUTH,
        "the project has no working billing account: link one to it ({message})",
        r"billing",
    ),
    _row("autherror required unauthenticated expired", _K.AUTH, _LOG_IN),
    _row(
        "forbidden iampermissiondenied permissionserror permissiondenied insufficientpermissions",
        _K.AUTH,
        _REFUSED,
    ),
    _row(
        "backenderror internalerror resourcenotready resourceinusebyanotherresource serviceunavailable operationcanceled"
        " resourcebeingused",
        _K.TRANSIENT,
        _HICCUP,
    ),
    _row(
        "invalid notfound resourcenotfound",
        _K.CONFIG,
        "there is no such image: name another, or leave it to the default ({message})",
        r"/images/|\bimage\b",
    ),
    _row(
        "invalid badrequest invalidparameter invalidfieldvalue invalidusage notfound resourcenotfound conditionnotmet"
        " unsupportedoperation alreadyexists duplicate vpcnotfound subnetnotfoundforvpc",
        _K.CONFIG,
        _WRONG,
    ),
)

_BY_STATUS = (
    (frozenset({401}), _K.AUTH, _LOG_IN),
    (frozenset({403}), _K.AUTH, _REFUSED),
    (frozenset({429}), _K.TRANSIENT, _THROTTLED),
    (frozenset({408, 425}), _K.TRANSIENT, _HICCUP),
    (frozenset(range(400, 500)), _K.CONFIG, _WRONG),
)


def classify(code: str, status: int, message: str, capacity_type: CapacityType) -> tuple[FailureKind, str]:
    """What to do next, and the sentence which says so; still with the names of its blanks."""
    spelled = code.replace("_", "").lower()
    for row in TABLE:
        if row.fits(spelled, message, capacity_type):
            return row.kind, row.says
    for statuses, kind, says in _BY_STATUS:
        if status in statuses:
            return kind, says
    return _K.TRANSIENT, _HICCUP


def error_of(
    code: str,
    status: int,
    message: str,
    *,
    capacity_type: CapacityType = CapacityType.ON_DEMAND,
    zone: Zone | None = None,
    now: float,
    retry_after_s: float | None = None,
) -> ProvisionError:
    """The error to raise. `retry_after_s` is what the answer asked for, if it did."""
    kind, says = classify(code, status, message, capacity_type)
    said = says.format(
        message=message.strip().rstrip("."),
        market=capacity_type.value.replace("_", "-"),
        quota=_quota(message),
        region=_region(message, zone),
        permission=_permission(message),
    )
    sentence = f"{zone.name}: {said}" if zone is not None else said
    if kind is _K.QUOTA:
        return QuotaError(sentence, cloud=CLOUD, code=code, zone=zone, retry_at=now + QUOTA_RETRY_S)
    if kind is _K.TRANSIENT:
        usual_s = THROTTLED_RETRY_S if says is _THROTTLED else RETRY_S
        retry_s = usual_s if retry_after_s is None else retry_after_s
        return TransientError(sentence, cloud=CLOUD, code=code, zone=zone, retry_after_s=retry_s)
    return _CLASSES[kind](sentence, cloud=CLOUD, code=code, zone=zone)


_CLASSES: dict[FailureKind, type[ProvisionError]] = {
    _K.CAPACITY: CapacityError,
    _K.AUTH: AuthError,
    _K.CONFIG: InvalidRequestError,
}


def _quota(message: str) -> str:
    found = re.search(r"quota '?([A-Z][A-Z0-9_]+)'?", message, re.IGNORECASE)
    return found[1] if found else "of the project"


def _region(message: str, zone: Zone | None) -> str:
    found = re.search(r"in region ([a-z0-9-]+)", message)
    return found[1] if found else zone.region if zone is not None else "that region"


def _permission(message: str) -> str:
    found = re.search(
        r"'?([a-z][\w.-]*\.[a-z]\w*\.[a-zA-Z]+)'? permission|permission '?([\w.]+)'?", message, re.IGNORECASE
    )
    return (found[1] or found[2]) if found else "which is missing"
