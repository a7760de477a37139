"""What EC2's codes mean: the table. Pure.

Sources: DOC is "Error codes for the Amazon EC2 API", STATE the API reference's StateReason, KARPENTER that project's
pkg/errors, RUN what the unmodified SDK was seen to do, IAM the IAM user guide's "Troubleshoot access denied error messages",
K knowledge that only a real account can confirm (`docs/unconfirmed.md`). EC2 sends capacity errors with HTTP 500, which is
why codes are looked up before the status is. The first row that fits decides, so rows with a pattern come before the general
row of their code.
"""

from __future__ import annotations

from policies.model import FailureKind, Scope
from provisioners.port.error_codes import ErrorCode, ErrorTable

_K = FailureKind

_NO_ROOM = "there is no capacity for it now; another zone is next"
_NOT_OFFERED = "it is not offered there; another zone or machine type is next"
_NO_LOGIN = (
    "the credentials are not accepted; renew them (`aws sso login`, `aws configure`) and run `serve check`"
)
_DENIED = (
    "not allowed; add it to the policy of this user or role (`serve check` tries the other actions, too)"
)
_FORBIDDEN = "a policy of the organisation forbids it; another machine type or region is next"
_CLOSED = "the region is closed by a policy of the organisation; set clouds.aws.regions to the regions that are open"
NOT_ENABLED = "the account has not enabled the region; enable it in the console, or set clouds.aws.regions"
_IMAGE = "there is no such image in the region; another region is next (check the image)"
_ENCRYPTION = (
    "EC2 terminated it at launch: in most cases its KMS key, that of the region's default encryption, may not be used;"
    " allow the key to this user or role, or name another in the console (EC2 > Settings > Data protection)"
)
_QUOTA = "a quota of the account is used up"
_TAGS = "a tag policy of the organisation rejects the tags; put those that it requires under `labels`"

