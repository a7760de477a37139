"""The messages between a controller and a load balancer agent: frozen values <-> JSON.

The controller pushes the whole table (`PUT /-/targets`), so a push is idempotent and an agent that missed one
misses nothing after the next. It reads `GET /-/stats`. Reading is strict: an unknown key, a wrong type, a number
out of bounds or a text too long raises `WireError` with the path of the value, and nothing is applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lb.config.cors import Cors
from lb.config.decode import Fields, WireError, network_problem, url_problem
from lb.config.options import (
    Access,
    Breaker,
    CacheEvents,
    Continuation,
    Limits,
    Listen,
    MetricsOptions,
    Pushing,
    Retries,
    Session,
    Slo,
    Warming,
)
from lb.config.regions import Regions
from lb.config.stats import Build, BuildKind, Stats, TargetHealth, TargetStats

__all__ = [
    "Build",
    "BuildKind",
    "Limits",
    "Readiness",
    "Stats",
    "Table",
    "Target",
    "TargetHealth",
    "TargetStats",
    "WireError",
    "network_problem",
    "url_problem",
]


class Readiness(str, Enum):
    """What the controller knows of a target; what the agent finds out itself is kept apart from it."""

    READY = "ready"
    LOADED = "loaded"  # its readiness probe waits behind requests: used where no other ready one has room
    UNHEALTHY = "unhealthy"  # its readiness probe fails: used only when nothing else is left
    DRAINING = "draining"  # no new request; what runs goes on to its end


@dataclass(frozen=True, slots=True)
class Target:
    """One backend. `url` is its base URL; `id` never changes and is never reused.

    `health_path` is probed only under suspicion (see `lb.engines.health_checks`); None allows a mere TCP connect. For a DRAINING
    target `drain_deadline_s` is the time left, counted from the push, until it is taken away; None = no limit.
    `capacity` is its size relative to others (see `policies.routing.base.TargetView`). With `tls_name` the target is used only
    if it has a certificate for that name by the table's `targets_ca`, at any address. `zones` are the residency zones whose
    requests it may have (see `lb.core.residency`).
    """

    id: str
    url: str
    region: str = ""
    zone: str = ""
    capacity_type: str = ""
    accelerator: str = ""
    state: Readiness = Readiness.READY
    health_path: str | None = None
    drain_deadline_s: float | None = None
    capacity: float = 1.0
    price_usd_hour: float = 0.0
    tls_name: str = ""
    zones: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than these keys accepts tables without them.
        extra: dict[str, Any] = {"tls_name": self.tls_name} if self.tls_name else {}
        if self.zones:
            extra["zones"] = list(self.zones)
        return extra | {
            "id": self.id,
            "url": self.url,
            "region": self.region,
            "zone": self.zone,
            "capacity_type": self.capacity_type,
            "accelerator": self.accelerator,
            "state": self.state.value,
            "health_path": self.health_path,
            "drain_deadline_s": self.drain_deadline_s,
            "capacity": self.capacity,
            "price_usd_hour": self.price_usd_hour,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Target:
        fields = Fields(value, path)
        target = cls(
            id=fields.name("id"),
            url=fields.url("url"),
            region=fields.text("region", ""),
            zone=fields.text("zone", ""),
            capacity_type=fields.text("capacity_type", ""),
            accelerator=fields.text("accelerator", ""),
            state=fields.one_of("state", Readiness, Readiness.READY),
            health_path=fields.path_or_none("health_path"),
            drain_deadline_s=fields.number_or_none("drain_deadline_s", 0.0, 1e9),
            capacity=fields.number("capacity", 1e-6, 1e9, 1.0),
            price_usd_hour=fields.number("price_usd_hour", 0.0, 1e6, 0.0),
            tls_name=fields.text("tls_name", ""),
            zones=fields.names("zones"),
        )
        fields.done()
        return target


@dataclass(frozen=True, slots=True)
class Standby:
    """The targets that the agents of the region `owner` (cloud/region) own."""

    owner: str
    targets: tuple[Target, ...]

    def to_json(self) -> dict[str, Any]:
        return {"owner": self.owner, "targets": [target.to_json() for target in self.targets]}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Standby:
        fields = Fields(value, path)
        targets = tuple(Target.from_json(one, at) for one, at in fields.items("targets"))
        standby = cls(fields.name("owner"), targets)
        fields.done()
        return standby


class RetiredError(RuntimeError):
    """Another agent has taken this one's ports over, and takes the tables too."""


class EarlierEpochError(ValueError):
    """The table is of a controller that another one has replaced since."""


