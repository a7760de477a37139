"""What a response of AWS means for the caller.

The table of `error_codes`, then what the form of an unknown code says, and the sentence that goes with it. Pure. The
service quotas are EC2's, by code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.aws.error_codes import FORBIDDEN_LAUNCH, NOT_ENABLED, TABLE
from provisioners.port.error_codes import ErrorCode
from provisioners.port.errors import ProvisionError, error_for

CLOUD = "aws"
QUOTA_RETRY_S = 1800.0  # quotas are raised by people
THROTTLED_RETRY_S = 10.0

_K = FailureKind


class AwsResponse(NamedTuple):
    """A refusal as AWS gave it. `status` is HTTP's, 0 where there was no response at all."""

    code: str
    status: int
    message: str
    request_id: str = ""


class ErrorContext(NamedTuple):
    """The request, as far as an error's sentence needs it. `action` is IAM's name of it (ec2:RunInstances)."""

    action: str
    region: str
    zone: Zone | None = None
    instance_type: str | None = None
    capacity_type: CapacityType | None = None


THROTTLES = frozenset(
    {
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)


def meaning_of(
    response: AwsResponse, capacity_type: CapacityType | None = None, instance_type: str | None = None
) -> ErrorCode:
    """Return the table, then what the form of a code says of one that is not in it.

    `instance_type`: a machine was requested.
    """
    code, status, message, _ = response
    if code in THROTTLES:
        return ErrorCode("", _K.TRANSIENT, "AWS asks for fewer calls", "DOC")
    if code == "UnsupportedOperation" and capacity_type is None:
        return ErrorCode(
            "", _K.CONFIG, "EC2 does not do that", "DOC"
        )  # it was not about a machine to be launched
    known = TABLE.find(code, message, capacity_type)
    if known is not None:
        return FORBIDDEN_LAUNCH if instance_type and known.pattern == FORBIDDEN_LAUNCH.pattern else known
    if status == 0 or status >= 500:
        return ErrorCode(
            "", _K.TRANSIENT, "AWS did not answer" if status == 0 else "AWS has trouble of its own", "DOC"
        )
    if code.endswith(("LimitExceeded", "CountExceeded", "QuotaExceeded")):
        return ErrorCode("", _K.QUOTA, "a quota of the account is used up", "by the form of the code")
    if code.startswith("AuthFailure"):
        return ErrorCode(
            "", _K.AUTH, "the credentials are not accepted for it; run `serve check`", "by the form"
        )
    if status in (401, 403) or code.startswith(("Unauthorized", "AccessDenied")):
        return ErrorCode("", _K.AUTH, "not allowed; run `serve check`", "by the status", scope=Scope.REGION)
    if status == 429:
        return ErrorCode("", _K.TRANSIENT, "AWS asks for fewer calls", "by the status")
    return ErrorCode("", _K.REFUSED, "AWS refuses it there; another zone or machine type is next", "unknown")


def error_of(response: AwsResponse, asked: ErrorContext, now: float) -> ProvisionError:
    """Return the error to raise, its sentence included. `now` is UNIX seconds, from which a quota's `retry_at` follows."""
    meaning = meaning_of(response, asked.capacity_type, asked.instance_type)
    return _error(meaning, response, asked, now)


def closed(response: AwsResponse, asked: ErrorContext, now: float) -> ProvisionError:
    """Of credentials that one region does not accept, and others do: the account has not enabled the region."""
    meaning = ErrorCode("", _K.AUTH, NOT_ENABLED, "DOC", scope=Scope.REGION, closes_region=True)
    return _error(meaning, response, asked, now)


def _error(meaning: ErrorCode, response: AwsResponse, asked: ErrorContext, now: float) -> ProvisionError:
    return error_for(
        meaning.kind,
        f"{_subject(meaning.kind, asked, response)}: {meaning.advice} ({_error_text(response)})",
        cloud=CLOUD,
        code=response.code,
        zone=asked.zone,
        scope=meaning.scope,
        closed_region=asked.region if meaning.closes_region else None,
        retry_at=now + QUOTA_RETRY_S,
        retry_after_s=THROTTLED_RETRY_S if response.code in THROTTLES else 1.0,
    )


def _error_text(response: AwsResponse) -> str:
    """AWS's own words, without the kilobyte that only `sts:DecodeAuthorizationMessage` can read."""
    message = re.sub(r"\s*Encoded authorization failure message: \S+", "", response.message).strip()
    said = f"{response.code}: {message}" if message else response.code
    return f"{said}; request id {response.request_id}" if response.request_id else said


def _subject(kind: FailureKind, asked: ErrorContext, response: AwsResponse) -> str:
    """Return what the sentence is about: the permission, the quota, the machine or the call."""
    if kind is _K.AUTH:
        return f"{CLOUD} {missing_action(response.message) or asked.action} in {asked.region}"
    if asked.instance_type is None or asked.capacity_type is None:
        return f"{CLOUD} {asked.action} in {asked.region}"
    machine = f"{asked.capacity_type.value.replace('_', '-')} {asked.instance_type}"
    place = str(asked.zone) if asked.zone is not None else f"{CLOUD}/{asked.region}"
    if kind is _K.QUOTA and response.code in ("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"):
        quota = quota_of(asked.instance_type, asked.capacity_type)
        named = f"{quota.name} ({quota.code})" if quota is not None else "a vCPU quota"
        return f"{machine} in {place}: quota {named} of {asked.region}"
    return f"{machine} in {place}"


def missing_action(message: str) -> str | None:
    """IAM's name of what was denied, if the message has it.

    It may be another action than the one that was called, as `ec2:CreateTags` is for RunInstances with tags.
    """
    found = re.search(r"not authorized to perform: ([a-z0-9-]+:\w+)", message)
    return found.group(1) if found else None


class Quota(NamedTuple):
    """A service quota of EC2, in vCPUs."""

    code: str
    name: str


_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_QUOTAS: Mapping[str, tuple[Quota, Quota]] = MappingProxyType(
    {  # by family: (on demand, spot)
        "g": (
            Quota("L-DB2E81BA", "Running On-Demand G and VT instances"),
            Quota("L-3819A6DF", "All G and VT Spot Instance Requests"),
        ),
        "p": (
            Quota("L-417A185B", "Running On-Demand P instances"),
            Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
        ),
        "p5": (
            Quota("L-417A185B", "Running On-Demand P instances"),
            Quota("L-C4BD4855", "All P5 Spot Instance Requests"),
        ),
        "inf": (
            Quota("L-1945791B", "Running On-Demand Inf instances"),
            Quota("L-B5D1601B", "All Inf Spot Instance Requests"),
        ),
        "trn": (
            Quota("L-2C3B7624", "Running On-Demand Trn instances"),
            Quota("L-6B0D517C", "All Trn Spot Instance Requests"),
        ),
        "standard": (
            Quota("L-1216C47A", f"Running On-Demand {_STANDARD} instances"),
            Quota("L-34B43A08", f"All {_STANDARD} Spot Instance Requests"),
        ),
    }
)


_OF_THEIR_OWN = frozenset({"dl", "hpc", "mac"})  # families that only begin like the standard ones


def quota_of(instance_type: str, capacity_type: CapacityType) -> Quota | None:
    """Return which quota an instance type counts against, None for families that are not known here."""
    series = re.match(r"([a-z]+)(\d*)", instance_type)
    if series is None:
        return None
    letters, generation = series.groups()
    family = "g" if letters in ("g", "gr", "vt") else letters
    is_spot = capacity_type is CapacityType.SPOT
    if family == "p" and generation not in ("2", "3", "4") and is_spot:
        family = f"p{generation}"  # each generation since has a spot quota of its own
    if family not in _QUOTAS and letters not in _OF_THEIR_OWN:
        family = "standard" if letters[0] in "acdhimrtz" else ""
    pair = _QUOTAS.get(family)
    return None if pair is None else pair[1 if is_spot else 0]
