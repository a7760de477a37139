"""AWS: machines are EC2 instances. Zones are AZ ids (`use1-az1`), the same in every account.

*One attempt, one client token.* RunInstances carries a ClientToken that follows from the order, so sending the order
again is the same launch ("Ensuring idempotency in Amazon EC2 API requests"). EC2 remembers the token's parameters even
of a launch that failed: when they have had to change (a group was deleted, AWS has published a new image) it returns
IdempotentParameterMismatch. Then the machine is looked for by our token tag; only when EC2 has shown none of it for as
long as a new machine may stay unlisted, the next of the order's tokens is used.

*What EC2 does not show yet.* A new instance may be missing from lists for some seconds. `machines` therefore shows what
this object has launched in the last minute whether it is listed or not; a controller that has been restarted since
sends the orders of its intents again, and their client tokens give the same machines. `destroy` does not believe that
a young instance is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from threading import Lock
from typing import Any, ClassVar

import boto3

from provisioners.aws.api import AwsApi, EveryRegion, RegionMemo, Reply
from provisioners.aws.check import findings
from provisioners.aws.discovery import offerings_in
from provisioners.aws.errors import CLOUD, ErrorContext
from provisioners.aws.health_checks import HealthChecks
from provisioners.aws.image import AwsImages
from provisioners.aws.network import AwsNetwork
from provisioners.aws.orphans import orphans_in, owners_in, remove
from provisioners.aws.outbound import outbound
from provisioners.aws.prices import spot_prices_of
from provisioners.aws.translate import (
    NOTICE_CODES,
    SPOT_NOTICE_S,
    check_order,
    client_token,
    forgotten,
    machine_of,
    request_of,
    trial_order,
)
from provisioners.clock import unix_now
from provisioners.offers.catalog.discovered import Discovery, Progress, RegionalType
from provisioners.offers.catalog.model import Shape
from provisioners.offers.reservations import Reservations, reserved_for
from provisioners.port.errors import (
    ProvisionError,
    RegionClosedError,
    TransientError,
)
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import (
    OWNER_TAG,
    TOKEN_TAG,
    Finding,
    Level,
    Machine,
    MachineOrder,
    OrphanedResource,
    Silent,
    Trial,
    in_region,
)

_SETTLED_S = 60.0  # after which EC2 is believed that something does not exist
_TOKENS = 3  # of one order, if its parameters have to change
_UNKNOWN = "InvalidInstanceID.NotFound"

# What a launch refers to and what was deleted since we looked. New groups and keys may be unknown for seconds, too.
_NEW = ("InvalidGroup.NotFound", "InvalidKeyPair.NotFound")
_NEW_PATIENCE_S = 15.0
_STALE = (*_NEW, "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSubnetID.NotFound")


@dataclass(frozen=True, slots=True)
class AwsSettings:
    """The user's `aws` section.

    `regions`: None is every region that the account has enabled. `vpc`: its id, or its name in all regions; None is the
    default VPC. `subnets`: ids by zone id or region. `image`: an AMI or an SSM parameter, None is one that fits. With
    `use_private_ip` machines have no public address, and we are inside their network. Disks are `encrypted`, by `kms_key`
    (one, or one for each region) if there is one. `labels` are of what machines share.
    """

    regions: tuple[str, ...] | None = None
    profile: str | None = None
    use_private_ip: bool = False
    vpc: str | None = None
    subnets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    encrypted: bool = False
    kms_key: str | Mapping[str, str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    instance_profile: str | None = None
    image: str | Mapping[str, str] | None = None
    reservations: Reservations = field(default_factory=dict)


class AwsMachines:
    """A `Machines` over EC2. Endpoints can be set by boto3's own AWS_ENDPOINT_URL*."""

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        settings: AwsSettings | None = None,
        *,
        now: Callable[[], float] = unix_now,
        sleep: Callable[[float], None] = time.sleep,
        rng: Random | None = None,
        session: boto3.Session | None = None,
    ) -> None:
        self._settings = settings or AwsSettings()
        self._now = now
        self._memo = RegionMemo()
        self._api = AwsApi(self._settings.profile, now, sleep, rng or Random(), session)
        self._network = AwsNetwork(
            self._api,
            self._memo,
            self._settings.vpc,
            self._settings.use_private_ip,
            self._settings.subnets,
            self._settings.labels,
        )
        self._images = AwsImages(self._api, self._memo, self._settings.image)
        self._launched: dict[str, tuple[float, Machine]] = {}
        self.cloud_clock = self._api.clock
        self._every = EveryRegion(now)
        self.closed = self._every.closed
        self._lock = Lock()

    def create(self, order: MachineOrder) -> Machine:
        check_order(order, self._regions(), self._settings.kms_key)
        region = order.zone.region
        has_looked_again = False
        for attempt in range(_TOKENS):
            try:
                return self._run(order, client_token(order, attempt))
            except ProvisionError as error:
                if error.code == "IdempotentInstanceTerminated":
                    return self._find(order) or forgotten(order)
                if error.code == "IdempotentParameterMismatch":
                    known = self._find_patiently(order)
                    if known is not None:
                        return known
                elif error.code in _STALE and not has_looked_again:
                    self._memo.drop(region)
                    has_looked_again = True
                else:
                    raise
        raise TransientError(
            f"{order.token}: EC2 knows all of its client tokens and none of its machines",
            cloud=CLOUD,
            zone=order.zone,
            retry_after_s=_SETTLED_S,
        )

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        def of(region: str) -> list[Machine]:
            # What did not respond a moment ago is not waited for: the other regions' machines are to be seen, too.
            how = {"attempts": 1} if silent is not None and self._every.is_suspect(region) else {}
            return self._list(region, _tagged(OWNER_TAG, owner), **how)

        listed = list(self._every.call(self._regions(), of, silent, is_listing=True))
        ids = {machine.id for machine in listed}
        with self._lock:
            self._launched = {
                key: (at, machine)
                for key, (at, machine) in self._launched.items()
                if self._now() - at < _SETTLED_S
            }
            unlisted = [machine for _, machine in self._launched.values() if machine.id not in ids]
        return [*listed, *(machine for machine in unlisted if machine.owner == owner)]

    def destroy(self, machine: Machine) -> None:
        if machine.state.is_gone:
            return
        age_s = _SETTLED_S if machine.launched_at is None else self._now() - machine.launched_at
        self._api.call(
            machine.zone.region,
            "TerminateInstances",
            {"InstanceIds": [machine.id]},
            unless=(_UNKNOWN, "InvalidInstanceID.Malformed"),
            wait_for=(_UNKNOWN,),
            patience_s=_SETTLED_S - age_s,
        )
        with self._lock:
            self._launched.pop(machine.id, None)

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        """Regions that the account has not enabled have no prices, and are no error."""

        def of(region: str) -> list[tuple[tuple[str, str], float]]:
            zone_ids = self._network.zone_ids(region)
            return list(spot_prices_of(self._api, region, zone_ids, instance_types).items())

        enabled = set(self._regions())
        return dict(self._every.call([one for one in regions if one in enabled], of, silent))

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        found = list(self._every.call(self._regions(), lambda region: self._orphans(region, owner), silent))
        return [*found, *HealthChecks(self._api).orphans(owner, silent)]

    def remove(self, orphan: OrphanedResource) -> None:
        remove(self._api, orphan)

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        def of(region: str) -> list[OrphanedResource]:
            return self._network.shared(owner, region)

        return list(self._every.call(self._regions(), of, silent))

    def owners(self, silent: Silent | None = None) -> Sequence[str]:
        return sorted(
            set(self._every.call(self._regions(), lambda region: owners_in(self._api, region), silent))
        )

    def discover(self, known: Sequence[Shape], progress: Progress) -> Discovery:
        regions, notes, failed = self._regions(), list[str](), dict[str, ProvisionError]()
        plain = [shape.name for shape in known if shape.accelerator is None]
        listed: list[str] = []

        def of(region: str) -> list[RegionalType]:
            found = list(offerings_in(self._api, region, plain, notes))
            listed.append(region)
            progress(len(listed), len(regions), region)
            return found

        offerings = tuple(self._every.call(regions, of, failed.__setitem__))
        notes += [f"{region}: {error}" for region, error in sorted(failed.items())]
        return Discovery(CLOUD, self._now(), tuple(sorted(listed)), offerings, tuple(notes))

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self._network.note(owner, access)
        failures: list[ProvisionError] = []

        def of(region: str) -> Sequence[None]:
            self._network.admit(owner, region)
            return ()

        list(self._every.call(self._regions(), of, lambda _, error: failures.append(error)))
        if failures:
            raise failures[0]

    def delete_shared(self, owner: str) -> Sequence[str]:
        return list(
            self._every.call(self._regions(), lambda region: self._network.delete_shared(owner, region))
        )

    def check(self, trials: Sequence[Trial] = (), instance_types: Collection[str] = ()) -> Sequence[Finding]:
        """`trials` are launched as dry runs, in the regions of the settings or else in the home region.

        Quotas are those of `instance_types`.
        """
        settings = self._settings
        regions = settings.regions
        if regions is None and settings.subnets:
            regions = tuple(sorted({trial.zone.region for trial in trials})) or None
        found = findings(
            self._api,
            regions,
            trials,
            instance_types,
            self._trial,
            lists_regions=settings.regions is None,
            labels=settings.labels,
        )
        if found[0].level is Level.MISSING:
            return found
        checked = regions or (self._api.home_region,)
        zones = sorted({trial.zone.physical for trial in trials if trial.zone.region in checked})
        ways = outbound(self._api, zones, self._network.place, settings.use_private_ip)
        return [*found, *ways, *self._closed_regions()]

    def _closed_regions(self) -> Iterator[Finding]:
        """Yield the regions that the account lists and does not let us use."""
        closed: dict[str, ProvisionError] = {}
        with suppress(ProvisionError):  # said by the other findings
            list(
                self._every.call(
                    self._regions(),
                    lambda region: self._list(region, []),
                    closed.__setitem__,
                    is_listing=True,
                )
            )
        level = Level.NOTE if self._settings.regions is None else Level.MISSING
        for region, error in sorted(closed.items()):
            if isinstance(error, RegionClosedError):
                yield Finding(f"region {region}", level, error.message)

    def _trial(self, trial: Trial) -> Mapping[str, Any]:
        """Return the request that a real launch would send, without the key pair and group that would be made for it."""
        order = trial_order(trial, self._settings.labels)
        return self._request(order, client_token(order, 0), key_name=None, groups=())

    def _request(
        self, order: MachineOrder, token: str, key_name: str | None, groups: Sequence[str]
    ) -> Mapping[str, Any]:
        settings = self._settings
        return request_of(
            order,
            token,
            self._images.of(order),
            key_name=key_name,
            subnet=self._network.place(order.zone).subnet,
            groups=groups,
            use_private_ip=settings.use_private_ip,
            instance_profile=settings.instance_profile,
            is_encrypted=settings.encrypted,
            kms_key=in_region(settings.kms_key, order.zone.region),
            reservation=reserved_for(order, settings.reservations),
        )

    def _run(self, order: MachineOrder, token: str) -> Machine:
        region = order.zone.region
        key_name, groups = self._network.key_pair(order), [self._network.group(order)]
        params = self._request(order, token, key_name, groups)
        asked = ErrorContext("ec2:RunInstances", region, order.zone, order.instance_type, order.capacity_type)
        reply = self._api.request(
            region, "RunInstances", params, asked=asked, wait_for=_NEW, patience_s=_NEW_PATIENCE_S
        )
        # Its zone is the order's: any other call now could fail, with the machine already there.
        machine = replace(self._read(reply["Instances"][0], region, {}), zone=order.zone)
        with self._lock:
            self._launched[machine.id] = (self._now(), machine)
        return machine

    def _find(self, order: MachineOrder) -> Machine | None:
        """Return the order's machine, by tag: a live one if there is any."""
        filters = _tagged(OWNER_TAG, order.owner) + _tagged(TOKEN_TAG, order.token)
        found = self._list(order.zone.region, filters)
        return min(found, key=lambda machine: machine.state.is_gone, default=None)

    def _find_patiently(self, order: MachineOrder) -> Machine | None:
        started, failures = self._now(), 0
        while (found := self._find(order)) is None and self._now() - started < _SETTLED_S:
            failures += 1
            self._api.wait(failures)
        return found

    def _list(self, region: str, filters: list[dict[str, Any]], **how: Any) -> list[Machine]:
        pages = self._api.pages(region, "DescribeInstances", "Reservations", {"Filters": filters}, **how)
        described = [instance for reservation in pages for instance in reservation["Instances"]]
        if not described:
            return []
        has_spot = any(
            one.get("InstanceLifecycle") == "spot" and one["State"]["Name"] == "running" for one in described
        )
        notices = self._notices(region, filters) if has_spot else {}
        zone_ids = self._network.zone_ids(region)
        return [self._read(one, region, zone_ids, notices.get(one["InstanceId"])) for one in described]

    def _notices(self, region: str, filters: list[dict[str, Any]]) -> dict[str, float]:
        """By instance, the instant (UNIX seconds) at which EC2 will take it."""
        by_code = [*filters, {"Name": "status-code", "Values": list(NOTICE_CODES)}]
        requests = self._api.pages(
            region, "DescribeSpotInstanceRequests", "SpotInstanceRequests", {"Filters": by_code}
        )
        return {
            request["InstanceId"]: request["Status"]["UpdateTime"].timestamp() + SPOT_NOTICE_S
            for request in requests
            if "InstanceId" in request
        }

    def _read(
        self, described: Reply, region: str, zone_ids: Mapping[str, str], preempt_at: float | None = None
    ) -> Machine:
        is_private = self._settings.use_private_ip
        return machine_of(described, region, zone_ids, use_private_ip=is_private, preempt_at=preempt_at)

    def _orphans(self, region: str, owner: str) -> list[OrphanedResource]:
        """Return the things first, then the machines: what belongs to a machine that is made meanwhile is not left over."""
        things = list(orphans_in(self._api, region, owner, self._now()))
        listed = self._list(region, _tagged(OWNER_TAG, owner))
        live = {machine.token for machine in listed if not machine.state.is_gone}
        return [thing for thing in things if thing.token not in live]

    def _regions(self) -> Sequence[str]:
        if self._settings.regions is not None:
            return self._settings.regions
        home = self._api.home_region
        found: Sequence[str] = self._memo.get("", ("regions",), lambda: self._find_regions(home))
        return found

    def _find_regions(self, home: str) -> list[str]:
        return sorted(
            region["RegionName"] for region in self._api.request(home, "DescribeRegions")["Regions"]
        )


def _tagged(tag: str, value: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{tag}", "Values": [value]}]
