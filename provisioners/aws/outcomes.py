"""What EC2's codes mean: the table. Pure.

Sources: DOC is "Error codes for the Amazon EC2 API", STATE the API reference's StateReason, KARPENTER that project's
pkg/errors, RUN what the unmodified SDK was seen to do, IAM the IAM user guide's "Troubleshoot access denied error messages",
K knowledge that only a real account can confirm (`docs/unconfirmed.md`). EC2 sends capacity errors with HTTP 500, which is
why codes are looked up before the status is.
"""

from __future__ import annotations

from policies.model import FailureKind, Scope
from provisioners.outcomes import Outcomes, Row

_K = FailureKind

_NO_ROOM = "there is no capacity for it now; another zone is next"
_NOT_OFFERED = "it is not offered there; another zone or machine type is next"
_NO_LOGIN = (
    "the credentials are not accepted; renew them (`aws sso login`, `aws configure`) and run `serve check`"
)
_DENIED = "not allowed; add it to the policy of this user or role (`serve check` tries the others, too)"
_FORBIDDEN = "a policy of the organisation forbids it; another machine type or region is next"
_CLOSED = "the region is closed by a policy of the organisation; set clouds.aws.regions to the regions that are open"
NOT_ENABLED = "the account has not enabled the region; enable it in the console, or set clouds.aws.regions"
_IMAGE = "there is no such image in the region; another region is next (check the image)"
_ENCRYPTION = (
    "EC2 ended it at launch: in most cases the KMS key of the region's default encryption does not let it be used;"
    " allow the key to this user or role, or name another in the console (EC2 > Settings > Data protection)"
)
_QUOTA = "a quota of the account is used up"
_TAGS = "a tag policy of the organisation refuses its tags; put those it asks for under `labels`"

