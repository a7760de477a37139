"""What AWS's codes mean, as a table."""

from __future__ import annotations

import pytest

from policies.model import CapacityType, FailureKind, Zone
from provisioners.aws.errors import (
    THROTTLES,
    Answer,
    Context,
    Quota,
    error_of,
    meaning_of,
    missing_action,
    quota_of,
)
from provisioners.errors import QuotaError, TransientError

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
CAPACITY, QUOTA, AUTH, CONFIG, TRANSIENT = (
    FailureKind.CAPACITY,
    FailureKind.QUOTA,
    FailureKind.AUTH,
    FailureKind.CONFIG,
    FailureKind.TRANSIENT,
)
LAUNCH = Context("ec2:RunInstances", "us-east-1", Zone("aws", "us-east-1", "use1-az1"), "g6.xlarge", SPOT)


@pytest.mark.parametrize(
    ("kind", "code", "status", "message"),
    [
        (CAPACITY, "InsufficientInstanceCapacity", 500, ""),
        (CAPACITY, "InsufficientCapacity", 500, ""),
        (CAPACITY, "UnfulfillableCapacity", 500, ""),
        (CAPACITY, "SpotMaxPriceTooLow", 400, ""),
        (CAPACITY, "Unsupported", 400, "Your requested instance type (p5.48xlarge) is not supported in …"),
        (CAPACITY, "InvalidParameterValue", 400, "Invalid value 'p9.huge' for InstanceType."),
        (CAPACITY, "InsufficientFreeAddressesInSubnet", 400, ""),
        (CAPACITY, "InsufficientAddressCapacity", 500, ""),
        (CAPACITY, "VPCIdNotSpecified", 400, "No default VPC for this user"),
        (CAPACITY, "ParameterNotFound", 400, ""),
        (QUOTA, "VcpuLimitExceeded", 400, ""),
        (QUOTA, "MaxSpotInstanceCountExceeded", 400, ""),
        (QUOTA, "InstanceLimitExceeded", 400, ""),
        (QUOTA, "VolumeLimitExceeded", 400, ""),
        (QUOTA, "AddressLimitExceeded", 400, ""),
        (QUOTA, "PendingVerification", 400, ""),
        (QUOTA, "SomethingNewLimitExceeded", 400, ""),
        (AUTH, "UnauthorizedOperation", 403, ""),
        (AUTH, "AuthFailure", 401, ""),
        (AUTH, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, ""),
        (AUTH, "AuthFailure.SomethingNew", 400, ""),
        (AUTH, "ExpiredToken", 403, ""),
        (AUTH, "RequestExpired", 400, ""),
        (AUTH, "NoCredentials", 401, ""),
        (AUTH, "OptInRequired", 401, "You are not subscribed to this service."),
        (AUTH, "Blocked", 400, ""),
        (AUTH, "SomethingNewForbidden", 403, ""),
        (
            CONFIG,
            "OptInRequired",
            401,
            "In order to use this AWS Marketplace product you need to accept terms",
        ),
        (CONFIG, "InvalidAMIID.NotFound", 400, ""),
        (CONFIG, "InvalidKeyPair.NotFound", 400, ""),
        (CONFIG, "InvalidGroup.NotFound", 400, ""),
        (CONFIG, "InvalidParameterValue", 400, "Invalid availability zone"),
        (CONFIG, "IdempotentParameterMismatch", 400, ""),
        (CONFIG, "InvalidBlockDeviceMapping", 400, ""),
        (CONFIG, "SomethingNew", 400, ""),
        (TRANSIENT, "RequestLimitExceeded", 503, ""),
        (TRANSIENT, "InternalError", 500, ""),
        (TRANSIENT, "Unavailable", 503, ""),
        (TRANSIENT, "SomethingNew", 500, ""),
        (TRANSIENT, "SomethingNew", 429, ""),
        (TRANSIENT, "ReadTimeoutError", 0, ""),
        (TRANSIENT, "DependencyViolation", 400, ""),
    ],
)
def test_a_code_means(kind: FailureKind, code: str, status: int, message: str) -> None:
    answer = Answer(code, status, message)
    assert meaning_of(answer, SPOT).kind is kind
    raised = error_of(answer, LAUNCH, now=1000.0)
    assert (raised.kind, raised.code, raised.cloud, raised.zone) == (kind, code, "aws", LAUNCH.zone)
    assert code in raised.message


