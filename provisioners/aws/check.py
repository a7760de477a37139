"""Whether an AWS account can be used: credentials, permissions by dry run, the network, quotas.

Each call is tried as a launch would send it, with its tags and in the configured VPC, so that a policy which allows only
what carries our tag (`provisioners/permissions/aws.json`) passes. What such a policy hides is reported as not
determined: a dry run names no resource with our tag, so a denial of DeleteVolume may hold for that resource only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from policies.model import CapacityType, FailureKind
from provisioners.aws.api import AwsApi
from provisioners.aws.errors import AwsResponse, ErrorContext, error_of, meaning_of, missing_action, quota_of
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import OWNER_TAG, Finding, Level, Trial

_GROUP = "sg-00000000000000000"
_RULE = [
    {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "192.0.2.1/32"}]},
]

Params = Mapping[str, Any]

# A policy either allows these or does not.
_FREE: Mapping[str, Params] = MappingProxyType(
    {
        "DescribeInstances": {},
        "DescribeAvailabilityZones": {},
        "DescribeVpcs": {},
        "DescribeSubnets": {},
        "DescribeImages": {"Owners": ["self"]},
        "DescribeSecurityGroups": {},
        "DescribeKeyPairs": {},
        "DescribeVolumes": {},
        "DescribeNetworkInterfaces": {},
        "DescribeSpotInstanceRequests": {},
        "DescribeSpotPriceHistory": {},
    }
)


def _creations(labels: Mapping[str, str]) -> Mapping[str, Params]:
    """Return the resources made with tags; a policy may demand some of them."""
    tags = [{"Key": key, "Value": value} for key, value in {**labels, OWNER_TAG: "check"}.items()]
    return {
        "CreateSecurityGroup": {
            "GroupName": "skyserve-check",
            "Description": "dry run",
            "TagSpecifications": [{"ResourceType": "security-group", "Tags": tags}],
        },
        "ImportKeyPair": {
            "KeyName": "skyserve-check",
            "PublicKeyMaterial": b"ssh-ed25519 AAAA",
            "TagSpecifications": [{"ResourceType": "key-pair", "Tags": tags}],
        },
    }


# A policy may allow these on resources that carry our tag. The ids are of no resource: a dry run checks permissions
# first, and changes nothing in any case.
_BY_TAG: Mapping[str, Params] = MappingProxyType(
    {
        "AuthorizeSecurityGroupIngress": {"GroupId": _GROUP, "IpPermissions": _RULE},
        "RevokeSecurityGroupIngress": {"GroupId": _GROUP, "IpPermissions": _RULE},
        "DeleteSecurityGroup": {"GroupId": _GROUP},
        "DeleteKeyPair": {"KeyName": "skyserve-check"},
        "TerminateInstances": {"InstanceIds": ["i-00000000000000000"]},
        "CancelSpotInstanceRequests": {"SpotInstanceRequestIds": ["sir-00000000"]},
        "DeleteVolume": {"VolumeId": "vol-00000000000000000"},
        "DeleteNetworkInterface": {"NetworkInterfaceId": "eni-00000000000000000"},
    }
)


def findings(
    api: AwsApi,
    regions: Sequence[str] | None,
    trials: Sequence[Trial],
    instance_types: Collection[str],
    request: Callable[[Trial], Params],
    *,
    lists_regions: bool,
    labels: Mapping[str, str],
) -> list[Finding]:
    """Credentials, then permissions, then launches as dry runs and quotas in each region.

    `regions`: those of the configuration; None is the home region alone. `lists_regions`: whether the account is queried for which
    there are. `labels`: the user's, of all that is made. `request`: the parameters with which a trial
    would be launched; it raises ProvisionError where the region lacks what they refer to. `instance_types`: those whose
    quotas matter.
    """
    try:
        region = regions[0] if regions else api.home_region
        caller = api.request(region, "GetCallerIdentity", service="sts")
    except ProvisionError as error:
        return [Finding("credentials", Level.MISSING, str(error))]
    found = [Finding("credentials", message=f"{caller['Arn']} (account {caller['Account']})")]
    if lists_regions:
        found.append(_reads(api, region, "DescribeRegions"))
    found += [
        _permission(api, region, action, params) for action, params in {**_FREE, **_creations(labels)}.items()
    ]
    found += [_permission(api, region, action, params, by_tag=True) for action, params in _BY_TAG.items()]
    checked = tuple(regions or (region,))
    found += [_launch(api, trial, request) for trial in trials if trial.zone.region in checked]
    return [*found, *_quotas(api, checked, instance_types)]


def _reads(api: AwsApi, region: str, action: str) -> Finding:
    try:
        api.request(region, action)
    except ProvisionError as error:
        return Finding(f"ec2:{action}", Level.MISSING, str(error))
    return Finding(f"ec2:{action}")


def _permission(api: AwsApi, region: str, action: str, params: Params, *, by_tag: bool = False) -> Finding:
    name = f"ec2:{action}"
    response = api.dry_run(region, action, params)
    if response.code == "DryRunOperation" or _is_about_the_resource(response):
        return Finding(name)
    if meaning_of(response).kind is not FailureKind.AUTH:
        return Finding(name, Level.MISSING, str(error_of(response, ErrorContext(name, region), api.now())))
    denied = missing_action(response.message) or name
    if by_tag:
        return Finding(
            name,
            Level.NOTE,
            f"not determined: denied for a resource without the tag {OWNER_TAG}; the policy must allow {denied} "
            "on resources with it (`serve check --policy aws`)",
        )
    return Finding(
        name, Level.MISSING, f"the policy of this user must allow {denied} ({response.code} in {region})"
    )


def _launch(api: AwsApi, trial: Trial, request: Callable[[Trial], Params]) -> Finding:
    """Return a dry run of the launch that would be sent."""
    region = trial.zone.region
    name = f"launch of {trial.instance_type} ({trial.capacity_type.value}) in {trial.zone.label}"
    try:
        params = request(trial)
    except ProvisionError as error:
        return Finding(name, Level.MISSING, str(error))
    response = api.dry_run(region, "RunInstances", params)
    if response.code == "DryRunOperation":
        return Finding(name)
    asked = ErrorContext("ec2:RunInstances", region, trial.zone, trial.instance_type, trial.capacity_type)
    is_denied = meaning_of(response).kind is FailureKind.AUTH
    message = str(error_of(response, asked, api.now()))
    if is_denied and (denied := missing_action(response.message)):
        message = f"the policy of this user must allow {denied} ({response.code} in {region}: {message})"
    return Finding(name, Level.MISSING if is_denied else Level.NOTE, message)


def _is_about_the_resource(response: AwsResponse) -> bool:
    return response.code.startswith("Invalid") and response.status < 500


def _quotas(api: AwsApi, regions: Sequence[str], instance_types: Collection[str]) -> list[Finding]:
    """Return the vCPU quotas of the families.

    One that is 0, which new accounts have, is worth knowing before the first launch; if all of them are 0 in all regions,
    no machine with an accelerator can be launched.
    """
    wanted = {
        quota_of(instance_type, capacity_type): None
        for instance_type in sorted(instance_types)
        for capacity_type in CapacityType
    }
    found: list[Finding] = []
    vcpus: list[int] = []
    for region in regions:
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
                return [*found, Finding("quotas", Level.NOTE, f"not determined: {error}")]
            except ProvisionError as error:
                found.append(Finding(what, Level.NOTE, f"not determined: {error}"))
                continue
            if reply is None:
                continue  # AWS keeps no such quota in this region
            vcpus.append(int(reply["Quota"]["Value"]))
            if vcpus[-1] > 0:
                found.append(Finding(what, message=f"{vcpus[-1]} vCPUs"))
            else:
                advice = f"request an increase of {quota.code} (Service Quotas console, Amazon EC2)"
                found.append(Finding(what, Level.NOTE, f"0 vCPUs: {advice}"))
    if vcpus and not any(vcpus):
        message = f"every quota for machines with accelerators is 0 in {', '.join(regions)}"
        found.append(Finding("quotas", Level.MISSING, message))
    return found
