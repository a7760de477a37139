"""The composition root: builds the controller, runs it, and takes it down. One per home.

Two threads of control: the event loop (API, probes, load balancers) and the reconciler's, which waits until
it is woken or a tick has passed. Nothing needs to be saved on the way out, because everything is saved on
the way: SIGKILL is a way of stopping like any other. Replicas and load balancers go on without it, and
`supervisor` starts it again.

    python -m skyserve_cli.controller.daemon
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from policies.model import Offer
from provisioners.files import write_json
from provisioners.port.base import Gated, Instance, Provisioner, Requirements
from provisioners.remote.certificates import Authority
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.config import ConfigError, load_config
from skyserve_cli.controller.api import unix_socket
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.balancers.dns import ThreadDns
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.balancers.regional_fleet import RegionalFleet, admin_token
from skyserve_cli.controller.callbacks import Callbacks
from skyserve_cli.controller.clouds.caches import OfferCache, SpecCache
from skyserve_cli.controller.clouds.firewalls import ThreadFirewalls
from skyserve_cli.controller.clouds.garbage_collector import Sweeper
from skyserve_cli.controller.clouds.instance_poller import ThreadInstancePoller
from skyserve_cli.controller.clouds.log_archive import LogArchive
from skyserve_cli.controller.clouds.operation_runner import ThreadOperationRunner
from skyserve_cli.controller.gc_pauses import GcPauses
from skyserve_cli.controller.metrics.endpoint import MetricsEndpoint
from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.persistence.housekeeping import Housekeeper
from skyserve_cli.controller.persistence.key_fingerprints import ForeignKeysError
from skyserve_cli.controller.persistence.leadership import Leadership, LeaseKeeper, about, holder_of
from skyserve_cli.controller.persistence.opening import CannotOpenError, opened
from skyserve_cli.controller.readiness import HttpProber
from skyserve_cli.controller.reconcile import leases
from skyserve_cli.controller.reconcile.adoption import Adoption, read_restored
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import JUMP_S, SteadyClock, SystemClock
from skyserve_cli.controller.reconcile.evidence import DaemonEvidence
from skyserve_cli.controller.reconcile.ports import CloudOperation, Offers
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.secret_box import seal_of
from skyserve_cli.home import Home, make_private
from skyserve_cli.state.lease import NO_TERM, LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

log = logging.getLogger("skyserve.controller")

#: In the environment of a process that has started again: its database was there a moment ago, so it is waited for.
_AGAIN = "SKYSERVE_CONTROLLER_AGAIN"
TRY_AGAIN_S = 1.0
#: Ticks that are requested in a row are one tick, so that a burst of results is handled at once.
BETWEEN_TICKS_S = 0.02
#: A full backlog of a Unix socket refuses a connection at once.
BACKLOG = 1024


class Ticker(threading.Thread):
    """Runs the reconciler: when woken, and once per `tick_s` at the least. Started when this controller's term begins."""

    def __init__(
        self,
        reconciler: Reconciler,
        store: Store,
        clock: SystemClock,
        woken: threading.Event,
        tick_s: float,
        leadership: Leadership,
    ) -> None:
        super().__init__(name="reconciler", daemon=True)
        self._reconciler = reconciler
        self._store = store
        self._clock = clock
        self._woken = woken
        self._tick_s = tick_s
        self._leadership = leadership
        self._stopping = threading.Event()
        self._turns = 0
        self._is_busy = False

    def run(self) -> None:
        self._woken.set()
        while not self._stopping.is_set() and self._leadership.leads:
            self._woken.wait(self._tick_s)
            self._woken.clear()
            self._turns += 1
            self._is_busy = True
            try:
                follow_clock(self._clock, self._store)
                self._reconciler.tick()
            except LeaseLostError:
                self._leadership.lost()
            except Exception:  # the database may be away for a while; the next tick is another chance
                log.exception("tick")
            self._is_busy = False
            self._stopping.wait(BETWEEN_TICKS_S)

    def turn(self) -> int | None:
        """Return the number of the tick that goes on; None between two."""
        return self._turns if self._is_busy else None

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        if self.is_alive():
            self.join(timeout=10.0)


