"""What the API can do, without HTTP: goals in, facts out. Synchronous; called on threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from policies.goals import UpdateMode
from policies.health import FailedProbe
from policies.model import EndReason, Replica, ReplicaState, Role
from provisioners.port.base import Instance, Provisioner, is_url
from provisioners.port.vm import KeyKeeper
from skyserve_cli import __version__
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import LoadBalancerConfig
from skyserve_cli.controller.api.access import calling, insist_on_other_hosts
from skyserve_cli.controller.api.series_view import series_view, span_for
from skyserve_cli.controller.api.team_rules import TeamRules
from skyserve_cli.controller.api.views import history_view, is_well, last_failure, service_view
from skyserve_cli.controller.balancers.dns import ThreadDns
from skyserve_cli.controller.balancers.front_address import choose_port, is_free, shown_host
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.balancers.regional_fleet import RegionalFleet
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.garbage_collector import Collected, janitor_of
from skyserve_cli.controller.clouds.log_archive import REASONS_WITH_LOG, LogArchive
from skyserve_cli.controller.content_hash import folder_digest
from skyserve_cli.controller.persistence.leadership import Leadership
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.demand import merged
from skyserve_cli.controller.reconcile.mappers import goal_of, has_local_agent, requirements_of
from skyserve_cli.controller.reconcile.region_places import insist_on_regions
from skyserve_cli.controller.reconcile.resource_match import copies_of
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.controller.reconcile.troubles import BROKEN, broken
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.series import RINGS
from skyserve_cli.state.store import Store
from skyserve_cli.state.usage import day_of
from skyserve_cli.state.values import DemandRow, NoSuchServiceError, ServiceRow, Spent

if TYPE_CHECKING:
    from skyserve_cli.controller.api.usage_view import UsageQuestion

#: Why a launch ends that the cloud has refused: it has left nothing.
_REFUSED = (EndReason.CAPACITY, EndReason.QUOTA, EndReason.AUTH, EndReason.REFUSED, EndReason.CONFIG)
ENDED_SHOWN_FOR_S = 3600.0


class NoSuchReplicaError(RejectedError):
    """The service has no live replica of that id."""

    status = 404


class Sightings(Protocol):
    """What this needs of `clouds.instance_poller.ThreadInstancePoller`."""

    def last(self, cloud: str) -> Sequence[Instance]: ...

    def machines(self, cloud: str) -> Mapping[str, Instance]: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored: rows, the specs in them, and the key of their secrets."""

    store: Store
    specs: SpecCache
    seal: SecretBox


def _no_probes(service: str) -> Mapping[int, FailedProbe]:
    return {}


@dataclass(frozen=True, slots=True)
class Running:
    """What runs: load balancers here and in regions, their names, the instances last listed, logs of ended replicas, failed probes."""

    fleet: LocalFleet
    regional: RegionalFleet
    names: ThreadDns
    sightings: Sightings
    log_archive: LogArchive
    failed_probes: Callable[[str], Mapping[int, FailedProbe]] = _no_probes


