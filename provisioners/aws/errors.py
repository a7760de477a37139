"""What an answer of AWS means for the caller: one table from vendor codes to the five classes of `errors`. Pure.

Sources: the EC2 API's list of error codes, the service quotas of EC2 by code, and what the unmodified SDK was seen to
do: EC2 sends capacity errors with HTTP 500, which is why they are looked up by code before the status is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.model import CapacityType, FailureKind, Zone
from provisioners.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    TransientError,
)

CLOUD = "aws"
QUOTA_RETRY_S = 1800.0  # quotas are raised by people
THROTTLED_RETRY_S = 10.0

_K = FailureKind


class Answer(NamedTuple):
    """A refusal as AWS gave it. `status` is HTTP's, 0 where there was no answer at all."""

    code: str
    status: int
    message: str


class Context(NamedTuple):
    """What was asked, as far as an error's sentence needs it. `action` is IAM's name of it (ec2:RunInstances)."""

    action: str
    region: str
    zone: Zone | None = None
    instance_type: str | None = None
    capacity_type: CapacityType | None = None


class Meaning(NamedTuple):
    """`advice` says what to do, in words that follow the place: "{place}: {advice}"."""

    kind: FailureKind
    advice: str


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

_NO_ROOM = "there is no capacity for it now; another zone is next"
_NOT_OFFERED = "it is not offered there; another zone is next"
_NO_LOGIN = (
    "the credentials are not accepted; renew them (`aws sso login`, `aws configure`) and run `serve check`"
)
_DENIED = "not allowed; add it to the policy of this user or role (`serve check` tries the others, too)"
_STALE = "what it refers to does not exist there; check the `aws` section of config.yaml and the image"

