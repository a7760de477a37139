"""What a machine on EC2 needs around it, made as needed and shared: subnet, security group, key pair.

Whatever is made here has a name that follows from what it is for, so two controllers, or one that was killed half-way,
come to the same thing. A group's name has a digest of what it opens: its rules never change, and a service that asks
for other ports gets another group. It opens port 22 and the order's ports to the order's sources, its public ports
to everybody, and nothing else; the machines of a gang reach one another on every port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from ipaddress import IPv6Network, ip_network
from typing import Any, NamedTuple

from policies.model import Zone
from provisioners.aws.api import AwsApi, RegionMemo, Reply
from provisioners.aws.errors import CLOUD
from provisioners.errors import CapacityError, InvalidRequestError, ProvisionError, TransientError
from provisioners.machines import OWNER_TAG, SERVICE_TAG, Leftover, MachineOrder

_SSH = 22
_ANYWHERE = "0.0.0.0/0"
_SETTLE_ATTEMPTS = 8
_DELETE_PATIENCE_S = 180.0  # a group is in use until the last of its machines is terminated, a minute or two


_REMOVALS = {  # the call, and its parameter
    "key-pair": ("DeleteKeyPair", "KeyName"),
    "security-group": ("DeleteSecurityGroup", "GroupId"),
}


class Rule(NamedTuple):
    """Inbound traffic that a group lets in. `peer` is a CIDR block, or the id of a group."""

    protocol: str
    port: int | None
    peer: str


class AwsNetwork:
    """Thread-safe. `vpc` is the id of a VPC, or the name that it has in each region; None is the default VPC."""

    def __init__(self, api: AwsApi, memo: RegionMemo, vpc: str | None, use_private_ip: bool) -> None:
        self._api = api
        self._memo = memo
        self._vpc = vpc
        self._use_private_ip = use_private_ip

    def zone_ids(self, region: str) -> Mapping[str, str]:
        """The account's names of a region's zones, and their ids, which mean the same zone in every account."""
        found: Mapping[str, str] = self._memo.get(region, ("zones",), partial(self._find_zones, region))
        return found

    def subnet(self, zone: Zone) -> str:
        """Where a machine in the zone belongs. CapacityError if the VPC has nothing there."""
        return str(self._memo.get(zone.region, ("subnet", zone.name), partial(self._find_subnet, zone)))

    def group(self, order: MachineOrder) -> str:
        """The id of the security group, which has all its rules."""
        rules = _rules(order)
        name = _group_name(order, rules)
        make = partial(self._make_group, order, name, rules)
        return str(self._memo.get(order.zone.region, ("group", name), make))

    def key_pair(self, order: MachineOrder) -> str:
        """The name of the key pair. User data lets `order.user` in; with the pair the image's own user can be logged
        in as, too, which is how one looks at a machine whose user data failed."""
        name = f"skyserve-{order.owner}-{_digest(order.public_key)}"
        return str(
            self._memo.get(order.zone.region, ("key", name), partial(self._make_key_pair, order, name))
        )

    def forget(self, owner: str, region: str) -> list[str]:
        """Remove the owner's groups and keys; sentences about those that could not be removed."""
        self._memo.drop(region)
        left = []
        for thing in self.shared(owner, region):
            action, parameter = _REMOVALS[thing.kind]
            left += self._remove(region, action, {parameter: thing.id}, f"{thing.kind} {thing.id}")
        return left

    def shared(self, owner: str, region: str) -> list[Leftover]:
        """The owner's keys and groups; neither costs anything."""
        of_owner = {"Filters": [{"Name": f"tag:{OWNER_TAG}", "Values": [owner]}]}
        pairs = self._api.ask(region, "DescribeKeyPairs", of_owner).get("KeyPairs", ())
        groups = self._api.pages(region, "DescribeSecurityGroups", "SecurityGroups", of_owner)
        return [
            *(Leftover("key-pair", pair["KeyName"], region, usd_month=0.0) for pair in pairs),
            *(Leftover("security-group", group["GroupId"], region, usd_month=0.0) for group in groups),
        ]

    def _remove(self, region: str, action: str, params: Mapping[str, str], what: str) -> list[str]:
        try:
            self._api.call(
                region,
                action,
                params,
                unless=("InvalidGroup.NotFound", "InvalidKeyPair.NotFound"),
                wait_for=("DependencyViolation",),
                patience_s=_DELETE_PATIENCE_S,
            )
        except ProvisionError as error:
            return [f"{what} in {region} is left: {error}"]
        return []

    def _find_zones(self, region: str) -> dict[str, str]:
        zones = self._api.ask(region, "DescribeAvailabilityZones").get("AvailabilityZones", ())
        return {zone["ZoneName"]: zone["ZoneId"] for zone in zones}

    def _vpc_id(self, region: str) -> str:
        return str(self._memo.get(region, ("vpc",), partial(self._find_vpc, region)))

    def _find_vpc(self, region: str) -> str:
        if self._vpc is None:
            which, called = {"Name": "is-default", "Values": ["true"]}, "default VPC"
            cure = "make one (`aws ec2 create-default-vpc`) or name another in config.yaml"
        else:
            by = "vpc-id" if self._vpc.startswith("vpc-") else "tag:Name"
            which, called = {"Name": by, "Values": [self._vpc]}, f"VPC {self._vpc}"
            cure = "make one of that name, or leave the region out in config.yaml"
        found = sorted(
            vpc["VpcId"] for vpc in self._api.pages(region, "DescribeVpcs", "Vpcs", {"Filters": [which]})
        )
        if not found:  # other regions may have it, so it is not the order that is wrong
            raise CapacityError(f"{CLOUD}/{region} has no {called}: {cure}", cloud=CLOUD, code="NoVpc")
        return str(found[0])

    def _find_subnet(self, zone: Zone) -> str:
        filters = [
            {"Name": "vpc-id", "Values": [self._vpc_id(zone.region)]},
            {"Name": "availability-zone-id", "Values": [zone.name]},
        ]
        if self._vpc is None:
            filters.append({"Name": "default-for-az", "Values": ["true"]})
        found = list(self._api.pages(zone.region, "DescribeSubnets", "Subnets", {"Filters": filters}))
        if not found:
            message = f"{zone} has no subnet in the VPC: make one there (`aws ec2 create-default-subnet`)"
            raise CapacityError(message, cloud=CLOUD, code="NoSubnet", zone=zone)
        # The same one each time: a repeated launch must have the same parameters.
        return str(min(found, key=self._least_apt)["SubnetId"])

    def _least_apt(self, subnet: Reply) -> tuple[bool, str]:
        is_public = bool(subnet.get("MapPublicIpOnLaunch"))
        return is_public == self._use_private_ip, subnet["SubnetId"]

    def _make_group(self, order: MachineOrder, name: str, rules: frozenset[Rule]) -> str:
        region = order.zone.region
        vpc_id = self._vpc_id(region)
        group = self._find_or_create_group(order, name, vpc_id)
        group_id = str(group["GroupId"])
        wanted = rules | ({Rule("-1", None, group_id)} if order.num_nodes > 1 else frozenset())
        if missing := wanted - _rules_of(group):
            self._api.call(
                region,
                "AuthorizeSecurityGroupIngress",
                {"GroupId": group_id, "IpPermissions": _permissions(missing)},
                unless=("InvalidPermission.Duplicate",),  # somebody else has come to the same thing just now
                wait_for=("InvalidGroup.NotFound",),
            )
        return group_id

    def _find_or_create_group(self, order: MachineOrder, name: str, vpc_id: str) -> Reply:
        region = order.zone.region
        by_name = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc_id]}]
        creation = {
            "GroupName": name,
            "Description": f"Machines of the service {order.service}",
            "VpcId": vpc_id,
            "TagSpecifications": [
                _tags("security-group", {OWNER_TAG: order.owner, SERVICE_TAG: order.service})
            ],
        }
        for failures in range(_SETTLE_ATTEMPTS):
            found = self._api.ask(region, "DescribeSecurityGroups", {"Filters": by_name}).get(
                "SecurityGroups"
            )
            if found:
                return dict(found[0])
            made = self._api.call(region, "CreateSecurityGroup", creation, unless=("InvalidGroup.Duplicate",))
            if made is not None:
                return made
            self._api.wait(failures)  # it is there, and not yet listed
        raise TransientError(
            f"security group {name} in {region} is not listed yet", cloud=CLOUD, zone=order.zone
        )

    def _make_key_pair(self, order: MachineOrder, name: str) -> str:
        self._api.call(
            order.zone.region,
            "ImportKeyPair",
            {
                "KeyName": name,
                "PublicKeyMaterial": order.public_key.encode(),
                "TagSpecifications": [_tags("key-pair", {OWNER_TAG: order.owner})],
            },
            unless=("InvalidKeyPair.Duplicate",),  # its name has the digest of the key, so it is the same key
        )
        return name


