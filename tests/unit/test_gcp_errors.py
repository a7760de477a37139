"""Compute Engine's codes as a truth table: what comes, what it means for the next decision, what users read."""

import pytest

from policies.model import CapacityType, FailureKind, Scope, Zone
from provisioners.gcp.error_codes import TABLE, spelled
from provisioners.gcp.errors import QUOTA_RETRY_S, THROTTLED_RETRY_S, error_of, outcome_of
from provisioners.port.errors import QuotaError, RegionClosedError, TransientError

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
ZONE = Zone("gcp", "us-central1", "us-central1-a")
K = FailureKind

STOCK_OUT = (
    "The zone 'projects/p/zones/us-central1-a' does not have enough resources available to fulfill the request."
    "  Try a different zone, or try again later."
)
L4_QUOTA = "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.  Limit: 0.0 in region us-central1."
ALL_GPUS = "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."
QUERIES = (
    "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'compute.googleapis.com'"
    " for consumer 'project_number:1'."
)
NO_PERMISSION = (
    "Required 'compute.instances.create' permission for 'projects/p/zones/us-central1-a/instances/r1'"
)
NO_TYPE = (
    "Invalid value for field 'resource.machineType': 'zones/us-central1-a/machineTypes/a3-highgpu-8g'."
    " Machine type with name 'a3-highgpu-8g' does not exist in zone 'us-central1-a'."
)
NO_ACCELERATOR = (
    "The resource 'projects/p/zones/us-central1-a/acceleratorTypes/nvidia-tesla-t4' was not found"
)
NO_IMAGE = "The resource 'projects/p/global/images/family/nope' was not found"

STANDARD = "Instance 'x' creation failed: The provisioning model STANDARD is not supported for machine type a3-highgpu-1g"
FEATURES = "[pd-balanced, c4-standard-16] features are not compatible for creating instance."
CUSTOM = "Invalid value for field 'x'. Subnetwork should be specified for custom subnetmode network"
EXTERNAL_IP = "Constraint constraints/compute.vmExternalIpAccess violated for project 1. Add instance x to the constraint"
CLOSED = "Location us-central1-a violates constraint constraints/gcp.resourceLocations on the resource projects/p/x."

FULL_RESERVATION = "Specified reservations [r1] do not have available resources for the request."
NOT_READY = "Cannot use reservation r1: it requires reservation to be in READY state"
OPEN_RESERVATION = "Specified reservations [projects/p/reservations/r] can not be targeted as specificReservationRequired is not set"
NO_RESERVATION = "Could not find the given reservation with the following name: r1"