_CODES: Mapping[str, Meaning] = MappingProxyType(
    {
        # Another zone, now.
        "InsufficientInstanceCapacity": Meaning(_K.CAPACITY, _NO_ROOM),
        "InsufficientCapacity": Meaning(_K.CAPACITY, _NO_ROOM),
        "InsufficientCapacityOnHost": Meaning(_K.CAPACITY, _NO_ROOM),
        "InsufficientHostCapacity": Meaning(_K.CAPACITY, _NO_ROOM),
        "InsufficientReservedInstanceCapacity": Meaning(_K.CAPACITY, _NO_ROOM),
        "ReservationCapacityExceeded": Meaning(_K.CAPACITY, _NO_ROOM),
        "UnfulfillableCapacity": Meaning(_K.CAPACITY, _NO_ROOM),
        "SpotMaxPriceTooLow": Meaning(
            _K.CAPACITY, "spot costs more than the limit there now; another zone is next"
        ),
        "Unsupported": Meaning(_K.CAPACITY, _NOT_OFFERED),
        "UnsupportedOperation": Meaning(_K.CAPACITY, _NOT_OFFERED),
        "InsufficientFreeAddressesInSubnet": Meaning(
            _K.CAPACITY,
            "the zone's subnet has no free address; free some or name a larger VPC in config.yaml",
        ),
        "InsufficientAddressCapacity": Meaning(_K.CAPACITY, "AWS has no free public address there now"),
        # Another region or capacity type, until somebody asks AWS for more.
        "VcpuLimitExceeded": Meaning(_K.QUOTA, "the account's vCPU quota is used up"),
        "MaxSpotInstanceCountExceeded": Meaning(_K.QUOTA, "the account's spot quota is used up"),
        "InstanceLimitExceeded": Meaning(
            _K.QUOTA, "the account's quota of instances of this type is used up"
        ),
        "VolumeLimitExceeded": Meaning(_K.QUOTA, "the account's quota of EBS storage is used up"),
        "MaxIOPSLimitExceeded": Meaning(_K.QUOTA, "the account's quota of EBS IOPS is used up"),
        "AddressLimitExceeded": Meaning(_K.QUOTA, "the account's quota of public addresses is used up"),
        "NetworkInterfaceLimitExceeded": Meaning(
            _K.QUOTA, "the account's quota of network interfaces is used up"
        ),
        "SecurityGroupLimitExceeded": Meaning(_K.QUOTA, "the account's quota of security groups is used up"),
        "RulesPerSecurityGroupLimitExceeded": Meaning(
            _K.CONFIG, "too many sources for one security group; give fewer CIDR blocks"
        ),
        "ResourceLimitExceeded": Meaning(_K.QUOTA, "a quota of the account is used up"),
        "PendingVerification": Meaning(
            _K.QUOTA, "AWS is still verifying the account for this region, which takes up to four hours"
        ),
        # Stop using AWS until somebody has acted.
        "AccessDenied": Meaning(_K.AUTH, _DENIED),
        "AccessDeniedException": Meaning(_K.AUTH, _DENIED),
        "UnauthorizedOperation": Meaning(_K.AUTH, _DENIED),
        "AuthFailure": Meaning(_K.AUTH, _NO_LOGIN),
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted": Meaning(
            _K.AUTH,
            "the account has never used spot; once: "
            "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`",
        ),
        "ExpiredToken": Meaning(_K.AUTH, _NO_LOGIN),
        "ExpiredTokenException": Meaning(_K.AUTH, _NO_LOGIN),
        "InvalidClientTokenId": Meaning(_K.AUTH, _NO_LOGIN),
        "MissingAuthenticationToken": Meaning(_K.AUTH, _NO_LOGIN),
        "SignatureDoesNotMatch": Meaning(_K.AUTH, _NO_LOGIN),
        "UnrecognizedClientException": Meaning(_K.AUTH, _NO_LOGIN),
        "RequestExpired": Meaning(_K.AUTH, "AWS finds the request too old; set this machine's clock right"),
        "NoCredentials": Meaning(
            _K.AUTH, "no credentials were found; run `aws configure`, then `serve check`"
        ),
        "OptInRequired": Meaning(
            _K.AUTH, "the account has not enabled this region or service; do so in its console"
        ),
        "Blocked": Meaning(_K.AUTH, "AWS has blocked the account; its support says why"),
        "AccountDisabled": Meaning(_K.AUTH, "the account is disabled; AWS's support says why"),
        # The order is wrong.
        "IdempotentParameterMismatch": Meaning(
            _K.CONFIG, "the attempt was made before with other parameters"
        ),
        "InvalidBlockDeviceMapping": Meaning(_K.CONFIG, "the disk does not fit the image; raise `disk_size`"),
        "InvalidUserData.Malformed": Meaning(_K.CONFIG, "the user data is not acceptable"),
        "VPCIdNotSpecified": Meaning(_K.CAPACITY, "the region has no default VPC; name one in config.yaml"),
        "ParameterNotFound": Meaning(
            _K.CAPACITY, "AWS publishes no image of that name there; another region is next"
        ),
        # The same again, a little later.
        "DependencyViolation": Meaning(_K.TRANSIENT, "it is still in use"),
        "IncorrectInstanceState": Meaning(_K.TRANSIENT, "it is between two states"),
        "IncorrectState": Meaning(_K.TRANSIENT, "it is between two states"),
        "ConcurrentTagAccess": Meaning(_K.TRANSIENT, "somebody else tags it at the same time"),
        "InvalidNetworkInterface.InUse": Meaning(_K.TRANSIENT, "it is still in use"),
        "VolumeInUse": Meaning(_K.TRANSIENT, "it is still in use"),
    }
)

_CLASSES: Mapping[FailureKind, type[ProvisionError]] = MappingProxyType(
    {
        _K.CAPACITY: CapacityError,
        _K.AUTH: AuthError,
        _K.CONFIG: InvalidRequestError,
    }
)


