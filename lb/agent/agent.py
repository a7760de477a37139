"""One agent: the table and everything that acts on it, without the listening sockets."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lb.agent.build_kind import own_build
from lb.agent.keys_file import LOOK_EVERY_S as LOOK_FOR_KEYS_EVERY_S
from lb.agent.keys_file import KeysFile
from lb.agent.ticker import Ticker
from lb.agent.traffic_file import NOTE_EVERY_S, TrafficNotes
from lb.agent.usage_file import STORE_EVERY_S, UsageFile
from lb.config import file as config_file
from lb.config.demand import Demand
from lb.config.options import Listen
from lb.config.regions import Regions
from lb.config.schema import EarlierEpochError, RetiredError, Stats, Table
from lb.config.totals import Totals
from lb.config.usage import UsageReport, UsageTotals
from lb.core.api_keys import ApiKeyStore, Usage
from lb.core.forwarding import Forwarding
from lb.core.limit_store import LimitStore
from lb.core.shared_quota import SharedQuota
from lb.core.targets import Changes, TargetTable
from lb.engines.distance_prober import LOOK_S, DistanceProber
from lb.engines.health_checks import LOOK_EVERY_S, HealthChecker
from lb.engines.http_get import HttpGetter
from lb.engines.kinds import EngineKind, common_kind
from lb.engines.load_poller import LoadPoller
from lb.engines.model_poller import CHECK_EVERY_S, ModelPoller
from lb.http.tls_acceptor import MAX_HANDSHAKES
from lb.http.upstream import Pools, trusting_only
from lb.observe.access_log import RequestRecord, both
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from lb.observe.tracing import Tracing
from lb.proxy.account import Account
from lb.proxy.adapter_sync import EVERY_S as ADAPTERS_EVERY_S
from lb.proxy.adapter_sync import AdapterSync
from lb.proxy.dispatch import Dispatch, Engines
from lb.proxy.fast_path import open_fast_path
from lb.proxy.home_finder import HomeFinder
from lb.proxy.intake import Intake
from lb.proxy.registry import RequestRegistry
from lb.proxy.runtime import Runtime
from lb.proxy.sweep import Sweep
from lb.proxy.warmer import Warmer
from policies.routing.registry import make_policy

if TYPE_CHECKING:
    from lb.cache_events.follower import CacheFollower
    from lb.regions.identity import Identity
    from lb.regions.region_links import RegionLinks

_log = logging.getLogger("lb.agent.agent")
_FOLLOW_EVERY_S = 0.5
FROM_ARGUMENTS = "arguments"
"""The revision of the table that an agent begins with if it is given none."""


class WrongServiceError(ValueError):
    """A table for another service was pushed to this agent."""


@dataclass(frozen=True)
class AgentOptions:
    """What one process of an agent is given, beside its table.

    `region` is where it runs, `table_file` where it keeps its table, `id_prefix` begins the ids of its requests. `limits` and
    `usage_file` are shared with other processes of this host, and with an `identity` it connects to agents of other regions.
    """

    region: str
    table_file: Path | None
    id_prefix: str
    targets_tls: ssl.SSLContext | None = None
    fast_path: bool = True
    mover_threads: int = 0  # that move chunks; 0: the event loop does
    max_clients: int | None = None  # None: no limit
    max_handshakes: int = MAX_HANDSHAKES  # at a time on each port with TLS
    traffic_file: Path | None = None
    usage_file: Path | None = None  # None: in memory
    limits: LimitStore | None = None
    identity: Identity | None = None


class Agent:
    """Composes the parts and owns the one way in which a table is replaced. Needs a running event loop."""

    def __init__(
        self,
        table: Table,
        options: AgentOptions,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        tracing: Tracing | None = None,
        access_log: Callable[[RequestRecord], None] | None = None,
        unix_time_s: Callable[[], float] | None = None,
    ) -> None:
        """Count minutes by `unix_time_s` as it is now; None: by `clock`."""
        self._options = options
        self._clock = clock
        # Opens the address of a table, and makes it the data port's if the body raises nothing; set by the server.
        self.listening: Callable[[Listen | None], AbstractContextManager[None]] = lambda _: nullcontext()
        self._started_at = now = clock()
        self.retired = False  # a successor serves: only it takes tables
        self._pushed = table  # without the keys of its file, and the targets added for dead agents
        self.keys_file = KeysFile(lambda: self._act_on(self._pushed))
        table = self.keys_file.extended(table)
        self.targets = targets = TargetTable(table, now)
        self.metrics = Metrics(table.service, options.region)
        self.metrics.use_table(table)
        self._pools = Pools(options.targets_tls)
        self._fetcher = HttpGetter(Pools(options.targets_tls), clock)
        self._set_authority(table)
        loop, identity = asyncio.get_running_loop(), options.identity
        self._fast_path = fast_path = (
            open_fast_path(loop, options.mover_threads) if options.fast_path else None
        )
        self.build = self.metrics.build = own_build(
            fast_path=fast_path is not None,
            slow_tls=fast_path.without_tls if fast_path is not None else "",
            workers=max(1, options.mover_threads) if fast_path is not None else 1,
        )
        forwarding = None
        if identity is not None:
            regions = table.regions or Regions("", "")
            forwarding = Forwarding(targets, regions, now, identity.cache_key())
        quota = None if identity is None else SharedQuota()

        # Each part gets those that are made before it, and nothing afterwards.
        self.runtime = Runtime(loop, clock)
        self.registry = registry = RequestRegistry(targets, forwarding, self.runtime)
        self.prober = LoadPoller(
            targets,
            self._fetcher.fetch,
            clock,
            registry.let_in_soon,
            self._has_queued,
            lambda: EngineKind.UNKNOWN if forwarding is None else common_kind(forwarding.peer_engines()),
        )
        self.model_poller = ModelPoller(targets, self._fetcher.fetch, clock, changed=registry.changed)
        self.distances = DistanceProber(targets, options.region, clock)
        self.account = Account(
            targets,
            self.metrics,
            Explanations(running=registry.explanations),
            ApiKeyStore(table.access, now, options.limits, quota),
            now,
            both(tracing.finished if tracing is not None else None, access_log),
            0.0 if unix_time_s is None else unix_time_s() - now,
        )
        self._unix_time_s = wall_clock = clock if unix_time_s is None else unix_time_s
        self._look_at_calendar()
        self.used = UsageFile(options.usage_file, self.account.usage, wall_clock, self.metrics.used)
        engines = Engines(self.prober.kind, self.model_poller.wrong_model, self.model_poller.missing_model)
        homes = HomeFinder(targets, self._fetcher.look, clock)
        dispatch = Dispatch(registry, self._pools, self.account, engines, rng, homes, self._fast_path)
        begin_span = tracing.begin if tracing is not None else None
        self.intake = Intake(
            dispatch,
            self.account,
            options.id_prefix,
            begin_span,
            options.max_clients,
            options.max_handshakes,
        )
        self.links: RegionLinks | None = None
        if identity is not None and forwarding is not None and quota is not None:
            from lb.regions.region_links import RegionLinks  # most agents have no other regions

            self.links = RegionLinks(
                self.intake,
                dispatch,
                self.account,
                forwarding,
                quota,
                identity,
                rng.getrandbits(48),
                engine=self.prober.usual_kind,
                on_takeover=lambda: self._act_on(self._pushed),
            )
            self.links.apply(table.regions)
        self.caches: CacheFollower | None = None
        self._follow_caches()
        self.sweep = Sweep(dispatch)
        self.warmer = Warmer(
            dispatch, self.intake.gate.samples, self.metrics, self._fetcher.post, self._is_leaving
        )
        self.adapters = AdapterSync(
            targets,
            self._fetcher.post,
            clock,
            self.model_poller.wrong_model,
            None if options.table_file is None else options.table_file.with_name("adapters.json"),
        )
        self.account.on_adapter = self.adapters.accepted
        self.checker = HealthChecker(
            targets,
            self._fetcher.alive,
            self.metrics,
            clock,
            changed=registry.changed,
            has_queued=self._has_queued,
        )

    @property
    def table(self) -> Table:
        """The table as it was pushed."""
        return self._pushed

    def _has_queued(self) -> bool:
        return self.registry.queued > 0

    def _is_leaving(self) -> bool:
        return self.retired or self.runtime.closing or self.runtime.draining

    @property
    def closing(self) -> bool:
        return self.runtime.closing

    @property
    def explanations(self) -> Explanations:
        return self.account.explanations

    async def run(self) -> None:
        """Watch over time and targets, until cancelled."""
        try:
            await self._ticker().run()
        finally:
            self.checker.close()
            self.warmer.close()
            self.adapters.close()
            await asyncio.gather(self.prober.close(), self.model_poller.close(), self.distances.close())

    def _follow_caches(self) -> None:
        """Act on whether the table has engines report what they have cached."""
        caches, follower = self.targets.policies.caches, self.caches
        if follower is not None and follower.caches is not caches:
            follower.close()
            follower = None
        if caches is not None and follower is None:
            from lb.cache_events.follower import CacheFollower  # most agents need no ZeroMQ

            follower = CacheFollower(self.targets, caches, self._fetcher.post, self._clock)
        elif follower is not None:
            follower.apply()
        self.caches = self.account.caches = follower

    def _tick_caches(self) -> float | None:
        return None if self.caches is None else self.caches.tick()

    def _ticker(self) -> Ticker:
        faults, metrics = self.runtime.faults, self.metrics
        ticker = Ticker(self._clock, faults.report, metrics.loop_lag.observe)
        ticker.add("sweep", self.sweep.check)
        ticker.add("health checks", self.checker.check_silent, LOOK_EVERY_S)
        ticker.add("load poller", self.prober.poll_due)
        ticker.add("model poller", self.model_poller.poll_due, CHECK_EVERY_S)
        ticker.add("distances", self.distances.tick, LOOK_S)
        ticker.add("warming", self.warmer.tick)
        ticker.add("adapters", self.adapters.tick, ADAPTERS_EVERY_S)
        ticker.add("cache events", self._tick_caches)
        ticker.add("tidying", self._fetcher.expire, 1.0)
        ticker.add("keys file", self.keys_file.tick, LOOK_FOR_KEYS_EVERY_S)
        ticker.add("usage", self.used.store, STORE_EVERY_S)
        ticker.add("calendar", self._look_at_calendar, 1.0)
        if self.links is not None:
            ticker.add("links", self.links.tick)
        if self._options.traffic_file is not None:
            traffic = TrafficNotes(self._options.traffic_file, metrics.served, lambda: self.targets.in_flight)
            ticker.add("noting traffic", traffic.note, NOTE_EVERY_S)
        return ticker

    def apply(self, table: Table) -> Changes:
        """Store the table, then act on it.

        Raises RetiredError, WrongServiceError, UnknownPolicyError, EarlierEpochError, CannotListenError or OSError; then
        nothing has changed.
        """
        if self.retired:
            raise RetiredError("a successor has taken this agent's ports: send it again, to the successor")
        self._check(table)
        if table.epoch < self.table.epoch:
            raise EarlierEpochError(
                f"epoch {table.epoch} is over: this agent has a table of epoch {self.table.epoch}"
            )
        with self.listening(table.listen):
            if self._options.table_file is not None and table != self._pushed:
                config_file.save(self._options.table_file, table)
        return self._act_on(table)

    def _check(self, table: Table) -> None:
        if table.service != self.table.service:
            raise WrongServiceError(f"this agent serves {self.table.service!r}, not {table.service!r}")
        make_policy(table.policy)
        if table.targets_ca != self.table.targets_ca:
            trusting_only(table.targets_ca)

    def _set_authority(self, table: Table) -> None:
        self._pools.set_authority(table.targets_ca)
        self._fetcher.set_authority(table.targets_ca)

    def _act_on(self, table: Table) -> Changes:
        self._pushed = table
        table = self.keys_file.extended(table)
        if self.links is not None:
            table = self.links.takeovers.extended(table)
        self._set_authority(table)
        before, changes = self.targets.table, self.targets.apply(table, self._clock())
        self.metrics.use_table(table)
        self._follow_caches()
        self._fetcher.retain({target.url for target in table.targets})
        if self.links is not None:
            self.links.apply(table.regions)
        self.intake.applied()
        self.model_poller.poll_due()
        self.warmer.applied(before, changes)
        if changes.added or changes.removed:
            _log.info("apply revision=%s added=%s removed=%s", table.revision, changes.added, changes.removed)
        return changes

    async def follow(self) -> None:
        """Take each table from the file, where a successor puts those it gets, until cancelled.

        Requests that are still queued here find the targets that have come since, and a stream that breaks is continued on
        one that is left.
        """
        if self._options.table_file is None:
            return
        seen = None
        while True:
            try:
                stamp = self._options.table_file.stat()
                if seen != (stamp.st_ino, stamp.st_mtime_ns):
                    seen = stamp.st_ino, stamp.st_mtime_ns
                    table = config_file.load(self._options.table_file)
                    if table is not None and table != self._pushed:
                        self._check(table)
                        self._act_on(table)
            except (OSError, ValueError) as error:
                # A successor of another release may know more than this one.
                _log.warning("cannot follow table_file=%s why=%r", self._options.table_file, str(error))
            await asyncio.sleep(_FOLLOW_EVERY_S)

    def reload(self) -> None:
        """Act on the table file as it is now. A table that cannot be used changes nothing."""
        if self._options.table_file is None or self.retired:
            return
        try:
            table = config_file.load(self._options.table_file)
            if table is None:
                raise FileNotFoundError("there is no such file")
            self._check(table)
            with self.listening(table.listen):
                pass
        except (OSError, ValueError) as error:
            _log.warning(
                "keep the table, cannot use table_file=%s why=%r", self._options.table_file, str(error)
            )
            return
        changed = table != self._pushed
        if changed:
            self._act_on(table)
        _log.info(
            "reload table_file=%s revision=%s changed=%s", self._options.table_file, table.revision, changed
        )

    def ready(self) -> bool:
        """Return whether a request that came now would find a healthy target."""
        return self.intake.ready()

    def has_table(self) -> bool:
        """Return whether it has a table of a controller, or of its file, and does not drain or close."""
        return (
            self.table.revision != FROM_ARGUMENTS and not self.runtime.closing and not self.runtime.draining
        )

    def drain(self, *, on: bool) -> None:
        """Serve on, but be not ready, until called again with `on` False."""
        self.runtime.drain(on=on)

    def stats(self, window_s: float) -> Stats:
        now = self._clock()
        return Stats(
            service=self.table.service,
            region=self._options.region,
            revision=self.table.revision,
            uptime_s=now - self._started_at,
            window_s=window_s,
            requests=self.account.arrivals.count(now, window_s),
            in_flight=self.targets.in_flight,
            queued=self.registry.queued,
            rejected=self.account.rejections.count(now, window_s),
            ongoing=self.account.ongoing.mean(now, window_s),
            targets=self.targets.stats(now, window_s),
            warming=tuple(self.targets.warming),
            keys_problem=self.keys_file.problem,
        )

    def demand(self, since: int) -> Demand:
        """Return what came in each minute from minute `since` on, as far as it is known."""
        return self.account.demand.report(self._clock(), since)

    def totals(self) -> Totals:
        """Return the counters since the start, in total and by target."""
        now = self._clock()
        busy = {one.id: one.in_flight for one in self.targets.stats(now, 1.0)}
        return self.metrics.totals(now - self._started_at, self.targets.in_flight, self.registry.queued, busy)

    def used_since(self, source: str, mark: int) -> UsageReport:
        """Return what the requests of each key and model have used (`UsageFile.report`)."""
        return self.used.report(source, mark)

    def regions(self) -> dict[str, Any]:
        """Return the state of agents of other regions."""
        if self.links is None:
            return {"here": None, "peers": []}
        return self.links.to_json() | {"distances_ms": self.distances.rtts_ms()}

    async def explained(self, explanation: Explanation) -> dict[str, Any]:
        peers = {} if self.links is None else {"peers": await self.links.explained(explanation)}
        return explanation.to_json() | peers

    def usage(self) -> Iterable[Usage]:
        """Return what the owners of API keys have used."""
        return self.account.api_keys.usage(self._clock())

    @property
    def wants_totals(self) -> bool:
        """Whether limits of days or months need what all agents have counted."""
        return self.account.api_keys.of_calendar

    def counted(self, totals: UsageTotals) -> None:
        """All agents together have used this much."""
        self.account.api_keys.counted(totals, self._clock())

    def _look_at_calendar(self) -> None:
        self.account.api_keys.look(self._unix_time_s(), self._clock())

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.used.count()
        queued, gauges = self.registry.queued, self.intake.gauges()
        if self._pushed.access.keys_file:
            gauges |= {
                "keys_file_keys": len(self.keys_file),
                "keys_file_broken": bool(self.keys_file.problem),
            }
        if self.caches is not None:
            gauges |= self.caches.figures()
        of_policy = self.targets.policies.own.gauges()
        return self.metrics.expose(self.targets, queued, self._clock(), of_policy, gauges, self.regions())

    def close(self) -> None:
        """Nothing goes on after this."""
        if self._fast_path is not None:
            self._fast_path.close()
        if self.caches is not None:
            self.caches.close()
        self._pools.close()
        self._fetcher.close()
        self.used.close()
