"""What a machine on EC2 needs around it, made as needed and shared: subnet, security group, key pair.

Everything made here has a name that follows from what it is for, so two controllers, or one that was killed half-way,
come to the same thing. A group's name has a digest of the ports that it is for: a service that requests other ports gets
another group. Its tags have the ports, so `admit` knows from a listing alone which rules it should have (`firewall`). The
machines of a replica of several nodes reach one another on every port.

Rules name addresses, not groups: a rule that names a group only lets in what comes from a private address, and load
balancers reach replicas by their public ones, unless there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from ipaddress import IPv6Network, ip_network
from threading import Lock
from typing import Any, NamedTuple

from policies.model import Zone
from provisioners.aws.api import AwsApi, RegionMemo, Reply
from provisioners.aws.errors import CLOUD
from provisioners.port.errors import CapacityError, InvalidRequestError, ProvisionError, TransientError
from provisioners.port.firewall import FirewallAccess, Opening, changes, openings, ports_of_text, ports_text
from provisioners.port.vm import (
    OWNER_TAG,
    PORTS_TAG,
    PUBLIC_PORTS_TAG,
    SERVICE_TAG,
    MachineOrder,
    OrphanedResource,
)

_SETTLE_ATTEMPTS = 8
_DELETE_PATIENCE_S = 180.0  # a group is in use until the last of its machines is terminated, a minute or two


_REMOVALS = {  # the call, and its parameter
    "key-pair": ("DeleteKeyPair", "KeyName"),
    "security-group": ("DeleteSecurityGroup", "GroupId"),
}


class SubnetPlace(NamedTuple):
    """The subnet of a machine, and its VPC: their ids."""

    subnet: str
    vpc: str


class AwsNetwork:
    """Thread-safe.

    `vpc` is the id of a VPC, or the name that it has in each region; None is the default VPC. `subnets` are ids by zone id
    or region, each the first one's choice in its zone. New resources carry the `labels`.
    """

    def __init__(
        self,
        api: AwsApi,
        memo: RegionMemo,
        vpc: str | None,
        use_private_ip: bool,
        subnets: Mapping[str, Sequence[str]] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._api = api
        self._memo = memo
        self._vpc = vpc
        self._use_private_ip = use_private_ip
        self._subnets = subnets or {}
        self._labels = labels or {}
        self._access: dict[str, FirewallAccess] = {}  # by owner, as last admitted
        self._lock = Lock()
        self._group_locks: dict[str, Lock] = {}  # by region: a group is made or its rules are changed

    def zone_ids(self, region: str) -> Mapping[str, str]:
        """Return the account's names of a region's zones, and their ids, which mean the same zone in every account."""
        found: Mapping[str, str] = self._memo.get(region, ("zones",), partial(self._find_zones, region))
        return found

    def place(self, zone: Zone) -> SubnetPlace:
        """Return where a machine in the zone belongs. CapacityError if there is no subnet for it."""
        found: SubnetPlace = self._memo.get(
            zone.region, ("subnet", zone.name), partial(self._find_subnet, zone)
        )
        return found

    def group(self, order: MachineOrder) -> str:
        """Return the id of the security group, which has all its rules."""
        wanted = _wanted(order, FirewallAccess(frozenset(order.sources)))  # a wrong source leaves nothing
        name = _group_name(order)
        vpc_id = self.place(order.zone).vpc
        make = partial(self._make_group, order, name, wanted, vpc_id)
        return str(self._memo.get(order.zone.region, ("group", name, vpc_id), make))

    def key_pair(self, order: MachineOrder) -> str:
        """Return the name of the key pair.

        User data lets `order.user` in; with the pair the image's own user can be logged in as, too, which is how one looks
        at a machine whose user data failed.
        """
        name = f"skyserve-{order.owner}-{_digest(order.public_key)}"
        return str(
            self._memo.get(order.zone.region, ("key", name), partial(self._make_key_pair, order, name))
        )

    def note(self, owner: str, access: FirewallAccess) -> None:
        """Groups that are made from now on let these in."""
        self._access[owner] = access

    def admit(self, owner: str, region: str) -> None:
        """Change the rules of the owner's groups to what `note` has."""
        with self._lock_of(region):
            access = self._access[owner]
            of_owner = {"Filters": [{"Name": f"tag:{OWNER_TAG}", "Values": [owner]}]}
            for group in self._api.pages(region, "DescribeSecurityGroups", "SecurityGroups", of_owner):
                tags = {tag["Key"]: tag["Value"] for tag in group.get("Tags", ())}
                if PORTS_TAG not in tags:
                    continue  # of an earlier version, which shared it between replicas and load balancers
                public = ports_of_text(tags.get(PUBLIC_PORTS_TAG, ""))
                ports = ports_of_text(tags[PORTS_TAG])
                wanted = openings(access, tags.get(SERVICE_TAG, ""), ports, public)
                opened, closed = changes(wanted, _openings_of(group), (*ports, *public))
                self._change(region, "Authorize", group["GroupId"], _permissions(opened))
                self._change(region, "Revoke", group["GroupId"], _permissions(closed))

    def delete_shared(self, owner: str, region: str) -> list[str]:
        """Remove the owner's groups and keys; sentences about those that could not be removed."""
        self._memo.drop(region)
        left = []
        for thing in self.shared(owner, region):
            action, parameter = _REMOVALS[thing.kind]
            left += self._remove(region, action, {parameter: thing.id}, f"{thing.kind} {thing.id}")
        return left

    def shared(self, owner: str, region: str) -> list[OrphanedResource]:
        """Return the owner's keys and groups; neither costs anything."""
        of_owner = {"Filters": [{"Name": f"tag:{OWNER_TAG}", "Values": [owner]}]}
        pairs = self._api.request(region, "DescribeKeyPairs", of_owner).get("KeyPairs", ())
        groups = self._api.pages(region, "DescribeSecurityGroups", "SecurityGroups", of_owner)
        return [
            *(OrphanedResource("key-pair", pair["KeyName"], region, usd_month=0.0) for pair in pairs),
            *(
                OrphanedResource("security-group", group["GroupId"], region, usd_month=0.0)
                for group in groups
            ),
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
        zones = self._api.request(region, "DescribeAvailabilityZones").get("AvailabilityZones", ())
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

    def _find_subnet(self, zone: Zone) -> SubnetPlace:
        named = self._subnets.get(zone.name) or self._subnets.get(zone.region)
        by_zone = {"Name": "availability-zone-id", "Values": [zone.name]}
        if named:
            asked: dict[str, Any] = {"SubnetIds": list(named)}
            cure = "name one in clouds.aws.subnets, or leave the zone out"
        else:
            filters = [{"Name": "vpc-id", "Values": [self._vpc_id(zone.region)]}, by_zone]
            if self._vpc is None:
                filters.append({"Name": "default-for-az", "Values": ["true"]})
            asked = {"Filters": filters}
            cure = "make one there (`aws ec2 create-default-subnet`)"
        reply = self._api.request(zone.region, "DescribeSubnets", asked)
        found = [one for one in reply.get("Subnets", ()) if one["AvailabilityZoneId"] == zone.name]
        if not found:
            where = "clouds.aws.subnets" if named else "the VPC"
            raise CapacityError(
                f"{zone} has no subnet in {where}: {cure}", cloud=CLOUD, code="NoSubnet", zone=zone
            )
        # The same one each time: a repeated launch must have the same parameters.
        chosen = min(found, key=self._least_apt)
        return SubnetPlace(str(chosen["SubnetId"]), str(chosen["VpcId"]))

    def _least_apt(self, subnet: Reply) -> tuple[bool, str]:
        is_public = bool(subnet.get("MapPublicIpOnLaunch"))
        return is_public == self._use_private_ip, subnet["SubnetId"]

    def _make_group(self, order: MachineOrder, name: str, wanted: frozenset[Opening], vpc_id: str) -> str:
        region = order.zone.region
        with self._lock_of(region):
            access = self._access.get(order.owner)
            if access is not None:
                wanted = _wanted(order, access.with_sources(order.sources))
            group = self._find_or_create_group(order, name, vpc_id)
            group_id = str(group["GroupId"])
            missing = _permissions(wanted - _openings_of(group))
            if order.num_nodes > 1 and group_id not in _peers_of(group):
                missing.append({"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]})
            self._change(region, "Authorize", group_id, missing)
        return group_id

    def _change(
        self, region: str, verb: str, group_id: str, permissions: Sequence[Mapping[str, Any]]
    ) -> None:
        if permissions:
            self._api.call(
                region,
                f"{verb}SecurityGroupIngress",
                {"GroupId": group_id, "IpPermissions": permissions},
                # Another controller has done the same just now.
                unless=("InvalidPermission.Duplicate", "InvalidPermission.NotFound"),
                wait_for=("InvalidGroup.NotFound",),
            )

    def _lock_of(self, region: str) -> Lock:
        with self._lock:
            return self._group_locks.setdefault(region, Lock())

    def _find_or_create_group(self, order: MachineOrder, name: str, vpc_id: str) -> Reply:
        region = order.zone.region
        by_name = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc_id]}]
        creation = {
            "GroupName": name,
            "Description": f"Machines of the service {order.service}",
            "VpcId": vpc_id,
            "TagSpecifications": [
                _tags(
                    "security-group",
                    {
                        **self._labels,
                        OWNER_TAG: order.owner,
                        SERVICE_TAG: order.service,
                        PORTS_TAG: ports_text(order.ports),
                        PUBLIC_PORTS_TAG: ports_text(order.public_ports),
                    },
                )
            ],
        }
        for failures in range(_SETTLE_ATTEMPTS):
            found = self._api.request(region, "DescribeSecurityGroups", {"Filters": by_name}).get(
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
                "TagSpecifications": [_tags("key-pair", {**self._labels, OWNER_TAG: order.owner})],
            },
            unless=("InvalidKeyPair.Duplicate",),  # its name has the digest of the key, so it is the same key
        )
        return name


