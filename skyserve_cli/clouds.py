"""The clouds that are enabled here, made when they are first used."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from policies.model import CapacityType, Offer, Role, Zone
from provisioners import plugins
from provisioners.clock import unix_now
from provisioners.offers.catalog import Catalog, CatalogError, Stock, load, stock
from provisioners.offers.catalog.discovered import Discoverer, Discovery, Progress, reasons, shapes_of
from provisioners.offers.catalog.model import Listing
from provisioners.offers.lb_instance_types import small_offers
from provisioners.offers.matching import Account, Customer, Reason, Stocked, in_order, offers_of
from provisioners.offers.reservations import open_at, reserved_listings
from provisioners.own_address import OwnAddresses
from provisioners.port.base import DISK_GB, Candidate, Provisioner, Requirements
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.registry import PROVISIONERS, MissingSdkError, UnknownCloudError, provisioner_class
from skyserve_cli.config import Config, ConfigError
from skyserve_cli.config_clouds import AwsConfig, RentedConfig, SshConfig, reservations_of
from skyserve_cli.config_section import CloudConfig
from skyserve_cli.home import Home

if TYPE_CHECKING:
    from provisioners.offers.explain_no_offer import NoOffer
    from provisioners.port.dns import Publisher
    from provisioners.ssh import pool

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 10.0  # for what `serve catalog refresh` and `discover` have written meanwhile
_CATALOG = "the catalog"  # stands for every cloud that it has


class CloudNotEnabledError(Exception):
    """A candidate names a cloud that is not enabled here."""


class MissingCloudSdkError(ConfigError, AuthError):
    """A cloud is enabled and its SDK is not installed, or its plug-in cannot be used. Other clouds can be."""


@dataclass(slots=True)
class Clouds:
    """Provisioners by name."""

    home: Home
    config: Config
    _made: dict[str, Provisioner] = field(default_factory=dict)
    _without_sdk: dict[str, MissingCloudSdkError] = field(default_factory=dict)
    _merged: tuple[Catalog, frozenset[str], Catalog] | None = None  # ours, reservations, and both
    _names: Publisher | None = None
    _own: OwnAddresses | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stock: Stock | None = None  # that the provisioners have
    _reserved: frozenset[str] = frozenset()  # that the provisioners have
    _checked_at: float = float("-inf")

    @property
    def enabled(self) -> tuple[str, ...]:
        return self.config.enabled

    def get(self, name: str) -> Provisioner:
        """Raise ConfigError; MissingCloudSdkError if only the SDK is missing, which may be installed later."""
        with self._lock:
            if name not in self._made:
                try:
                    self._made[name] = self._make(name)
                except MissingCloudSdkError as error:
                    self._without_sdk[name] = error
                    raise
                self._without_sdk.pop(name, None)
                self._stock, self._checked_at = None, float("-inf")
            self._restock()
            return self._made[name]

    def all(self) -> list[Provisioner]:
        """Return the enabled clouds, without those whose SDK is missing. Raises ConfigError, also if no cloud is left."""
        found = []
        for name in self.enabled:
            with suppress(MissingCloudSdkError):
                found.append(self.get(name))
        if not found and self._without_sdk:
            raise next(iter(self._without_sdk.values()))
        return found

    def with_unconfigured(self, spec_clouds: Iterable[str]) -> Clouds:
        """These, and those of the named clouds that are in the catalog and not enabled here: to list prices, not to launch."""
        missing = [
            name for name in spec_clouds if name in self._catalog().clouds and name not in self.enabled
        ]
        sections = {**self.config.clouds, **{name: RentedConfig() for name in missing}}
        return Clouds(self.home, self.config.model_copy(update={"clouds": sections})) if missing else self

    @property
    def without_sdk(self) -> Mapping[str, MissingCloudSdkError]:
        """The clouds that could not be made for want of their SDK."""
        return dict(self._without_sdk)

    def poll_s(self) -> dict[str, float]:
        chosen = {name: cloud.poll_seconds for name, cloud in self.config.clouds.items()}
        return {name: seconds for name, seconds in chosen.items() if seconds is not None}

    def resolve(self, need: Requirements) -> Requirements:
        """`need` restricted to enabled clouds.

        A candidate that names none means any of them, but this machine itself (`local`) only if it is named or there is
        nothing else. Raises CloudNotEnabledError if nothing is left.
        """
        kept = [
            replace(candidate, cloud=name) for candidate in need.candidates for name in self._meant(candidate)
        ]
        if not kept:
            named = sorted({candidate.cloud for candidate in need.candidates if candidate.cloud})
            wanted = (
                f"only on {' or '.join(named)}, and none of them is enabled here"
                if named
                else "no cloud is enabled"
            )
            raise CloudNotEnabledError(
                f"resources: {wanted} (enabled: {', '.join(self.enabled) or 'none'}); "
                f"name an enabled cloud in `infra`, or enable one in {self.home.config}"
            )
        return replace(need, candidates=tuple(kept))

    def names(self) -> Publisher:
        """Route 53, with the credentials that `aws` has here; also if no machine is ever rented there."""
        with self._lock:
            if self._names is None:
                route53 = import_module("provisioners.aws.dns")
                section = self.config.clouds.get("aws")
                profile = section.profile if isinstance(section, AwsConfig) else None
                self._names = cast("Publisher", route53.Route53Names(profile, unix_now, time.sleep))
            return self._names

    def name_region(self, cloud: str, region: str) -> str:
        """Return the region of Route 53 by which an agent in that one is found."""
        if cloud in plugins.installed():
            known = plugins.plugin(cloud).route53_region(region)
            if known is not None:
                return known
        nearest: str = import_module("provisioners.aws.dns").nearest_region(cloud, region)
        return nearest

    def discover(self, name: str, progress: Progress) -> Discovery:
        """Return what the account of an enabled cloud can have.

        Raises ConfigError, also for a cloud that cannot list them, and ProvisionError. Regions of the configuration need not be
        in the catalog.
        """
        section = self.config.clouds.get(name)
        if name not in PROVISIONERS or not isinstance(section, RentedConfig):
            raise ConfigError(f"{name} does not list what an account can have")
        try:
            provisioner_class(name)  # which says what to install
        except MissingSdkError as error:
            raise MissingCloudSdkError(str(error), cloud=name) from error
        machines: Discoverer = import_module(f"provisioners.{name}.cloud").machines_of(section)
        return machines.discover(shapes_of(load(self.home.root), name), progress)

    def listed(self, need: Requirements) -> tuple[Offer, ...]:
        """Return the offers best first, as the catalog and our own files have them.

        No cloud is called: no credentials are needed and no SDK is loaded, and what spot machines cost at this moment is
        not known. Raises CloudNotEnabledError.
        """

        def query(part: Requirements) -> list[Offer]:
            return [offer for name in self.enabled for offer in self._listed(name, part)]

        return in_order(self.resolve(need), query)

    def extra_usd_hour(self, cloud: str, disk_gb: int | None) -> float:
        """About what a machine's disk and address cost beyond its price."""
        section = self.config.clouds.get(cloud)
        if not isinstance(section, RentedConfig):
            return 0.0
        size_gb = disk_gb or section.disk_gb or DISK_GB
        return extra_usd_hour(cloud, size_gb, has_address=not section.use_private_ip)

    def explain_no_offer(self, candidate: Candidate) -> NoOffer | None:
        """Return why no enabled cloud has an offer for the candidate; None if one has, or the reason is unknown."""
        from provisioners.offers.explain_no_offer import (  # for plans alone
            Explaining,
            NoOffer,
            explain_no_offer,
        )

        if candidate.cloud is not None and candidate.cloud not in self.enabled:
            enabled = ", ".join(self.enabled) or "none"
            message = f"{candidate.cloud} is not enabled here (enabled: {enabled})"
            return NoOffer("cloud", message, f"enable it in {self.home.config}")
        meant = self._meant(candidate)
        if meant and all(name in self._without_sdk for name in meant):
            return NoOffer("cloud", str(self._without_sdk[meant[0]]))
        if meant and candidate.use_spot and all(map(self._has_no_spot, meant)):
            return NoOffer("use_spot", f"{meant[0]} has no spot machines", "set use_spot: false")
        reasons = []
        for name in dict.fromkeys(self._kind(each) for each in meant):
            if name == _CATALOG:
                reasons.append(
                    explain_no_offer(candidate, self._catalog(), self._accounts(), self._is_usable)
                )
            elif name == "ssh":
                from provisioners.ssh import pool  # as in `_pools`

                reasons.append(pool.explain_no_offer(self._pools(), candidate))
            elif isinstance(cloud := self.get(name), Explaining):
                reasons.append(cloud.explain_no_offer(candidate))
            else:
                return None
        return None if None in reasons else reasons[0]

    # --- inside

    def _meant(self, candidate: Candidate) -> Sequence[str]:
        """Return the enabled clouds that it may be on."""
        if candidate.cloud is not None:
            return [candidate.cloud] if candidate.cloud in self.enabled else []
        return [name for name in self.enabled if name != "local"] or self.enabled

    def _has_no_spot(self, name: str) -> bool:
        return name in plugins.installed() and CapacityType.SPOT not in plugins.plugin(name).markets

    def _listed(self, name: str, need: Requirements) -> Sequence[Offer]:
        if self._kind(name) == _CATALOG:
            rented, regions = self._catalog().of(name), self._regions(name)
            rented = rented if regions is None else rented.within(regions)
            places = self._places(name)
            rented = rented.at(places) if places else rented
            if need.role is Role.LOAD_BALANCER:
                small = plugins.plugin(name).small if name in plugins.installed() else None
                return small_offers(need, name, (row.zone.physical for row in rented.rows), small)
            if name in plugins.installed():
                need = plugins.in_its_markets(plugins.plugin(name), need)
            return offers_of(need, rented, Account(reason=self._reason()))
        if name == "ssh":
            from provisioners.ssh import pool  # as in `_pools`

            return pool.offers_of(self._pools(), need)
        with suppress(ProvisionError):  # a cluster that does not respond: `explain_no_offer` says so
            return self.get(name).offers(need)
        return ()

    def _kind(self, name: str) -> str:
        return _CATALOG if name in self._catalog().clouds else name

    def _catalog(self) -> Catalog:
        """With the listings of plug-ins of enabled clouds, and reservations there. Raises ConfigError."""
        known, reserved = load(self.home.root), self._open_reservations()
        merged = self._merged  # a catalog works out its indexes once
        if merged is None or merged[0] is not known or merged[1] != reserved:
            listings = [each for name in self.enabled for each in self._listings(name)]
            listings += [each for name in self.enabled for each in self._reserved_of(name, known)]
            merged = known, reserved, Catalog((*known.listings, *listings)) if listings else known
            self._merged = merged
        return merged[2]

    def _open_reservations(self) -> frozenset[str]:
        now = unix_now()
        return frozenset(
            f"{name}/{each}"
            for name, section in self.config.clouds.items()
            for each in open_at(reservations_of(section), now)
        )

    def _reserved_of(self, name: str, known: Catalog) -> list[Listing]:
        reservations = open_at(reservations_of(self.config.clouds.get(name)), unix_now())
        if not reservations:
            return []
        try:
            return list(reserved_listings(reservations, known.of(name), name))
        except ValueError as error:
            raise ConfigError(f"{self.home.config}: {error}") from error

    def _stocked(self, name: str, known: Catalog) -> Catalog:
        """Return what the provisioner of that cloud offers from."""
        rented, reserved = known.of(name), self._reserved_of(name, known)
        return Catalog((*rented.listings, *reserved)) if reserved else rented

    def _listings(self, name: str) -> Sequence[Listing]:
        """Of a plug-in. One that cannot be used has none, and shows where it is used."""
        if name in PROVISIONERS or name not in plugins.installed():
            return ()
        with suppress(plugins.PluginError):
            return plugins.listings_of(plugins.plugin(name))
        return ()

    def _pools(self) -> pool.HostPools:
        from provisioners.ssh import pool  # a cloud's module is imported on first use

        try:
            section = self.config.clouds["ssh"]
            return pool.load_pools(section.pools if isinstance(section, SshConfig) else {})
        except ValueError as error:
            raise ConfigError(f"{self.home.config}: {error}") from error

    def _regions(self, name: str) -> tuple[str, ...] | None:
        section = self.config.clouds[name]
        return section.regions if isinstance(section, RentedConfig) else None

    def _places(self, name: str) -> Collection[str]:
        section = self.config.clouds[name]
        return section.places if isinstance(section, RentedConfig) else ()

    def _is_usable(self, zone: Zone) -> bool:
        if zone.cloud not in self.enabled:
            return False
        regions, places = self._regions(zone.cloud), self._places(zone.cloud)
        return (regions is None or zone.region in regions) and (
            not places or zone.region in places or zone.name in places
        )

    def _accounts(self) -> Account:
        """Return knowledge of the user's accounts: those of clouds that have been used already."""
        with self._lock:
            made = {name: one.account for name, one in self._made.items() if isinstance(one, Customer)}

        def spot_price(instance_type: str, zone: Zone) -> float | None:
            query = made[zone.cloud].spot_price if zone.cloud in made else None
            return None if query is None else query(instance_type, zone)

        zone_ids = {mine: zone for one in made.values() for mine, zone in one.zone_ids.items()}
        return Account(spot_price=spot_price, zone_ids=zone_ids, reason=self._reason())

    def _reason(self) -> Reason:
        return reasons(stock(self.home.root).discoveries, unix_now)

    def _restock(self) -> None:
        """Give provisioners what was refreshed or discovered since they were made. With the lock held."""
        now = unix_now()
        if now - self._checked_at < _LOOK_EVERY_S:
            return
        self._checked_at = now
        try:
            found, reserved = stock(self.home.root), self._open_reservations()
            if found is self._stock and reserved == self._reserved:
                return
            catalogs = {
                name: self._stocked(name, found.catalog)
                for name, made in self._made.items()
                if isinstance(made, Stocked) and name not in plugins.installed()
            }
        except (CatalogError, ConfigError) as error:  # of a reservation whose zone or type is gone
            _log.warning("the catalog stays as it was: %s", error)
            return
        self._stock, self._reserved = found, reserved
        for name, catalog in catalogs.items():
            cast("Stocked", self._made[name]).restock(catalog, reasons(found.discoveries, unix_now))

    def _own_addresses(self) -> OwnAddresses:
        """Return one for all clouds. With the lock held."""
        if self._own is None:
            url = self.config.controller.address_url
            self._own = OwnAddresses(self.home.own_addresses, url, unix_now)
        return self._own

    def _make(self, name: str) -> Provisioner:
        """Return what each cloud's constructor takes.

        Raises ConfigError for a cloud that is none, or lacks its SDK, and for what the cloud makes of its section.
        """
        section = self.config.clouds.get(name)
        try:
            if name not in PROVISIONERS and name in plugins.installed():
                return self._from_plugin(name, section)
            cloud = provisioner_class(name)
            build = cast("Callable[..., Provisioner]", cloud)
            if name == "local":
                return build(self.home.root)
            match section:
                case SshConfig():
                    secret, seen = self.home.machine_secret(), self.home.hosts_seen
                    return build(section.pools, secret, seen, tls=section.tls)
                case CloudConfig() if name == "kubernetes":
                    return build(section.clusters(), section.kubeconfig)  # type: ignore[attr-defined]
                case RentedConfig():
                    catalog = self._stocked(name, load(self.home.root))
                    secret = b"".join(self.home.machine_secrets())
                    own, folder = self._own_addresses(), self.home.first_logins(name)
                    return build(section, catalog, secret, own=own, folder=folder)
                case _:
                    return build()
        except (MissingSdkError, plugins.PluginError) as error:
            raise MissingCloudSdkError(f"{self.home.config}: {error}", cloud=name) from error
        except (UnknownCloudError, ValueError) as error:
            raise ConfigError(f"{self.home.config}: {error}") from error

    def _from_plugin(self, name: str, section: CloudConfig | None) -> Provisioner:
        """Raise PluginError, and ValueError for what the plug-in makes of its section."""
        from provisioners.plugin_cloud import provisioner_of  # which loads SSH libraries, and plans need none

        found = plugins.plugin(name)
        if not isinstance(section, RentedConfig):
            raise plugins.PluginError(f"the plug-in {name!r}: its section is no RentedConfig")
        return provisioner_of(
            found,
            section,
            Catalog(plugins.listings_of(found)),
            b"".join(self.home.machine_secrets()),
            own=self._own_addresses(),
            folder=self.home.first_logins(name),
        )


# What a rented machine costs beside its own price: its disk, and its public address. About, and for people to know.
#
# List prices of the vendors' cheapest American regions in 2025, to be confirmed (docs/unconfirmed.md): gp3 0.08, pd-balanced 0.10 and
# Standard SSD (E15) 0.075 USD per GB and month; a public IPv4 address 0.005 USD per hour on all three. Traffic out of a cloud, about
# 0.09 USD per GB, is left out: it depends on the requests.

_USD_GB_MONTH: Mapping[str, float] = MappingProxyType({"aws": 0.08, "gcp": 0.10, "azure": 0.075})
_USD_ADDRESS_HOUR = 0.005
_HOURS_A_MONTH = 730.0


def extra_usd_hour(cloud: str, disk_gb: float, *, has_address: bool) -> float:
    """Of one machine; 0.0 on clouds whose price has all of it, or that are not known."""
    if cloud not in _USD_GB_MONTH:
        return 0.0
    disk = _USD_GB_MONTH[cloud] * disk_gb / _HOURS_A_MONTH
    return disk + (_USD_ADDRESS_HOUR if has_address else 0.0)
