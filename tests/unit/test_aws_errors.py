"""What AWS's codes mean, as a table."""

from __future__ import annotations

import pytest

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.aws.error_codes import AT_BIRTH, TABLE
from provisioners.aws.errors import (
    THROTTLES,
    AwsResponse,
    ErrorContext,
    Quota,
    error_of,
    missing_action,
    quota_of,
)
from provisioners.port.errors import QuotaError, RegionClosedError, TransientError

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
CAPACITY, QUOTA, AUTH, CONFIG, TRANSIENT, REFUSED = (
    FailureKind.CAPACITY,
    FailureKind.QUOTA,
    FailureKind.AUTH,
    FailureKind.CONFIG,
    FailureKind.TRANSIENT,
    FailureKind.REFUSED,
)
TYPE, ZONE, REGION, CLOUD_WIDE = Scope.TYPE, Scope.ZONE, Scope.REGION, Scope.CLOUD
SCP = "User: u is not authorized to perform: ec2:X with an explicit deny in a service control policy"
LAUNCH = ErrorContext(
    "ec2:RunInstances", "us-east-1", Zone("aws", "us-east-1", "use1-az1"), "g6.xlarge", SPOT
)


CASES = [
    (CAPACITY, None, "InsufficientInstanceCapacity", 500, ""),
    (CAPACITY, None, "InsufficientCapacity", 500, ""),
    (CAPACITY, None, "UnfulfillableCapacity", 500, ""),
    (CAPACITY, None, "InsufficientVolumeCapacity", 500, ""),
    (CAPACITY, None, "InsufficientVolumeCapacity", 400, ""),
    (CAPACITY, None, "SpotMaxPriceTooLow", 400, ""),
    (CAPACITY, None, "InsufficientFreeAddressesInSubnet", 400, ""),
    (CAPACITY, None, "InsufficientAddressCapacity", 500, ""),
    (QUOTA, None, "VcpuLimitExceeded", 400, ""),
    (QUOTA, None, "MaxSpotInstanceCountExceeded", 400, ""),
    (QUOTA, None, "InstanceLimitExceeded", 400, ""),
    (QUOTA, None, "VolumeLimitExceeded", 400, ""),
    (QUOTA, None, "MaxIOPSLimitExceeded", 400, ""),
    (QUOTA, None, "AddressLimitExceeded", 400, ""),
    (QUOTA, None, "NetworkInterfaceLimitExceeded", 400, ""),
    (QUOTA, None, "SecurityGroupLimitExceeded", 400, ""),
    (QUOTA, None, "ResourceLimitExceeded", 400, ""),
    (QUOTA, None, "PendingVerification", 400, ""),
    (QUOTA, None, "SomethingNewLimitExceeded", 400, ""),
    (CONFIG, None, "OptInRequired", 401, "To use this AWS Marketplace product you need to accept terms"),
    (CONFIG, None, "IdempotentParameterMismatch", 400, ""),
    (CONFIG, None, "InvalidBlockDeviceMapping", 400, "Volume of size 8GB is smaller than snapshot 'snap-1'"),
    (CONFIG, None, "InvalidUserData.Malformed", 400, ""),
    (CONFIG, None, "InvalidParameterValue", 400, "User data is limited to 16384 bytes"),
    (CONFIG, None, "InvalidAMIID.Malformed", 400, ""),
    (CONFIG, None, "RulesPerSecurityGroupLimitExceeded", 400, ""),
    (REFUSED, None, "Unsupported", 400, "Your requested instance type (p5.48xlarge) is not supported in …"),
    (REFUSED, TYPE, "InvalidParameterValue", 400, "Invalid value 'p9.huge' for InstanceType."),
    (
        REFUSED,
        TYPE,
        "InvalidParameterValue",
        400,
        "The architecture 'x86_64' of the specified instance type does not match the architecture 'arm64' of the AMI",
    ),
    (REFUSED, TYPE, "InvalidParameter", 400, "The following supplied instance types do not exist: [p6]"),
    (REFUSED, None, "InvalidParameterCombination", 400, "not supported in your requested Availability Zone"),
    (REFUSED, ZONE, "InvalidAvailabilityZone", 400, ""),
    (REFUSED, ZONE, "InvalidSubnet.Conflict", 400, ""),
    (REFUSED, ZONE, "VolumeTypeNotAvailableInZone", 400, ""),
    (REFUSED, ZONE, "InvalidParameterValue", 400, "Invalid availability zone-id: [use1-az3]"),
    (REFUSED, REGION, "InvalidAMIID.NotFound", 400, ""),
    (REFUSED, REGION, "ParameterNotFound", 400, ""),
    (REFUSED, REGION, "VPCIdNotSpecified", 400, "No default VPC for this user"),
    (REFUSED, REGION, "InvalidKeyPair.NotFound", 400, ""),
    (REFUSED, REGION, "InvalidGroup.NotFound", 400, ""),
    (REFUSED, CLOUD_WIDE, "TagPolicyViolation", 400, ""),
    (REFUSED, REGION, "KMSKeyNotAccessibleFault", 400, ""),
    (REFUSED, REGION, "InvalidKMSKey.InvalidState", 400, ""),
    (REFUSED, TYPE, "UnauthorizedOperation", 403, SCP),  # of a launch; of a listing see below
    (REFUSED, None, "InvalidBlockDeviceMapping", 400, ""),
    (REFUSED, None, "SomethingNew", 400, ""),
    (AUTH, REGION, "UnauthorizedOperation", 403, ""),
    (AUTH, None, "AuthFailure", 401, ""),
    (AUTH, None, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, ""),
    (AUTH, None, "AuthFailure.SomethingNew", 400, ""),
    (AUTH, None, "ExpiredToken", 403, ""),
    (AUTH, None, "RequestExpired", 400, ""),
    (AUTH, None, "NoCredentials", 401, ""),
    (AUTH, REGION, "OptInRequired", 401, "You are not subscribed to this service."),
    (AUTH, None, "Blocked", 400, ""),
    (AUTH, None, "AccountDisabled", 400, ""),
    (AUTH, REGION, "SomethingNewForbidden", 403, ""),
    (TRANSIENT, None, "RequestLimitExceeded", 503, ""),
    (TRANSIENT, None, "InternalError", 500, ""),
    (TRANSIENT, None, "Unavailable", 503, ""),
    (TRANSIENT, None, "SomethingNew", 500, ""),
    (TRANSIENT, None, "SomethingNew", 429, ""),
    (TRANSIENT, None, "ReadTimeoutError", 0, ""),
    (TRANSIENT, None, "DependencyViolation", 400, ""),
    (TRANSIENT, None, "IncorrectState", 400, ""),
    (TRANSIENT, None, "ConcurrentTagAccess", 400, ""),
    (TRANSIENT, None, "VolumeInUse", 400, ""),
]


