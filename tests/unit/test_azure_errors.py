"""The table of Azure's codes: what each means for the next step."""

from __future__ import annotations

import pytest

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.azure.error_codes import TABLE
from provisioners.azure.errors import NO_QUOTA_RETRY_S, QUOTA_RETRY_S, AzureFailure, error_of, meaning
from provisioners.port.errors import CapacityError, QuotaError, RegionClosedError, TransientError

CAPACITY, QUOTA, AUTH = FailureKind.CAPACITY, FailureKind.QUOTA, FailureKind.AUTH
CONFIG, TRANSIENT, REFUSED = FailureKind.CONFIG, FailureKind.TRANSIENT, FailureKind.REFUSED

LOW_PRIORITY = (
    "Operation could not be completed as it results in exceeding approved LowPriorityCores quota. Additional details - "
    "Deployment Model: Resource Manager, Location: eastus, Current Limit: 3, Current Usage: 3, Additional Required: 4, "
    "(Minimum) New Limit Required: 7."
)
FAMILY = LOW_PRIORITY.replace("LowPriorityCores", "standardNCASv3_T4Family Cores").replace(
    "Limit: 3", "Limit: 0"
)
REGIONAL = LOW_PRIORITY.replace("LowPriorityCores", "Total Regional Cores")
TOO_MANY = "Cannot create more than 10 public IP addresses for this subscription in this region."
POLICY = (
    "Resource 'x' was disallowed by policy. Policy identifiers: "
    '[{{"policyAssignment":{{"name":"{}","id":"/subscriptions/0"}}}}].'
)
ZONE = Zone("azure", "eastus", "eastus-1")
CLOSED = "The size is not available for your current subscription. Reason: NotAvailableForSubscription"