class ControllerService:
    """One per daemon. What changes something raises NotLeadingError where another controller leads. `wake` makes the reconciler look at once."""

    def __init__(
        self,
        stored: Stored,
        running: Running,
        clouds: Clouds,
        clock: Clock,
        leadership: Leadership,
        store_health: StoreHealth,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._specs, self._seal = stored.store, stored.specs, stored.seal
        self._running = running
        self._store_health = store_health
        self.clouds = clouds
        self._clock = clock
        self._leadership = leadership
        self._owner = self._store.database.owner()
        self._wake = wake
        self._started_at = clock.now()
        self._choosing = threading.Lock()
        self.log_archive = running.log_archive
        self.printed: dict[
            tuple[str, int], str
        ] = {}  # the last lines of replicas that come up, if a part reads them
        self.teams = TeamRules(self._store, self._specs, clouds, clock)
        self.refuse_unless_leading = leadership.refuse_unless_leading
        self.garbage_collector = janitor_of(self._store, self._specs, clouds, clock, leadership.may_terminate)

    def health(self) -> dict[str, Any]:
        store, lease = self._store_health.to_json(), self._leadership.to_json()
        if lease["astray"]:
            store |= {"ok": False, "why": lease["unfit"]}
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(self._clock.now() - self._started_at, 3),
            "clouds": list(self.clouds.enabled),
            "store": store,
            "database": self._store.database.url.render_as_string(hide_password=True),
            "lease": lease,
        }

    def machines_with_older_keys(self) -> int:
        """Return how many rented machines are not known to let in the present login key yet."""
        clouds = [
            self.clouds.get(name) for name in self.clouds.enabled if name not in self.clouds.without_sdk
        ]
        return sum(cloud.with_older_keys(self._owner) for cloud in clouds if isinstance(cloud, KeyKeeper))

    def put(self, spec: ServiceSpec, secrets: Mapping[str, str], mode: UpdateMode | None) -> int:
        """Return a new service (`mode` None) or a new version of one, and its version. `spec` is one that `sent_spec` returned.

        Raises CloudNotEnabledError, NoFreePortError, TeamError and the store's errors; after an error nothing has changed.
        """
        name = spec.name
        self._leadership.refuse_unless_leading()
        insist_on_other_hosts(spec, self.clouds.resolve(requirements_of(spec)))
        insist_on_regions(spec, self.clouds)
        team = self.teams.admit(name, spec, is_new=mode is None)
        missing = sorted(set(spec.secrets) - set(secrets))
        if missing:
            raise ValueError(f"secrets without a value: {', '.join(missing)}")
        with self._choosing:  # or two that come at once would be given the same port
            version = self._store.put_service(
                name,
                spec_to_json(spec),
                replica_hash=spec.replica_hash(self._content_digest(spec, secrets)),
                sealed_secrets=self._seal.close(secrets),
                lb_port=endpoint_port(name, spec, self._store, self.clouds.config.load_balancer),
                target=_first_target(spec),
                mode=mode,
                now=self._clock.now(),
                author=calling().name,
                team=team,
            )
        self._wake()
        return version

    def down(self, name: str, purge: bool) -> None:
        """Raise NoSuchServiceError."""
        self._leadership.refuse_unless_leading()
        self._store.set_down(name, purge=purge, now=self._clock.now(), author=calling().name)
        self._wake()

    def tidy(self, names: Sequence[str]) -> dict[str, Any]:
        """One step towards nothing being left of services that are down, where they have ever been; see `GarbageCollector.tidy`.

        May take minutes.
        """
        places: dict[str, set[str]] = {}
        for name in names:
            for one in self._store.replicas(name, limit=1000):
                here = places.setdefault(one.zone.cloud, set())
                if one.launched_at is not None or one.end_reason not in _REFUSED:
                    here |= {one.zone.region, one.zone.name}
        steps = (self.garbage_collector.tidy(cloud, names, here) for cloud, here in sorted(places.items()))
        done = sum(steps, Collected())
        if not done.waiting and self._leadership.may_terminate():
            from skyserve_cli.controller.clouds.node_caches import purged

            done += purged(names, self._store.services(down=True), self._specs, self._owner, self.clouds)
        return done.view()

    def kill(self, name: str, replica_id: int) -> None:
        """Raise NoSuchServiceError, NoSuchReplicaError."""
        self._leadership.refuse_unless_leading()
        try:
            self._store.kill_replica(name, replica_id, now=self._clock.now(), author=calling().name)
        except KeyError:
            raise NoSuchReplicaError(f"service {name} has no live replica {replica_id}") from None
        self._wake()

    def services(self, *, down: bool, ended: bool, name: str = "") -> list[dict[str, Any]]:
        """Return the views of all services, by name; or only of the one of that name."""
        with self._store.still():
            now = self._clock.now()
            rows = [row for row in self._store.services(down=down) if name in ("", row.name)]
            spent = self._store.spent(now, name)
            names = [row.name for row in rows if ended or not is_well(row)]
            gone = self._store.recently_ended(names, now - ENDED_SHOWN_FOR_S)
        return [
            self._view(row, spent.get(row.name, Spent(0.0, 0.0)), gone.get(row.name, ()), ended, now)
            for row in rows
        ]

    def has(self, name: str) -> bool:
        """Return whether the service is up, or something of it is left."""
        return any(row.name == name for row in self._store.services())

    def one(self, name: str, *, ended: bool) -> dict[str, Any]:
        """Return the view of one service. Raises NoSuchServiceError."""
        found = self.services(down=False, ended=ended, name=name)
        if not found:
            raise NoSuchServiceError(name)
        return found[0]

    def changes(self) -> int:
        """Return how many times the database has changed."""
        return self._store.count()

    def events(self, service: str | None, *, after: int, limit: int, newest: bool) -> list[dict[str, Any]]:
        """Return the event log, oldest first."""
        return [
            {
                "seq": line.seq,
                "at": line.at,
                "service": line.service,
                "replica_id": line.record.replica_id,
                "kind": line.record.kind,
                "state": line.record.state,
                "message": line.record.message,
                "author": line.record.author or None,
            }
            for line in self._store.events(
                calling().services if service is None else service, after=after, limit=limit, newest=newest
            )
        ]

    def history(self, name: str, *, since: float, most: int) -> dict[str, Any]:
        """Return what became of a service since then, at most since the `up` that began its present life.

        `most` replicas at most, the last to end. Raises NoSuchServiceError.
        """
        row = next((row for row in self._store.services(down=True) if row.name == name), None)
        if row is None:
            raise NoSuchServiceError(name)
        history = self._store.history(name, since=max(since, row.created_at), most=most)
        num_nodes = {
            version: self._specs.get(name, version).num_nodes
            for version in {replica.version for replica in history.replicas}
        }
        placement = self._specs.get(name, row.version).placement
        return history_view(row, placement, history, num_nodes, self._clock.now())

    def series(self, name: str, *, since: float | None, replica_id: int) -> dict[str, Any]:
        """Return what load balancers counted since then, of the service or (`replica_id` not 0) of a replica.

        `since` None: for as long as the finest numbers are kept. Raises NoSuchServiceError.
        """
        if not self.has(name) and not any(row.name == name for row in self._store.services(down=True)):
            raise NoSuchServiceError(name)
        until = self._clock.now()
        begin = until - RINGS[0].keep_s if since is None else since
        since = min(until, max(begin, until - RINGS[-1].keep_s))
        span_s = span_for(since, until)
        slots = self._store.series(name, span_s, since=since - span_s, until=until)
        return series_view(name, replica_id, span_s, since, until, slots)

    def usage(self, name: str, question: UsageQuestion) -> dict[str, Any]:
        """Return what the requests of each API key and model have used; see `usage_view`.

        Raises NoSuchServiceError, or ValueError if there are more than MOST_ROWS sums.
        """
        from skyserve_cli.controller.api.usage_view import MOST_ROWS, usage_view, usd_of  # rarely needed

        both = (False, True)
        service = next(
            (row for down in both for row in self._store.services(down=down) if row.name == name), None
        )
        if service is None:
            raise NoSuchServiceError(name)
        asked = question.on(day_of(self._clock.now()))
        most = MOST_ROWS + 1 if asked.top is None else asked.top
        prices = self._specs.get(name, service.version).load_balancer.access.prices
        rows, total = self._store.usage(
            name,
            since=asked.since,
            until=asked.until,
            by=asked.by,
            most=most,
            top=asked.top is not None,
            usd=usd_of(prices) if prices else None,
        )
        return usage_view(name, asked, rows, total)

    def instance(
        self, name: str, replica_id: int, node: int = 0
    ) -> tuple[Provisioner, Instance | None, bool]:
        """Return the instance of a replica, dead or alive, its cloud, and whether the replica is live.

        Raises NoSuchReplicaError if there is no such replica, or no such node in it.
        """
        known = {replica.id: replica for replica in self._store.replicas(name, limit=1000)}
        if replica_id not in known:
            raise NoSuchReplicaError(f"service {name} has no replica {replica_id}")
        replica = known[replica_id]
        is_agent = replica.role is Role.LOAD_BALANCER
        last = 0 if is_agent else self._specs.get(name, replica.version).num_nodes - 1
        if node > last:
            raise NoSuchReplicaError(f"replica {replica_id} of {name} has no node {node}; its last is {last}")
        cloud, lives = self.clouds.get(replica.zone.cloud), replica.state is not ReplicaState.GONE
        if replica.instance_id is None:
            return cloud, None, lives
        # A client that follows a log polls several times a second, which is more than a cloud should be.
        found = _by_id(self._running.sightings.last(cloud.name), replica.instance_id)
        if found is None and not self.log_archive.find(name, replica_id, node):
            found = _by_id(cloud.instances(self._owner, name), replica.instance_id)
        return cloud, found, lives

    def sighted(self, replica: Replica) -> tuple[Provisioner, Instance | None]:
        """Return the cloud of a replica, and its instance as it was listed last. Calls no cloud."""
        cloud = self.clouds.get(replica.zone.cloud)
        return cloud, _by_id(self._running.sightings.last(cloud.name), replica.instance_id or "")

    def _view(
        self, row: ServiceRow, spent: Spent, recently: Sequence[Replica], ended: bool, now: float
    ) -> dict[str, Any]:
        spec = self._specs.get(row.name, row.version)
        shown = (*row.replicas, *(recently if ended else ()))
        kept = {
            r.id: self.log_archive.find(row.name, r.id) for r in shown if r.end_reason in REASONS_WITH_LOG
        }
        is_local = self._running.fleet.view(row.name).alive
        is_local |= self._leadership.leads and has_local_agent(row, spec)
        loads = [self._running.fleet.load(row.name)] if is_local else []
        view = service_view(
            row,
            spec,
            goal_of(row, spec, now),
            local_agent=self._running.fleet.view(row.name) if is_local else None,
            agents={agent.id: self._running.regional.view(row.name, agent.id) for agent in row.balancers},
            load=merged([*loads, *self._running.regional.loads(row.name)]),
            spent=spent,
            host=shown_host(spec.load_balancer.host or self.clouds.config.load_balancer.host),
            ended=recently if ended else (),
            num_nodes={
                version: self._specs.get(row.name, version).num_nodes
                for version in {replica.version for replica in shown}
            },
            now=now,
            failure=last_failure(row, recently),
            day=self._day(row.name, now) if spec.slo is not None else (),
            machines={
                cloud: self._running.sightings.machines(cloud)
                for cloud in {r.zone.cloud for r in row.attempts}
            },
            logs={replica_id: str(found[0]) for replica_id, found in kept.items() if found is not None},
            failed_probes=self._running.failed_probes(row.name),
            printed=self.printed,
        )
        troubles = [
            self._running.fleet.view(row.name).trouble if is_local else "",
            self._running.names.trouble(row.name),
        ]
        view["notes"] = "; ".join(filter(None, [view["notes"], *troubles]))
        unreadable = row.trouble or self._specs.trouble(row.name, row.version)
        if unreadable and not row.down:
            view["status"], view["notes"] = BROKEN, broken(row, unreadable)
        return view

    def _day(self, name: str, now: float) -> Sequence[DemandRow]:
        """Return the minutes of the last 24 hours."""
        return self._store.demand(name, since=int(now // 60) - 1440)

    def keeps_replicas(self, running: ServiceRow, spec: ServiceSpec, secrets: Mapping[str, str]) -> bool:
        """Return whether the replicas of a running service may serve this spec as they are."""
        made = self._store.version(running.name, running.version).replica_hash
        return spec.replica_hash(self._content_digest(spec, secrets)) == made

    def _content_digest(self, spec: ServiceSpec, secrets: Mapping[str, str]) -> str:
        """Return what the spec only names.

        The files of the working directory and of mounts, and secret values, these by a keyed digest that does not give them
        away.
        """
        files = folder_digest(Path(spec.workdir)) if spec.workdir is not None else ""
        sources = sorted(source for source in copies_of(spec.file_mounts).values() if not is_url(source))
        files += "".join(folder_digest(Path(source)) for source in sources)
        return files + (self._seal.digest(secrets) if secrets else "")


def _by_id(instances: Sequence[Instance], instance_id: str) -> Instance | None:
    return next((instance for instance in instances if instance.id == instance_id), None)


def _first_target(spec: ServiceSpec) -> int:
    """Return what a service shows as its target until the first tick has planned."""
    least = spec.scaling.min_replicas
    return least + spec.placement.num_overprovision if least else 0


class NoFreePortError(RejectedError):
    """No port is left for another endpoint."""


def endpoint_port(name: str, spec: ServiceSpec, store: Store, settings: LoadBalancerConfig) -> int:
    """Return the endpoint's port: the one requested, the one the name had, or the first that is free. Raises NoFreePortError."""
    rows = {row.name: row for row in store.services(down=True)}
    taken = {row.lb_port for row in rows.values() if row.name != name and not row.down}
    had = rows[name].lb_port if name in rows else None
    host = spec.load_balancer.host or settings.host
    chosen = spec.load_balancer.port
    if chosen is not None:
        if chosen in taken:
            raise NoFreePortError(f"service.load_balancer.port: {chosen} belongs to another service")
        if chosen != had and not is_free(host, chosen):  # its own agent may still hold it
            raise NoFreePortError(f"service.load_balancer.port: {chosen} is in use on {host}")
        return chosen
    if had is not None and not rows[name].down:
        return had
    port = choose_port(
        range(settings.first_port, settings.last_port + 1),
        had=had,
        taken=taken,
        remembered={row.lb_port for row in rows.values() if row.name != name and row.down},
        is_free=lambda port: is_free(host, port),
    )
    if port is None:
        raise NoFreePortError(
            f"no free port from {settings.first_port} to {settings.last_port} for an endpoint"
        )
    return port