def follow_clock(clock: SystemClock, store: Store) -> float:
    """If the host's clock was set, let ours follow it, and what it has measured. Returns by how much."""
    jump_s = clock.jump_s()
    if not jump_s:
        return 0.0
    if clock.moves_instants(jump_s):
        store.move_instants(jump_s, then=lambda: clock.follow(jump_s))
    else:
        clock.follow(jump_s)
    _tell_jump(store, jump_s, clock.now())
    return jump_s


def catch_up(clock: SystemClock, store: Store) -> None:
    """If the host's clock was set back while no controller ran, move live replicas out of the future."""
    latest = store.latest_instant()
    if latest is not None and latest - clock.now() > JUMP_S:
        jump_s = clock.now() - latest
        store.move_instants(jump_s)
        _tell_jump(store, jump_s, clock.now())


def _tell_jump(store: Store, jump_s: float, now: float) -> None:
    log.warning("clock jumped by %+.1f s", jump_s)
    store.append_event(EventRecord("clock", f"clock jumped by {jump_s:+.0f} s"), now=now)


def _tell_lease(store: Store, service: str, replica_id: int, sentence: str, now: float) -> None:
    log.warning("%s/%d: %s", service, replica_id, sentence)
    with suppress(SQLAlchemyError, LeaseLostError):  # it is in the log, too
        store.append_event(EventRecord(leases.KIND, sentence, replica_id), now=now, service=service)


def _tell_clock(store: Store, sentence: str, now: float) -> None:
    with suppress(SQLAlchemyError, LeaseLostError):  # it is in the log, too
        store.append_event(EventRecord("clock", sentence), now=now)


def _tell_rules(store: Store, cloud: str, sentence: str, now: float) -> None:
    said = f"rules for the network cannot be set: {sentence}" if sentence else "rules for the network are set"
    with suppress(SQLAlchemyError, LeaseLostError):  # it is in the log, too
        store.append_event(EventRecord("network", f"{cloud}: {said}"), now=now)


class _ResolvedOffers:
    """The offers of enabled clouds only; a need that only disabled ones could meet meets no offer."""

    def __init__(self, clouds: Clouds, book: OfferCache) -> None:
        self._clouds = clouds
        self._book = book

    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        try:
            return self._book.get(self._clouds.resolve(need))
        except CloudNotEnabledError:
            return ()


class _Term:
    """What begins when this controller leads. Called on the thread that renews the lease."""

    def __init__(self, home: Home, store: Store, clock: SystemClock, stop: Callable[[], object]) -> None:
        self._home = home
        self._store = store
        self._clock = clock
        self._stop = stop
        self.threads: tuple[threading.Thread, ...] = ()
        self.failure: Exception | None = None

    def begin(self) -> None:
        try:
            fingerprints.check_or_record(self._store, self._home)
            catch_up(self._clock, self._store)
        except (LeaseLostError, SQLAlchemyError):  # another term has started, or will
            log.exception("the term ends before it has started")
            begin_again()
        except ForeignKeysError as error:
            self.failure = error
            self._stop()
        else:
            for thread in self.threads:
                thread.start()


def begin_again() -> None:
    """Execute the same program in place of this one, whichever thread is doing what.

    What this process knew is of a term that is over, so nothing of it stays but its number; and what waits for a
    database that does not respond would keep an orderly stop waiting, too.
    """
    logging.shutdown()
    os.environ[_AGAIN] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def _wait_for_database(why: str) -> None:
    log.error("the database cannot be used, trying again: %s", why)
    time.sleep(TRY_AGAIN_S)
    begin_again()


