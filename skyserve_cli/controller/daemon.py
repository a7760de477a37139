"""The daemon: assembles the controller (`assembly`), runs it, and takes it down. One per home.

Two threads of control: the event loop (API, probes, load balancers) and the reconciler's, which waits until
it is woken or a tick has passed. Nothing needs to be saved on the way out, because everything is saved on
the way: SIGKILL is a way of stopping like any other. Replicas and load balancers go on without it, and
`supervisor` starts it again.

    python -m skyserve_cli.controller.daemon
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

if __name__ == "__main__":
    gc.disable()  # what is imported stays, so to collect meanwhile is a sixth of the start for nothing

from aiohttp import web
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from provisioners.files import write_json
from skyserve_cli.config import ConfigError, ListenConfig, load_config
from skyserve_cli.controller.api import unix_socket
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.reasons import of_stopping, of_tick
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.assembly import (
    Foundation,
    Workers,
    activity_of,
    parts_of,
    reconciler_of,
    service_of,
)
from skyserve_cli.controller.balancers.agent_reader import AgentReader
from skyserve_cli.controller.clouds.garbage_collector import Sweeper
from skyserve_cli.controller.gc_pauses import GcPauses
from skyserve_cli.controller.part import Parts
from skyserve_cli.controller.persistence.housekeeping import Housekeeper
from skyserve_cli.controller.persistence.key_fingerprints import ForeignKeysError
from skyserve_cli.controller.persistence.leadership import LeaseRenewer
from skyserve_cli.controller.persistence.opening import CannotOpenError
from skyserve_cli.controller.persistence.series_recorder import SeriesRecorder
from skyserve_cli.controller.phase import Phase, StopLimit
from skyserve_cli.controller.reconcile.clock import SteadyClock, SystemClock
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.store_health import sentence_of
from skyserve_cli.controller.term import AGAIN, Term, begin_again
from skyserve_cli.controller.ticker import Ticker
from skyserve_cli.home import POD_NAME, Home, make_private, write_private
from skyserve_cli.state.store import Store

if TYPE_CHECKING:
    from skyserve_cli.controller.leader_label import LeaderLabel

log = logging.getLogger("skyserve.controller")

TRY_AGAIN_S = 1.0
#: In the environment of a daemon in the foreground: a service manager, or a container, has the log, too.
LOG_TO_STDERR = "SKYSERVE_LOG_TO_STDERR"
#: A full backlog of a Unix socket refuses a connection at once.
BACKLOG = 1024
SWITCH_S = 0.0002  # a thread that computes gives way to others after so long


async def run(home: Home, phase: Phase) -> None:
    """Run until SIGTERM, SIGINT or the API requests a stop. Raises ConfigError, ForeignKeysError."""
    loop = asyncio.get_running_loop()
    config = load_config(home.config)
    stopping = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stopping.set)
    phase.enter(f"opening its database{_shown(home.database_url)}")
    again = partial(_begin_again_unless, stopping)
    base = Foundation.of(home, config, again)
    phase.enter("starting its parts")
    workers = Workers(base, loop)
    reconciler = reconciler_of(base, workers)
    service = service_of(base, workers, reconciler)
    agents = AgentReader(workers.fleet.admin_ports, workers.regional.admin_ports)
    activity = activity_of(base, workers, reconciler, stopping.is_set)
    parts, routes, kernel = parts_of(base, service, agents, stopping.set, activity)
    await workers.start()
    stop = partial(loop.call_soon_threadsafe, stopping.set)
    threads = _Threads(base, workers, reconciler, service, parts, activity, again, stop)
    threads.start()
    await parts.start()
    api = Api(home.token(), routes, parts)
    site = await _listen(api.app(), home)
    remote = await _listen_for_others(api.app(is_remote=True), config.controller.listen)
    label = _leader_label(lambda: base.leadership.leads)
    if label is not None:
        label.start()
    spare = asyncio.create_task(kernel.keep_spare())
    phase.over()
    log.info(
        "controller is up pid=%d owner=%s database=%s",
        os.getpid(),
        base.owner,
        _without_password(base.store),
    )
    await stopping.wait()
    log.info("controller stops; replicas and load balancers go on")
    limit = StopLimit(phase, lambda: of_stopping(activity.to_json()), partial(_end, phase, threads.term))
    limit.start()
    spare.cancel()
    home.controller_address.unlink(missing_ok=True)
    home.controller_socket.unlink(missing_ok=True)
    if label is not None:
        await asyncio.to_thread(label.stop)
    await site.cleanup()
    if remote is not None:
        await remote.cleanup()
    await parts.stop()
    await agents.close()
    await threads.stop()
    await _release(base)
    await workers.close()
    base.store.close()
    limit.cancel()
    if threads.term.failure is not None:
        raise threads.term.failure


def _leader_label(leads: Callable[[], bool]) -> LeaderLabel | None:
    if POD_NAME not in os.environ:
        return None
    from skyserve_cli.controller.leader_label import leader_label

    return leader_label(os.environ, leads)


class _Threads:
    """The threads of the kernel: one renews the lease, the others begin with the term."""

    def __init__(
        self,
        base: Foundation,
        workers: Workers,
        reconciler: Reconciler,
        service: ControllerService,
        parts: Parts,
        activity: Activity,
        again: Callable[[], None],
        stop: Callable[[], object],
    ) -> None:
        store, clock, home, controller = base.store, base.clock, base.home, base.config.controller
        ticker = Ticker(reconciler, store, clock, base.woken, controller.tick_seconds, base.leadership)
        housekeeper = Housekeeper(
            store,
            clock,
            base.steady,
            home.backups,
            home.load_balancers,
            check=base.watch.check,
            tidy=parts.tidy,
            keeps_month=any(team.max_usd_month is not None for team in base.config.teams.values()),
        )
        recorder = SeriesRecorder(store, workers.traffic, clock)
        swept = base.names_of_usable()
        sweeper = Sweeper(service.garbage_collector, swept, controller.sweep_minutes * 60.0)
        threads = (ticker, housekeeper, recorder, sweeper)
        self.term = Term(home, store, clock, stop, again, (*(thread.start for thread in threads), parts.lead))
        renewer = LeaseRenewer(
            base.leadership,
            self.term.begin,
            again,
            ticker.turn,
            lambda: of_tick(tick) if (tick := activity.tick()) is not None else "a tick is about to end",
        )
        self.start = renewer.start
        self._stops = (*(thread.stop for thread in threads), renewer.stop)

    async def stop(self) -> None:
        for stop in self._stops:
            await asyncio.to_thread(stop)


async def _release(base: Foundation) -> None:
    try:
        await asyncio.to_thread(base.watch.close)
        await asyncio.to_thread(base.leadership.release)
    except SQLAlchemyError as error:
        log.warning("the lease cannot be released, it runs out by itself: %s", sentence_of(error))


def _begin_again_unless(stopping: asyncio.Event) -> None:
    """A term that ends while this process stops is no reason to start."""
    if not stopping.is_set():
        begin_again()


def _end(phase: Phase, term: Term) -> None:
    """End the process whatever its threads are doing."""
    phase.over()
    if term.failure is not None:
        print(term.failure, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(0 if term.failure is None else 2)


async def _listen(app: web.Application, home: Home) -> web.AppRunner:
    """Serve on the home's socket, and record in the home which process does."""
    listener = unix_socket.bound(home.controller_socket)
    site = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await site.setup()
    await web.SockSite(site, listener, backlog=BACKLOG).start()
    write_json(home.controller_address, {"pid": os.getpid()})
    return site


