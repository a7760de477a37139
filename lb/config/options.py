"""How an agent behaves: limits, retries, breaker, pushing, continuation and access, as values <-> JSON.

Every option has a default that suits most services; what a table leaves out has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar, get_type_hints

from lb.config.decode import Fields, WireError
from lb.config.key_limits import (
    NO_LIMITS,
    KeyLimits,
    ModelLimits,
    Prices,
    models_from_json,
    models_to_json,
    prices_from_json,
    prices_to_json,
)
from policies.routing.deadlines import Late

_MIB = 1024 * 1024
_O = TypeVar("_O", bound="_Options")


def _number(default: float, low: float, high: float, *, newer: bool = False) -> Any:
    """Return a field. One that is `newer` than some agents is not written at its default, so that they take the table."""
    return field(default=default, metadata={"low": low, "high": high, "newer": newer})


class _Options:
    """Reads and writes a dataclass of numbers, flags and enums."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        shown = (
            one
            for one in fields(self)  # type: ignore[arg-type]
            if not one.metadata.get("newer") or getattr(self, one.name) != one.default
        )
        plain = {one.name: getattr(self, one.name) for one in shown}
        return {name: value.value if isinstance(value, Enum) else value for name, value in plain.items()}

    @classmethod
    def from_json(cls: type[_O], value: object, path: str = "") -> _O:
        given = Fields(value, path)
        kinds = get_type_hints(cls)
        read: dict[str, Any] = {}
        for one in fields(cls):  # type: ignore[arg-type]
            kind, default = kinds[one.name], one.default
            if kind is bool:
                read[one.name] = given.flag(one.name, default)
            elif issubclass(kind, Enum):
                read[one.name] = given.one_of(one.name, kind, default)
            elif kind is int:
                read[one.name] = given.integer(one.name, one.metadata["low"], one.metadata["high"], default)
            else:
                read[one.name] = given.number(one.name, one.metadata["low"], one.metadata["high"], default)
        given.done()
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Limits(_Options):
    """How long and how much. All of them act on requests that arrive after the push.

    `time_to_first_byte_s` is for a whole request over all its attempts; the time it is held does not count. A response that
    is no stream begins when it is whole, and a model that thinks takes minutes for it: the default is the time for which
    OpenAI's clients wait.
    `idle_timeout_s` is between two bytes of a response. A request that no target can take is held up to `hold_s`, and
    at most `max_held` of them; a stream that was interrupted waits as long as `idle_timeout_s`, if that is longer. A
    target that owes a response, or the rest of one, and has been silent for `suspect_after_s` is probed and has `probe_timeout_s` to respond. `stall_timeout_s` is between two data events of a stream
    (comments are no sign of life); then it is continued elsewhere, if it can be. A client whose streamed response has been silent
    for `stream_keepalive_s` is sent a comment, and so again; 0: never.

    Of clients: `head_timeout_s` for a whole head, `keepalive_s` between two requests, `max_head_bytes` and
    `max_headers` per head. Bodies up to `buffer_bytes` are kept, so that they can be sent again; longer ones are
    passed on as they come, and have one attempt. A body that arrives more slowly than `min_upload_bytes_per_s`, over
    `UPLOAD_WINDOW_S` of `lb.proxy.upload`, is refused; 0: never.
    """

    time_to_first_byte_s: float = _number(600.0, 0.001, 86_400.0)
    idle_timeout_s: float = _number(120.0, 0.001, 86_400.0)
    connect_timeout_s: float = _number(2.0, 0.001, 600.0)
    max_body_bytes: int = _number(64 * _MIB, 0, 4096 * _MIB)
    hold_s: float = _number(30.0, 0.0, 86_400.0)
    max_held: int = _number(1000, 0, 1_000_000)
    suspect_after_s: float = _number(2.0, 0.001, 86_400.0)
    probe_timeout_s: float = _number(2.0, 0.001, 600.0)
    stall_timeout_s: float = _number(30.0, 0.001, 86_400.0)
    head_timeout_s: float = _number(10.0, 0.001, 86_400.0)
    keepalive_s: float = _number(75.0, 0.001, 86_400.0)
    max_head_bytes: int = _number(64 * 1024, 256, _MIB)
    max_headers: int = _number(128, 1, 10_000)
    buffer_bytes: int = _number(8 * _MIB, 0, 1024 * _MIB)
    stream_keepalive_s: float = _number(0.0, 0.0, 3600.0, newer=True)
    min_upload_bytes_per_s: int = _number(1024, 0, 1024 * _MIB, newer=True)


