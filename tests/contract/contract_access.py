"""Clouds whose machines have firewalls: how to order a machine, its open ports, and how to crash at any call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from policies.model import Role
from provisioners.port.errors import ProvisionError
from provisioners.port.firewall import Opening
from provisioners.port.vm import MachineOrder, Machines
from tests.clouds.aws.aws_bench import ORDER as AWS_ORDER
from tests.clouds.aws.aws_bench import Killed, aws_bench
from tests.clouds.azure.azure_harness import Crash, Killer, azure
from tests.clouds.azure.azure_harness import order as azure_order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import NIC, NSG, VM, World
from tests.clouds.gcp.gcp_controller import controller, order_of

OWNER = "owner-1"


class Walled(ABC):
    def __init__(self) -> None:
        self.stack = ExitStack()

    def order(
        self,
        token: str,
        *,
        service: str = "chat",
        role: Role = Role.REPLICA,
        sources: tuple[str, ...] = (),
        port: int = 8000,
        owner: str = OWNER,
    ) -> MachineOrder:
        is_public = role is Role.LOAD_BALANCER
        return replace(
            self.any_order(),
            token=token,
            owner=owner,
            service=service,
            role=role,
            sources=sources,
            ports=() if is_public else (port,),
            public_ports=(port,) if is_public else (),
        )

    @abstractmethod
    def any_order(self) -> MachineOrder: ...

    @abstractmethod
    def machines(self) -> Machines:
        """As after a restart: nothing is remembered."""

    @abstractmethod
    def open(self, token: str) -> frozenset[Opening]:
        """The truth, as a packet meets it."""

    @abstractmethod
    def widen(self) -> None:
        """The replicas' port is opened to any address, by hand."""

    @property
    @abstractmethod
    def writes(self) -> int:
        """Calls so far that could change a rule."""

    @abstractmethod
    def dies(self, at: int, after: bool, act: Callable[[Machines], object]) -> bool:
        """Do it with a controller that crashes at its call of that number (from 0). Returns False if there was no such call."""

    @abstractmethod
    def pass_time(self) -> None: ...

    def close(self) -> None:
        self.stack.close()


class AwsWalled(Walled):
    def __init__(self) -> None:
        super().__init__()
        self.bench = self.stack.enter_context(
            aws_bench(self.stack.enter_context(pytest.MonkeyPatch.context()))
        )
        self.bench.settings = replace(self.bench.settings, regions=("us-east-1",))

    def any_order(self) -> MachineOrder:
        return AWS_ORDER

    def machines(self) -> Machines:
        return self.bench.fresh()

    def open(self, token: str) -> frozenset[Opening]:
        (instance,) = self.bench.world.live(skyserve_token=token)
        ec2 = self.bench.onlooker()
        (described,) = ec2.describe_instances(InstanceIds=[instance])["Reservations"][0]["Instances"]
        ids = [group["GroupId"] for card in described["NetworkInterfaces"] for group in card["Groups"]]
        return frozenset(
            Opening(rule["FromPort"], block)
            for group in ec2.describe_security_groups(GroupIds=ids)["SecurityGroups"]
            for rule in group["IpPermissions"]
            for block in _blocks(rule)
        )

    def widen(self) -> None:
        for group in self.bench.groups():
            self.bench.onlooker().authorize_security_group_ingress(
                GroupId=group["GroupId"], IpProtocol="tcp", FromPort=8000, ToPort=8000, CidrIp="0.0.0.0/0"
            )

    @property
    def writes(self) -> int:
        asked = self.bench.world.asked
        return len(asked("AuthorizeSecurityGroupIngress")) + len(asked("RevokeSecurityGroupIngress"))

    def dies(self, at: int, after: bool, act: Callable[[Machines], object]) -> bool:
        self.bench.tripwire.arm(at, after)
        try:
            act(self.bench.fresh())
        except Killed:
            return True
        finally:
            self.bench.tripwire.disarm()
        return False

    def pass_time(self) -> None:
        self.bench.time.sleep(10.0)


class AzureWalled(Walled):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.server = self.stack.enter_context(AzureServer(self.world).running())

    def any_order(self) -> MachineOrder:
        return azure_order()

    def machines(self) -> Machines:
        return azure(self.server)

    def open(self, token: str) -> frozenset[Opening]:
        (vm,) = self._of(VM, token)
        cards = [one for one in self._of(NIC) if one.name.startswith(f"{vm.name}-")]
        group_id = cards[0].body["properties"]["networkSecurityGroup"]["id"].lower()
        rules = [
            rule["properties"] for rule in self.world.resources[group_id].body["properties"]["securityRules"]
        ]
        return frozenset(
            Opening(int(port), block)
            for rule in rules
            for block in rule["sourceAddressPrefixes"]
            for port in rule["destinationPortRanges"]
        )

    def widen(self) -> None:
        for group in self._of(NSG):
            for rule in group.body["properties"]["securityRules"]:
                if "8000" in rule["properties"]["destinationPortRanges"]:
                    rule["properties"]["sourceAddressPrefixes"] = ["0.0.0.0/0"]

    def _of(self, kind: str, name: str | None = None) -> list[Any]:
        return [one for one in self.world.resources.values() if one.kind == kind and name in (None, one.name)]

    @property
    def writes(self) -> int:
        return self.server.count("PUT", "/networkSecurityGroups/")

    def dies(self, at: int, after: bool, act: Callable[[Machines], object]) -> bool:
        try:
            act(azure(self.server, Killer(at, after)))
        except Crash:
            return True
        return False

    def pass_time(self) -> None:
        self.world.pass_time(10.0)

    def close(self) -> None:
        super().close()
        assert self.world.violations == []


class GcpWalled(Walled):
    def __init__(self) -> None:
        super().__init__()
        self.gcp = self.stack.enter_context(controller())

    def any_order(self) -> MachineOrder:
        return order_of()

    def machines(self) -> Machines:
        return self.gcp.another()

    def open(self, token: str) -> frozenset[Opening]:
        (instance,) = [one for (_, name), one in self.gcp.world.instances.items() if name == token]
        tags = set(instance["tags"]["items"])
        return frozenset(
            Opening(int(port), block)
            for rule in self.gcp.world.firewalls.values()
            if tags & set(rule["targetTags"])
            for block in rule.get("sourceRanges", [] if rule.get("sourceTags") else ["0.0.0.0/0"])
            for entry in rule["allowed"]
            for port in entry["ports"]
        )

    def widen(self) -> None:
        for rule in self.gcp.world.firewalls.values():
            if "8000" in rule["allowed"][0].get("ports", ()):
                rule["sourceRanges"] = ["0.0.0.0/0"]

    @property
    def writes(self) -> int:
        verbs = ("insert", "update", "delete")
        return sum(self.gcp.world.count(f"compute.firewalls.{verb}") for verb in verbs)

    def dies(self, at: int, after: bool, act: Callable[[Machines], object]) -> bool:
        world = self.gcp.world
        world.crash = at, after
        machines = self.gcp.another()
        try:
            act(machines)
        except ProvisionError:
            assert world.is_down  # there is no other reason
        died = world.is_down
        self.gcp.restart()
        return died

    def pass_time(self) -> None:
        self.gcp.world.advance(10.0)


WALLED: Mapping[str, Callable[[], Walled]] = {"aws": AwsWalled, "azure": AzureWalled, "gcp": GcpWalled}


def _blocks(rule: Mapping[str, Any]) -> Iterable[str]:
    yield from (block["CidrIp"] for block in rule.get("IpRanges", ()))
    yield from (block["CidrIpv6"] for block in rule.get("Ipv6Ranges", ()))