async def _listen_for_others(app: web.Application, listen: ListenConfig | None) -> web.AppRunner | None:
    """Serve on the configured port. Raises ConfigError if that cannot be done."""
    if listen is None:
        return None
    certificate = _certificate(listen)
    site = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await site.setup()
    try:
        await web.TCPSite(site, listen.host, listen.port, ssl_context=certificate).start()
    except OSError as error:
        await site.cleanup()
        raise ConfigError(
            f"controller.listen: {listen.host}:{listen.port} cannot be opened: {error.strerror or error}"
        ) from error
    log.info("the API is served at %s port %d", listen.host, listen.port)
    return site


def _certificate(listen: ListenConfig) -> ssl.SSLContext | None:
    """Raise ConfigError if a file cannot be read."""
    if listen.certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(listen.certfile, listen.keyfile)
    except OSError as error:
        files = " and ".join(filter(None, (listen.certfile, listen.keyfile)))
        raise ConfigError(
            f"controller.listen.certfile: {files} cannot be read: {error.strerror or error}"
        ) from error
    proxy = listen.trusted_proxy
    if proxy is not None and proxy.client_ca_file is not None:
        try:
            context.load_verify_locations(cafile=proxy.client_ca_file)
        except OSError as error:
            raise ConfigError(
                f"controller.listen.trusted_proxy.client_ca_file: {proxy.client_ca_file} cannot be read: "
                f"{error.strerror or error}"
            ) from error
        context.verify_mode = ssl.CERT_OPTIONAL  # callers with a token have none
    return context


def _without_password(store: Store) -> str:
    return store.database.url.render_as_string(hide_password=True)


def _shown(url: str) -> str:
    with suppress(ArgumentError):  # which the opening explains
        return f" {make_url(url).render_as_string(hide_password=True)}"
    return ""


def _wait_for_database(phase: Phase, why: str) -> None:
    log.error("the database cannot be used, trying again: %s", why)
    phase.enter("waiting for its database", why)
    time.sleep(TRY_AGAIN_S)
    begin_again()


def _log_to(home: Home) -> None:
    handler = RotatingFileHandler(home.controller_log, maxBytes=16 << 20, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handlers: list[logging.Handler] = [handler]
    if LOG_TO_STDERR in os.environ:
        handlers.append(logging.StreamHandler())
        handlers[1].setFormatter(handler.formatter)
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _ended(home: Home, error: Exception, code: int) -> int:
    """Say why there is no controller any more, also to the commands that come later."""
    print(error, file=sys.stderr)
    with suppress(OSError):
        write_private(home.why_ended, str(error).encode())
    return code


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
    home.why_ended.unlink(missing_ok=True)
    gc.freeze()
    gc.enable()
    GcPauses(SteadyClock().now).install()
    # A response takes a dozen turns of the loop and of its threads, each of which may wait so long for a tick that computes.
    sys.setswitchinterval(SWITCH_S)
    phase = Phase(home.controller_phase, SystemClock().now)
    phase.enter("reading its configuration")
    try:
        # Not asyncio.run: it would wait for every thread that a query holds up.
        asyncio.new_event_loop().run_until_complete(run(home, phase))
    except (ConfigError, ForeignKeysError) as error:
        return _ended(home, error, 2)
    except CannotOpenError as error:
        if AGAIN in os.environ and not error.is_final:
            _wait_for_database(phase, str(error))
        return _ended(home, error, 4 if error.is_final else 1)
    except SQLAlchemyError as error:
        if AGAIN in os.environ:
            _wait_for_database(phase, sentence_of(error))
        print(f"the controller cannot read or write its state: {sentence_of(error)}", file=sys.stderr)
        return 1
    except Exception:
        log.exception("the controller cannot go on")
        raise
    finally:
        phase.over()
    # Cloud calls may still be under way on threads. Their rows say so; the next controller makes them again.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
