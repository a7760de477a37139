"""What an agent reports of its demand and load (`GET /-/stats`): frozen values <-> JSON. See `lb.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeGuard

from lb.config.decode import MAX_TEXT, Fields

_TARGET_STATS = {"id", "in_flight", "requests", "errors", "ejected", "heard_s", "served_s"}
_OLDEST_S = 1e12
_MOST = 2**53
MAX_REASON = 300  # characters of `Build.not_compiled`


class BuildKind(Enum):
    """How the hot modules of an agent run: compiled by mypyc, or as Python modules."""

    NATIVE = "native"
    INTERPRETED = "interpreted"


@dataclass(frozen=True, slots=True)
class Build:
    """How an agent runs. `fast_path`: with the helper in C. `not_compiled`: why the modules are interpreted, empty: on purpose.

    `slow_tls` is why the helper leaves connections of TLS to Python, empty if it does not. `workers` is how many cores move
    chunks.
    """

    kind: BuildKind
    fast_path: bool
    not_compiled: str = ""
    slow_tls: str = ""
    workers: int = 1

    def to_json(self) -> dict[str, Any]:
        # A controller that is older than these keys reads a build without them.
        extra: dict[str, Any] = {"slow_tls": self.slow_tls} if self.slow_tls else {}
        extra |= {"workers": self.workers} if self.workers != 1 else {}
        return {
            "kind": self.kind.value,
            "fast_path": self.fast_path,
            "not_compiled": self.not_compiled,
            **extra,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Build:
        fields = Fields(value, path)
        build = cls(
            kind=fields.one_of("kind", BuildKind, BuildKind.INTERPRETED),
            fast_path=fields.flag("fast_path"),
            not_compiled=fields.text("not_compiled", ""),
            slow_tls=fields.text("slow_tls", ""),
            workers=fields.integer("workers", 1, 1000, 1),
        )
        fields.done()
        return build


class TargetHealth(NamedTuple):
    """What one agent knows of a target's work for clients.

    The last byte of a response that is no error of the target (5xx) came `worked_s` seconds ago (None: there was none). Since then it
    responded with `errors` errors and nothing else, the first `first_error_s` and the last `last_error_s` seconds ago. `running`
    requests it has by its engine's own account, of which `queued` wait, and its KV cache is used to `kv_usage` (0 to 1); None: the
    engine does not report it.
    """

    worked_s: float | None = None
    errors: int = 0
    first_error_s: float = 0.0
    last_error_s: float = 0.0
    running: int | None = None
    queued: int | None = None
    kv_usage: float | None = None

    @classmethod
    def from_json(cls, value: object, path: str = "") -> TargetHealth:
        fields = Fields(value, path)
        health = cls(
            worked_s=fields.number_or_none("worked_s", 0.0, _OLDEST_S),
            errors=fields.count("errors", 0),
            first_error_s=fields.number("first_error_s", 0.0, _OLDEST_S, 0.0),
            last_error_s=fields.number("last_error_s", 0.0, _OLDEST_S, 0.0),
            running=fields.count_or_none("running"),
            queued=fields.count_or_none("queued"),
            kv_usage=fields.number_or_none("kv_usage", 0.0, _OLDEST_S),
        )
        fields.done()
        return health


@dataclass(frozen=True, slots=True)
class TargetStats:
    """One target in a window: attempts made on it, how many failed, and what it has in flight now.

    A target that left the table stays here while it still has requests in flight, so a controller can see it
    run dry. It last sent something, or responded to a probe, `heard_s` seconds ago (None: an agent that does not report it).
    The first byte of its last response with a status of 2xx came `served_s` seconds ago (None: there was none, or the agent
    does not report it).

    `health` is reported if the request asks for it (`?health=1`), by agents that know it.
    """

    id: str
    in_flight: int
    requests: int
    errors: int
    ejected: bool
    heard_s: float | None = None
    served_s: float | None = None
    health: TargetHealth | None = None

    def to_json(self) -> dict[str, Any]:
        # A controller that is older than these keys does not ask for them, and rejects them.
        extra: dict[str, Any] = {} if self.health is None else {"health": self.health._asdict()}
        return extra | {
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
        health = None
        if type(value) is dict and "health" in value:
            value = dict(value)
            health = TargetHealth.from_json(value.pop("health"), f"{path}.health")
        if _are_target_stats(value):
            return cls(**value, health=health)
        fields = Fields(value, path)
        stats = cls(
            id=fields.name("id"),
            in_flight=fields.count("in_flight"),
            requests=fields.count("requests"),
            errors=fields.count("errors"),
            ejected=fields.flag("ejected"),
            heard_s=fields.number_or_none("heard_s", 0.0, _OLDEST_S),
            served_s=fields.number_or_none("served_s", 0.0, _OLDEST_S),
            health=health,
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
        and (heard_s is None or (type(heard_s) is float and 0.0 <= heard_s <= _OLDEST_S))
        and (served_s is None or (type(served_s) is float and 0.0 <= served_s <= _OLDEST_S))
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """Demand and load.

    `requests` arrived and `rejected` were turned away during the last `window_s`; `ongoing` is how many were in flight or
    held at a time, on the mean over it.

    Held and rejected requests are among `requests`: they are demand as well. `warming` are the targets whose caches are being
    filled (see `lb.core.warming`). `keys_problem` is why the file of API keys cannot be used as it is, empty: it can.
    `build` is there if the request asks for it (`?build=1`); an older agent does not report it, and an older controller does not ask.
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
    warming: tuple[str, ...] = ()
    keys_problem: str = ""
    build: Build | None = None

    def to_json(self) -> dict[str, Any]:
        # A controller that is older than these keys reads statistics without them.
        extra: dict[str, Any] = {"warming": list(self.warming)} if self.warming else {}
        if self.keys_problem:
            extra["keys_problem"] = self.keys_problem[:MAX_TEXT]
        if self.build is not None:
            extra["build"] = self.build.to_json()
        return extra | {
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
        build = fields.take("build", None)
        stats = cls(
            service=fields.text("service"),
            region=fields.text("region"),
            revision=fields.text("revision"),
            uptime_s=fields.number("uptime_s", 0.0, _OLDEST_S),
            window_s=fields.number("window_s", 0.0, 1e9),
            requests=fields.count("requests"),
            in_flight=in_flight,
            queued=queued,
            rejected=fields.count("rejected"),
            # An agent of an earlier version reports no mean; the present value is the best guess.
            ongoing=fields.number("ongoing", 0.0, _OLDEST_S, float(in_flight + queued)),
            targets=tuple(TargetStats.from_json(one, at) for one, at in fields.items("targets")),
            warming=fields.names("warming"),
            keys_problem=fields.text("keys_problem", ""),
            build=None if build is None else Build.from_json(build, fields.at("build")),
        )
        fields.done()
        return stats