CASES = [
    pytest.param("SkuNotAvailable", 409, "not available in zone '1'", CAPACITY, id="no room, told at once"),
    pytest.param("SkuNotAvailable", 409, CLOSED, QUOTA, id="a size that is closed to us"),
    pytest.param("ZonalAllocationFailed", None, "", CAPACITY, id="no room, told later"),
    pytest.param("AllocationFailed", 200, "", CAPACITY, id="an error with status 200"),
    pytest.param("OverconstrainedAllocationRequest", None, "", CAPACITY, id="overconstrained"),
    pytest.param("OverconstrainedZonalAllocationRequest", None, "", CAPACITY, id="overconstrained in a zone"),
    pytest.param("OperationNotAllowed", 409, LOW_PRIORITY, QUOTA, id="spot cores"),
    pytest.param("OperationNotAllowed", 409, FAMILY, QUOTA, id="cores of a family"),
    pytest.param("OperationNotAllowed", 409, REGIONAL, QUOTA, id="cores of a region"),
    pytest.param(
        "OperationNotAllowed", 409, "The disk is attached.", REFUSED, id="not allowed, and no quota"
    ),
    pytest.param("QuotaExceeded", 409, "", QUOTA, id="quota by its code"),
    pytest.param("PublicIPCountLimitReached", 400, TOO_MANY, QUOTA, id="addresses"),
    pytest.param("AuthorizationFailed", 403, "", AUTH, id="a permission"),
    pytest.param("InvalidAuthenticationToken", 401, "", AUTH, id="a bad token"),
    pytest.param("", 401, "", AUTH, id="401 without a code"),
    pytest.param("Forbidden", 403, "", AUTH, id="403 with an unknown code"),
    pytest.param("CredentialUnavailable", None, "", AUTH, id="no credentials"),
    pytest.param("SubscriptionNotFound", 404, "", AUTH, id="no such subscription"),
    pytest.param("ReadOnlyDisabledSubscription", 409, "", AUTH, id="unpaid"),
    pytest.param("MissingSubscriptionRegistration", 409, "", AUTH, id="a provider that is not registered"),
    pytest.param("PropertyChangeNotAllowed", 409, "", CONFIG, id="another order of the same name"),
    pytest.param("MarketplacePurchaseEligibilityFailed", 400, "", CONFIG, id="terms"),
    pytest.param("InvalidParameter", 400, "Custom data in OSProfile must be Base64", CONFIG, id="user data"),
    pytest.param(
        "InvalidParameter", 400, "The specified disk size 8 GB is smaller than the image", CONFIG, id="small"
    ),
    pytest.param("TooManyRequests", 429, "", TRANSIENT, id="throttled"),
    pytest.param("", 429, "", TRANSIENT, id="throttled without a code"),
    pytest.param("Conflict", 409, "", TRANSIENT, id="busy"),
    pytest.param("SomethingNew", 409, "", TRANSIENT, id="409 with an unknown code"),
    pytest.param("SomethingNew", 500, "", TRANSIENT, id="500 with an unknown code"),
    pytest.param("RetryableError", 409, "", TRANSIENT, id="retryable"),
    pytest.param("NicReservedForAnotherVm", 400, "", TRANSIENT, id="a card that is still held"),
    pytest.param("Unreachable", None, "", TRANSIENT, id="no answer"),
    pytest.param("", None, "", TRANSIENT, id="nothing is known"),
    pytest.param("SpotVMEvicted", 409, "", CAPACITY, id="evicted"),
    pytest.param("SubscriptionQuotaReached", 400, "", QUOTA, id="a subscription's limit"),
    pytest.param("ResourceGroupQuotaExceeded", 409, "", QUOTA, id="groups"),
    pytest.param("SubnetIsFull", 400, "", QUOTA, id="a full subnet"),
    pytest.param("NetworkInterfaceCountExceeded", 400, "", QUOTA, id="cards"),
    pytest.param("ScopeLocked", 409, "", AUTH, id="a lock"),
    pytest.param("SubscriptionRequestsThrottled", 429, "", TRANSIENT, id="the subscription is throttled"),
    pytest.param("ReferencedResourceNotProvisioned", 409, "", TRANSIENT, id="not there yet"),
    pytest.param("ResourceGroupBeingDeleted", 409, "", TRANSIENT, id="a group that goes"),
    pytest.param("OSProvisioningTimedOut", 409, "", TRANSIENT, id="died"),
]
REFUSALS = {
    "no such image": ("PlatformImageNotFound", 404, "", Scope.REGION),
    "a retired size": (
        "InvalidParameter",
        400,
        "The requested VM size X is not available in the current region.",
        Scope.TYPE,
    ),
    "no spot": (
        "OperationNotAllowed",
        409,
        "The specified size 'X' does not support Spot priority",
        Scope.OFFER,
    ),
    "no spot at all": ("BadRequest", 400, "Azure Spot Virtual Machine is not supported", Scope.OFFER),
    "generation": (
        "BadRequest",
        400,
        "The selected VM size 'X' cannot boot Hypervisor Generation '2'",
        Scope.TYPE,
    ),
    "confidential": (
        "InvalidParameter",
        400,
        "The VM size 'X' requires securityType ConfidentialVM",
        Scope.TYPE,
    ),
    "no zones": ("ResourceTypeNotSupportAvailabilityZones", 400, "", Scope.ZONE),
    "no such zone": ("InvalidAvailabilityZone", 400, "", Scope.ZONE),
    "no such region": ("NoRegisteredProviderFound", 400, "", Scope.REGION),
    "cards of the size": (
        "NetworkInterfaceCountExceeded",
        400,
        "exceeds the maximum allowed for the virtual machine size Standard_A2",
        Scope.TYPE,
    ),
    "a key": ("DiskEncryptionSetNotFound", 404, "", Scope.REGION),
    "sizes that a policy allows": (
        "RequestDisallowedByPolicy",
        403,
        POLICY.format("Allowed VM size SKUs"),
        Scope.TYPE,
    ),
    "a policy": ("RequestDisallowedByPolicy", 403, POLICY.format("Require a tag"), Scope.REGION),
    "a bad parameter": ("InvalidParameter", 400, "", None),
    "an unknown code": ("SomethingNew", 400, "", None),
}


