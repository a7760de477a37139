"""Whether we can work with an AWS account: credentials, permissions by dry run, quotas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from policies.model import CapacityType, FailureKind
from provisioners.aws.api import AwsApi
from provisioners.aws.errors import Answer, Context, error_of, meaning_of, missing_action, quota_of
from provisioners.aws.image import parameter_of
from provisioners.errors import AuthError, ProvisionError
from provisioners.machines import OWNER_TAG, Finding

_PROBES = ("g6.xlarge", "p4d.24xlarge", "p5.48xlarge")  # one of each GPU family that has a quota of its own
_TAG = [{"Key": OWNER_TAG, "Value": "check"}]

# Ids that no resource has: a dry run looks at permissions first, and it changes nothing anyway.
_ACTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DescribeInstances": {},
        "DescribeAvailabilityZones": {},
        "DescribeVpcs": {},
        "DescribeSubnets": {},
        "DescribeImages": {},
        "DescribeSecurityGroups": {},
        "DescribeKeyPairs": {},
        "DescribeVolumes": {},
        "DescribeNetworkInterfaces": {},
        "DescribeSpotInstanceRequests": {},
        "DescribeSpotPriceHistory": {},
        "CreateSecurityGroup": {"GroupName": "skyserve-check", "Description": "dry run"},
        "AuthorizeSecurityGroupIngress": {
            "GroupId": "sg-00000000000000000",
            "IpPermissions": [
                {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.1/32"}]}
            ],
        },
        "RevokeSecurityGroupIngress": {
            "GroupId": "sg-00000000000000000",
            "IpPermissions": [
                {
                    "IpProtocol": "tcp",
                    "FromPort": 22,
                    "ToPort": 22,
                    "IpRanges": [{"CidrIp": "203.0.113.7/32"}],
                }
            ],
        },
        "DeleteSecurityGroup": {"GroupId": "sg-00000000000000000"},
        "ImportKeyPair": {"KeyName": "skyserve-check", "PublicKeyMaterial": b"ssh-ed25519 AAAA"},
        "DeleteKeyPair": {"KeyName": "skyserve-check"},
        "CreateTags": {"Resources": ["i-00000000000000000"], "Tags": _TAG},
        "TerminateInstances": {"InstanceIds": ["i-00000000000000000"]},
        "CancelSpotInstanceRequests": {"SpotInstanceRequestIds": ["sir-00000000"]},
        "DeleteVolume": {"VolumeId": "vol-00000000000000000"},
        "DeleteNetworkInterface": {"NetworkInterfaceId": "eni-00000000000000000"},
    }
)


def findings(api: AwsApi, regions: Sequence[str] | None) -> list[Finding]:
    """Credentials, then permissions and quotas. Permissions are looked at in one region: policies that differ by
    region show when that region is used."""
    try:
        region = regions[0] if regions else api.home_region
        caller = api.ask(region, "GetCallerIdentity", service="sts")
    except ProvisionError as error:
        return [Finding("credentials", False, str(error))]
    found = [Finding("credentials", True, f"{caller['Arn']} (account {caller['Account']})")]
    image, finding = _image(api, region)
    found.append(finding)
    actions = dict(_ACTIONS)
    if image is not None:
        actions["RunInstances"] = {
            "ImageId": image,
            "InstanceType": "t3.micro",
            "MinCount": 1,
            "MaxCount": 1,
            "TagSpecifications": [{"ResourceType": kind, "Tags": _TAG} for kind in ("instance", "volume")],
        }
    found += [_permission(api, region, action, params) for action, params in actions.items()]
    for name in regions or (region,):
        found += _quotas(api, name)
    return found


def _image(api: AwsApi, region: str) -> tuple[str | None, Finding]:
    """ssm:GetParameter has no dry run; reading the parameter of the plain image shows as much."""
    try:
        reply = api.ask(region, "GetParameter", {"Name": parameter_of("t3.micro", False)}, service="ssm")
    except ProvisionError as error:
        return None, Finding("ssm:GetParameter", False, str(error))
    return str(reply["Parameter"]["Value"]), Finding("ssm:GetParameter", True)


def _permission(api: AwsApi, region: str, action: str, params: Mapping[str, Any]) -> Finding:
    name = f"ec2:{action}"
    answer = api.dry_run(region, action, params)
    if answer.code == "DryRunOperation":
        return Finding(name, True)
    if meaning_of(answer).kind is FailureKind.AUTH:
        denied = missing_action(answer.message) or name
        return Finding(
            name, False, f"the policy of this user must allow {denied} ({answer.code} in {region})"
        )
    if _is_about_the_resource(answer):
        return Finding(name, True, "not refused; EC2 looked for the resource first")
    return Finding(name, False, str(error_of(answer, Context(name, region), api.now())))


def _is_about_the_resource(answer: Answer) -> bool:
    return answer.code.startswith("Invalid") and answer.status < 500


def _quotas(api: AwsApi, region: str) -> list[Finding]:
    """A quota of 0 vCPUs, which new accounts have, is worth knowing before the first launch."""
    found: list[Finding] = []
    wanted = {
        quota_of(instance_type, capacity_type): None
        for instance_type in _PROBES
        for capacity_type in CapacityType
    }
    for quota in wanted:
        if quota is None:
            continue
        what = f"quota {quota.name} in {region}"
        params = {"ServiceCode": "ec2", "QuotaCode": quota.code}
        try:
            reply = api.call(
                region,
                "GetServiceQuota",
                params,
                service="service-quotas",
                unless=("NoSuchResourceException",),
            )
        except AuthError as error:
            return [*found, Finding(what, False, f"cannot be told: {error}")]
        except ProvisionError as error:
            found.append(Finding(what, False, f"cannot be told: {error}"))
            continue
        if reply is None:
            continue  # AWS keeps no such quota in this region
        vcpus = int(reply["Quota"]["Value"])
        cure = f"ask AWS to raise {quota.code} (Service Quotas console, Amazon EC2)"
        found.append(Finding(what, vcpus > 0, f"{vcpus} vCPUs" + ("" if vcpus > 0 else f": {cure}")))
    return found