async def run(home: Home) -> None:
    """Run until SIGTERM, SIGINT or the API says stop. Raises ConfigError, ForeignKeysError."""
    loop = asyncio.get_running_loop()
    config = load_config(home.config)
    stopping = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stopping.set)

    steady = SteadyClock()
    woken = threading.Event()
    store = opened(home)
    store.fence(NO_TERM)
    fingerprints.check(store, home)
    owner = store.owner()
    leadership = Leadership(store, holder_of(home), about(home), steady)
    leadership.step()
    clock = SystemClock(leadership.database_now)
    seal = seal_of(home)
    specs = SpecCache(store, seal, lambda token: admin_token(home.machine_secret(), token))
    clouds = Clouds(home, config)
    usable = clouds.all()
    for name in clouds.without_sdk:
        log.warning("%s", clouds.without_sdk[name])
    attention = Attention(loop, clock, steady)
    served = ServedReplicas()
    regional = RegionalFleet(
        clouds.get, home.machine_secret(), clock, loop, woken.set, attention=attention, served=served
    )
    names = ThreadDns(clouds.names, clouds.name_region, owner, steady, woken.set, leadership.may_terminate)
    # Agents are known by their folder, whichever links lead to it.
    fleet = LocalFleet(home.load_balancers.resolve(), loop, woken.set, attention, served, clock.now)
    authority = Authority(home.machine_secret(), owner).certificate
    prober = HttpProber(loop, woken.set, attention, served, authority=authority)
    instance_poller = ThreadInstancePoller(
        clouds.get,
        owner,
        clock,
        woken.set,
        clouds.poll_s(),
        tell=lambda sentence: store.append_event(EventRecord("RegionClosed", sentence), now=clock.now()),
        tell_clock=lambda sentence: _tell_clock(store, sentence, clock.now()),
        warn=lambda service, id_, sentence: _tell_lease(store, service, id_, sentence, clock.now()),
    )
    log_archive = LogArchive(home.log_archive)

    def farewell(call: CloudOperation, cloud: Provisioner, instance: Instance) -> None:
        num_nodes = specs.get(call.service, call.replica.version).num_nodes
        log_archive.keep(call.service, call.replica, instance, cloud, num_nodes)

    runner = ThreadOperationRunner(
        clouds.get,
        lambda call: specs.order(owner, call),
        owner,
        steady,
        woken.set,
        farewell=farewell,
        allows=leadership.allows,
    )
    firewalls = ThreadFirewalls(
        [name for name in clouds.enabled if name not in clouds.without_sdk],
        lambda name: cloud if isinstance(cloud := clouds.get(name), Gated) else None,
        owner,
        steady,
        leadership.may_terminate,  # closing a rule that another controller needs is as final
        tell=lambda cloud, sentence: _tell_rules(store, cloud, sentence, clock.now()),
    )
    offers: Offers = _ResolvedOffers(clouds, OfferCache(usable, steady, woken.set))
    restored = read_restored(home.restored)
    adoption = Adoption(
        restored,
        clouds.enabled,
        owner,
        store,
        specs,
        offers,
        done=lambda: home.restored.unlink(True),
    )
    reconciler = Reconciler(
        clock=clock,
        store=store,
        specs=specs,
        offers=offers,
        runner=runner,
        instance_poller=instance_poller,
        prober=prober,
        fleet=fleet,
        enabled_clouds=frozenset(clouds.enabled),
        lb_host=config.load_balancer.host,
        regional=regional,
        names=names,
        firewalls=firewalls,
        adoption=adoption,
        evidence=DaemonEvidence(attention, prober, fleet, regional, (prober, instance_poller, regional)).of,
        epoch=lambda: leadership.epoch,
        targets_ca=base64.b64encode(authority).decode(),
        max_usd_hour=config.controller.max_usd_hour,
    )
    controller_service = ControllerService(
        store=store,
        specs=specs,
        seal=seal,
        clouds=clouds,
        fleet=fleet,
        regional=regional,
        names=names,
        clock=clock,
        leadership=leadership,
        owner=owner,
        wake=woken.set,
        sighted=instance_poller.last,
        leases=instance_poller.leases,
        log_archive=log_archive,
        store_health=reconciler.store_health,
        load_balancer_log=lambda name: home.load_balancers / Path(name).name / "agent.log",
    )
    attention.start()
    await fleet.start()
    await regional.start()
    ticker = Ticker(reconciler, store, clock, woken, config.controller.tick_seconds, leadership)
    swept = [name for name in clouds.enabled if name not in clouds.without_sdk]
    sweeper = Sweeper(controller_service.garbage_collector, swept, config.controller.sweep_minutes * 60.0)
    housekeeper = Housekeeper(store, clock, steady, home.backups, home.load_balancers)
    term = _Term(home, store, clock, lambda: loop.call_soon_threadsafe(stopping.set))
    callbacks = Callbacks(store, specs, clock, home.callbacks)
    term.threads = (ticker, sweeper, housekeeper, callbacks)
    lease_keeper = LeaseKeeper(leadership, term.begin, begin_again, ticker.turn)
    lease_keeper.start()
    api = Api(controller_service, home.token(), home.controller_log, stopping.set)
    site = await _listen(api.app(), home)
    metrics = _serve_metrics(controller_service, home, config.controller.metrics_port)
    log.info("controller is up pid=%d owner=%s database=%s", os.getpid(), owner, _without_password(store))
    await stopping.wait()
    log.info("controller stops; replicas and load balancers go on")
    home.controller_address.unlink(missing_ok=True)
    home.controller_socket.unlink(missing_ok=True)
    await site.cleanup()
    if metrics is not None:
        await metrics.close()
    callbacks.stop()
    await asyncio.to_thread(ticker.stop)
    await asyncio.to_thread(housekeeper.stop)
    sweeper.stop()
    await asyncio.to_thread(lease_keeper.stop)
    try:
        await asyncio.to_thread(leadership.release)
    except SQLAlchemyError as error:
        log.warning("the lease cannot be released, it runs out by itself: %s", sentence_of(error))
    instance_poller.close()
    await attention.close()
    await prober.close()
    await fleet.close()
    await regional.close()
    store.close()
    if term.failure is not None:
        raise term.failure


