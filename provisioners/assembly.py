"""A cloud's provisioner, put together: its machines, hosts over SSH with keys of our own, offers from the catalog.

    AWS = the fleet over `AwsMachines`, Google Cloud over `GcpMachines`, Azure over `AzureMachines`

The catalog has what there is and what it cost; what a spot machine costs now is read from the cloud in the background,
every few minutes, and used as long as it is fresh.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from policies.model import CapacityType, Offer, Role, Zone
from provisioners.clock import unix_now
from provisioners.offers.catalog.model import Catalog, Row
from provisioners.offers.lb_instance_types import small_offers
from provisioners.offers.matching import Account, Reason, offers_of
from provisioners.offers.spot_prices import SpotPrices
from provisioners.own_address import OwnAddresses
from provisioners.port.base import DISK_GB, Instance, LaunchOrder, Requirements, peers_port
from provisioners.port.commands import Login, UnreachableError
from provisioners.port.errors import TransientError
from provisioners.port.firewall import FirewallAccess, block_of
from provisioners.port.lease import shortest_s, terms_of
from provisioners.port.vm import Machine, MachineOrder, Machines, Trial, in_region, machine_token, service_in
from provisioners.remote.bootstrap_steps import Front
from provisioners.remote.certificates import Authority
from provisioners.remote.first_login import FirstLogins
from provisioners.remote.ssh_config import SshRoute
from provisioners.remote.ssh_hosts import DEFAULT_PORT, SshHosts
from provisioners.remote.ssh_keys import (
    Keys,
    SshKey,
    generations,
    lasting_keys_script,
    own_login_script,
    user_data,
)
from provisioners.remote.supervise import HEARTBEAT_S
from provisioners.vm_provisioner import VmProvisioner

_log = logging.getLogger(__name__)

USER = "skyserve"
DISCOVERED = ("aws", "gcp", "azure")  # the clouds that can list what an account has
FRONT_PORT = 8443  # of TLS in front of a replica
SETTLED_S = 20.0  # after which a cloud lists what was made before its rules were last changed
RULES_EVERY_S = 600.0
_ADMIT_WAIT_S = 15.0


class VmSection(Protocol):
    """What config.yaml says about any cloud that rents machines; None is the default.

    A cloud's own module adds what only it understands.
    """

    regions: tuple[str, ...] | None
    use_private_ip: bool
    image: str | dict[str, str] | None
    disk_gb: int | None
    sources: tuple[str, ...] | None
    labels: dict[str, str]
    dead_man_minutes: int | None
    tls: bool

    @property
    def way(self) -> SshRoute:
        """How machines are reached over ssh."""
        ...


@dataclass(frozen=True, slots=True)
class VmSettings:
    """What the user has set for the machines of a cloud.

    `sources` are the CIDR blocks from which machines can be reached, beside the load balancers; none: this host's own
    addresses are found out. `image` is the cloud's own name of one, or one for each region. `dead_man_minutes` is the lease
    of machines (`lease.terms_of`), `terminate_script` the program by which one has its cloud delete it. With `tls` replicas are
    reached by TLS alone.
    """

    image: str | Mapping[str, str] | None = None
    disk_gb: int | None = None
    sources: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    dead_man_minutes: int | None = None
    tls: bool = False
    terminate_script: str = ""


class VmCloudProvisioner(VmProvisioner):
    """Of one cloud; its own module gives it its machines and its `name`.

    `catalog` has that cloud's rows, `secret` the bytes of the home from which all keys follow (`ssh_keys.generations`), `own` knows this
    host's addresses, `zone_ids` map the account's names of zones to the catalog's, `first_login` prepares machines of a
    cloud that runs no user data, `folder` keeps records of first connections, `terminate_script` is the program by which a
    machine whose lease is over has the cloud delete it. `subnets` are the regions and zones in which the user names
    subnets: the only ones that are used, if there are any.

    The cloud is not called before the first use. ValueError if the section names a region that is none.
    """

    def __init__(
        self,
        machines: Machines,
        section: VmSection,
        catalog: Catalog,
        secret: bytes,
        *,
        own: OwnAddresses | None = None,
        zone_ids: Mapping[str, str] | None = None,
        now: Callable[[], float] = unix_now,
        first_login: FirstLogins | None = None,
        folder: Path | None = None,
        terminate_script: str = "",
        subnets: Collection[str] = (),
    ) -> None:
        if isinstance(section.image, Mapping):
            within(catalog, tuple(section.image), machines.name, "image")
        self._regions, self._subnets = section.regions, tuple(subnets)
        in_them = in_places(catalog, subnets, machines.name, "subnets") if subnets else catalog
        if section.regions is not None:
            within(catalog, section.regions, machines.name)
            in_them = in_them.within(section.regions)
        catalog = in_them
        settings = VmSettings(
            image=section.image,
            disk_gb=section.disk_gb,
            sources=section.sources or (),
            labels=section.labels,
            dead_man_minutes=section.dead_man_minutes,
            tls=section.tls,
            terminate_script=terminate_script,
        )
        prices = self._prices = SpotPrices(machines, zones_of(catalog), now, types_of(catalog))
        self.account = Account(spot_price=prices, zone_ids=zone_ids or {})
        self._catalog = catalog
        self._sources = settings.sources
        self._use_private_ip = section.use_private_ip
        self._own = own if own is not None else OwnAddresses(None, None, now)
        self._is_needed = False
        self._admitted: FirewallAccess | None = None
        self._admission = threading.Condition()  # of the above
        self._is_done = False
        self._admitted_at = self._changed_at = float("-inf")
        way = section.way
        first = self._first = first_login or first_logins(way, secret, folder)
        super().__init__(
            machines,
            SshHosts(
                first.login,
                heartbeat_s=heartbeat_s(shortest_s(settings.dead_man_minutes)),
                now=now,
                seen_from=self._own.saw,
                front=lambda machine, order: front_of(machine, order, secret) if settings.tls else None,
                first_login=first,
            ),
            lambda order, rank: order_of(order, rank, secret, settings),
            lambda need: offer(need, self._catalog, self.account, prices),
            now,
        )

    def restock(self, catalog: Catalog, reason: Reason | None = None) -> None:
        """Offer from another catalog of this cloud from now on, without what the account cannot have."""
        catalog = catalog.at(self._subnets) if self._subnets else catalog
        self._catalog = catalog if self._regions is None else catalog.within(self._regions)
        self._prices.cover(zones_of(self._catalog), types_of(self._catalog))
        self.account = replace(self.account, reason=reason)

    def launch(self, order: LaunchOrder) -> Instance:
        with self._admission:
            self._is_needed = True
            if not self._sources and not self._admission.wait_for(self._knows_us, _ADMIT_WAIT_S):
                raise TransientError(self._unknown(), cloud=self.name, zone=order.offer.zone)
        return super().launch(order)

    def admit(self, owner: str, balancers: Mapping[str, frozenset[str]]) -> None:
        """From one thread at a time. Does nothing while there is no machine and none is wanted."""
        if not self._is_needed and not self.addresses(owner):
            return
        own = self._sources or self._addresses(owner)
        agents = {service: _blocks_of(addresses) for service, addresses in balancers.items()}
        access = FirewallAccess(frozenset(self._sources) or _blocks_of(own), agents)
        now = self._now()
        if access != self._admitted:
            self._changed_at = now
        is_settled = self._admitted_at >= self._changed_at + SETTLED_S
        next_at = self._admitted_at + RULES_EVERY_S if is_settled else self._changed_at + SETTLED_S
        if access != self._admitted or not self._is_done or now >= next_at:
            self._is_done = False
            with self._admission:
                self._admitted = access
                self._admission.notify_all()
            self.machines.admit(owner, access)
            self._is_done, self._admitted_at = True, now
        if not access.sources:
            raise TransientError(self._unknown(), cloud=self.name)

    def open_for(self, owner: str) -> None:
        """Let this host in to the owner's machines, those to come too. Raises TransientError if its address is not known."""
        self._is_needed = True
        self.admit(owner, {})

    def _knows_us(self) -> bool:
        return self._admitted is not None and bool(self._admitted.sources)

    def _addresses(self, owner: str) -> frozenset[str]:
        """This host's, as the machines see them."""
        return self._own.private(self.addresses(owner)) if self._use_private_ip else self._own.public()

    def _unknown(self) -> str:
        return (
            "the address from which this host reaches the Internet is not known, so no machine would let it in: "
            f"set clouds.{self.name}.sources in config.yaml"
        )

    def with_older_keys(self, owner: str) -> int:
        return sum(not self._first.has_present_keys(token) for token in self.running(owner))

    def usd_hour(self, machine: Machine) -> float | None:
        rows = self._catalog.by_instance_type.get(machine.instance_type.lower(), ())
        prices = (row.price(machine.capacity_type) for row in rows if row.zone == machine.zone)
        return next((price.usd_hour for price in prices if price is not None), None)


