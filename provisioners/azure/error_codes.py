"""What Azure's codes mean: the table. Pure.

Sources: ARM is "Troubleshoot common Azure deployment errors", VM "Azure VM allocation failures" and "Error codes for spot
VMs", POLICY "RequestDisallowedByPolicy error", THROTTLE "Understand how Resource Manager throttles requests", PEERS the
tables of Karpenter for Azure, dstack and SkyPilot, owner/name#n an issue or pull request on GitHub where the message was
seen, K knowledge that only a real account can confirm (`docs/unconfirmed.md`), "ours" a code that this package makes.

In `advice` {market} and {policy} are filled in. Where a quota's advice is empty, it is made from the message. The first row that
fits decides, so rows with a pattern come before the general row of their code, even where the kind differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.model import FailureKind, Scope
from provisioners.port.error_codes import ErrorCode, ErrorTable

_K = FailureKind

_NO_QUOTA_RETRY_S = 60 * 60.0
_QUOTA_RETRY_S = 30 * 60.0

_NO_ROOM = (
    "Azure has no room for {market} machines of this size here now: another zone or region may have some"
)
_LOGIN = "the credentials were refused: sign in again (`az login`) or renew the service principal's secret"
_ROLE = "a permission is missing: give the identity the action named here, or the role Contributor"
_SUBSCRIPTION = "the subscription cannot be used: check that its id is right and that it is active"
_REGISTER = "register the resource provider named here: `az provider register --namespace ...`"
_IMAGE = "there is no such image here: check `image` (publisher:offer:sku:version, or a resource id)"
_TERMS = "the image's terms must be accepted once: `az vm image terms accept --urn ...`"
REFUSED = "Azure refuses it here, and another zone or size may take it"
_NOT_HERE = "the size is not sold in this region: another size or region is next"
_NO_ZONE = "the region does not have that zone, or not for machines: another is next"
_NO_REGION = "the region does not sell that: another region is next"
_NO_SPOT = "the size is not sold as spot here: another size, or on-demand, is next"
_GENERATION = (
    "the image does not boot on this size: another size is next, or name an image that does (`image`)"
)
_POLICY = "the organisation's policy {policy} forbids it: ask for an exception, or do as it asks"
_CLOSED = "the region is closed by the organisation's policy {policy}: set clouds.azure.regions to the regions that are open"
LATER = "Azure could not do it now; the same order is sent again"
_SLOW = "too many requests; the same order is sent again when Azure allows it"
_BUSY = "Azure is still busy with an earlier change of the same thing"
_DIED = "Azure broke off the creation of the machine"

TABLE = ErrorTable(
    (
        # Another zone, now.
        ErrorCode(
            "SkuNotAvailable",
            _K.QUOTA,
            "the size is not open to this subscription here: ask for access in the portal (Usage + quotas)",
            "PEERS; VM",
            r"NotAvailableForSubscription|not available (?:for|to) your (?:current )?subscription",
            retry_s=_NO_QUOTA_RETRY_S,
        ),
        ErrorCode(
            "AllocationFailed ZonalAllocationFailed OverconstrainedAllocationRequest AllocationTimeout"
            " OverconstrainedZonalAllocationRequest SkuNotAvailable CapacityNotAvailable ResourcesForSkuUnavailable",
            _K.CAPACITY,
            _NO_ROOM,
            "VM; PEERS",
        ),
        ErrorCode(
            "SpotEvicted SpotVMEvicted",
            _K.CAPACITY,
            "Azure took the spot machine back before it ran",
            "ours; K",
        ),
        # Another region or size, until a person requests more.
        ErrorCode(
            "QuotaExceeded ResourceQuotaExceeded PublicIPCountLimitReached PublicIPAddressCountLimitReached"
            " SubscriptionQuotaReached VirtualNetworkCountLimitReached ManagedDiskQuota",
            _K.QUOTA,
            "",
            "ARM; PEERS",
            retry_s=_QUOTA_RETRY_S,
        ),
        ErrorCode(
            "ResourceGroupQuotaExceeded",
            _K.QUOTA,
            "the subscription has as many resource groups as it may have: delete some, or use another subscription",
            "ARM",
            scope=Scope.CLOUD,
            retry_s=_QUOTA_RETRY_S,
        ),
        ErrorCode("SubnetIsFull", _K.QUOTA, "", "ARM", retry_s=_QUOTA_RETRY_S),
        ErrorCode(
            "NetworkInterfaceCountExceeded",
            _K.REFUSED,
            "the size has room for fewer network cards: another size is next",
            "Azure/azure-sdk-for-java#15425",
            "maximum allowed for the virtual machine size",
            Scope.TYPE,
        ),
        ErrorCode("NetworkInterfaceCountExceeded", _K.QUOTA, "", "K", retry_s=_QUOTA_RETRY_S),
        # Wrong wherever it is sent.
        ErrorCode(
            "MarketplacePurchaseEligibilityFailed ResourcePurchaseValidationFailed", _K.CONFIG, _TERMS, "ARM"
        ),
        ErrorCode(
            "PropertyChangeNotAllowed",
            _K.CONFIG,
            "a machine of that name exists and was ordered differently",
            "ARM",
        ),
        ErrorCode(
            "InvalidParameter BadRequest",
            _K.CONFIG,
            "the user data is not acceptable",
            "ARM",
            r"custom ?data|user ?data",
        ),
        ErrorCode(
            "InvalidParameter ResizeDiskError BadRequest OperationNotAllowed",
            _K.CONFIG,
            "the disk is smaller than the image: raise `disk_size`",
            "ARM",
            r"disk .*(smaller|less) than|diskSizeGB",
        ),
        # Not in this place: another zone, region or size is next.
        ErrorCode(
            "ImageNotFound PlatformImageNotFound GalleryImageNotFound ImageVersionNotFound",
            _K.REFUSED,
            _IMAGE,
            "ARM",
            scope=Scope.REGION,
        ),
        ErrorCode(
            "InvalidParameter BadRequest OperationNotAllowed",
            _K.REFUSED,
            _NOT_HERE,
            "microsoft/onefuzz#1126",
            r"VM size .*not available in the current region|is not available in location",
            Scope.TYPE,
        ),
        ErrorCode(
            "BadRequest OperationNotAllowed InvalidParameter",
            _K.REFUSED,
            _NO_SPOT,
            "VM; MicrosoftDocs/azure-compute-docs#226",
            r"not support (azure )?spot|spot (virtual machine|vm)s?( is| are)? not supported|spot priority",
            Scope.OFFER,
        ),
        ErrorCode(
            "BadRequest OperationNotAllowed InvalidParameter",
            _K.REFUSED,
            _GENERATION,
            "skypilot-org/skypilot#133; loft-sh/devpod#731; K for trusted launch and securityType",
            r"hypervisor generation|trusted ?launch|securityType|cpu architecture",
            Scope.TYPE,
        ),
        ErrorCode(
            "AvailabilityZoneNotSupported InvalidAvailabilityZone ResourceTypeNotSupportAvailabilityZones"
            " LocationNotSupportAvailabilityZones",
            _K.REFUSED,
            _NO_ZONE,
            "kubernetes-sigs/cluster-api-provider-azure#294; PEERS",
            scope=Scope.ZONE,
        ),
        ErrorCode(
            "NoRegisteredProviderFound LocationNotAvailableForResourceType",
            _K.REFUSED,
            _NO_REGION,
            "ARM",
            scope=Scope.REGION,
        ),
        ErrorCode(
            "DiskEncryptionSetNotFound KeyVaultAccessForbidden KeyVaultKeyNotFound",
            _K.REFUSED,
            "the key that encrypts disks cannot be used here: check the disk encryption set",
            "ARM",
            scope=Scope.REGION,
        ),
        ErrorCode(
            "RequestDisallowedByPolicy",
            _K.AUTH,
            _CLOSED,
            "POLICY: the built-in definition 'Allowed locations'",
            r"location",
            Scope.REGION,
            closes_region=True,
        ),
        ErrorCode(
            "RequestDisallowedByPolicy",
            _K.REFUSED,
            _POLICY,
            "POLICY: the built-in definition 'Allowed virtual machine size SKUs'",
            r"\b(size )?sku",
            Scope.TYPE,
        ),
        ErrorCode("RequestDisallowedByPolicy", _K.REFUSED, _POLICY, "POLICY", scope=Scope.REGION),
        # Stop using what was refused until a person has acted.
        ErrorCode(
            "InvalidAuthenticationToken InvalidAuthenticationTokenTenant ExpiredAuthenticationToken"
            " AuthenticationFailed CredentialUnavailable",  # the last is ours: no credentials were found
            _K.AUTH,
            _LOGIN,
            "ARM; ours",
        ),
        ErrorCode("AuthorizationFailed LinkedAuthorizationFailed", _K.AUTH, _ROLE, "ARM"),
        ErrorCode("ScopeLocked", _K.AUTH, "a lock forbids it: remove the lock named here", "ARM"),
        ErrorCode(
            "SubscriptionNotFound InvalidSubscriptionId DisabledSubscription ReadOnlyDisabledSubscription",
            _K.AUTH,
            _SUBSCRIPTION,
            "ARM",
        ),
        ErrorCode("MissingSubscriptionRegistration SubscriptionNotRegistered", _K.AUTH, _REGISTER, "ARM"),
        # The same again, a little later.
        ErrorCode("TooManyRequests", _K.TRANSIENT, _SLOW, "THROTTLE", retry_s=10.0),
        ErrorCode("SubscriptionRequestsThrottled", _K.TRANSIENT, _SLOW, "THROTTLE", retry_s=30.0),
        ErrorCode(
            "Conflict AnotherOperationInProgress OperationPreempted InUse PublicIPAddressCannotBeDeleted"
            " InUseSubnetCannotBeDeleted NicInUse",
            _K.TRANSIENT,
            _BUSY,
            "ARM",
            retry_s=10.0,
        ),
        ErrorCode("ReferencedResourceNotProvisioned", _K.TRANSIENT, _BUSY, "ARM", retry_s=5.0),
        ErrorCode("ResourceGroupBeingDeleted", _K.TRANSIENT, _BUSY, "ARM", retry_s=30.0),
        # Azure keeps a lost machine's card for three minutes.
        ErrorCode("NicReservedForAnotherVm", _K.TRANSIENT, _BUSY, "ARM", retry_s=180.0),
        ErrorCode(
            "VMStartTimedOut OSProvisioningTimedOut OSProvisioningInternalError",
            _K.TRANSIENT,
            _DIED,
            "ARM; VM",
            retry_s=30.0,
        ),
        ErrorCode(
            "RetryableError InternalServerError InternalExecutionError InternalOperationError ServerTimeout"
            " NetworkingInternalOperationError GatewayTimeout ServiceUnavailable",
            _K.TRANSIENT,
            LATER,
            "ARM",
        ),
        ErrorCode(
            "Unreachable", _K.TRANSIENT, "no response from Azure; the same order is sent again", "ours"
        ),
    )
)

#: For responses whose code is in no row, by HTTP status.
BY_STATUS: Mapping[int, ErrorCode] = MappingProxyType(
    {
        401: ErrorCode("", _K.AUTH, _LOGIN, "by the status"),
        403: ErrorCode("", _K.AUTH, _ROLE, "by the status"),
        408: ErrorCode("", _K.TRANSIENT, LATER, "by the status"),
        409: ErrorCode("", _K.TRANSIENT, _BUSY, "by the status", retry_s=10.0),
        412: ErrorCode("", _K.TRANSIENT, _BUSY, "by the status"),
        429: ErrorCode("", _K.TRANSIENT, _SLOW, "by the status", retry_s=10.0),
    }
)