@dataclass(frozen=True, slots=True)
class Table:
    """All an agent needs to serve one service.

    `revision` is the controller's, compared for equality only. `epoch` grows with every controller that takes over, and an
    agent refuses a table of an earlier one. From `trusted_proxies`, networks of IP, what a proxy reports of its clients
    (`X-Forwarded-*` and the like) is passed on. `listen` is the address of the data port; None: that of the agent's
    arguments. `targets_ca` is the certificate (DER in base64) by which targets with a `tls_name` are known. `regions` is None where the
    agent has no peers. `residency` are the zones of every request that enters here (see `lb.core.residency`). `standby` are targets
    of other regions that this agent takes over if the agents there die (see `lb.core.takeover`).
    """

    service: str
    revision: str
    targets: tuple[Target, ...] = ()
    policy: str = "least_load"
    limits: Limits = field(default_factory=Limits)
    retries: Retries = field(default_factory=Retries)
    breaker: Breaker = field(default_factory=Breaker)
    pushing: Pushing = field(default_factory=Pushing)
    continuation: Continuation = field(default_factory=Continuation)
    access: Access = field(default_factory=Access)
    cors: Cors = field(default_factory=Cors)
    trusted_proxies: tuple[str, ...] = ()
    session: Session = field(default_factory=Session)
    listen: Listen | None = None
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    epoch: int = 0
    targets_ca: str = ""
    slo: Slo = field(default_factory=Slo)
    warming: Warming = field(default_factory=Warming)
    cache_events: CacheEvents = field(default_factory=CacheEvents)
    regions: Regions | None = None
    residency: tuple[str, ...] = ()
    standby: tuple[Standby, ...] = ()

    @property
    def has_residency(self) -> bool:
        """Return whether some request may have some targets only."""
        return bool(
            self.residency
            or any(target.zones for target in self.targets)
            or any(key.residency for key in self.access.keys)
            or self.access.keys_file
        )

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for target in self.targets:
            if target.id in seen:
                raise WireError("targets", f"two targets have the id {target.id!r}")
            seen.add(target.id)

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than these keys accepts tables without them.
        extra: dict[str, Any] = {"targets_ca": self.targets_ca} if self.targets_ca else {}
        if self.slo != Slo():
            extra["slo"] = self.slo.to_json()
        if self.warming != Warming():
            extra["warming"] = self.warming.to_json()
        if self.cache_events != CacheEvents():
            extra["cache_events"] = self.cache_events.to_json()
        if self.regions is not None:
            extra["regions"] = self.regions.to_json()
        if self.residency:
            extra["residency"] = list(self.residency)
        if self.standby:
            extra["standby"] = [one.to_json() for one in self.standby]
        return extra | {
            "service": self.service,
            "revision": self.revision,
            "targets": [target.to_json() for target in self.targets],
            "policy": self.policy,
            "limits": self.limits.to_json(),
            "retries": self.retries.to_json(),
            "breaker": self.breaker.to_json(),
            "pushing": self.pushing.to_json(),
            "continuation": self.continuation.to_json(),
            "access": self.access.to_json(),
            "cors": self.cors.to_json(),
            "trusted_proxies": list(self.trusted_proxies),
            "session": self.session.to_json(),
            "listen": None if self.listen is None else self.listen.to_json(),
            "metrics": self.metrics.to_json(),
            "epoch": self.epoch,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Table:
        fields = Fields(value, path)
        listen, regions = fields.take("listen", None), fields.take("regions", None)
        table = cls(
            service=fields.name("service"),
            revision=fields.name("revision"),
            targets=tuple(Target.from_json(one, at) for one, at in fields.items("targets")),
            policy=fields.text("policy", "least_load"),
            limits=Limits.from_json(fields.take("limits", {}), fields.at("limits")),
            retries=Retries.from_json(fields.take("retries", {}), fields.at("retries")),
            breaker=Breaker.from_json(fields.take("breaker", {}), fields.at("breaker")),
            pushing=Pushing.from_json(fields.take("pushing", {}), fields.at("pushing")),
            continuation=Continuation.from_json(fields.take("continuation", {}), fields.at("continuation")),
            access=Access.from_json(fields.take("access", {}), fields.at("access")),
            cors=Cors.from_json(fields.take("cors", {}), fields.at("cors")),
            trusted_proxies=fields.networks("trusted_proxies"),
            session=Session.from_json(fields.take("session", {}), fields.at("session")),
            listen=None if listen is None else Listen.from_json(listen, fields.at("listen")),
            metrics=MetricsOptions.from_json(fields.take("metrics", {}), fields.at("metrics")),
            epoch=fields.count("epoch", 0),
            targets_ca=fields.certificate("targets_ca"),
            slo=Slo.from_json(fields.take("slo", {}), fields.at("slo")),
            warming=Warming.from_json(fields.take("warming", {}), fields.at("warming")),
            cache_events=CacheEvents.from_json(fields.take("cache_events", {}), fields.at("cache_events")),
            regions=None if regions is None else Regions.from_json(regions, fields.at("regions")),
            residency=fields.names("residency"),
            standby=tuple(Standby.from_json(one, at) for one, at in fields.items("standby")),
        )
        fields.done()
        return table