@dataclass(frozen=True, slots=True)
class Retries(_Options):
    """Before the first byte, on connect errors, dead connections, 502, 503, 504 and silence.

    `max_worker_retries` bounds further attempts on one target (SGLang's rule; after a failure others always go
    first, so it matters only when no other is left), `max_total_retries` those of a request that may have started
    to run; a target that could not be reached is not counted. All retries together are at most `budget_ratio` of the
    requests of the last ten seconds plus `budget_floor_per_s` a second, so that they cannot multiply an overload; a retry
    after a refused connection is free, and so is the first one after the death of a target. The first retry is
    immediate, later ones wait `backoff_s` doubling up to `max_backoff_s`, each shortened by a random share up to
    `jitter`. An attempt that has been running for `slow_after_s` when its target died may have cost the engine much: such
    a request is started twice at most, never three times.
    """

    max_worker_retries: int = _number(0, 0, 100)
    max_total_retries: int = _number(2, 0, 100)
    budget_ratio: float = _number(0.2, 0.0, 100.0)
    budget_floor_per_s: float = _number(10.0, 0.0, 1e6)
    backoff_s: float = _number(0.05, 0.0, 60.0)
    max_backoff_s: float = _number(1.0, 0.0, 600.0)
    jitter: float = _number(0.5, 0.0, 1.0)
    slow_after_s: float = _number(20.0, 0.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class Breaker(_Options):
    """When a target is left out.

    A target that cannot be reached or fails on a request is left out after `failures` in a row, for `first_s`, doubling up
    to `longest_s`; then one request is its trial (a single half-open probe). One that returns 5xx is left out after
    `errors_in_row` of them.
    """

    failures: int = _number(1, 1, 1000)
    errors_in_row: int = _number(10, 1, 1000)
    first_s: float = _number(1.0, 0.001, 3600.0)
    longest_s: float = _number(30.0, 0.001, 86_400.0)


class PushMode(str, Enum):
    """When a target may be given one more request (SkyWalker §3.3)."""

    WORK = (
        "work"  # as SP-P, or while the prefill it has before it is bounded; requests wait for the best target
    )
    SELECTIVE = "selective"  # SP-P: while its engine has no pending request
    FIXED_CAP = "fixed_cap"  # SP-O: while it has fewer than `cap` in flight
    BLIND = "blind"  # always


@dataclass(frozen=True, slots=True)
class Pushing(_Options):
    """`probe_s` is how often an engine that has work is polled for its load.

    Pushing by work or selectively falls back to `blind` for targets that report no load, and by work to `selective` for
    routing policies that do not measure it.
    """

    mode: PushMode = PushMode.WORK
    cap: int = _number(32, 1, 100_000)
    probe_s: float = _number(0.1, 0.01, 60.0)

    @property
    def is_polled(self) -> bool:
        """Whether engines are polled for their load."""
        return self.mode in (PushMode.WORK, PushMode.SELECTIVE)


class Continue(str, Enum):
    EXACT = "exact"  # only if the rest is what an undisturbed engine would have made
    AUTO = "auto"  # or if it has the same distribution
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> Continue | None:
        return cls.AUTO if value == "text" else None  # of tables and service files before `exact`


@dataclass(frozen=True, slots=True)
class Continuation(_Options):
    """What becomes of a stream whose target fails.

    At most `max_breaks` times in a row without a token in between; what has been sent of it is kept up to `buffer_bytes`, counted as
    it came: with the C helper the memory for it is about a fifteenth of that. A planned drain hands its streams over `handover_s` before
    its deadline.
    """

    mode: Continue = Continue.AUTO
    max_breaks: int = _number(3, 0, 100)
    buffer_bytes: int = _number(4 * _MIB, 0, 1024 * _MIB)
    handover_s: float = _number(5.0, 0.0, 3600.0)


class CookieMode(str, Enum):
    AUTO = "auto"  # a client that names no session gets one by cookie
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Listen:
    """The address of the data port."""

    host: str
    port: int

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host, "port": self.port}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Listen:
        given = Fields(value, path)
        listen = cls(given.name("host"), given.integer("port", 1, 65535))
        given.done()
        return listen


@dataclass(frozen=True, slots=True)
class MetricsOptions(_Options):
    """`target_label`: metrics of targets have a series for each, up to 100 of them; the rest is one series."""

    target_label: bool = False


@dataclass(frozen=True, slots=True)
class Warming(_Options):
    """For how long the cache of a new target is filled before it takes its share (see `lb.core.warming`); 0: not at all."""

    seconds: float = _number(15.0, 0.0, 600.0)