CASES = {
    # throttled
    "429 rateLimitExceeded": ("rateLimitExceeded", 429, QUERIES, SPOT, K.TRANSIENT),
    "403 rateLimitExceeded is no missing permission": ("rateLimitExceeded", 403, QUERIES, SPOT, K.TRANSIENT),
    "403 userRateLimitExceeded": ("userRateLimitExceeded", 403, "", SPOT, K.TRANSIENT),
    "403 quotaExceeded of requests is no quota of machines": (
        "quotaExceeded",
        403,
        QUERIES,
        SPOT,
        K.TRANSIENT,
    ),
    "operation rate": ("RESOURCE_OPERATION_RATE_EXCEEDED", 403, "", SPOT, K.TRANSIENT),
    "429 of unknown reason": ("", 429, "", SPOT, K.TRANSIENT),
    # transient
    "500 internalError": ("internalError", 500, "Internal error", SPOT, K.TRANSIENT),
    "503 backendError": ("backendError", 503, "Backend Error", SPOT, K.TRANSIENT),
    "not ready yet": ("resourceNotReady", 400, "The resource is not ready", SPOT, K.TRANSIENT),
    "operation not ready": ("RESOURCE_NOT_READY", 400, "", SPOT, K.TRANSIENT),
    "operation internal error": ("INTERNAL_ERROR", 500, "", SPOT, K.TRANSIENT),
    "unknown 502": ("", 502, "Bad gateway", SPOT, K.TRANSIENT),
    "unknown code without a status": ("BRAND_NEW", 0, "", SPOT, K.TRANSIENT),
    # capacity
    "a full reservation": ("invalid", 400, FULL_RESERVATION, ON_DEMAND, K.CAPACITY),
    "a reservation that has not begun": ("invalid", 400, NOT_READY, ON_DEMAND, K.CAPACITY),
    "a reservation that is open to all": ("invalid", 400, OPEN_RESERVATION, ON_DEMAND, K.REFUSED),
    "no such reservation": ("invalid", 400, NO_RESERVATION, ON_DEMAND, K.REFUSED),
    "stock-out of spot": ("ZONE_RESOURCE_POOL_EXHAUSTED", 503, STOCK_OUT, SPOT, K.CAPACITY),
    "stock-out on demand": ("ZONE_RESOURCE_POOL_EXHAUSTED", 503, STOCK_OUT, ON_DEMAND, K.CAPACITY),
    "stock-out with details": ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 503, "", SPOT, K.CAPACITY),
    "stock-out dressed as 503": ("backendError", 503, STOCK_OUT, SPOT, K.CAPACITY),
    "preempted while being made": ("UNSUPPORTED_OPERATION", 400, "Instance was preempted", SPOT, K.CAPACITY),
    "no address left": ("IP_SPACE_EXHAUSTED", 400, "IP space is exhausted", SPOT, K.CAPACITY),
    "stock-out by another name": ("GCE_STOCKOUT", 503, "x", SPOT, K.CAPACITY),
    # refused there
    "type not in this zone": ("invalid", 400, NO_TYPE, SPOT, K.REFUSED),
    "accelerator not in this zone": ("notFound", 404, NO_ACCELERATOR, SPOT, K.REFUSED),
    "no such zone": (
        "invalid",
        400,
        "Invalid value for field 'zone': 'us-x-1'. Unknown zone.",
        SPOT,
        K.REFUSED,
    ),
    "zone not found": (
        "notFound",
        404,
        "The resource 'projects/p/zones/asia-x1-a' was not found",
        SPOT,
        K.REFUSED,
    ),
    "location": (
        "forbidden",
        403,
        "Location us-south1 not found or access is unauthorized.",
        SPOT,
        K.REFUSED,
    ),
    "not sold on demand": ("UNSUPPORTED_OPERATION", 400, STANDARD, ON_DEMAND, K.REFUSED),
    "a disk that does not fit": ("UNSUPPORTED_OPERATION", 400, FEATURES, SPOT, K.REFUSED),
    "a network in custom mode": ("invalid", 400, CUSTOM, SPOT, K.REFUSED),
    "no address from outside": ("conditionNotMet", 412, EXTERNAL_IP, SPOT, K.REFUSED),
    "no address, told later": ("CONDITION_NOT_MET", 412, EXTERNAL_IP, SPOT, K.REFUSED),
    "networks": ("quotaExceeded", 403, "Quota 'NETWORKS' exceeded.  Limit: 5.0 globally.", SPOT, K.QUOTA),
    "OS Login": (
        "conditionNotMet",
        412,
        "Constraint constraints/compute.requireOsLogin violated",
        SPOT,
        K.REFUSED,
    ),
    "Secure Boot": (
        "conditionNotMet",
        412,
        "Constraint constraints/compute.requireShieldedVm violated",
        SPOT,
        K.REFUSED,
    ),
    "image projects": (
        "conditionNotMet",
        412,
        "Constraint constraints/compute.trustedImageProjects violated",
        SPOT,
        K.REFUSED,
    ),
    "another constraint": (
        "conditionNotMet",
        412,
        "Constraint constraints/compute.newOne violated",
        SPOT,
        K.REFUSED,
    ),
    "unsupported on demand": ("UNSUPPORTED_OPERATION", 400, "Operation not supported", ON_DEMAND, K.REFUSED),
    "an unknown field": ("invalid", 400, "Invalid value for field 'x'", SPOT, K.REFUSED),
    "no such network": (
        "RESOURCE_NOT_FOUND",
        404,
        "The resource 'global/networks/x' was not found",
        SPOT,
        K.REFUSED,
    ),
    "unknown 412": ("brandNew", 412, "", SPOT, K.REFUSED),
    "closed region": ("conditionNotMet", 412, CLOSED, SPOT, K.AUTH),
    # quota
    "403 quotaExceeded": ("quotaExceeded", 403, L4_QUOTA, SPOT, K.QUOTA),
    "operation quota": ("QUOTA_EXCEEDED", 403, L4_QUOTA, SPOT, K.QUOTA),
    "all regions": ("QUOTA_EXCEEDED", 403, ALL_GPUS, SPOT, K.QUOTA),
    "rpc quota": (
        "type.googleapis.com/google.rpc.QuotaFailure",
        429,
        "Quota limit 'X' exceeded",
        SPOT,
        K.QUOTA,
    ),
    # auth
    "401": ("authError", 401, "Invalid Credentials", SPOT, K.AUTH),
    "401 without a reason": ("", 401, "Unauthorized", SPOT, K.AUTH),
    "403 forbidden": ("forbidden", 403, NO_PERMISSION, SPOT, K.AUTH),
    "operation permission": ("PERMISSIONS_ERROR", 403, NO_PERMISSION, SPOT, K.AUTH),
    "API not enabled": ("accessNotConfigured", 403, "Compute Engine API has not been used", SPOT, K.AUTH),
    "no billing": ("forbidden", 403, "The billing account for the owning project is disabled", SPOT, K.AUTH),
    "no such project": ("notFound", 404, "The resource 'projects/p' was not found", SPOT, K.AUTH),
    # config
    "400 invalid": ("invalid", 400, "Invalid value for field 'resource.name': 'R_1'.", SPOT, K.CONFIG),
    "no such image": ("notFound", 404, NO_IMAGE, SPOT, K.CONFIG),
    "a small disk": (
        "invalid",
        400,
        "Requested disk size cannot be smaller than the image size",
        SPOT,
        K.CONFIG,
    ),
    "name taken": ("alreadyExists", 409, "The resource already exists", SPOT, K.CONFIG),
}