def _tags(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


def _group_name(order: MachineOrder, rules: frozenset[Rule]) -> str:
    shape = repr((order.service, order.num_nodes > 1, sorted(rules, key=repr)))
    return f"skyserve-{order.owner}-{order.service}-{_digest(shape)}"


def _rules(order: MachineOrder) -> frozenset[Rule]:
    try:
        blocks = [str(ip_network(source, strict=False)) for source in order.sources]
    except ValueError as error:
        raise InvalidRequestError(f"not a CIDR block: {error}", cloud=CLOUD, zone=order.zone) from error
    inner = {Rule("tcp", port, block) for port in (_SSH, *order.ports) for block in blocks}
    return frozenset(inner | {Rule("tcp", port, _ANYWHERE) for port in order.public_ports})


def _rules_of(group: Reply) -> frozenset[Rule]:
    """The rules a group has, those that are of our form."""
    found = set()
    for permission in group.get("IpPermissions", ()):
        low, high = permission.get("FromPort"), permission.get("ToPort")
        peers = [
            *(block["CidrIp"] for block in permission.get("IpRanges", ())),
            *(block["CidrIpv6"] for block in permission.get("Ipv6Ranges", ())),
            *(pair["GroupId"] for pair in permission.get("UserIdGroupPairs", ()) if "GroupId" in pair),
        ]
        if permission["IpProtocol"] == "-1":
            low = high = None  # all traffic has no ports
        if low == high:
            found |= {Rule(permission["IpProtocol"], low, peer) for peer in peers}
    return frozenset(found)


def _permissions(rules: frozenset[Rule]) -> Sequence[Mapping[str, Any]]:
    return [_permission(rule) for rule in sorted(rules, key=repr)]


def _permission(rule: Rule) -> dict[str, Any]:
    if rule.port is None:
        return {"IpProtocol": rule.protocol, "UserIdGroupPairs": [{"GroupId": rule.peer}]}
    ports = {"IpProtocol": rule.protocol, "FromPort": rule.port, "ToPort": rule.port}
    if isinstance(ip_network(rule.peer), IPv6Network):
        return {**ports, "Ipv6Ranges": [{"CidrIpv6": rule.peer}]}
    return {**ports, "IpRanges": [{"CidrIp": rule.peer}]}
