"""The parts of the controller and how they are connected. Nothing here runs by itself: the daemon starts and stops it."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from policies.model import Offer
from provisioners.offers.egress import egress_usd_per_gb
from provisioners.port.base import Gated, Instance, Provisioner, Requirements
from provisioners.remote.certificates import Authority
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.config import Config, egress_rates
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.api.routes import KernelRoutes
from skyserve_cli.controller.api.service import ControllerService, Running, Stored
from skyserve_cli.controller.balancers.agent_reader import AgentReader
from skyserve_cli.controller.balancers.dns import ThreadDns
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.balancers.regional_fleet import RegionalFleet, admin_token
from skyserve_cli.controller.clouds.caches import OfferCache, SpecCache
from skyserve_cli.controller.clouds.firewalls import ThreadFirewalls
from skyserve_cli.controller.clouds.instance_poller import ThreadInstancePoller
from skyserve_cli.controller.clouds.log_archive import LogArchive
from skyserve_cli.controller.clouds.operation_runner import ThreadOperationRunner
from skyserve_cli.controller.part import Kernel, Parts
from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.persistence.leadership import Leadership, about, holder_of
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.controller.persistence.state_watch import StateWatch
from skyserve_cli.controller.readiness import HttpProber
from skyserve_cli.controller.reconcile import leases
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import Clock, SteadyClock, SystemClock
from skyserve_cli.controller.reconcile.evidence import DaemonEvidence
from skyserve_cli.controller.reconcile.inputs import BalancerPorts, Budget, Doubts, ReplicaPorts
from skyserve_cli.controller.reconcile.ports import CloudOperation
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.references import path_of
from skyserve_cli.controller.secret_box import SecretBox, seal_of
from skyserve_cli.home import Home
from skyserve_cli.state.lease import NO_TERM, LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

if TYPE_CHECKING:
    from skyserve_cli.controller.reconcile.adoption import Adoption

log = logging.getLogger("skyserve.controller")


@dataclass(frozen=True, slots=True)
class Foundation:
    """What every other part is built on.

    `usable` are the enabled clouds whose SDK is installed; `woken` is set when the reconciler has reason to tick.
    """

    home: Home
    config: Config
    store: Store
    watch: StateWatch
    steady: SteadyClock
    clock: SystemClock
    owner: str
    leadership: Leadership
    seal: SecretBox
    specs: SpecCache
    clouds: Clouds
    usable: list[Provisioner]
    woken: threading.Event

    @classmethod
    def of(cls, home: Home, config: Config, begin_again: Callable[[], object]) -> Foundation:
        """Open the database, and take the lease if it is free. Raises CannotOpenError, ConfigError, ForeignKeysError.

        `begin_again` starts the program again, with the keys that the home has then.
        """
        steady = SteadyClock()
        store = opened(home)
        store.database.fence(NO_TERM)
        fingerprints.check(store, home)
        owner = store.database.owner()
        unfit = partial(_unfit, store, home, fingerprints.of_files(home), begin_again)
        watch = StateWatch(home, store.database, owner, SystemClock(), steady)
        leadership = Leadership(
            store, holder_of(home), about(home), steady, unfit=unfit, astray=watch.trouble
        )
        leadership.step()
        seal = seal_of(home)
        clouds = Clouds(home, config)
        usable = clouds.all()
        for name in clouds.without_sdk:
            log.warning("%s", clouds.without_sdk[name])
        return cls(
            home=home,
            config=config,
            store=store,
            watch=watch,
            steady=steady,
            clock=SystemClock(leadership.database_now),
            owner=owner,
            leadership=leadership,
            seal=seal,
            specs=SpecCache(
                store,
                seal,
                lambda token: admin_token(home.machine_secret(), token),
                partial(path_of, home.uploads),
            ),
            clouds=clouds,
            usable=usable,
            woken=threading.Event(),
        )

    def names_of_usable(self) -> list[str]:
        """Return the names of the enabled clouds whose SDK is installed."""
        return [name for name in self.clouds.enabled if name not in self.clouds.without_sdk]


def _unfit(
    store: Store, home: Home, loaded: Mapping[str, list[str]], begin_again: Callable[[], object]
) -> str:
    """Return why this controller must not lead: its keys are not those of the database, after a rotation in another home.

    If they have been copied here since, the program starts again, because it has the `loaded` ones in memory.
    """
    try:
        fingerprints.check(store, home)
    except fingerprints.ForeignKeysError as error:
        return str(error)
    present = fingerprints.of_files(home)
    if any(present[name] != digests for name, digests in loaded.items()):
        begin_again()
    return ""


class Workers:
    """The parts that talk to clouds, replicas and load balancers for the reconciler."""

    def __init__(self, base: Foundation, loop: asyncio.AbstractEventLoop) -> None:
        home, clock, wake, clouds = base.home, base.clock, base.woken.set, base.clouds
        reports = EventReports(base.store, clock)
        self.served = served = ServedReplicas()
        self.traffic = TrafficBuffer()
        self.attention = Attention(loop, clock, base.steady)
        self.regional = RegionalFleet(
            clouds.get,
            home.machine_secret(),
            clock,
            loop,
            wake,
            native_wheels=home.native,
            attention=self.attention,
            served=served,
            traffic=self.traffic,
        )
        self.names = ThreadDns(
            clouds.names, clouds.name_region, base.owner, base.steady, wake, base.leadership.may_terminate
        )
        # Agents are known by their folder, whichever links lead to it.
        folder = home.load_balancers.resolve()
        self.fleet = LocalFleet(folder, loop, wake, self.attention, served, clock.now, self.traffic)
        self.authority = Authority(home.machine_secret(), base.owner).certificate
        self.prober = HttpProber(loop, wake, self.attention, served, authority=self.authority)
        self.instance_poller = ThreadInstancePoller(
            clouds.get,
            base.owner,
            clock,
            wake,
            clouds.poll_s(),
            report=reports.closed_region,
            report_clock=reports.clock,
            warn=reports.lease,
        )
        self.log_archive = LogArchive(home.log_archive)
        self.runner = self._operation_runner(base)
        self.firewalls = ThreadFirewalls(
            base.names_of_usable(),
            lambda name: cloud if isinstance(cloud := clouds.get(name), Gated) else None,
            base.owner,
            base.steady,
            base.leadership.may_terminate,  # closing a rule that another controller needs is as final
            report=reports.network_rules,
        )

    def _operation_runner(self, base: Foundation) -> ThreadOperationRunner:
        def farewell(call: CloudOperation, cloud: Provisioner, instance: Instance) -> None:
            num_nodes = base.specs.get(call.service, call.replica.version).num_nodes
            self.log_archive.keep(call.service, call.replica, instance, cloud, num_nodes)

        return ThreadOperationRunner(
            base.clouds.get,
            lambda call: base.specs.order(base.owner, call),
            base.owner,
            base.steady,
            base.woken.set,
            farewell=farewell,
            allows=base.leadership.allows,
        )

    async def start(self) -> None:
        self.attention.start()
        await self.fleet.start()
        await self.regional.start()

    async def close(self) -> None:
        self.instance_poller.close()
        await self.attention.close()
        await self.prober.close()
        await self.fleet.close()
        await self.regional.close()


class _ResolvedOffers:
    """The offers of enabled clouds only; a need that only disabled ones could meet meets no offer."""

    def __init__(self, clouds: Clouds, cache: OfferCache) -> None:
        self._clouds = clouds
        self._cache = cache

    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        try:
            return self._cache.get(self._clouds.resolve(need))
        except CloudNotEnabledError:
            return ()


def reconciler_of(base: Foundation, workers: Workers) -> Reconciler:
    """Return the reconciler over these workers."""
    clouds = base.clouds
    offers = _ResolvedOffers(clouds, OfferCache(base.usable, base.steady, base.woken.set))
    prober, regional = workers.prober, workers.regional
    watchers = (prober, workers.instance_poller, regional)
    return Reconciler(
        base.clock,
        base.store,
        base.specs,
        ReplicaPorts(
            enabled=frozenset(clouds.enabled),
            offers=offers,
            runner=workers.runner,
            instance_poller=workers.instance_poller,
            prober=prober,
            firewalls=workers.firewalls,
        ),
        BalancerPorts(
            fleet=workers.fleet,
            host=base.config.load_balancer.host,
            regional=regional,
            names=workers.names,
            targets_ca=base64.b64encode(workers.authority).decode(),
            egress=partial(egress_usd_per_gb, own=egress_rates(base.config)),
        ),
        budget=Budget(
            base.config.controller.max_usd_hour,
            {name: team.quota for name, team in base.config.teams.items()},
            base.steady.now,
        ),
        doubts=Doubts(
            DaemonEvidence(workers.attention, prober, workers.fleet, regional, watchers, workers.served).of,
            _adoption(base, offers),
        ),
        epoch=lambda: base.leadership.epoch,
    )


def _adoption(base: Foundation, offers: _ResolvedOffers) -> Adoption | None:
    """Return what completes a restore, if one is to be completed."""
    restored = base.home.restored
    if not restored.exists():
        return None
    from skyserve_cli.controller.reconcile.adoption import Adoption, read_restored

    done = partial(restored.unlink, missing_ok=True)
    machines = read_restored(restored)
    return Adoption(machines, base.clouds.enabled, base.owner, base.store, base.specs, offers, done=done)


def service_of(base: Foundation, workers: Workers, reconciler: Reconciler) -> ControllerService:
    """Return the application service that the API is over."""
    return ControllerService(
        Stored(base.store, base.specs, base.seal),
        Running(
            workers.fleet,
            workers.regional,
            workers.names,
            workers.instance_poller,
            workers.log_archive,
            workers.prober.failed,
        ),
        base.clouds,
        base.clock,
        base.leadership,
        reconciler.store_health,
        base.woken.set,
    )


def activity_of(
    base: Foundation, workers: Workers, reconciler: Reconciler, is_stopping: Callable[[], bool]
) -> Activity:
    """Return what says what the controller is doing."""
    return Activity(
        base.store.database,
        reconciler.store_health,
        base.leadership,
        base.clock,
        tick_under_way=reconciler.under_way,
        calls=workers.runner.under_way,
        last_jump=base.clock.last_jump,
        is_stopping=is_stopping,
    )


def parts_of(
    base: Foundation,
    service: ControllerService,
    agents: AgentReader,
    stop: Callable[[], None],
    activity: Activity,
) -> tuple[Parts, Sequence[Route], KernelRoutes]:
    """Return the parts, all routes of the API, and those of the kernel. Raises ConfigError."""
    parts = Parts()
    routes = KernelRoutes(service, base.home, stop, parts, activity)
    parts.make(
        Kernel(
            home=base.home,
            config=base.config,
            store=base.store,
            clock=base.clock,
            specs=base.specs,
            service=service,
            routes=routes,
            agents=agents,
            parts=parts,
        )
    )
    return parts, [*routes.all(), *parts.routes], routes


# Events that the controller's threads record beside those of the reconciler.
#
# An event that cannot be stored is in the log, too, so a database that is away stops no thread.


class EventReports:
    """Appends events at the present instant. Thread-safe."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def closed_region(self, sentence: str) -> None:
        """Raise LeaseLostError, SQLAlchemyError: the poller reports it again."""
        self._store.append_event(EventRecord("RegionClosed", sentence), now=self._clock.now())

    def clock(self, sentence: str) -> None:
        """Record the offset of a cloud's clock."""
        self._append(EventRecord("clock", sentence))

    def lease(self, service: str, replica_id: int, sentence: str) -> None:
        """Record trouble with the lease of a replica's instance."""
        log.warning("%s/%d: %s", service, replica_id, sentence)
        self._append(EventRecord(leases.KIND, sentence, replica_id), service)

    def network_rules(self, cloud: str, sentence: str) -> None:
        """Record that rules cannot be set, and why; that they are set again if `sentence` is empty."""
        said = (
            f"rules for the network cannot be set: {sentence}"
            if sentence
            else "rules for the network are set"
        )
        self._append(EventRecord("network", f"{cloud}: {said}"))

    def _append(self, record: EventRecord, service: str = "") -> None:
        with suppress(SQLAlchemyError, LeaseLostError):
            self._store.append_event(record, now=self._clock.now(), service=service)