def _tags(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


def _group_name(order: MachineOrder) -> str:
    shape = repr(
        (
            order.service,
            order.num_nodes > 1,
            ports_text(order.ports),
            ports_text(order.public_ports),
        )
    )
    return f"skyserve-{order.owner}-{order.service}-{_digest(shape)}"


def _wanted(order: MachineOrder, access: FirewallAccess) -> frozenset[Opening]:
    try:
        return openings(access, order.service, order.ports, order.public_ports)
    except ValueError as error:
        raise InvalidRequestError(f"not a CIDR block: {error}", cloud=CLOUD, zone=order.zone) from error


def _openings_of(group: Reply) -> frozenset[Opening]:
    """Return the rules of a group for one port and one block; there may be others, which are not ours."""
    found = set()
    for permission in group.get("IpPermissions", ()):
        low, high = permission.get("FromPort"), permission.get("ToPort")
        if permission["IpProtocol"] == "tcp" and low is not None and low == high:
            found |= {Opening(low, block["CidrIp"]) for block in permission.get("IpRanges", ())}
            found |= {Opening(low, block["CidrIpv6"]) for block in permission.get("Ipv6Ranges", ())}
    return frozenset(found)


def _peers_of(group: Reply) -> set[str]:
    """Return the groups whose machines may open every port."""
    return {
        pair["GroupId"]
        for permission in group.get("IpPermissions", ())
        if permission["IpProtocol"] == "-1"
        for pair in permission.get("UserIdGroupPairs", ())
        if "GroupId" in pair
    }


def _permissions(rules: Iterable[Opening]) -> list[dict[str, Any]]:
    return [_permission(rule) for rule in sorted(rules)]


def _permission(rule: Opening) -> dict[str, Any]:
    ports = {"IpProtocol": "tcp", "FromPort": rule.port, "ToPort": rule.port}
    if isinstance(ip_network(rule.source), IPv6Network):
        return {**ports, "Ipv6Ranges": [{"CidrIpv6": rule.source}]}
    return {**ports, "IpRanges": [{"CidrIp": rule.source}]}