@pytest.mark.parametrize("code", sorted(THROTTLES))
def test_throttling_asks_for_patience(code: str) -> None:
    raised = error_of(Answer(code, 400, ""), LAUNCH, now=0.0)
    assert isinstance(raised, TransientError)
    assert raised.retry_after_s > 1.0


@pytest.mark.parametrize(
    ("asked", "kind"),
    [(LAUNCH, CAPACITY), (Context("ec2:DeleteVolume", "us-east-1"), CONFIG)],
    ids=["a-launch-elsewhere", "anything-else-nowhere"],
)
def test_what_is_not_supported_depends_on_what_was_asked(asked: Context, kind: FailureKind) -> None:
    assert error_of(Answer("UnsupportedOperation", 400, ""), asked, now=0.0).kind is kind


@pytest.mark.parametrize(
    ("code", "status", "message", "sentence"),
    [
        pytest.param(
            "InsufficientInstanceCapacity",
            500,
            "We do not have enough.",
            "spot g6.xlarge in aws/us-east-1/use1-az1: there is no capacity for it now; another zone is next "
            "(InsufficientInstanceCapacity: We do not have enough.)",
            id="capacity",
        ),
        pytest.param(
            "MaxSpotInstanceCountExceeded",
            400,
            "",
            "spot g6.xlarge in aws/us-east-1/use1-az1: quota All G and VT Spot Instance Requests (L-3819A6DF) of "
            "us-east-1: the account's spot quota is used up (MaxSpotInstanceCountExceeded)",
            id="quota-named",
        ),
        pytest.param(
            "UnauthorizedOperation",
            403,
            "User: x is not authorized to perform: ec2:CreateTags on resource: *",
            "aws ec2:CreateTags in us-east-1: not allowed; add it to the policy of this user or role (`serve check` "
            "tries the others, too) (UnauthorizedOperation: User: x is not authorized to perform: ec2:CreateTags on resource: *)",
            id="permission-named",
        ),
    ],
)
def test_the_sentence(code: str, status: int, message: str, sentence: str) -> None:
    assert str(error_of(Answer(code, status, message), LAUNCH, now=0.0)) == sentence


def test_a_quota_error_says_when_to_try_again() -> None:
    raised = error_of(Answer("VcpuLimitExceeded", 400, ""), LAUNCH, now=1000.0)
    assert isinstance(raised, QuotaError)
    assert raised.retry_at == 2800.0


@pytest.mark.parametrize(
    ("message", "action"),
    [
        (
            "User: arn:aws:iam::1:user/u is not authorized to perform: ec2:RunInstances on …",
            "ec2:RunInstances",
        ),
        ("… is not authorized to perform: iam:CreateServiceLinkedRole …", "iam:CreateServiceLinkedRole"),
        ("You are not authorized to perform this operation.", None),
    ],
    ids=["the-call", "another-action", "not-told"],
)
def test_the_missing_action(message: str, action: str | None) -> None:
    assert missing_action(message) == action


@pytest.mark.parametrize(
    ("instance_type", "on_demand", "spot"),
    [
        ("g4dn.xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("g6e.48xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("gr6.4xlarge", "L-DB2E81BA", "L-3819A6DF"),
        ("p3.2xlarge", "L-417A185B", "L-7212CCBC"),
        ("p4d.24xlarge", "L-417A185B", "L-7212CCBC"),
        ("p5en.48xlarge", "L-417A185B", "L-C4BD4855"),
        ("inf2.xlarge", "L-1945791B", "L-B5D1601B"),
        ("trn1.2xlarge", "L-2C3B7624", "L-6B0D517C"),
        ("t3.micro", "L-1216C47A", "L-34B43A08"),
        ("m7g.large", "L-1216C47A", "L-34B43A08"),
        ("u-6tb1.56xlarge", None, None),
    ],
)
def test_the_quota_of_a_type(instance_type: str, on_demand: str | None, spot: str | None) -> None:
    def code(quota: Quota | None) -> str | None:
        return None if quota is None else quota.code

    assert code(quota_of(instance_type, ON_DEMAND)) == on_demand
    assert code(quota_of(instance_type, SPOT)) == spot