async def _listen(app: web.Application, home: Home) -> web.AppRunner:
    """Serve on the home's socket, and record in the home which process does."""
    listener = unix_socket.bound(home.controller_socket)
    site = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await site.setup()
    await web.SockSite(site, listener, backlog=BACKLOG).start()
    write_json(home.controller_address, {"pid": os.getpid()})
    return site


def _serve_metrics(
    controller_service: ControllerService, home: Home, port: int | None
) -> MetricsEndpoint | None:
    if port is None:
        return None
    metrics = MetricsEndpoint(
        home.metrics_token(),
        controller_service.health,
        lambda: controller_service.services(down=False, ended=False),
    )
    metrics.start(port)
    return metrics


def _without_password(store: Store) -> str:
    return store.url.render_as_string(hide_password=True)


def _log_to(home: Home) -> None:
    handler = RotatingFileHandler(home.controller_log, maxBytes=16 << 20, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)


def main() -> int:
    """Return the daemon's process.

    Exit code 2: something is configured wrongly; 3: another controller of this home is running; 4: this program cannot use
    the database.
    """
    make_private(os.environ)
    home = Home.from_environment(os.environ)
    home.create()
    lock = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"a controller of {home.root} is already running", file=sys.stderr)
        return 3
    _log_to(home)
    GcPauses(SteadyClock().now).install()
    try:
        # Not asyncio.run: it would wait for every thread that a query holds up.
        asyncio.new_event_loop().run_until_complete(run(home))
    except (ConfigError, ForeignKeysError) as error:
        print(error, file=sys.stderr)
        return 2
    except CannotOpenError as error:
        if _AGAIN in os.environ and not error.is_final:
            _wait_for_database(str(error))
        print(error, file=sys.stderr)
        return 4 if error.is_final else 1
    except SQLAlchemyError as error:
        if _AGAIN in os.environ:
            _wait_for_database(sentence_of(error))
        print(f"the controller cannot read or write its state: {sentence_of(error)}", file=sys.stderr)
        return 1
    except Exception:
        log.exception("the controller cannot go on")
        raise
    # Cloud calls may still be under way on threads. Their rows say so; the next controller makes them again.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