def meaning_of(answer: Answer, capacity_type: CapacityType | None = None) -> Meaning:
    """The table, then what the form of a code says of one that is not in it."""
    code, status, message = answer
    if code in THROTTLES:
        return Meaning(_K.TRANSIENT, "AWS asks for fewer calls")
    if code == "InvalidParameterValue" and "instancetype" in message.lower().replace(" ", ""):
        return Meaning(_K.CAPACITY, _NOT_OFFERED)  # a type that this region does not know
    if code == "OptInRequired" and "marketplace" in message.lower():
        return Meaning(_K.CONFIG, "the image is sold on the Marketplace; accept its terms there first")
    if code == "UnsupportedOperation" and capacity_type is None:
        return Meaning(_K.CONFIG, "EC2 does not do that")  # it was not about a machine to be launched
    if (known := _CODES.get(code)) is not None:
        return known
    if status == 0 or status >= 500:
        return Meaning(_K.TRANSIENT, "AWS did not answer" if status == 0 else "AWS has trouble of its own")
    if code.endswith(("LimitExceeded", "CountExceeded", "QuotaExceeded")):
        return Meaning(_K.QUOTA, "a quota of the account is used up")
    if status in (401, 403) or code.startswith(("Unauthorized", "AuthFailure", "AccessDenied")):
        return Meaning(_K.AUTH, _DENIED)
    if status == 429:
        return Meaning(_K.TRANSIENT, "AWS asks for fewer calls")
    return Meaning(_K.CONFIG, _STALE if code.startswith("Invalid") else "AWS refuses the request as wrong")


def error_of(answer: Answer, asked: Context, now: float) -> ProvisionError:
    """The error to raise, its sentence included. `now` is UNIX seconds, from which a quota's `retry_at` follows."""
    meaning = meaning_of(answer, asked.capacity_type)
    said = f"{answer.code}: {answer.message}" if answer.message else answer.code
    text = f"{_subject(meaning.kind, asked, answer)}: {meaning.advice} ({said})"
    if meaning.kind is _K.TRANSIENT:
        wait_s = THROTTLED_RETRY_S if answer.code in THROTTLES else 1.0
        return TransientError(text, cloud=CLOUD, code=answer.code, zone=asked.zone, retry_after_s=wait_s)
    if meaning.kind is _K.QUOTA:
        retry_at = now + QUOTA_RETRY_S
        return QuotaError(text, cloud=CLOUD, code=answer.code, zone=asked.zone, retry_at=retry_at)
    return _CLASSES[meaning.kind](text, cloud=CLOUD, code=answer.code, zone=asked.zone)


def _subject(kind: FailureKind, asked: Context, answer: Answer) -> str:
    """What the sentence is about: the permission, the quota, the machine or the call."""
    if kind is _K.AUTH:
        return f"{CLOUD} {missing_action(answer.message) or asked.action} in {asked.region}"
    if asked.instance_type is None or asked.capacity_type is None:
        return f"{CLOUD} {asked.action} in {asked.region}"
    machine = f"{asked.capacity_type.value.replace('_', '-')} {asked.instance_type}"
    place = str(asked.zone) if asked.zone is not None else f"{CLOUD}/{asked.region}"
    if kind is _K.QUOTA and answer.code in ("VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"):
        quota = quota_of(asked.instance_type, asked.capacity_type)
        named = f"{quota.name} ({quota.code})" if quota is not None else "a vCPU quota"
        return f"{machine} in {place}: quota {named} of {asked.region}"
    return f"{machine} in {place}"


def missing_action(message: str) -> str | None:
    """IAM's name of what was denied, where the message tells; it may be another action than the one that was called,
    as `ec2:CreateTags` is for RunInstances with tags."""
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


def quota_of(instance_type: str, capacity_type: CapacityType) -> Quota | None:
    """Which quota an instance type counts against, None for families that are not known here."""
    series = re.match(r"([a-z]+)(\d*)", instance_type)
    if series is None:
        return None
    letters, generation = series.groups()
    family = "g" if letters in ("g", "gr", "vt") else letters
    if family == "p" and generation == "5":
        family = "p5"
    if family not in _QUOTAS:
        family = "standard" if letters[0] in "acdhimrtz" else ""
    pair = _QUOTAS.get(family)
    if pair is None:
        return None
    return pair[1] if capacity_type is CapacityType.SPOT else pair[0]
