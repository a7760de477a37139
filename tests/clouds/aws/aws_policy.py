"""An IAM policy as EC2 applies it: which permission a call lacks.

A call needs its action on each resource that it names or creates ("Actions, resources, and condition keys for Amazon
EC2", Service Authorization Reference), and ec2:CreateTags on what it creates with tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tests.clouds.aws.aws_wire import Call

Tags = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Need:
    """One permission of a call: an action on a resource, with the keys that conditions can look at."""

    action: str
    resource: str
    keys: Mapping[str, str] = field(default_factory=dict)


# What a call changes: the kind of resource, and the parameter with its id.
_CHANGES = {
    "AuthorizeSecurityGroupIngress": ("security-group", "GroupId"),
    "RevokeSecurityGroupIngress": ("security-group", "GroupId"),
    "DeleteSecurityGroup": ("security-group", "GroupId"),
    "DeleteKeyPair": ("key-pair", "KeyName"),
    "TerminateInstances": ("instance", "InstanceId.1"),
    "CancelSpotInstanceRequests": ("spot-instances-request", "SpotInstanceRequestId.1"),
    "DeleteVolume": ("volume", "VolumeId"),
    "DeleteNetworkInterface": ("network-interface", "NetworkInterfaceId"),
}
_CREATES = {  # with tags, and what it refers to
    "CreateSecurityGroup": (("security-group",), ("vpc",)),
    "ImportKeyPair": (("key-pair",), ()),
    "RunInstances": (
        ("instance", "volume", "network-interface", "spot-instances-request"),
        ("image", "subnet", "key-pair", "security-group"),
    ),
}


def needs_of(call: Call, tags_of: Callable[[str, str], Tags]) -> Iterator[Need]:
    """The permissions that a call needs; `tags_of(region, id)` are the tags of a resource."""
    action = f"{call.service}:{call.action}"
    if call.service == "ec2" and call.action in _CREATES:
        created, named = _CREATES[call.action]
        for kind in created:
            if kind == "spot-instances-request" and "InstanceMarketOptions.MarketType" not in call.params:
                continue
            tags = call.tags(kind)
            yield Need(action, _arn(kind, "*"), {f"aws:RequestTag/{key}": tags[key] for key in tags})
            if tags:
                yield Need("ec2:CreateTags", _arn(kind, "*"), {"ec2:CreateAction": call.action})
        for kind in named:
            yield Need(action, _arn(kind, "x"))
    elif call.service == "ec2" and call.action in _CHANGES:
        kind, parameter = _CHANGES[call.action]
        name = str(call.params.get(parameter, ""))
        tags = tags_of(call.region, name)
        yield Need(action, _arn(kind, name), {f"aws:ResourceTag/{key}": tags[key] for key in tags})
    elif call.service != "sts":  # GetCallerIdentity needs no permission
        yield Need(action, "*")


def untagged(call: Call, required: Iterable[str]) -> str | None:
    """The first kind of resource that a call would make without one of these tags."""
    if call.service != "ec2" or call.action not in _CREATES:
        return None
    for kind in _CREATES[call.action][0]:
        is_wanted = kind != "spot-instances-request" or "InstanceMarketOptions.MarketType" in call.params
        if is_wanted and not set(required) <= set(call.tags(kind)):
            return kind
    return None


def lacking(policy: Mapping[str, Any], needs: Iterable[Need]) -> Need | None:
    """The first permission that the policy does not give."""
    return next((need for need in needs if not any(_gives(one, need) for one in policy["Statement"])), None)


def _gives(statement: Mapping[str, Any], need: Need) -> bool:
    return (
        statement["Effect"] == "Allow"
        and any(fnmatchcase(need.action, pattern) for pattern in _all(statement["Action"]))
        and any(fnmatchcase(need.resource, pattern) for pattern in _all(statement["Resource"]))
        and all(
            key in need.keys and any(fnmatchcase(need.keys[key], pattern) for pattern in _all(patterns))
            for conditions in statement.get("Condition", {}).values()
            for key, patterns in conditions.items()
        )
    )


def _all(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _arn(kind: str, name: str) -> str:
    account = "" if kind == "image" else "123456789012"
    return f"arn:aws:ec2:us-east-1:{account}:{kind}/{name}"
