"""The table of Azure's codes: what each means for the next step."""

from __future__ import annotations

import pytest

from policies.model import CapacityType, FailureKind, Zone
from provisioners.azure.errors import NO_QUOTA_RETRY_S, QUOTA_RETRY_S, Failure, error_of, meaning
from provisioners.errors import CapacityError, QuotaError, TransientError

CAPACITY, QUOTA, AUTH = FailureKind.CAPACITY, FailureKind.QUOTA, FailureKind.AUTH
CONFIG, TRANSIENT = FailureKind.CONFIG, FailureKind.TRANSIENT

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
CLOSED = "The size is not available for your current subscription. Reason: NotAvailableForSubscription"


@pytest.mark.parametrize(
    ("code", "status", "message", "kind"),
    [
        pytest.param(
            "SkuNotAvailable", 409, "not available in zone '1'", CAPACITY, id="no room, told at once"
        ),
        pytest.param("SkuNotAvailable", 409, CLOSED, QUOTA, id="a size that is closed to us"),
        pytest.param("ZonalAllocationFailed", None, "", CAPACITY, id="no room, told later"),
        pytest.param("AllocationFailed", 200, "", CAPACITY, id="an error with status 200"),
        pytest.param("OverconstrainedAllocationRequest", None, "", CAPACITY, id="overconstrained"),
        pytest.param(
            "OverconstrainedZonalAllocationRequest", None, "", CAPACITY, id="overconstrained in a zone"
        ),
        pytest.param("OperationNotAllowed", 409, LOW_PRIORITY, QUOTA, id="spot cores"),
        pytest.param("OperationNotAllowed", 409, FAMILY, QUOTA, id="cores of a family"),
        pytest.param("OperationNotAllowed", 409, REGIONAL, QUOTA, id="cores of a region"),
        pytest.param(
            "OperationNotAllowed", 409, "The disk is attached.", CONFIG, id="not allowed, and no quota"
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
        pytest.param(
            "MissingSubscriptionRegistration", 409, "", AUTH, id="a provider that is not registered"
        ),
        pytest.param("RequestDisallowedByPolicy", 403, "", AUTH, id="a policy"),
        pytest.param("PlatformImageNotFound", 404, "", CONFIG, id="no such image"),
        pytest.param("InvalidParameter", 400, "", CONFIG, id="a bad parameter"),
        pytest.param("PropertyChangeNotAllowed", 409, "", CONFIG, id="another order of the same name"),
        pytest.param("SomethingNew", 400, "", CONFIG, id="400 with an unknown code"),
        pytest.param("TooManyRequests", 429, "", TRANSIENT, id="throttled"),
        pytest.param("", 429, "", TRANSIENT, id="throttled without a code"),
        pytest.param("Conflict", 409, "", TRANSIENT, id="busy"),
        pytest.param("SomethingNew", 409, "", TRANSIENT, id="409 with an unknown code"),
        pytest.param("SomethingNew", 500, "", TRANSIENT, id="500 with an unknown code"),
        pytest.param("RetryableError", 409, "", TRANSIENT, id="retryable"),
        pytest.param("NicReservedForAnotherVm", 400, "", TRANSIENT, id="a card that is still held"),
        pytest.param("Unreachable", None, "", TRANSIENT, id="no answer"),
    ],
)
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
    error = error_of(Failure("OperationNotAllowed", 409, message), now=1000.0)
    assert isinstance(error, QuotaError)
    assert repr(name) in error.message
    assert f"to {need} or more" in error.message
    assert error.retry_at == 1000.0 + retry_s


def test_an_error_says_where_and_in_which_market() -> None:
    zone = Zone("azure", "eastus", "eastus-1")
    error = error_of(Failure("AllocationFailed", None, "No  \n capacity."), 0.0, zone, CapacityType.ON_DEMAND)
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
    error = error_of(Failure("NicReservedForAnotherVm", 400, "", told_s), 0.0)
    assert isinstance(error, TransientError)
    assert error.retry_after_s == expected_s


def test_a_long_text_is_cut() -> None:
    assert len(error_of(Failure("InvalidParameter", 400, "long " * 1000), 0.0).message) < 500
