"""What a controller and a load balancer agent say to each other: frozen values <-> JSON.

The controller pushes the whole table (`PUT /-/targets`), so a push is idempotent and an agent that missed one
misses nothing after the next. It reads `GET /-/stats`. Reading is strict: an unknown key, a wrong type, a number
out of bounds or a text too long raises `WireError` with the path of the value, and nothing is applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeGuard

from lb.config.cors import Cors
from lb.config.decode import MAX_TEXT, Fields, WireError, network_problem, url_problem
from lb.config.options import (
    Access,
    Breaker,
    Continuation,
    Limits,
    Listen,
    MetricsOptions,
    Pushing,
    Retries,
    Session,
    Slo,
)
from lb.config.regions import Regions

__all__ = [
    "Limits",
    "Readiness",
    "Stats",
    "Table",
    "Target",
    "TargetStats",
    "WireError",
    "network_problem",
    "url_problem",
]


class Readiness(str, Enum):
    """What the controller knows of a target; what the agent finds out itself is kept apart from it."""

    READY = "ready"
    UNHEALTHY = "unhealthy"  # its readiness probe fails: used only when nothing else is left
    DRAINING = "draining"  # no new request; what runs goes on to its end


@dataclass(frozen=True, slots=True)
class Target:
    """One backend. `url` is its base URL; `id` stays the same over its life and is never reused.

    `health_path` is probed only under suspicion (see `lb.engines.health_checks`); None allows a mere TCP connect. For a DRAINING
    target `drain_deadline_s` is the time left, counted from the push, until it is taken away; None = no limit.
    `capacity` is its size relative to others (see `policies.routing.base.TargetView`). With `tls_name` the target is spoken to only
    if it has a certificate for that name by the table's `targets_ca`, at any address.
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

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than this key takes the tables in which nothing is said by it.
        extra = {"tls_name": self.tls_name} if self.tls_name else {}
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
        )
        fields.done()
        return target


class RetiredError(RuntimeError):
    """Another agent has taken this one's ports over, and takes the tables too."""


class EarlierEpochError(ValueError):
    """The table is of a controller that another one has replaced since."""


@dataclass(frozen=True, slots=True)
class Table:
    """All an agent needs to serve one service.

    `revision` is the controller's, compared for equality only. `epoch` grows with every controller that takes over, and an
    agent refuses a table of an earlier one. From `trusted_proxies`, networks of IP, what a proxy says of its clients
    (`X-Forwarded-*` and the like) is passed on. `listen` is the address of the data port; None: that of the agent's
    arguments. `targets_ca` is the certificate (DER in base64) by which targets with a `tls_name` are known. `regions` is None where the
    agent has no peers.
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
    regions: Regions | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for target in self.targets:
            if target.id in seen:
                raise WireError("targets", f"two targets have the id {target.id!r}")
            seen.add(target.id)

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than these keys takes the tables in which nothing is said by them.
        extra: dict[str, Any] = {"targets_ca": self.targets_ca} if self.targets_ca else {}
        if self.slo != Slo():
            extra["slo"] = self.slo.to_json()
        if self.regions is not None:
            extra["regions"] = self.regions.to_json()
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
            regions=None if regions is None else Regions.from_json(regions, fields.at("regions")),
        )
        fields.done()
        return table


_TARGET_STATS = {"id", "in_flight", "requests", "errors", "ejected", "heard_s", "served_s"}
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class TargetStats:
    """One target in a window: attempts made on it, how many failed, and what it has in flight now.

    A target that left the table stays here while it still has requests in flight, so a controller can see it
    run dry. It last sent something, or responded to a probe, `heard_s` seconds ago (None: an agent that does not report it).
    The first byte of its last response with a status of 2xx came `served_s` seconds ago (None: there was none, or the agent
    does not report it).
    """

    id: str
    in_flight: int
    requests: int
    errors: int
    ejected: bool
    heard_s: float | None = None
    served_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "in_flight": self.in_flight,
            "requests": self.requests,
            "errors": self.errors,
            "ejected": self.ejected,
            "heard_s": self.heard_s,
            "served_s": self.served_s,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> TargetStats:
        if _are_target_stats(value):
            return cls(**value)
        fields = Fields(value, path)
        stats = cls(
            id=fields.name("id"),
            in_flight=fields.count("in_flight"),
            requests=fields.count("requests"),
            errors=fields.count("errors"),
            ejected=fields.flag("ejected"),
            heard_s=fields.number_or_none("heard_s", 0.0, 1e12),
            served_s=fields.number_or_none("served_s", 0.0, 1e12),
        )
        fields.done()
        return stats


def _are_target_stats(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether this is what `TargetStats.to_json` writes.

    A controller reads thousands a second; other tables are read field by field, for its error.
    """
    if type(value) is not dict or value.keys() != _TARGET_STATS:
        return False
    name, heard_s, served_s = value["id"], value["heard_s"], value["served_s"]
    return (
        type(name) is str
        and 0 < len(name) <= MAX_TEXT
        and name.isprintable()
        and all(
            type(value[key]) is int and 0 <= value[key] <= _MOST
            for key in ("in_flight", "requests", "errors")
        )
        and type(value["ejected"]) is bool
        and (heard_s is None or (type(heard_s) is float and 0.0 <= heard_s <= 1e12))
        and (served_s is None or (type(served_s) is float and 0.0 <= served_s <= 1e12))
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """Demand and load.

    `requests` arrived and `rejected` were turned away during the last `window_s`; `ongoing` is how many were in flight or
    held at a time, on the mean over it.

    Held and rejected requests are among `requests`: they are demand as well.
    """

    service: str
    region: str
    revision: str
    uptime_s: float
    window_s: float
    requests: int
    in_flight: int
    queued: int
    rejected: int
    ongoing: float = 0.0
    targets: tuple[TargetStats, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "service": self.service,
            "region": self.region,
            "revision": self.revision,
            "uptime_s": self.uptime_s,
            "window_s": self.window_s,
            "requests": self.requests,
            "in_flight": self.in_flight,
            "queued": self.queued,
            "rejected": self.rejected,
            "ongoing": self.ongoing,
            "targets": [target.to_json() for target in self.targets],
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Stats:
        fields = Fields(value, path)
        in_flight, queued = fields.count("in_flight"), fields.count("queued")
        stats = cls(
            service=fields.text("service"),
            region=fields.text("region"),
            revision=fields.text("revision"),
            uptime_s=fields.number("uptime_s", 0.0, 1e12),
            window_s=fields.number("window_s", 0.0, 1e9),
            requests=fields.count("requests"),
            in_flight=in_flight,
            queued=queued,
            rejected=fields.count("rejected"),
            # An agent of an earlier version reports no mean; the present value is the best guess.
            ongoing=fields.number("ongoing", 0.0, 1e12, float(in_flight + queued)),
            targets=tuple(TargetStats.from_json(one, at) for one, at in fields.items("targets")),
        )
        fields.done()
        return stats