@pytest.mark.parametrize(("code", "status", "message", "scope"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_is_refused_there(code: str, status: int, message: str, scope: Scope | None) -> None:
    raised = error_of(AzureFailure(code, status, message, request_id="r-7"), 0.0, ZONE, CapacityType.SPOT)
    assert (raised.kind, raised.scope) == (REFUSED, scope)
    assert "{" not in raised.message.replace(message, "")
    assert "request id r-7" in raised.message


def test_a_location_policy_closes_the_region_and_is_named() -> None:
    failure = AzureFailure("RequestDisallowedByPolicy", 403, POLICY.format("Allowed locations"))
    raised = error_of(failure, 0.0, ZONE)
    assert isinstance(raised, RegionClosedError)
    assert raised.region == "eastus"
    assert "policy 'Allowed locations'" in raised.message
    assert "clouds.azure.regions" in raised.message


def test_every_row_has_a_source_and_a_case() -> None:
    cases = [
        *((one.values[0], one.values[2]) for one in CASES),
        *((code, said) for code, _, said, _ in REFUSALS.values()),
    ]
    cases.append(("RequestDisallowedByPolicy", POLICY.format("Allowed locations")))
    found = [TABLE.find(code, message, CapacityType.SPOT) for code, message in cases]
    assert [(row.codes, row.pattern) for row in TABLE.rows if row not in found] == []
    assert all(row.source for row in TABLE.rows)


@pytest.mark.parametrize(("code", "status", "message", "kind"), CASES)
def test_what_a_code_means(code: str, status: int | None, message: str, kind: FailureKind) -> None:
    means = meaning(code, status, message, CapacityType.SPOT)
    assert means.kind is kind
    assert means.advice
    assert "{" not in means.advice


@pytest.mark.parametrize(
    ("message", "name", "need", "retry_s"),
    [
        (LOW_PRIORITY, "LowPriorityCores", "7", QUOTA_RETRY_S),
        (FAMILY, "standardNCASv3_T4Family Cores", "7", NO_QUOTA_RETRY_S),
        (REGIONAL, "Total Regional Cores", "7", QUOTA_RETRY_S),
    ],
    ids=["spot", "family without any", "region"],
)
def test_a_quota_is_named_and_tried_again_later(message: str, name: str, need: str, retry_s: float) -> None:
    error = error_of(AzureFailure("OperationNotAllowed", 409, message), now=1000.0)
    assert isinstance(error, QuotaError)
    assert repr(name) in error.message
    assert f"to {need} or more" in error.message
    assert error.retry_at == 1000.0 + retry_s


def test_an_error_says_where_and_in_which_market() -> None:
    zone = Zone("azure", "eastus", "eastus-1")
    error = error_of(
        AzureFailure("AllocationFailed", None, "No  \n capacity."), 0.0, zone, CapacityType.ON_DEMAND
    )
    assert isinstance(error, CapacityError)
    assert (error.zone, error.code, error.cloud) == (zone, "AllocationFailed", "azure")
    assert "on-demand machines" in error.message
    assert "(AllocationFailed: No capacity.)" in error.message


@pytest.mark.parametrize(
    ("told_s", "expected_s"),
    [(None, 180.0), (7.0, 7.0), (0.0, 0.0)],
    ids=["the table's", "Azure's", "at once"],
)
def test_azures_own_wait_goes_first(told_s: float | None, expected_s: float) -> None:
    error = error_of(AzureFailure("NicReservedForAnotherVm", 400, "", told_s), 0.0)
    assert isinstance(error, TransientError)
    assert error.retry_after_s == expected_s


def test_a_long_text_is_cut() -> None:
    assert len(error_of(AzureFailure("InvalidParameter", 400, "long " * 1000), 0.0).message) < 500