@pytest.mark.parametrize(
    ("kind", "scope", "code", "status", "message"),
    CASES,
    ids=[f"{one[2]}-{one[3]}-{one[4][:20]}" for one in CASES],
)
def test_a_code_means(kind: FailureKind, scope: Scope | None, code: str, status: int, message: str) -> None:
    answer = AwsResponse(code, status, message, "r-7")
    raised = error_of(answer, LAUNCH, now=1000.0)
    assert (raised.kind, raised.scope) == (kind, scope)
    assert (raised.code, raised.cloud, raised.zone) == (code, "aws", LAUNCH.zone)
    assert code in raised.message
    assert "request id r-7" in raised.message


def test_every_row_has_a_source_and_a_case() -> None:
    found = [TABLE.find(code, message, SPOT) for _, _, code, _, message in CASES]
    assert [row.codes for row in TABLE.rows if row not in found] == []
    assert all(row.source for row in (*TABLE.rows, *AT_BIRTH.rows))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("UnauthorizedOperation", SCP, id="a policy of the organisation"),
        pytest.param("OptInRequired", "You are not subscribed to this service.", id="not enabled"),
    ],
)
def test_a_listing_that_is_refused_for_good_closes_the_region(code: str, message: str) -> None:
    listing = ErrorContext("ec2:DescribeInstances", "eu-west-3")
    raised = error_of(AwsResponse(code, 403, message), listing, now=0.0)
    assert isinstance(raised, RegionClosedError)
    assert raised.region == "eu-west-3"
    assert "clouds.aws.regions" in raised.message


def test_what_only_aws_can_decode_is_left_out() -> None:
    message = "You are not authorized. Encoded authorization failure message: " + "x" * 1000
    raised = error_of(AwsResponse("UnauthorizedOperation", 403, message, "r-7"), LAUNCH, now=0.0)
    assert raised.message.endswith("(UnauthorizedOperation: You are not authorized.; request id r-7)")


@pytest.mark.parametrize("code", sorted(THROTTLES))
def test_throttling_asks_for_patience(code: str) -> None:
    raised = error_of(AwsResponse(code, 400, ""), LAUNCH, now=0.0)
    assert isinstance(raised, TransientError)
    assert raised.retry_after_s > 1.0


@pytest.mark.parametrize(
    ("asked", "kind"),
    [(LAUNCH, REFUSED), (ErrorContext("ec2:DeleteVolume", "us-east-1"), CONFIG)],
    ids=["a-launch-elsewhere", "anything-else-nowhere"],
)
def test_what_is_not_supported_depends_on_what_was_asked(asked: ErrorContext, kind: FailureKind) -> None:
    assert error_of(AwsResponse("UnsupportedOperation", 400, ""), asked, now=0.0).kind is kind


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
            "tries the other actions, too) (UnauthorizedOperation: User: x is not authorized to perform: ec2:CreateTags on resource: *)",
            id="permission-named",
        ),
    ],
)
def test_the_sentence(code: str, status: int, message: str, sentence: str) -> None:
    assert str(error_of(AwsResponse(code, status, message), LAUNCH, now=0.0)) == sentence


def test_a_quota_error_says_when_to_try_again() -> None:
    raised = error_of(AwsResponse("VcpuLimitExceeded", 400, ""), LAUNCH, now=1000.0)
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
        ("p6-b200.48xlarge", "L-417A185B", None),
        ("dl1.24xlarge", None, None),
        ("hpc7a.96xlarge", None, None),
        ("mac2.metal", None, None),
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
