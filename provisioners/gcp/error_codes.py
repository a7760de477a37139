"""What Compute Engine's codes mean: the table. Pure.

A refusal comes as an HTTP error with a `reason` (`quotaExceeded`), or minutes later as the `code` of an operation that was
accepted (`QUOTA_EXCEEDED`). Both are spelled alike here: lower case, without underscores.

Sources: API is Google's "Handling API errors", VM "Troubleshooting VM creation", POLICY "Organization policy constraints",
GPU "Create an A3 VM" and its neighbours, owner/name#n an issue or pull request on GitHub where the message was seen, K
knowledge that only a real account can confirm (`docs/unconfirmed.md`).

In `advice` {message}, {market}, {quota}, {region}, {constraint} and {permission} are filled in.
"""

from __future__ import annotations

from policies.model import CapacityType, FailureKind, Scope
from provisioners.port.error_codes import ErrorCode, ErrorTable

_K = FailureKind

_NO_ROOM = "there is no {market} capacity: another zone or machine type may have some ({message})"
_NOT_OFFERED = "the machine type or accelerator is not offered there: take another zone or type ({message})"
THROTTLED = "Compute Engine throttles our requests: tried again a little later ({message})"
HICCUP = "Compute Engine did not answer properly: tried again ({message})"
LOG_IN = (
    "the credentials are not accepted: log in again with `gcloud auth application-default login` ({message})"
)
DENIED = "the credentials do not allow it: grant the permission {permission} ({message})"
WRONG = "Compute Engine refuses the order as wrong: {message}"
REFUSED = "Compute Engine refuses the order there, and another zone or machine type may take it ({message})"
_CLOSED = (
    "the region is closed by the organisation's policy gcp.resourceLocations: set clouds.gcp.regions to the regions that"
    " are open ({message})"
)
REQUIRES_OS_LOGIN = "constraints/compute.requireOsLogin"
_POLICY = "conditionnotmet badrequest invalid forbidden permissiondenied failedprecondition"


def _constraint(name: str, scope: Scope, what_to_do: str, source: str) -> ErrorCode:
    return ErrorCode(
        _POLICY,
        _K.REFUSED,
        f"the organisation's policy {name} forbids it: {what_to_do} ({{message}})",
        source,
        rf"constraints/{name}",
        scope,
    )


def spelled(code: str) -> str:
    return code.replace("_", "").lower()