TABLE = Outcomes(
    (
        # Another zone, now.
        Row(
            "InsufficientInstanceCapacity InsufficientCapacity InsufficientCapacityOnHost InsufficientHostCapacity"
            " InsufficientReservedInstanceCapacity ReservationCapacityExceeded UnfulfillableCapacity",
            _K.CAPACITY,
            _NO_ROOM,
            "DOC; KARPENTER",
        ),
        Row("InsufficientVolumeCapacity", _K.CAPACITY, "EBS has no room in the zone now", "DOC"),
        Row(
            "SpotMaxPriceTooLow",
            _K.CAPACITY,
            "spot costs more than the limit there now; another zone is next",
            "DOC",
        ),
        Row(
            "InsufficientFreeAddressesInSubnet",
            _K.CAPACITY,
            "the zone's subnet has no free address; free some or name a larger VPC in config.yaml",
            "DOC; KARPENTER",
        ),
        Row("InsufficientAddressCapacity", _K.CAPACITY, "AWS has no free public address there now", "DOC"),
        # Another region or capacity type, until a person asks AWS for more.
        Row("VcpuLimitExceeded", _K.QUOTA, "the account's vCPU quota is used up", "DOC"),
        Row("MaxSpotInstanceCountExceeded", _K.QUOTA, "the account's spot quota is used up", "DOC"),
        Row(
            "InstanceLimitExceeded",
            _K.QUOTA,
            "the account's quota of instances of this type is used up",
            "DOC",
        ),
        Row("VolumeLimitExceeded", _K.QUOTA, "the account's quota of EBS storage is used up", "DOC"),
        Row("MaxIOPSLimitExceeded", _K.QUOTA, "the account's quota of EBS IOPS is used up", "DOC"),
        Row("AddressLimitExceeded", _K.QUOTA, "the account's quota of public addresses is used up", "DOC"),
        Row(
            "NetworkInterfaceLimitExceeded",
            _K.QUOTA,
            "the account's quota of network interfaces is used up",
            "DOC",
        ),
        Row(
            "SecurityGroupLimitExceeded",
            _K.QUOTA,
            "the account's quota of security groups is used up",
            "DOC",
        ),
        Row("ResourceLimitExceeded", _K.QUOTA, _QUOTA, "DOC"),
        Row(
            "PendingVerification",
            _K.QUOTA,
            "AWS is still verifying the account for this region, which takes up to four hours",
            "DOC",
        ),
        # Wrong wherever it is sent.
        Row(
            "OptInRequired",
            _K.CONFIG,
            "the image is sold on the Marketplace; accept its terms there first",
            "RUN",
            "marketplace",
        ),
        Row(
            "IdempotentParameterMismatch",
            _K.CONFIG,
            "the attempt was made before with other parameters",
            "DOC",
        ),
        Row(
            "InvalidBlockDeviceMapping",
            _K.CONFIG,
            "the disk does not fit the image; raise `disk_size`",
            "DOC",
            "smaller than snapshot|size",
        ),
        Row("InvalidUserData.Malformed", _K.CONFIG, "the user data is not acceptable", "DOC"),
        Row(
            "InvalidParameterValue",
            _K.CONFIG,
            "the user data is longer than EC2 allows",
            "K",
            "user data is limited",
        ),
        Row("InvalidAMIID.Malformed", _K.CONFIG, "that is no id of an image; check the image", "DOC"),
        Row(
            "RulesPerSecurityGroupLimitExceeded",
            _K.CONFIG,
            "too many sources for one security group; give fewer CIDR blocks",
            "DOC",
        ),
        # Not there.
        Row(
            "Unsupported UnsupportedOperation InvalidInstanceType UnsupportedTenancy",
            _K.REFUSED,
            _NOT_OFFERED,
            "DOC",
        ),
        Row(
            "InvalidParameterValue InvalidParameterCombination",
            _K.REFUSED,
            "the image is for another processor architecture than the machine type",
            "K",
            "architecture",
            Scope.TYPE,
        ),
        Row(
            "InvalidParameterValue InvalidParameter InvalidInput",
            _K.REFUSED,
            _NOT_OFFERED,
            "RUN",
            r"instance ?types?\b",
            Scope.TYPE,
        ),
        Row("InvalidParameterCombination", _K.REFUSED, _NOT_OFFERED, "DOC, and K that launches get it"),
        Row(
            "InvalidAvailabilityZone InvalidSubnet.Conflict InvalidSubnet VolumeTypeNotAvailableInZone",
            _K.REFUSED,
            "the zone cannot be used",
            "DOC",
            scope=Scope.ZONE,
        ),
        Row(
            "InvalidParameterValue",
            _K.REFUSED,
            "the zone cannot be used",
            "DOC",
            "availability ?zone",
            Scope.ZONE,
        ),
        Row(
            "InvalidAMIID.NotFound InvalidAMIID.Unavailable ParameterNotFound InvalidSnapshot.NotFound"
            " Client.InvalidSnapshot.NotFound",
            _K.REFUSED,
            _IMAGE,
            "DOC; STATE",
            scope=Scope.REGION,
        ),
        Row(
            "VPCIdNotSpecified DefaultVpcDoesNotExist MissingInput",
            _K.REFUSED,
            "the region has no default VPC; name one in config.yaml",
            "DOC",
            "",
            Scope.REGION,
        ),
        Row(
            "InvalidKeyPair.NotFound InvalidGroup.NotFound InvalidSubnetID.NotFound InvalidVpcID.NotFound",
            _K.REFUSED,
            "what it refers to does not exist there; check the `aws` section of config.yaml",
            "DOC",
            scope=Scope.REGION,
        ),
        Row("TagPolicyViolation", _K.REFUSED, _TAGS, "DOC", scope=Scope.CLOUD),
        Row(
            "KMSKeyNotAccessibleFault InvalidKMSKey.InvalidState InvalidKmsKey.InvalidState KMS.DisabledException"
            " Client.InternalError Client.InvalidKMSKey.InvalidState",
            _K.REFUSED,
            _ENCRYPTION,
            "STATE; AWS re:Post 'kms-iam-ec2-permission'",
            scope=Scope.REGION,
        ),
        # Stop using what was refused until a person has acted.
        Row(
            "UnauthorizedOperation AccessDenied AccessDeniedException",
            _K.AUTH,
            _CLOSED,
            "IAM",
            "explicit deny",
            Scope.REGION,
            closes_region=True,
        ),
        Row(
            "AccessDenied AccessDeniedException UnauthorizedOperation",
            _K.AUTH,
            _DENIED,
            "DOC",
            scope=Scope.REGION,
        ),
        Row(
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
            _K.AUTH,
            "the account has never used spot; once: "
            "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`",
            "EC2 user guide, Service-linked role for Spot Instance requests",
        ),
        Row("OptInRequired", _K.AUTH, NOT_ENABLED, "DOC", scope=Scope.REGION, closes_region=True),
        Row(
            "AuthFailure ExpiredToken ExpiredTokenException InvalidClientTokenId MissingAuthenticationToken"
            " SignatureDoesNotMatch UnrecognizedClientException",
            _K.AUTH,
            _NO_LOGIN,
            "DOC",
        ),
        Row(
            "RequestExpired",
            _K.AUTH,
            "AWS finds the request too old; set this machine's clock right",
            "DOC",
        ),
        Row(
            "NoCredentials",
            _K.AUTH,
            "no credentials were found; run `aws configure`, then `serve check`",
            "ours",
        ),
        Row("Blocked", _K.AUTH, "AWS has blocked the account; its support says why", "DOC"),
        Row("AccountDisabled", _K.AUTH, "the account is disabled; AWS's support says why", "DOC"),
        # The same again, a little later.
        Row("DependencyViolation", _K.TRANSIENT, "it is still in use", "DOC"),
        Row("IncorrectInstanceState IncorrectState", _K.TRANSIENT, "it is between two states", "DOC"),
        Row("ConcurrentTagAccess", _K.TRANSIENT, "another request changes its tags at the same time", "DOC"),
        Row("InvalidNetworkInterface.InUse VolumeInUse", _K.TRANSIENT, "it is still in use", "DOC"),
    )
)

#: Of a launch that an organisation denies: its policy may be about the type, and only a listing shows a closed region.
FORBIDDEN_LAUNCH = Row("", _K.REFUSED, _FORBIDDEN, "IAM", "explicit deny", Scope.TYPE)

#: Why EC2 ended an instance that it had accepted, by the code of its StateReason.
AT_BIRTH = Outcomes(
    (
        Row("Server.InsufficientInstanceCapacity", _K.CAPACITY, _NO_ROOM, "STATE"),
        Row("Server.InternalError", _K.CAPACITY, "EC2 failed to start it; another zone is next", "STATE"),
        Row("Client.VolumeLimitExceeded", _K.QUOTA, "the account's quota of EBS storage is used up", "STATE"),
        Row("Client.InvalidSnapshot.NotFound", _K.REFUSED, _IMAGE, "STATE", scope=Scope.REGION),
        Row(
            "Client.InternalError Client.InvalidKMSKey.InvalidState",
            _K.REFUSED,
            _ENCRYPTION,
            "STATE; AWS re:Post 'kms-iam-ec2-permission'",
            scope=Scope.REGION,
        ),
    )
)
