"""What Azure's errors mean for the next step.

The table of `error_codes`, then what the wording and the HTTP status say of a code that is not in it. Pure.

The status alone shows little: a zone without room and a used-up quota are both 409, and an allocation that fails after it was
accepted comes as a status of the machine, with no HTTP error at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from policies.model import CapacityType, FailureKind, Zone
from provisioners.azure.error_codes import BY_STATUS, LATER, REFUSED, TABLE
from provisioners.port.error_codes import ErrorCode
from provisioners.port.errors import ProvisionError, error_for

CLOUD = "azure"

QUOTA_RETRY_S = 30 * 60.0  # machines of others may end
NO_QUOTA_RETRY_S = 60 * 60.0  # a limit of 0 stays 0 until a person requests more


@dataclass(frozen=True, slots=True)
class AzureFailure:
    """The error that Azure returned. `status` is None where there was no response, or none by HTTP."""

    code: str
    status: int | None
    message: str
    retry_after_s: float | None = None
    request_id: str = ""


# "... exceeding approved standardNCASv3_T4Family Cores quota. Additional details - ..., Location: eastus, Current
# Limit: 0, Current Usage: 0, Additional Required: 4, ..."
_QUOTA_NAME = re.compile(r"exceeding (?:the )?(?:approved )?(?P<name>[\w .-]+?) quota", re.IGNORECASE)
_QUOTA_LIMIT = re.compile(r"Current Limit: (?P<limit>\d+)", re.IGNORECASE)
_QUOTA_NEED = re.compile(r"New Limit Required: (?P<need>\d+)", re.IGNORECASE)
_POLICY = re.compile(
    r"policyAssignment\W+name\W+(?P<name>[^\"'\\\\]+)|disallowed by policy '(?P<plain>[^']+)'", re.IGNORECASE
)


def meaning(
    code: str, status: int | None, message: str, capacity_type: CapacityType | None = None
) -> ErrorCode:
    """Return what Azure's response means. `message` decides only where one code stands for several things."""
    known = TABLE.find(code, message, capacity_type)
    if (known is not None and known.kind is FailureKind.QUOTA and not known.advice) or (
        known is None and _is_quota(code, message)
    ):
        return _quota(code, message)
    if known is not None:
        return replace(known, advice=_filled(known.advice, message, capacity_type))
    if code == "OperationNotAllowed":
        return ErrorCode("", FailureKind.REFUSED, REFUSED, "a 409, but no conflict that passes")
    if status is None or status >= 500:
        return ErrorCode("", FailureKind.TRANSIENT, LATER, "by the status")
    return BY_STATUS.get(status, ErrorCode("", FailureKind.REFUSED, REFUSED, "unknown"))


def error_of(
    failure: AzureFailure, now: float, zone: Zone | None = None, capacity_type: CapacityType | None = None
) -> ProvisionError:
    """Return the error to raise (`from` the SDK's). `now` (UNIX seconds) dates `retry_at` of a quota."""
    means = meaning(failure.code, failure.status, failure.message, capacity_type)
    code = failure.code or (f"HTTP {failure.status}" if failure.status else "")
    said = f"{code}: {_first_sentences(failure.message)}" if failure.message else code
    if said and failure.request_id:
        said = f"{said}; request id {failure.request_id}"
    retry_after_s = failure.retry_after_s if failure.retry_after_s is not None else means.retry_s
    return error_for(
        means.kind,
        f"{means.advice} ({said})" if said else means.advice,
        cloud=CLOUD,
        code=failure.code,
        zone=zone,
        scope=means.scope,
        closed_region=zone.region if means.closes_region and zone is not None else None,
        retry_at=now + (means.retry_s or QUOTA_RETRY_S),
        retry_after_s=1.0 if retry_after_s is None else retry_after_s,
    )


def _filled(advice: str, message: str, capacity_type: CapacityType | None) -> str:
    market = "such" if capacity_type is None else capacity_type.value.replace("_", "-")
    found = _POLICY.search(message)
    policy = repr((found["name"] or found["plain"]).strip()) if found else "of the organisation"
    return advice.format(market=market, policy=policy)


def _is_quota(code: str, message: str) -> bool:
    return code in ("OperationNotAllowed", "") and _QUOTA_NAME.search(message) is not None


def _quota(code: str, message: str) -> ErrorCode:
    named, limit, need = (
        _QUOTA_NAME.search(message),
        _QUOTA_LIMIT.search(message),
        _QUOTA_NEED.search(message),
    )
    name = named["name"] if named else code
    to = f" to {need['need']} or more" if need else ""
    retry_s = NO_QUOTA_RETRY_S if limit and limit["limit"] == "0" else QUOTA_RETRY_S
    advice = f"the quota {name!r} is used up: ask for it to be raised{to} (Usage + quotas)"
    return ErrorCode("", FailureKind.QUOTA, advice, "the wording", retry_s=retry_s)


def _first_sentences(message: str, limit: int = 300) -> str:
    """Azure's texts run on for paragraphs; what matters comes first."""
    flat = " ".join(message.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
