"""An AWS account: its permissions, its capacity, and the lifetimes of its instances. Of moto's insides only the state
of an instance is touched here, which a canary test watches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from threading import RLock
from typing import Any

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # 1300 of them, at 0.1 s a region

from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import InstanceState, StateReason

from tests.clouds.meter import ADDRESS_USD_HOUR, DISK_USD_HOUR, MACHINE_USD_HOUR

ACCOUNT = "123456789012"
GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
PLAIN_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"
CONTROLLER_IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"


@dataclass(frozen=True, slots=True)
class Launched:
    """What one needs to really boot the machine."""

    id: str
    region: str
    zone: str  # its id: use1-az1
    instance_type: str
    private_ip: str
    public_ip: str | None
    user_data: str
    public_key: str
    tags: Mapping[str, str]


@dataclass(slots=True)
class Life:
    """What moto does not know of an instance."""

    instance: Any  # moto's own
    region: str
    born: float
    room: tuple[str, str, str]
    request_id: str | None
    tags: Mapping[str, str]
    ended: float | None = None
    spot_code: str = "fulfilled"
    spot_since: float = 0.0


@dataclass(slots=True)
class AwsAccount:
    """The account: its facts and the market. Everything can be changed while it runs."""

    now: Callable[[], float]
    regions: tuple[str, ...] = ("us-east-1", "us-west-2")
    boot_s: float = 0.0
    shutdown_s: float = 0.0
    listed_after_s: float = 0.0
    page_size: int = 1000
    room: dict[tuple[str, str, str], int] = field(
        default_factory=dict
    )  # (zone id, type, market): that many more
    quota_vcpus: dict[tuple[str, str], int] = field(default_factory=dict)  # (region, quota code)
    prices: list[tuple[str, str, float, float]] = field(
        default_factory=list
    )  # (type, zone name, USD, UNIX time)
    images: dict[tuple[str, str], str] = field(default_factory=dict)  # (region, parameter): AMI
    # What policies of the organisation demand: tags of all that is made, and encrypted disks by a key that there is.
    required_tags: tuple[str, ...] = ()
    requires_encryption: bool = False
    kms_keys: tuple[str, ...] = ()
    on_launch: Callable[[Launched], None] = lambda launched: None
    on_gone: Callable[[str], None] = lambda instance_id: None
    on_rules: Callable[[], None] = lambda: None  # the rules of a security group have changed
    lock: RLock = field(default_factory=RLock)  # moto is not thread-safe
    _lives: dict[str, Life] = field(default_factory=dict)
    _tokens: dict[tuple[str, str], tuple[str, bytes, str]] = field(default_factory=dict)
    _addresses: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def open(self) -> None:
        """From nothing: default networks and the public images."""
        for region in self.regions:
            backend = self._backend(region)
            backend.reset()
            (vpc,) = backend.describe_vpcs(filters={"is-default": "true"})
            self.open_gateway(region, vpc.id)
            for parameter in (GPU_IMAGE, PLAIN_IMAGE, CONTROLLER_IMAGE):
                self.publish_image(region, parameter)

    def open_gateway(self, region: str, vpc_id: str) -> None:
        """The VPC gets an Internet gateway, to which its main route table leads, as that of every default VPC does."""
        backend = self._backend(region)
        gateway = backend.create_internet_gateway()
        backend.attach_internet_gateway(gateway.id, vpc_id)
        of_vpc = backend.describe_route_tables(filters={"vpc-id": [vpc_id]})
        (main,) = [table for table in of_vpc if table.main_association_id is not None]
        backend.create_route(main.id, "0.0.0.0/0", gateway_id=gateway.id)

    def preempt(self, instance_id: str) -> None:
        """EC2 takes a spot instance, and there is no room in its place."""
        self.end(
            instance_id,
            "Server.SpotInstanceTermination",
            "Server.SpotInstanceTermination: Spot instance termination",
        )
        with self.lock:
            life = self._lives[instance_id]
            self.room[life.room] = 0
            life.spot_code, life.spot_since = "instance-terminated-no-capacity", self.now()

    def warn(self, instance_id: str, code: str = "instance-terminated-no-capacity") -> None:
        """The notice, two minutes before."""
        with self.lock:
            life = self._lives[instance_id]
            life.spot_code, life.spot_since = code, self.now()

    def end(self, instance_id: str, code: str, message: str) -> None:
        """An instance ends for a reason of EC2's."""
        with self.lock:
            instance = self._lives[instance_id].instance
            instance.terminate()
            instance.state_reason = StateReason(message, code)
            self._ended(instance_id)
        self.on_gone(instance_id)

    def stop_instance(self, instance_id: str) -> None:
        with self.lock:
            self._lives[instance_id].instance.stop()

    def shut_down(self, instance_id: str) -> None:
        """The machine shuts down from inside; its order decides the rest."""
        with self.lock:
            behaviour = self._lives[instance_id].instance.instance_initiated_shutdown_behavior
        if behaviour == "terminate":
            code = "Client.InstanceInitiatedShutdown"
            self.end(instance_id, code, f"{code}: Instance initiated shutdown")
        else:
            self.stop_instance(instance_id)

    def usd_hour(self) -> float:
        """The resources that are billed now: instances while they run, and volumes as long as they exist."""
        with self.lock:
            self._age()
            running = [
                life for life in self._lives.values() if life.instance._state.name in ("pending", "running")
            ]
            volumes = sum(
                len(self._backend(region).volumes)
                for region in {life.region for life in self._lives.values()}
            )
            return len(running) * (MACHINE_USD_HOUR + ADDRESS_USD_HOUR) + volumes * DISK_USD_HOUR

    def live(self, **tags: str) -> list[str]:
        """The truth: ids of instances that are billed, of those that carry the tags (a hyphen is an underscore here)."""
        wanted = {key.replace("_", "-"): value for key, value in tags.items()}
        with self.lock:
            return [
                instance_id
                for instance_id, life in self._lives.items()
                if life.ended is None and wanted.items() <= dict(life.tags).items()
            ]

    def openings(self, instance_id: str) -> set[tuple[int, str]]:
        """The truth: what the security groups of an instance let in, (port, CIDR block)."""
        with self.lock:
            life = self._lives[instance_id]
            groups = {group.id: group for card in life.instance.nics.values() for group in card.group_set}
            return {
                (int(rule.from_port), rule.ip_range["CidrIp"])
                for group in groups.values()
                for rule in group.ingress_rules
                if rule.from_port is not None and rule.ip_range and "CidrIp" in rule.ip_range
            }

    def belongings(self, region: str) -> list[str]:
        """The truth: ids of all volumes, network cards, security groups and key pairs that did not come with the account."""
        with self.lock:
            backend = self._backend(region)
            groups = [group for of_vpc in backend.groups.values() for group in of_vpc.values()]
            return [
                *backend.volumes,
                *backend.enis,
                *(group.id for group in groups if group.name != "default"),
                *backend.key_pairs,
            ]

    def tags_of(self, region: str, name: str) -> Mapping[str, str]:
        """The tags of the resource with an id, or of the key pair with a name; none if there is none."""
        with self.lock:
            backend = self._backend(region)
            pair = backend.key_pairs.get(name)
            if name in self._lives:
                return self._lives[name].tags
            return dict(backend.tags.get(name if pair is None else pair.id, {}))

    def backdate_volume(self, region: str, volume_id: str, age_s: float) -> None:
        with self.lock:
            self._backend(region).volumes[volume_id].create_time -= timedelta(seconds=age_s)

    def forget_instance(self, instance_id: str) -> None:
        """EC2 lists dead instances for about an hour."""
        with self.lock:
            life = self._lives.pop(instance_id)
            books = self._backend(life.region).reservations
            for key in [key for key, one in books.items() if life.instance in one.instances]:
                del books[key]

    def forget_the_dead(self) -> None:
        for instance_id in [key for key, life in self._lives.items() if life.ended is not None]:
            self.forget_instance(instance_id)

    def publish_image(self, region: str, parameter: str) -> str:
        with self.lock:
            image = self._backend(region).register_image(name=parameter)
            self.images[region, parameter] = image.id
            return str(image.id)

    def _backend(self, region: str) -> Any:
        return ec2_backends[ACCOUNT][region]

    def _age(self) -> None:
        """Let time have its way with the instances."""
        for life in self._lives.values():
            state = life.instance._state.name
            if state == "pending" and self.now() - life.born >= self.boot_s:
                life.instance._state = InstanceState("running", 16)
            if (
                state == "shutting-down"
                and life.ended is not None
                and self.now() - life.ended >= self.shutdown_s
            ):
                life.instance._state = InstanceState("terminated", 48)

    def _ended(self, instance_id: str) -> None:
        life = self._lives[instance_id]
        life.ended = self.now()
        dead = InstanceState("terminated", 48)
        life.instance._state = InstanceState("shutting-down", 32) if self.shutdown_s else dead