@pytest.mark.parametrize(
    ("code", "status", "message", "capacity_type", "kind"), CASES.values(), ids=CASES.keys()
)
def test_what_a_code_means(
    code: str, status: int, message: str, capacity_type: CapacityType, kind: FailureKind
) -> None:
    assert outcome_of(code, status, message, capacity_type).kind is kind
    raised = error_of(code, status, message, capacity_type=capacity_type, zone=ZONE, now=0.0)
    assert (raised.kind, raised.cloud, raised.code, raised.zone) == (kind, "gcp", code, ZONE)
    assert "{" not in raised.message


def test_every_row_has_a_source_and_a_case() -> None:
    found = [TABLE.find(code, message, market) for code, _, message, market, _ in CASES.values()]
    assert [(row.codes, row.pattern) for row in TABLE.rows if row not in found] == []
    assert all(row.source for row in TABLE.rows)
    assert spelled("GCE_STOCKOUT") in {name for row in TABLE.rows for name in row.names}


def test_a_location_policy_closes_the_region() -> None:
    raised = error_of("conditionNotMet", 412, CLOSED, zone=ZONE, now=0.0)
    assert isinstance(raised, RegionClosedError)
    assert raised.region == "us-central1"
    assert "clouds.gcp.regions" in raised.message


@pytest.mark.parametrize(
    ("code", "status", "message", "scope"),
    [
        pytest.param("conditionNotMet", 412, EXTERNAL_IP, Scope.CLOUD, id="a policy is the project's"),
        pytest.param("QUOTA_EXCEEDED", 403, ALL_GPUS, Scope.CLOUD, id="a quota of all regions"),
        pytest.param("QUOTA_EXCEEDED", 403, L4_QUOTA, None, id="a quota of a region"),
        pytest.param(
            "notFound", 404, "The resource 'projects/p/zones/x-a' was not found", Scope.ZONE, id="a zone"
        ),
        pytest.param("UNSUPPORTED_OPERATION", 400, FEATURES, Scope.TYPE, id="a machine type"),
        pytest.param("UNSUPPORTED_OPERATION", 400, STANDARD, Scope.OFFER, id="a market"),
    ],
)
def test_what_a_refusal_is_about(code: str, status: int, message: str, scope: Scope | None) -> None:
    assert error_of(code, status, message, zone=ZONE, now=0.0).scope is scope


@pytest.mark.parametrize(
    ("code", "status", "message", "told"),
    [
        pytest.param(
            "quotaExceeded",
            403,
            L4_QUOTA,
            "quota PREEMPTIBLE_NVIDIA_L4_GPUS is used up in us-central1",
            id="quota",
        ),
        pytest.param(
            "QUOTA_EXCEEDED", 403, ALL_GPUS, "quota GPUS_ALL_REGIONS is used up in all regions", id="all GPUs"
        ),
        pytest.param(
            "forbidden", 403, NO_PERMISSION, "grant the permission compute.instances.create", id="permission"
        ),
        pytest.param("ZONE_RESOURCE_POOL_EXHAUSTED", 503, STOCK_OUT, "no spot capacity", id="stock-out"),
        pytest.param("accessNotConfigured", 403, "", "gcloud services enable compute", id="API"),
        pytest.param("authError", 401, "", "gcloud auth application-default login", id="credentials"),
    ],
)
def test_the_sentence_says_what_to_do(code: str, status: int, message: str, told: str) -> None:
    assert told in error_of(code, status, message, capacity_type=SPOT, zone=ZONE, now=0.0).message


def test_a_quota_is_left_alone_for_a_while() -> None:
    raised = error_of("quotaExceeded", 403, L4_QUOTA, zone=ZONE, now=100.0)
    assert isinstance(raised, QuotaError)
    assert raised.retry_at == 100.0 + QUOTA_RETRY_S


@pytest.mark.parametrize(
    ("asked_s", "waited_s"), [(None, THROTTLED_RETRY_S), (7.0, 7.0)], ids=["unasked", "asked for 7 s"]
)
def test_throttling_is_waited_for_as_long_as_it_asks(asked_s: float | None, waited_s: float) -> None:
    raised = error_of("rateLimitExceeded", 429, QUERIES, now=0.0, retry_after_s=asked_s)
    assert isinstance(raised, TransientError)
    assert raised.retry_after_s == waited_s
