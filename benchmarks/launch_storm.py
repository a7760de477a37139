"""Hundreds of launches on three clouds at once: does anything get lost, doubled, or refused for the number of calls?

    python -m benchmarks.launch_storm [--launches 300] [--zones 12] [--unpaced] [--json]

The production runner, witness, fleets and official SDKs of aws, gcp and azure, against the strict make-believe clouds of
tests/clouds, with the clouds' own limits on calls and responses that take 10 to 300 ms. Replicas are launched over the
zones, listed all the while, and terminated; what runs on machines is made up, so no one logs in to them. `--unpaced`:
without our own token buckets, for comparison. Time is real.

Limits on calls: EC2 RunInstances 5 at once and 2 a second, other changes 50 and 5, Describe 100 and 20, by region ("Request
throttling for the Amazon EC2 API"); Google 20 a second of each group (published are 1,500 a minute); Azure 250 reads and 25
a second, 200 writes and deletes and 10 a second ("Understand how Azure Resource Manager throttles requests").
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from policies.model import (
    GaveUp,
    Launched,
    LaunchFailed,
    Offer,
    Progressed,
    Replica,
    ReplicaState,
    Terminated,
)
from provisioners.assembly import VmSettings, order_of, within
from provisioners.aws.machines import AwsMachines, AwsSettings
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.gcp.machines import GcpMachines
from provisioners.offers.catalog import packaged
from provisioners.offers.matching import offers_of
from provisioners.port.base import Candidate, Instance, LaunchOrder, Requirements
from provisioners.port.vm import Machines
from provisioners.rate_limit import RateLimiter
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.controller.clouds.instance_poller import ThreadInstancePoller
from skyserve_cli.controller.clouds.operation_runner import ThreadOperationRunner
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.reconcile.mappers import order_of as order_of_replica
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind
from skyserve_cli.output import put_json
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.text_tables import FittedTable, put_table
from tests.clouds.api_limits import Limits
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.azure.azure_harness import azure
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_ground import PROJECT
from tests.clouds.gcp.gcp_parts import RealClock
from tests.clouds.gcp.gcp_server import serving
from tests.clouds.gcp.gcp_world import World as GcpWorld

OWNER, SERVICE = "0a1b2c3d", "storm"
SPEC = ServiceSpec(SERVICE, "run")
ANSWER_S = (0.01, 0.3)
BOOT_S = 20.0
LIST_EVERY_S = 5.0
PATIENCE_S = 1800.0

RATES = {
    "aws": {"RunInstances": (5, 2), "TerminateInstances": (50, 5), "Describe": (100, 20)},
    "gcp": dict.fromkeys(("read", "list", "wait", "write"), (40, 20)),
    "azure": {"GET": (250, 25), "PUT": (200, 10), "DELETE": (200, 10)},
}
PLACES = {  # (accelerator, regions, zones in the order in which they are taken)
    "aws": ("L4", ("us-east-1", "us-west-2"), ("use1-az4", "usw2-az1", "use1-az6", "usw2-az2")),
    "gcp": (
        "L4",
        ("us-central1", "us-east1", "europe-west4"),
        ("us-central1-a", "us-east1-b", "europe-west4-a", "us-central1-b", "us-central1-c"),
    ),
    "azure": (
        "T4",
        ("eastus", "westeurope"),
        ("eastus-1", "westeurope-1", "eastus-2", "westeurope-2", "eastus-3", "westeurope-3"),
    ),
}


class Fleet(VmProvisioner):
    """Of one cloud, which counts its launches."""

    def __init__(self, machines: Machines) -> None:
        hosts = MemoryHosts(time.time, setup_s=0.0)
        super().__init__(
            machines,
            hosts,
            lambda order, rank: order_of(order, rank, bytes(32), VmSettings()),
            lambda need: [],
        )
        self.launches: Counter[str] = Counter()

    def launch(self, order: LaunchOrder) -> Instance:
        self.launches[order.token] += 1
        return super().launch(order)


class AwsFleet(Fleet):
    name: ClassVar[str] = "aws"


class GcpFleet(Fleet):
    name: ClassVar[str] = "gcp"


class AzureFleet(Fleet):
    name: ClassVar[str] = "azure"


@dataclass
class Cloud:
    """A world, and what there is to ask of it: `made` is how many machines ever were, `alive` how many are."""

    fleet: Fleet
    limits: Limits
    sent: Callable[[], int]  # launches, with a response or without
    made: Callable[[], int]
    alive: Callable[[], int]
    left: Callable[[], int]  # machines and whatever comes with them


@contextmanager
def aws() -> Iterator[Cloud]:
    world = AwsWorld(time.time)
    world.boot_s = BOOT_S
    with world.running():
        os.environ |= {
            "AWS_ENDPOINT_URL": world.url,
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "of-no-account",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        machines = AwsMachines(AwsSettings(regions=world.regions))
        yield Cloud(
            AwsFleet(machines),
            world.limits,
            lambda: len(world.asked("RunInstances")),
            lambda: len(world._lives),
            lambda: len(world.live()),
            lambda: len(world.live()) + len(machines.orphans(OWNER)),
        )
        assert world.errors == [], world.errors[:3]


@contextmanager
def gcp() -> Iterator[Cloud]:
    world = GcpWorld(clock=RealClock(), operation_s=5.0, boot_s=BOOT_S)
    with serving(world) as url:
        machines = GcpMachines(PROJECT, endpoint=url)
        yield Cloud(
            GcpFleet(machines),
            world.limits,
            lambda: world.count("compute.instances.insert"),
            lambda: sum(world.launches.values()),
            lambda: len(world.alive()),
            lambda: len(world.alive()) + len(world.disks),
        )
        assert world.violations == [], world.violations[:3]


@contextmanager
def arm() -> Iterator[Cloud]:
    world = AzureWorld(clock=RealClock(), page_size=100, boot_s=BOOT_S)  # type: ignore[arg-type]
    world.private_ips = (f"10.64.{number >> 8}.{number & 255}" for number in itertools.count(4))
    world.public_ips = (f"203.0.{number >> 8}.{number & 255}" for number in itertools.count(1))
    with AzureServer(world).running() as server:
        yield Cloud(
            AzureFleet(azure(server)),
            server.limits,
            lambda: server.count("PUT", "/virtualMachines/[^/]+$"),
            lambda: world.launched,
            lambda: len(world.alive()),
            lambda: len(world.parts()),
        )
        assert world.violations == [], world.violations[:3]


CLOUDS = {"aws": aws, "gcp": gcp, "azure": arm}


@dataclass
class Figures:
    """Of one cloud, or of all."""

    launches: int = 0
    failed: int = 0
    duplicates: int = 0
    left: int = 0
    calls: int = 0
    calls_per_launch: float = 0.0
    most_in_flight: int = 0
    throttled: int = 0
    throttled_percent: float = 0.0
    sent_again: int = 0  # requests that launch, above one for each
    launched_s: float = 0.0  # until the last launch got its response
    listed_s: float = 0.0  # until all of them were in one listing
    gone_s: float = 0.0  # and from the first terminate to the last


@dataclass
class Storm:
    """`replicas` are launched by one runner, watched by one witness, and ended."""

    clouds: dict[str, Cloud]
    replicas: list[Replica]
    figures: dict[str, Figures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = SystemClock()
        self._woken = threading.Event()
        self._runner = ThreadOperationRunner(self._fleet, self._order, OWNER, self._clock, self._woken.set)
        polls = dict.fromkeys(self.clouds, LIST_EVERY_S)
        self._instance_poller = ThreadInstancePoller(self._fleet, OWNER, self._clock, self._woken.set, polls)
        self.figures = {name: Figures() for name in self.clouds}

    def run(self) -> None:
        began = time.monotonic()
        self._instance_poller.watch(frozenset(self.clouds))
        launched = self._until_done(self.replicas, OperationKind.LAUNCH, "launched_s")
        self._until_listed(launched, began)
        self._until_done(launched, OperationKind.TERMINATE, "gone_s")
        self._until(lambda: not any(cloud.alive() for cloud in self.clouds.values()), "the last is gone")
        self._instance_poller.close()
        for name, cloud in self.clouds.items():
            self._count(name, cloud)

    def _until_done(self, replicas: Sequence[Replica], kind: OperationKind, phase: str) -> list[Replica]:
        """Make the calls; the replicas whose launch got a response."""
        began = time.monotonic()
        waiting = {one.id: one for one in replicas}
        done: list[Replica] = []

        def turn() -> bool:
            self._runner.ensure([CloudOperation(SERVICE, "i1", kind, one) for one in waiting.values()])
            for _, event in self._runner.drain():
                if isinstance(event, Progressed):  # a call is made again
                    print(f"replica {event.replica_id}: {event.message}", file=sys.stderr)
                    continue
                replica = waiting.pop(event.replica_id)
                mine = self.figures[replica.zone.cloud]
                setattr(mine, phase, time.monotonic() - began)
                if isinstance(event, Launched):
                    done.append(replace(replica, instance_id=event.instance_id))
                elif isinstance(event, LaunchFailed | GaveUp):
                    mine.failed += 1
                    print(f"{replica.zone}: {event.message}", file=sys.stderr)
                else:
                    assert isinstance(event, Terminated)
            return not waiting

        self._until(turn, f"the last {kind.value} is answered")
        return done

    def _until_listed(self, launched: Sequence[Replica], began: float) -> None:
        wanted = {name: {one.id for one in launched if one.zone.cloud == name} for name in self.clouds}
        seen: set[str] = set()

        def turn() -> bool:
            for listing in self._instance_poller.drain():
                ids = {one.replica_id for one in listing.instances if not one.state.is_gone}
                if ids == wanted[listing.cloud] and listing.cloud not in seen:
                    seen.add(listing.cloud)
                    self.figures[listing.cloud].listed_s = time.monotonic() - began
            return seen == set(self.clouds)

        self._until(turn, "all are listed")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends_at, f"waited for too long until {what}"
            self._woken.wait(0.25)
            self._woken.clear()

    def _count(self, name: str, cloud: Cloud) -> None:
        mine, limits = self.figures[name], cloud.limits
        mine.launches = sum(one.zone.cloud == name for one in self.replicas)
        mine.duplicates = cloud.made() - (mine.launches - mine.failed)
        mine.left = cloud.left()
        mine.calls = limits.calls.total()
        mine.calls_per_launch = mine.calls / mine.launches
        mine.most_in_flight = limits.most_under_way
        mine.throttled = limits.refused.total()
        mine.throttled_percent = 100 * mine.throttled / mine.calls
        mine.sent_again = cloud.sent() - mine.launches

    def _fleet(self, cloud: str) -> Fleet:
        return self.clouds[cloud].fleet

    def _order(self, call: CloudOperation) -> LaunchOrder:
        return order_of_replica(OWNER, call.service, call.incarnation, call.replica, SPEC, {})


def offers(zones: int) -> list[Offer]:
    """One per zone, the clouds taking turns."""
    found: list[Offer] = []
    for place in range(max(len(names) for _, _, names in PLACES.values())):
        for cloud, (accelerator, regions, names) in PLACES.items():
            if place < len(names):
                catalog = within(packaged().of(cloud), regions, cloud)
                need = Candidate(cloud, zone=names[place], accelerator=accelerator, use_spot=True)
                found += offers_of(Requirements((need,)), catalog)
    if zones > len(found):
        raise SystemExit(f"there are {len(found)} zones")
    return found[:zones]


def total_of(figures: Sequence[Figures]) -> Figures:
    """Sums; times are those of the slowest."""
    slowest = ("launched_s", "listed_s", "gone_s")
    rows = [asdict(one) for one in figures]
    whole = Figures(**{key: (max if key in slowest else sum)(row[key] for row in rows) for key in rows[0]})
    whole.calls_per_launch = whole.calls / whole.launches
    whole.throttled_percent = 100 * whole.throttled / whole.calls
    return whole


def show(figures: dict[str, Figures]) -> None:
    names = list(asdict(Figures()))
    rows = [
        (name.replace("_", " "), *(f"{getattr(one, name):.4g}" for one in figures.values())) for name in names
    ]
    put_table(FittedTable(("", *figures), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--launches", type=int, default=300)
    parser.add_argument("--zones", type=int, default=12)
    parser.add_argument("--unpaced", action="store_true", help="without our own limits on calls")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.unpaced:
        RateLimiter.take_turn = lambda self, group, rate: None  # type: ignore[method-assign]
    places = offers(args.zones)
    now = time.time()
    replicas = [
        Replica(number, 1, places[number % len(places)], ReplicaState.REQUESTED, now, now)
        for number in range(1, args.launches + 1)
    ]
    with ExitStack() as stack:
        used = {offer.zone.cloud for offer in places}
        clouds = {name: stack.enter_context(make()) for name, make in CLOUDS.items() if name in used}
        for name, cloud in clouds.items():
            cloud.limits.rates, cloud.limits.answer_s = RATES[name], ANSWER_S
        storm = Storm(clouds, replicas)
        storm.run()
    figures = {**storm.figures, "all": total_of(list(storm.figures.values()))}
    if args.json:
        put_json({name: asdict(one) for name, one in figures.items()})
    else:
        show(figures)
    whole = figures["all"]
    sys.exit(1 if whole.failed or whole.duplicates or whole.left else 0)


if __name__ == "__main__":
    main()