TABLE = ErrorTable(
    (
        # What organisations forbid. It comes as 412 at once, or as the code of an operation.
        ErrorCode(
            _POLICY,
            _K.AUTH,
            _CLOSED,
            "POLICY; cloudfoundry/bosh-bootloader#513; googlecodelabs/feedback#351",
            r"constraints/gcp\.resourceLocations",
            Scope.REGION,
            closes_region=True,
        ),
        _constraint(
            r"compute.vmExternalIpAccess",
            Scope.CLOUD,
            "let the controller run inside the network and set clouds.gcp.use_private_ip, or ask for an exception",
            "POLICY; googlecodelabs/feedback#695; gardener/gardener-extension-provider-gcp#415",
        ),
        _constraint(
            r"compute.requireOsLogin",
            Scope.CLOUD,
            "set clouds.gcp.os_login to auto or true",
            "POLICY",
        ),
        _constraint(
            r"compute.requireShieldedVm",
            Scope.CLOUD,
            "set clouds.gcp.shielded, and name an image that boots with Secure Boot",
            "POLICY; fortinet/fortigate-terraform-deploy#34",
        ),
        _constraint(
            r"compute.trustedImageProjects",
            Scope.CLOUD,
            "name an image of a project that is trusted (`image`)",
            "POLICY",
        ),
        ErrorCode(
            _POLICY,
            _K.REFUSED,
            "the organisation's policy {constraint} forbids it ({message})",
            "POLICY",
            r"constraints?/|violates? constraint",
            Scope.REGION,
        ),
        # stock-outs next: they also come dressed as 503
        ErrorCode(
            "zoneresourcepoolexhausted zoneresourcepoolexhaustedwithdetails resourcepoolexhausted"
            " resourcepoolexhaustedwithdetails stockout gcestockout insufficientcapacity vmmincountnotreached",
            _K.CAPACITY,
            _NO_ROOM,
            "VM; SkyPilot's and dstack's tables",
        ),
        ErrorCode(
            "",
            _K.CAPACITY,
            "the reservation has no free machine now, or has not started ({message})",
            "kubernetes/autoscaler#6006; GoogleCloudPlatform/gsutil#1000; skypilot-org/skypilot#4579",
            r"reservations?\b.*(not have (enough|available|sufficient)|in READY state)|insufficient reserved capacity",
        ),
        ErrorCode(
            "",
            _K.REFUSED,
            "the reservation is not there, or cannot be asked for by name: check clouds.gcp.reservations, and that it was made "
            "with --require-specific-reservation ({message})",
            "kubernetes/autoscaler#6006; skypilot-org/skypilot#3327",
            r"could not find the given reservation|reservations? .*can ?not be targeted|must use ReservationAffinity"
            r"|reservation must exist in the same project|incompatible AggregateReservation",
            Scope.OFFER,
        ),
        ErrorCode("", _K.CAPACITY, _NO_ROOM, "VM", r"does not have enough resources|resource pool exhausted"),
        ErrorCode(
            "unsupportedoperation invalid badrequest invalidusage",
            _K.REFUSED,
            "that kind of disk does not go with the machine type: another type may work ({message})",
            "astronomer/astronomer#2463; NVIDIA/aicr#2338",
            r"features are not compatible|disk type cannot be used",
            Scope.TYPE,
        ),
        ErrorCode(
            "unsupportedoperation invalid badrequest invalidusage",
            _K.REFUSED,
            "Google does not sell the machine type on this market: take spot, or another type ({message})",
            "GPU",
            r"provisioning model|only supports Spot",
            Scope.OFFER,
        ),
        ErrorCode(
            "unsupportedoperation",
            _K.CAPACITY,
            "it was preempted while it was being made ({message})",
            "SkyPilot's table",
            market=CapacityType.SPOT,
        ),
        ErrorCode(
            "ipspaceexhausted ipspaceexhaustedwithdetails",
            _K.CAPACITY,
            "the subnetwork of {region} has no free address: enlarge it, or use another region ({message})",
            "VM",
        ),
        ErrorCode(
            "",
            _K.REFUSED,
            _NOT_OFFERED,
            "VM",
            r"(machine ?types?|accelerator ?types?)\b.*(does not exist|not found|not available|not supported in)",
        ),
        # throttling comes as 429, and as 403; the quota of requests per minute is no quota of machines
        ErrorCode(
            "ratelimitexceeded userratelimitexceeded resourceoperationrateexceeded operationrateexceeded"
            " toomanyrequests concurrentlimitexceeded",
            _K.TRANSIENT,
            THROTTLED,
            "API",
        ),
        ErrorCode(
            "quotaexceeded", _K.TRANSIENT, THROTTLED, "API", r"quer(y|ies) per|requests per|per minute"
        ),
        ErrorCode(
            "quotaexceeded limitexceeded type.googleapis.com/google.rpc.quotafailure",
            _K.QUOTA,
            "the project has as many networks as it may: set clouds.gcp.network or clouds.gcp.subnets to those of yours, or ask"
            " for more of {quota} under IAM & Admin > Quotas ({message})",
            "VPC 'Quotas and limits'",
            r"quota '?NETWORKS\b",
            Scope.CLOUD,
        ),
        ErrorCode(
            "quotaexceeded limitexceeded type.googleapis.com/google.rpc.quotafailure",
            _K.QUOTA,
            "the project's quota {quota} is used up in all regions: ask for more of it under IAM & Admin > Quotas, or use"
            " another cloud ({message})",
            "VM",
            r"globally|all[ _]regions",
            Scope.CLOUD,
        ),
        ErrorCode(
            "quotaexceeded limitexceeded type.googleapis.com/google.rpc.quotafailure",
            _K.QUOTA,
            "the project's quota {quota} is used up in {region}: ask for more of it under IAM & Admin > Quotas, or use"
            " another region ({message})",
            "VM",
        ),
        ErrorCode(
            "accessnotconfigured servicedisabled",
            _K.AUTH,
            "the Compute Engine API is not enabled: `gcloud services enable compute.googleapis.com` ({message})",
            "API",
        ),
        ErrorCode(
            "forbidden billingdisabled billingnotenabled accountdisabled",
            _K.AUTH,
            "the project has no working billing account: link one to it ({message})",
            "API",
            r"billing",
        ),
        ErrorCode(
            "forbidden notfound",
            _K.REFUSED,
            "the project cannot use that location: take another region ({message})",
            "pulumi/pulumi-google-native#292",
            r"location \S+ (is )?not found or access is unauthorized",
            Scope.REGION,
        ),
        ErrorCode("autherror required unauthenticated expired", _K.AUTH, LOG_IN, "API"),
        ErrorCode(
            "forbidden iampermissiondenied permissionserror permissiondenied insufficientpermissions",
            _K.AUTH,
            DENIED,
            "API",
        ),
        ErrorCode(
            "backenderror internalerror resourcenotready resourceinusebyanotherresource serviceunavailable operationcanceled"
            " resourcebeingused",
            _K.TRANSIENT,
            HICCUP,
            "API",
        ),
        ErrorCode(
            "invalid notfound resourcenotfound",
            _K.CONFIG,
            "there is no such image: name another, or leave it to the default ({message})",
            "VM: images are global, so it is missing in every region",
            r"\bimages?\b.*(not found|cannot be found|does not exist)",
        ),
        ErrorCode(
            "invalid badrequest invalidusage",
            _K.CONFIG,
            "the disk is smaller than the image: raise `disk_size` ({message})",
            "VM",
            r"smaller than the size of the image|disk size .*(smaller|less) than",
        ),
        ErrorCode("invalid", _K.CONFIG, WRONG, "API", r"field 'resource\.(name|labels|metadata)"),
        ErrorCode("alreadyexists duplicate", _K.CONFIG, WRONG, "API: the name is taken"),
        ErrorCode(
            "notfound",
            _K.AUTH,
            "there is no such project, or the credentials do not see it: check clouds.gcp.project ({message})",
            "API",
            r"projects/[^/']+' was not found",
        ),
        ErrorCode(
            "notfound resourcenotfound invalid",
            _K.REFUSED,
            "there is no such network: check clouds.gcp.network ({message})",
            "API: networks are the project's",
            r"\b(sub)?networks/.*(not found|cannot be found)",
            Scope.CLOUD,
        ),
        ErrorCode(
            "invalid badrequest invalidusage",
            _K.REFUSED,
            "the network is in custom subnet mode: name a subnetwork of {region} in clouds.gcp.subnets ({message})",
            "compute_v1: NetworkInterface.subnetwork; hashicorp/terraform-google-vault#21;"
            " datastax-archive/google-compute-engine-dse#27",
            r"subnetwork should be specified|must specify a subnet|custom subnet",
            Scope.REGION,
        ),
        ErrorCode(
            "invalid notfound resourcenotfound",
            _K.REFUSED,
            "the project has no such zone: another is next ({message})",
            "inspec/inspec-gcp#301",
            r"unknown zone|projects/[^/']+/zones/[^/']+' was not found",
            Scope.ZONE,
        ),
    ),
    spelled,
)

BY_STATUS = (
    (frozenset({401}), ErrorCode("", _K.AUTH, LOG_IN, "by the status")),
    (frozenset({403}), ErrorCode("", _K.AUTH, DENIED, "by the status")),
    (frozenset({429}), ErrorCode("", _K.TRANSIENT, THROTTLED, "by the status")),
    (frozenset({408, 425}), ErrorCode("", _K.TRANSIENT, HICCUP, "by the status")),
    (frozenset(range(400, 500)), ErrorCode("", _K.REFUSED, REFUSED, "unknown")),
)
UNKNOWN = ErrorCode("", _K.TRANSIENT, HICCUP, "unknown, and without a status")