TABLE = ErrorTable(
    (
        # Another zone, now.
        ErrorCode(
            "InsufficientInstanceCapacity InsufficientCapacity InsufficientCapacityOnHost InsufficientHostCapacity"
            " InsufficientReservedInstanceCapacity ReservationCapacityExceeded UnfulfillableCapacity",
            _K.CAPACITY,
            _NO_ROOM,
            "DOC; KARPENTER",
        ),
        ErrorCode("InsufficientVolumeCapacity", _K.CAPACITY, "EBS has no room in the zone now", "DOC"),
        ErrorCode(
            "SpotMaxPriceTooLow",
            _K.CAPACITY,
            "spot costs more than the limit there now; another zone is next",
            "DOC",
        ),
        ErrorCode(
            "InsufficientFreeAddressesInSubnet",
            _K.CAPACITY,
            "the zone's subnet has no free address; free some or name a larger VPC in config.yaml",
            "DOC; KARPENTER",
        ),
        ErrorCode(
            "InsufficientAddressCapacity", _K.CAPACITY, "AWS has no free public address there now", "DOC"
        ),
        # Another region or capacity type, until a person requests more from AWS.
        ErrorCode("VcpuLimitExceeded", _K.QUOTA, "the account's vCPU quota is used up", "DOC"),
        ErrorCode("MaxSpotInstanceCountExceeded", _K.QUOTA, "the account's spot quota is used up", "DOC"),
        ErrorCode(
            "InstanceLimitExceeded",
            _K.QUOTA,
            "the account's quota of instances of this type is used up",
            "DOC",
        ),
        ErrorCode("VolumeLimitExceeded", _K.QUOTA, "the account's quota of EBS storage is used up", "DOC"),
        ErrorCode("MaxIOPSLimitExceeded", _K.QUOTA, "the account's quota of EBS IOPS is used up", "DOC"),
        ErrorCode(
            "AddressLimitExceeded", _K.QUOTA, "the account's quota of public addresses is used up", "DOC"
        ),
        ErrorCode(
            "NetworkInterfaceLimitExceeded",
            _K.QUOTA,
            "the account's quota of network interfaces is used up",
            "DOC",
        ),
        ErrorCode(
            "SecurityGroupLimitExceeded",
            _K.QUOTA,
            "the account's quota of security groups is used up",
            "DOC",
        ),
        ErrorCode("ResourceLimitExceeded", _K.QUOTA, _QUOTA, "DOC"),
        ErrorCode(
            "PendingVerification",
            _K.QUOTA,
            "AWS is still verifying the account for this region, which takes up to four hours",
            "DOC",
        ),
        # Wrong wherever it is sent.
        ErrorCode(
            "OptInRequired",
            _K.CONFIG,
            "the image is sold on the Marketplace; accept its terms there first",
            "RUN",
            "marketplace",
        ),
        ErrorCode(
            "IdempotentParameterMismatch",
            _K.CONFIG,
            "the attempt was made before with other parameters",
            "DOC",
        ),
        ErrorCode(
            "InvalidBlockDeviceMapping",
            _K.CONFIG,
            "the disk does not fit the image; raise `disk_size`",
            "DOC",
            "smaller than snapshot|size",
        ),
        ErrorCode("InvalidUserData.Malformed", _K.CONFIG, "the user data is not acceptable", "DOC"),
        ErrorCode(
            "InvalidParameterValue",
            _K.CONFIG,
            "the user data is longer than EC2 allows",
            "K",
            "user data is limited",
        ),
        ErrorCode("InvalidAMIID.Malformed", _K.CONFIG, "that is no id of an image; check the image", "DOC"),
        ErrorCode(
            "RulesPerSecurityGroupLimitExceeded",
            _K.CONFIG,
            "too many sources for one security group; give fewer CIDR blocks",
            "DOC",
        ),
        # Not in this place: another zone, region or machine type is next.
        ErrorCode(
            "Unsupported UnsupportedOperation InvalidInstanceType UnsupportedTenancy",
            _K.REFUSED,
            _NOT_OFFERED,
            "DOC",
        ),
        ErrorCode(
            "InvalidParameterValue InvalidParameterCombination",
            _K.REFUSED,
            "the image is for another processor architecture than the machine type",
            "K",
            "architecture",
            Scope.TYPE,
        ),
        ErrorCode(
            "InvalidParameterValue InvalidParameter InvalidInput",
            _K.REFUSED,
            _NOT_OFFERED,
            "RUN",
            r"instance ?types?\b",
            Scope.TYPE,
        ),
        ErrorCode("InvalidParameterCombination", _K.REFUSED, _NOT_OFFERED, "DOC, and K that launches get it"),
        ErrorCode(
            "InvalidAvailabilityZone InvalidSubnet.Conflict InvalidSubnet VolumeTypeNotAvailableInZone",
            _K.REFUSED,
            "the zone cannot be used",
            "DOC",
            scope=Scope.ZONE,
        ),
        ErrorCode(
            "InvalidParameterValue",
            _K.REFUSED,
            "the zone cannot be used",
            "DOC",
            "availability ?zone",
            Scope.ZONE,
        ),
        ErrorCode(
            "InvalidAMIID.NotFound InvalidAMIID.Unavailable ParameterNotFound InvalidSnapshot.NotFound"
            " Client.InvalidSnapshot.NotFound",
            _K.REFUSED,
            _IMAGE,
            "DOC; STATE",
            scope=Scope.REGION,
        ),
        ErrorCode(
            "VPCIdNotSpecified DefaultVpcDoesNotExist MissingInput",
            _K.REFUSED,
            "the region has no default VPC; name one in config.yaml",
            "DOC",
            "",
            Scope.REGION,
        ),
        ErrorCode(
            "InvalidKeyPair.NotFound InvalidGroup.NotFound InvalidSubnetID.NotFound InvalidVpcID.NotFound",
            _K.REFUSED,
            "what it refers to does not exist there; check the `aws` section of config.yaml",
            "DOC",
            scope=Scope.REGION,
        ),
        ErrorCode("TagPolicyViolation", _K.REFUSED, _TAGS, "DOC", scope=Scope.CLOUD),
        ErrorCode(
            "KMSKeyNotAccessibleFault InvalidKMSKey.InvalidState InvalidKmsKey.InvalidState KMS.DisabledException"
            " Client.InternalError Client.InvalidKMSKey.InvalidState",
            _K.REFUSED,
            _ENCRYPTION,
            "STATE; AWS re:Post 'kms-iam-ec2-permission'",
            scope=Scope.REGION,
        ),
        # Stop using what was refused until a person has acted.
        ErrorCode(
            "UnauthorizedOperation AccessDenied AccessDeniedException",
            _K.AUTH,
            _CLOSED,
            "IAM",
            "explicit deny",
            Scope.REGION,
            closes_region=True,
        ),
        ErrorCode(
            "AccessDenied AccessDeniedException UnauthorizedOperation",
            _K.AUTH,
            _DENIED,
            "DOC",
            scope=Scope.REGION,
        ),
        ErrorCode(
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
            _K.AUTH,
            "the account has never used spot; once: "
            "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`",
            "EC2 user guide, Service-linked role for Spot Instance requests",
        ),
        ErrorCode("OptInRequired", _K.AUTH, NOT_ENABLED, "DOC", scope=Scope.REGION, closes_region=True),
        ErrorCode(
            "AuthFailure ExpiredToken ExpiredTokenException InvalidClientTokenId MissingAuthenticationToken"
            " SignatureDoesNotMatch UnrecognizedClientException",
            _K.AUTH,
            _NO_LOGIN,
            "DOC",
        ),
        ErrorCode(
            "RequestExpired",
            _K.AUTH,
            "AWS finds the request too old; set this machine's clock right",
            "DOC",
        ),
        ErrorCode(
            "NoCredentials",
            _K.AUTH,
            "no credentials were found; run `aws configure`, then `serve check`",
            "ours",
        ),
        ErrorCode("Blocked", _K.AUTH, "AWS has blocked the account; its support says why", "DOC"),
        ErrorCode("AccountDisabled", _K.AUTH, "the account is disabled; AWS's support says why", "DOC"),
        # The same again, a little later.
        ErrorCode("DependencyViolation", _K.TRANSIENT, "it is still in use", "DOC"),
        ErrorCode("IncorrectInstanceState IncorrectState", _K.TRANSIENT, "it is between two states", "DOC"),
        ErrorCode(
            "ConcurrentTagAccess", _K.TRANSIENT, "another request changes its tags at the same time", "DOC"
        ),
        ErrorCode("InvalidNetworkInterface.InUse VolumeInUse", _K.TRANSIENT, "it is still in use", "DOC"),
    )
)

#: For a launch that an organisation denies. Its policy may be about the type: only a denied listing shows a closed region.
FORBIDDEN_LAUNCH = ErrorCode("", _K.REFUSED, _FORBIDDEN, "IAM", "explicit deny", Scope.TYPE)

#: Why EC2 terminated an instance that it had accepted, by the code of its StateReason.
AT_BIRTH = ErrorTable(
    (
        ErrorCode("Server.InsufficientInstanceCapacity", _K.CAPACITY, _NO_ROOM, "STATE"),
        ErrorCode(
            "Server.InternalError", _K.CAPACITY, "EC2 failed to start it; another zone is next", "STATE"
        ),
        ErrorCode(
            "Client.VolumeLimitExceeded", _K.QUOTA, "the account's quota of EBS storage is used up", "STATE"
        ),
        ErrorCode("Client.InvalidSnapshot.NotFound", _K.REFUSED, _IMAGE, "STATE", scope=Scope.REGION),
        ErrorCode(
            "Client.InternalError Client.InvalidKMSKey.InvalidState",
            _K.REFUSED,
            _ENCRYPTION,
            "STATE; AWS re:Post 'kms-iam-ec2-permission'",
            scope=Scope.REGION,
        ),
    )
)