def _blocks_of(addresses: Iterable[str]) -> frozenset[str]:
    return frozenset(filter(None, map(block_of, addresses)))


def offer(need: Requirements, catalog: Catalog, account: Account, prices: SpotPrices) -> list[Offer]:
    if need.role is Role.LOAD_BALANCER:
        return small_offers(need, prices.cloud, zones_of(catalog))
    prices.refresh_soon()
    return offers_of(need, catalog, account)


def in_places(catalog: Catalog, places: Collection[str], cloud: str, key: str) -> Catalog:
    """Return the catalog of these regions and zones alone.

    ValueError for a place that it does not know; `key` of the section has them.
    """
    known = {listing.region for listing in catalog.listings} | {row.zone.name for row in catalog.rows}
    for place in places:
        if place not in known:
            close = difflib.get_close_matches(place, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"clouds.{cloud}.{key}: {cloud} has no region or zone {place!r}{hint}")
    return catalog.at(places)


def within(catalog: Catalog, regions: Sequence[str], cloud: str, key: str = "regions") -> Catalog:
    """Return the catalog of these regions alone.

    ValueError for one that it does not know: nothing is offered there; `key` of the section has them.
    """
    known = {listing.region for listing in catalog.listings}
    for region in regions:
        if region not in known:
            close = difflib.get_close_matches(region, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f" (known: {', '.join(sorted(known))})"
            is_listed = cloud not in DISCOVERED  # a plug-in has what it lists
            more = (
                ""
                if is_listed
                else f"; a region that exists is added by `serve catalog discover --cloud {cloud}`"
            )
            raise ValueError(f"clouds.{cloud}.{key}: {cloud} has no region {region!r}{hint}{more}")
    return catalog.within(regions)


def zones_of(catalog: Catalog) -> list[Zone]:
    """Return every zone of the catalog, in order."""
    return sorted({row.zone.physical for row in catalog.rows})


def types_of(catalog: Catalog) -> set[str]:
    """Return the names of its instance types."""
    return {row.shape.name for row in catalog.rows}


def cheapest_trials(rows: Iterable[Row]) -> list[Trial]:
    """In each region the cheapest machine with an accelerator, spot and on demand, in the first of its zones."""
    cheapest: dict[tuple[str, CapacityType], tuple[float, str, str, Trial]] = {}
    for row in rows:
        if row.shape.accelerator is None or row.places is not None:
            continue
        for capacity_type in CapacityType:
            price = row.price(capacity_type)
            if price is None:
                continue
            trial = Trial(row.zone, row.shape.name, capacity_type, row.shape.accelerator)
            key = (row.zone.region, capacity_type)
            ranked = (price.usd_hour, row.shape.name, row.zone.name, trial)
            cheapest[key] = min(cheapest.get(key, ranked), ranked, key=lambda one: one[:3])
    return [trial for _, _, _, trial in cheapest.values()]


def reserved_trials(rows: Iterable[Row]) -> list[Trial]:
    """Of each reservation one."""
    return [
        Trial(row.zone, row.shape.name, CapacityType.ON_DEMAND, row.shape.accelerator)
        for row in rows
        if row.places is not None
    ]


def first_logins(way: SshRoute, secret: bytes, folder: Path | None) -> FirstLogins:
    """Of machines that run user data."""

    def script(machine: Machine) -> str:
        keys = Keys(generations(secret)[0], machine.owner)
        return lasting_keys_script(USER, login_key_of(keys, machine), keys.host(machine.token))

    return FirstLogins(
        USER,
        lambda machine: login_by(way, machine, secret),
        script,
        folder,
        boot_keys=lambda machine: [
            Keys(each, machine.owner).boot_host(machine.token).public for each in generations(secret)
        ],
        own_script=lambda machine: own_login_script(
            login_key_of(Keys(generations(secret)[0], machine.owner), machine)
        ),
        older=lambda machine: older_logins(way, machine, secret),
    )


def login_key_of(keys: Keys, one: Machine | MachineOrder) -> SshKey:
    """Return the key that a machine is to let in. It follows from what its cloud shows of it: that of a plug-in may only have names."""
    if one.zone.cloud in DISCOVERED:
        return keys.login(one.service, one.role)
    return keys.login(service_in(one.token, one.owner))


def older_logins(way: SshRoute, machine: Machine, secret: bytes) -> list[Login]:
    """Return how to get into a machine that does not know its usual login yet, newest first."""
    found = []
    for number, each in enumerate(generations(secret)):
        usual = login_by(way, machine, each)
        owners = Keys(each, machine.owner).owner_login().private
        found += [*([usual] if number else []), replace(usual, private_key=owners)]
    return found


def login_by(way: SshRoute, machine: Machine, secret: bytes) -> Login:
    """As `login_of`, by the way of the cloud's section. Raises UnreachableError if a file for it cannot be read."""
    plain = login_of(machine, secret)
    try:
        return way.to(plain, machine.id, machine.zone.region, machine.zone.name)
    except OSError as error:
        raise UnreachableError(
            f"{error.filename}, for the bastion of {machine.zone.cloud}, cannot be read: {error.strerror}"
        ) from error


def login_of(machine: Machine, secret: bytes) -> Login:
    """Return how to get into a machine that was made by an order of ours, once it was prepared."""
    keys = Keys(generations(secret)[0], machine.owner)
    return Login(
        name=machine.id,
        address=machine.address or "",
        user=USER,
        private_key=login_key_of(keys, machine).private,
        host_keys=(keys.host(machine.token).public,),
    )


def front_of(machine: Machine, order: LaunchOrder, secret: bytes) -> Front:
    """TLS in front of the replica on the machine, where the firewall expects it."""
    oldest = generations(secret)[-1]  # that of the certificates of all machines that run
    return Front(Authority(oldest, machine.owner).of_machine(machine.token), front_port(order))


def front_port(order: LaunchOrder) -> int:
    return FRONT_PORT if order.port != FRONT_PORT else FRONT_PORT + 1


def heartbeat_s(lease_s: int) -> float:
    """Return how often a machine reports that terminates itself without visits: several times before it would."""
    return min(HEARTBEAT_S, lease_s / 4) if lease_s else HEARTBEAT_S


def order_of(order: LaunchOrder, rank: int, secret: bytes, settings: VmSettings) -> MachineOrder:
    """Return one machine of the replica. The same order gives the same, to the byte, as long as the secret is the same.

    After a rotation its keys are others. A cloud to which it was sent before finds its machine by name or tag, which has the older keys.
    """
    keys = Keys(generations(secret)[0], order.owner)
    token = machine_token(order.token, rank)
    port, is_public = order.port or DEFAULT_PORT, order.role is Role.LOAD_BALANCER
    inner = front_port(order) if settings.tls else port  # the server's own port stays shut then
    own_ports = (peers_port(port),) if order.has_peers else ()
    plain = MachineOrder(
        token=token,
        owner=order.owner,
        service=order.service,
        replica_id=order.replica_id,
        rank=rank,
        num_nodes=order.num_nodes,
        zone=order.offer.zone.physical,
        reservation=order.offer.zone.reservation,
        instance_type=order.offer.instance_type,
        capacity_type=order.offer.capacity_type,
        public_key="",
        user=USER,
        accelerator=order.offer.accelerator,
        accelerator_count=order.offer.accelerator_count,
        image=order.machine_image or in_region(settings.image, order.offer.zone.region),
        disk_gb=order.disk_gb or settings.disk_gb or DISK_GB,
        ports=own_ports if is_public else (inner,),
        public_ports=(port,) if is_public else (),
        sources=settings.sources,
        labels={**settings.labels, **order.labels},
        role=order.role,
    )
    plain = replace(plain, public_key=login_key_of(keys, plain).public)
    terms = terms_of(settings.dead_man_minutes, token, serves_at_once=is_public)
    return replace(plain, user_data=user_data(plain, keys.boot_host(token), terms, settings.terminate_script))