@dataclass(frozen=True, slots=True)
class CacheEvents(_Options):
    """Whether engines are asked for what they have cached (`lb.cache_events`), and for the tokens of how many prompts a second."""

    enabled: bool = False
    tokenize_per_s: float = _number(20.0, 0.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Slo(_Options):
    """Which requests count as late: a first byte after `ttft_s`, or more than `tpot_s` per token after it; 0: no bound.

    `deadlines`: these are the deadlines of requests that bring none. `late` is what becomes of a request whose deadline cannot be kept.
    """

    ttft_s: float = _number(0.0, 0.0, 86_400.0)
    tpot_s: float = _number(0.0, 0.0, 86_400.0)
    deadlines: bool = field(default=False, metadata={"newer": True})
    late: Late = field(default=Late.QUEUE, metadata={"newer": True})


SESSION_FIELD = re.compile(r"[A-Za-z0-9_-]{1,64}(?:\.[A-Za-z0-9_-]{1,64}){0,3}")
MAX_SESSION_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Session:
    """What keeps a client with a target.

    `fields` of a JSON body or of a query name its session, the first one that is there; a dot goes down into an object
    (`metadata.session_id`). If there are no others, `prompt_cache_key` and `session_id` do with policy `gorgo`, and `user` with policy
    `consistent_hash` or a cookie.
    """

    cookie: CookieMode = CookieMode.OFF
    fields: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than `fields` takes the tables in which it is not.
        return {"cookie": self.cookie.value} | ({"fields": list(self.fields)} if self.fields else {})

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Session:
        given = Fields(value, path)
        names = given.names("fields")
        if len(names) > MAX_SESSION_FIELDS:
            raise WireError(given.at("fields"), f"more than {MAX_SESSION_FIELDS} entries")
        for index, name in enumerate(names):
            if not SESSION_FIELD.fullmatch(name):
                raise WireError(
                    f"{given.at('fields')}[{index}]", "expected a name such as metadata.session_id"
                )
        session = cls(given.one_of("cookie", CookieMode, CookieMode.OFF), names)
        given.done()
        return session


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One client's key, known by its SHA-256 only.

    `weight` is its share of a full queue and of full memory. `residency` is the zone of its requests (see `lb.core.residency`), empty: none.
    With a limit of tokens, or of a model, a key may use the APIs whose tokens are known, and of other paths those in `paths`; `*` at the end
    of one stands for anything. Adapters are loaded by keys that have that path only. `models` has further limits, of single models.
    """

    name: str
    sha256: str
    limits: KeyLimits = NO_LIMITS
    weight: float = 1.0
    residency: str = ""
    paths: tuple[str, ...] = ()
    models: ModelLimits = ()

    @property
    def of_calendar(self) -> bool:
        """Whether it has limits of days or months."""
        return self.limits.of_calendar or any(limits.of_calendar for _, limits in self.models)

    @property
    def needs_prices(self) -> bool:
        """Whether it has limits in US dollars."""
        return bool(self.limits.usd_per_month) or any(limits.usd_per_month for _, limits in self.models)

    def to_json(self) -> dict[str, Any]:
        # An agent that is older than some of these takes the tables in which they are not.
        shown: dict[str, Any] = {"name": self.name, "sha256": self.sha256, "weight": self.weight}
        shown |= self.limits.to_json()
        if self.residency:
            shown["residency"] = self.residency
        if self.paths:
            shown["paths"] = list(self.paths)
        if self.models:
            shown["models"] = models_to_json(self.models)
        return shown

    @classmethod
    def from_json(cls, value: object, path: str = "") -> ApiKey:
        given = Fields(value, path)
        key = cls(
            name=given.name("name"),
            sha256=given.sha256("sha256"),
            limits=KeyLimits.read(given),
            weight=given.number("weight", 0.001, 1000.0, 1.0),
            residency=given.text("residency", ""),
            paths=given.names("paths"),
            models=models_from_json(given.take("models", {}), given.at("models")),
        )
        given.done()
        return key


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call.

    Without keys everybody may, and all are one tenant. `overrides`: whether a request may name its routing policy
    (`X-SkyServe-Policy`); each policy that is named stays in use for a while and is informed of every request, which costs CPU.
    `strict_json`: whether the body of a request to a model must be JSON as everybody reads it; what some parsers take and others do
    not is refused. `keys_file` has further keys, where the agent runs (see `lb.config.keys_file`); with one, a key is needed even
    while none is known. `keys_in_query`: whether a key is read from `?api_key=` as well. `prices` are those of tokens, for the limits in US
    dollars.
    """

    keys: tuple[ApiKey, ...] = ()
    overrides: bool = False
    strict_json: bool = True
    keys_file: str = ""
    keys_in_query: bool = False
    prices: Prices = ()

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"keys": [key.to_json() for key in self.keys], "overrides": self.overrides}
        # Agents that are older than these take the tables in which they are not.
        if not self.strict_json:
            shown["strict_json"] = False
        if self.keys_file:
            shown["keys_file"] = self.keys_file
        if self.keys_in_query:
            shown["keys_in_query"] = True
        if self.prices:
            shown["prices"] = prices_to_json(self.prices)
        return shown

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Access:
        given = Fields(value, path)
        access = cls(
            tuple(ApiKey.from_json(one, at) for one, at in given.items("keys")),
            given.flag("overrides", False),
            given.flag("strict_json", True),
            given.path_or_none("keys_file") or "",
            given.flag("keys_in_query", False),
            prices_from_json(given.take("prices", {}), given.at("prices")),
        )
        given.done()
        return access
