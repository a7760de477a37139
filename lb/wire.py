"""What a controller and a load balancer agent say to each other: frozen values <-> JSON.

The controller pushes the whole table (`PUT /-/targets`), so a push is idempotent and an agent that missed one
misses nothing after the next. It reads `GET /-/stats`. Reading is strict: an unknown key, a wrong type, a number
out of bounds or a text too long raises `WireError` with the path of the value, and nothing is applied.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar
from urllib.parse import urlsplit

MAX_TARGETS = 10_000
MAX_TEXT = 512
MAX_URL = 2048

_E = TypeVar("_E", bound=Enum)
_MIB = 1024 * 1024


class WireError(ValueError):
    """A message that cannot be understood; `path` says where, the text says what is wrong with it."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'message'}: {problem}")
        self.path = path


class TargetState(str, Enum):
    """What the controller knows of a target; what the agent finds out itself is kept apart from it."""

    READY = "ready"
    UNHEALTHY = "unhealthy"  # its readiness probe fails: used only when nothing else is left
    DRAINING = "draining"  # no new request; what runs goes on to its end


@dataclass(frozen=True, slots=True)
class Target:
    """One backend. `url` is its base URL; `id` stays the same over its life and is never reused.

    `health_path` is asked only under suspicion (see `lb.health`); None allows a mere TCP connect. For a DRAINING
    target `drain_deadline_s` is the time left, counted from the push, until it is taken away; None = no limit.
    """

    id: str
    url: str
    region: str = ""
    zone: str = ""
    capacity_type: str = ""
    accelerator: str = ""
    state: TargetState = TargetState.READY
    health_path: str | None = None
    drain_deadline_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "url": self.url,
            "region": self.region,
            "zone": self.zone,
            "capacity_type": self.capacity_type,
            "accelerator": self.accelerator,
            "state": self.state.value,
            "health_path": self.health_path,
            "drain_deadline_s": self.drain_deadline_s,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Target:
        fields = _Fields(value, path)
        target = cls(
            id=fields.name("id"),
            url=fields.url("url"),
            region=fields.text("region", ""),
            zone=fields.text("zone", ""),
            capacity_type=fields.text("capacity_type", ""),
            accelerator=fields.text("accelerator", ""),
            state=fields.one_of("state", TargetState, TargetState.READY),
            health_path=fields.path_or_none("health_path"),
            drain_deadline_s=fields.number_or_none("drain_deadline_s", 0.0, 1e9),
        )
        fields.done()
        return target


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much. All of them act on requests that arrive after the push.

    `time_to_first_byte_s` is for a whole request over all its attempts; the time it is held does not count.
    `idle_timeout_s` is between two bytes of an answer. `max_attempts` bounds how often a request may have begun
    to run somewhere; a target that could not be reached is not counted. A request that no target can take is
    held up to `hold_s`, and at most `max_held` of them. A target that owes an answer and has been silent for
    `suspect_after_s` is asked for a sign of life and has `probe_timeout_s` to give it.
    """

    time_to_first_byte_s: float = 120.0
    idle_timeout_s: float = 120.0
    connect_timeout_s: float = 2.0
    max_body_bytes: int = 64 * _MIB
    max_attempts: int = 3
    hold_s: float = 30.0
    max_held: int = 1000
    suspect_after_s: float = 2.0
    probe_timeout_s: float = 2.0

    def to_json(self) -> dict[str, Any]:
        return {
            "time_to_first_byte_s": self.time_to_first_byte_s,
            "idle_timeout_s": self.idle_timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
            "max_body_bytes": self.max_body_bytes,
            "max_attempts": self.max_attempts,
            "hold_s": self.hold_s,
            "max_held": self.max_held,
            "suspect_after_s": self.suspect_after_s,
            "probe_timeout_s": self.probe_timeout_s,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Limits:
        fields = _Fields(value, path)
        plain = cls()
        limits = cls(
            time_to_first_byte_s=fields.number(
                "time_to_first_byte_s", 0.001, 86_400.0, plain.time_to_first_byte_s
            ),
            idle_timeout_s=fields.number("idle_timeout_s", 0.001, 86_400.0, plain.idle_timeout_s),
            connect_timeout_s=fields.number("connect_timeout_s", 0.001, 600.0, plain.connect_timeout_s),
            max_body_bytes=fields.whole("max_body_bytes", 0, 4096 * _MIB, plain.max_body_bytes),
            max_attempts=fields.whole("max_attempts", 1, 100, plain.max_attempts),
            hold_s=fields.number("hold_s", 0.0, 86_400.0, plain.hold_s),
            max_held=fields.whole("max_held", 0, 1_000_000, plain.max_held),
            suspect_after_s=fields.number("suspect_after_s", 0.001, 86_400.0, plain.suspect_after_s),
            probe_timeout_s=fields.number("probe_timeout_s", 0.001, 600.0, plain.probe_timeout_s),
        )
        fields.done()
        return limits


@dataclass(frozen=True, slots=True)
class Table:
    """All an agent needs to serve one service. `revision` is the controller's, compared for equality only."""

    service: str
    revision: str
    targets: tuple[Target, ...] = ()
    policy: str = "least_load"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for target in self.targets:
            if target.id in seen:
                raise WireError("targets", f"two targets have the id {target.id!r}")
            seen.add(target.id)

    def to_json(self) -> dict[str, Any]:
        return {
            "service": self.service,
            "revision": self.revision,
            "targets": [target.to_json() for target in self.targets],
            "policy": self.policy,
            "limits": self.limits.to_json(),
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Table:
        fields = _Fields(value, path)
        table = cls(
            service=fields.name("service"),
            revision=fields.name("revision"),
            targets=tuple(Target.from_json(one, at) for one, at in fields.items("targets")),
            policy=fields.text("policy", "least_load"),
            limits=Limits.from_json(fields.take("limits", {}), fields.at("limits")),
        )
        fields.done()
        return table


@dataclass(frozen=True, slots=True)
class TargetStats:
    """One target in a window: attempts made on it, how many failed, and what it has in flight now.

    A target that left the table stays here while it still has requests in flight, so a controller can see it
    run dry.
    """

    id: str
    in_flight: int
    requests: int
    errors: int
    ejected: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "in_flight": self.in_flight,
            "requests": self.requests,
            "errors": self.errors,
            "ejected": self.ejected,
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> TargetStats:
        fields = _Fields(value, path)
        stats = cls(
            id=fields.name("id"),
            in_flight=fields.count("in_flight"),
            requests=fields.count("requests"),
            errors=fields.count("errors"),
            ejected=fields.flag("ejected"),
        )
        fields.done()
        return stats


@dataclass(frozen=True, slots=True)
class Stats:
    """Demand and load. `requests` arrived and `rejected` were turned away during the last `window_s`; `ongoing` is
    how many were in flight or held at a time, on the mean over it.

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
        fields = _Fields(value, path)
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
            # An agent of an earlier version tells no mean; what is now is the best guess.
            ongoing=fields.number("ongoing", 0.0, 1e12, float(in_flight + queued)),
            targets=tuple(TargetStats.from_json(one, at) for one, at in fields.items("targets")),
        )
        fields.done()
        return stats


# --- Strict reading -------------------------------------------------------------------------------------------

_REQUIRED: Any = object()
_VISIBLE = re.compile(r"[^\x00-\x1f\x7f]*")


class _Fields:
    """Reads one JSON object key by key; what nobody asked for by the time of `done` is an error."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise WireError(path, f"expected an object, got {_kind(value)}")
        self._rest = dict(value)
        self._path = path

    def at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._rest.pop(key, default)
        if value is _REQUIRED:
            raise WireError(self.at(key), "is missing")
        return value

    def text(self, key: str, default: Any = _REQUIRED, longest: int = MAX_TEXT) -> str:
        value = self.take(key, default)
        if not isinstance(value, str):
            raise WireError(self.at(key), f"expected a text, got {_kind(value)}")
        if len(value) > longest:
            raise WireError(self.at(key), f"longer than {longest} characters")
        if not _VISIBLE.fullmatch(value):
            raise WireError(self.at(key), "contains control characters")
        return value

    def name(self, key: str) -> str:
        value = self.text(key)
        if not value:
            raise WireError(self.at(key), "must not be empty")
        return value

    def url(self, key: str) -> str:
        value = self.text(key, longest=MAX_URL)
        problem = url_problem(value)
        if problem:
            raise WireError(self.at(key), problem)
        return value

    def path_or_none(self, key: str) -> str | None:
        if self._rest.get(key) is None:
            self.take(key, None)
            return None
        value = self.text(key, longest=MAX_URL)
        if not value.startswith("/") or " " in value:
            raise WireError(self.at(key), "must start with '/' and contain no space")
        return value

    def one_of(self, key: str, kind: type[_E], default: _E) -> _E:
        value = self.take(key, default.value)
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise WireError(self.at(key), f"expected one of {known}") from None

    def number(self, key: str, low: float, high: float, default: Any = _REQUIRED) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WireError(self.at(key), f"expected a number, got {_kind(value)}")
        if not low <= value <= high:  # false for NaN as well
            raise WireError(self.at(key), f"must be between {low:g} and {high:g}")
        return float(value)

    def number_or_none(self, key: str, low: float, high: float) -> float | None:
        if self._rest.get(key) is None:
            self.take(key, None)
            return None
        return self.number(key, low, high)

    def whole(self, key: str, low: int, high: int, default: Any = _REQUIRED) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise WireError(self.at(key), f"expected a whole number, got {_kind(value)}")
        if not low <= value <= high:
            raise WireError(self.at(key), f"must be between {low} and {high}")
        return value

    def count(self, key: str) -> int:
        return self.whole(key, 0, 2**53)

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise WireError(self.at(key), f"expected true or false, got {_kind(value)}")
        return value

    def items(self, key: str) -> list[tuple[object, str]]:
        value = self.take(key, [])
        if not isinstance(value, list):
            raise WireError(self.at(key), f"expected a list, got {_kind(value)}")
        if len(value) > MAX_TARGETS:
            raise WireError(self.at(key), f"more than {MAX_TARGETS} entries")
        return [(one, f"{self.at(key)}[{index}]") for index, one in enumerate(value)]

    def done(self) -> None:
        if self._rest:
            key = min(map(str, self._rest))
            raise WireError(self.at(key[:80]), "is not known")


def url_problem(url: str) -> str | None:
    """Why `url` cannot be the base URL of a target, in a few words; None if it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "must start with http:// or https://"
    if not parts.hostname or " " in url:
        return "has no host"
    if port == 0:
        return "has port 0"
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return "must have neither query nor fragment"
    if parts.username is not None or parts.password is not None:
        return "must not carry credentials"
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
