"""The section `service.load_balancer`, and what it configures in a load balancer agent.

What may be set is a part of `lb.config.options`: the rest is right as it is, or for those who run an agent by hand. Bounds and
defaults are the agent's own, so that no file passes here which an agent would refuse.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from lb.config.key_limits import LIMITS, MAX_CONCURRENT, OTHER_MODELS, KeyLimits, Price, models_from_json
from lb.config.options import (
    Access,
    ApiKey,
    Breaker,
    CacheEvents,
    Continuation,
    Continue,
    CookieMode,
    Limits,
    MetricsOptions,
    Pushing,
    PushMode,
    Retries,
    Session,
    Warming,
)
from lb.config.schema import WireError
from lb.config.workers import AUTO, MOST_WORKERS
from skyserve_cli.spec.fields import Port, SomeSeconds, Text, not_bool, one_of, refuse
from skyserve_cli.spec.front_door import CorsSection, ListenHost, Network, SessionSection, cors
from skyserve_cli.spec.model import LoadBalancerSpec
from skyserve_cli.spec.references import NAME
from skyserve_cli.spec.section import Section, Shorthand, Words

MIB = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)
_LONGEST_NAME = 100
_LONGEST_MODEL = 512
_PUSHING = [mode.value for mode in PushMode]
_CONTINUATION = [mode.value for mode in Continue]

_limits, _retries, _breaker, _pushing, _warming = Limits(), Retries(), Breaker(), Pushing(), Warming()
_NUMBER = BeforeValidator(not_bool)


def _within(options: type, name: str, unit: float = 1) -> Any:
    """Return the bounds an agent sets for this option, here counted in `unit`."""
    bounds = next(one.metadata for one in fields(options) if one.name == name)
    return Field(ge=bounds["low"] / unit, le=bounds["high"] / unit, allow_inf_nan=False)


def _continuation(value: object) -> str:
    """``off`` without quotes is YAML's word for false; service files before ``exact`` had ``text``, a part of ``auto``."""
    if value is False:
        return Continue.OFF.value
    return Continue.AUTO.value if value == "text" else one_of(*_CONTINUATION)(value)


def _no_warming(value: object) -> object:
    """``off`` without quotes is YAML's word for false."""
    return {"seconds": 0} if value is False or value == "off" else value


def _one_per_core(value: object) -> object:
    return None if value == "auto" else value


def _variable(value: object) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise refuse("must be the name of a variable, without a $")
    return value


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise refuse("must be 64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them")
    return value.lower()


def _owner(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= _LONGEST_NAME:
        raise refuse(f"must be a name of at most {_LONGEST_NAME} printable characters")
    return value


def _by_model(value: object) -> object:
    """Return the mapping if its keys are names of models that an agent takes."""
    for name in value if isinstance(value, dict) else ():
        try:
            models_from_json({name: {}}, "")
        except WireError:
            sentence = (
                f'must be the name of a model, or "{OTHER_MODELS}": 1 to {_LONGEST_MODEL} visible characters'
            )
            raise refuse(sentence, at=(name,)) from None
    return value


def _name_first(schema: dict[str, Any]) -> None:
    """Put the name before the limits, which pydantic has first because they are inherited."""
    own = ("name", "key_env", "sha256")
    schema["properties"] = {key: schema["properties"][key] for key in own} | schema["properties"]


def _host_path(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/") or " " in value or not value.isprintable():
        raise refuse("must be an absolute path, without spaces, on the host of the load balancer")
    return value


HostPath = Annotated[
    str, PlainValidator(_host_path), WithJsonSchema({"type": "string", "pattern": "^/[^ ]*$"})
]
PushingWord = Annotated[
    str, PlainValidator(one_of(*_PUSHING)), WithJsonSchema({"type": "string", "enum": _PUSHING})
]
ContinuationWord = Annotated[
    str, PlainValidator(_continuation), WithJsonSchema({"enum": [*_CONTINUATION, False]})
]
Variable = Annotated[
    str, PlainValidator(_variable), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})
]
Digest = Annotated[
    str, PlainValidator(_digest), WithJsonSchema({"type": "string", "pattern": "^[0-9A-Fa-f]{64}$"})
]
Owner = Annotated[
    str,
    PlainValidator(_owner),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME}),
]
# The bounds are those of `KeyLimits` and `Price`.
KeyLimit = Annotated[float, _NUMBER, Field(gt=0, le=1e12, allow_inf_nan=False)]
UsdPerMillion = Annotated[float, _NUMBER, Field(ge=0, le=1e6, allow_inf_nan=False)]
ModelName = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _LONGEST_MODEL})]


class QueueSection(Section):
    size: Annotated[int, _NUMBER, _within(Limits, "max_held")] = _limits.max_held
    """How many requests may wait for a replica; more get a 429."""
    timeout_seconds: Annotated[float, _NUMBER, _within(Limits, "hold_s")] = _limits.hold_s
    """How long one may wait. One that wakes a sleeping service waits for a whole start besides."""


class RetriesSection(Section):
    max_worker_retries: Annotated[int, _NUMBER, _within(Retries, "max_worker_retries")] = (
        _retries.max_worker_retries
    )
    """Further attempts on one replica, when no other is left."""
    max_total_retries: Annotated[int, _NUMBER, _within(Retries, "max_total_retries")] = (
        _retries.max_total_retries
    )
    """Further attempts of one request, wherever."""
    budget_percent: Annotated[float, _NUMBER, _within(Retries, "budget_ratio", 0.01)] = (
        100 * _retries.budget_ratio
    )
    """All retries together, in percent of the requests of the last ten seconds."""


class CircuitBreakerSection(Section):
    renamed: ClassVar[Words] = {
        "failures": "failure_threshold",
        "timeout_duration_seconds": "timeout_seconds",
    }

    failure_threshold: Annotated[int, _NUMBER, _within(Breaker, "failures")] = _breaker.failures
    """A replica that cannot be reached, or fails on a request, this number of times in a row is ejected."""
    error_threshold: Annotated[int, _NUMBER, _within(Breaker, "errors_in_row")] = _breaker.errors_in_row
    """A replica that responds with server errors this number of times in a row is ejected."""
    timeout_seconds: Annotated[float, _NUMBER, _within(Breaker, "first_s")] = _breaker.first_s
    """For how long at first; then one request is its trial. Doubles each time."""
    max_timeout_seconds: Annotated[float, _NUMBER, _within(Breaker, "longest_s")] = _breaker.longest_s
    """For how long at most."""


class KeyLimitsSection(Section):
    requests_per_minute: KeyLimit | None = None
    """A bucket that fills evenly, as all limits per minute. Default: no limit."""
    tokens_per_minute: KeyLimit | None = None
    """Tokens of prompts and responses. Default: no limit."""
    input_tokens_per_minute: KeyLimit | None = None
    """Tokens of prompts. Default: no limit."""
    output_tokens_per_minute: KeyLimit | None = None
    """Tokens of responses. Default: no limit."""
    requests_per_day: KeyLimit | None = None
    """From midnight to midnight in UTC, as all limits per day. Default: no limit."""
    tokens_per_day: KeyLimit | None = None
    """Tokens of prompts and responses. Default: no limit."""
    input_tokens_per_day: KeyLimit | None = None
    """Tokens of prompts. Default: no limit."""
    output_tokens_per_day: KeyLimit | None = None
    """Tokens of responses. Default: no limit."""
    tokens_per_month: KeyLimit | None = None
    """Tokens of prompts and responses in a calendar month in UTC. Default: no limit."""
    usd_per_month: KeyLimit | None = None
    """What the tokens of a calendar month in UTC cost by load_balancer.prices, in US dollars. Default: no limit."""
    max_concurrent: Annotated[int, _NUMBER, Field(ge=1, le=MAX_CONCURRENT)] | None = None
    """Requests under way at a time, waiting ones included; more get 429. Default: no limit."""


class ModelLimitsSection(KeyLimitsSection):
    """Further limits of an API key, for one model."""


class ApiKeySection(KeyLimitsSection):
    model_config = ConfigDict(json_schema_extra=_name_first)

    refused: ClassVar[Words] = {
        "key": "is never written in the file; name the variable that holds it with key_env, or give its sha256",
    }

    name: Owner
    """Whose key it is. Several keys of one name share its limits."""
    key_env: Variable | None = None
    """The secret, or the variable of your own environment, that holds the key. Only its SHA-256 is kept."""
    sha256: Digest | None = None
    """Instead of key_env: the key's SHA-256."""
    weight: Annotated[float, _NUMBER, Field(ge=0.001, le=1000, allow_inf_nan=False)] = 1.0
    """Its share of a full queue and of full memory, relative to others."""
    residency: Text | None = None
    """A zone of service.residency, in which its requests are served. Default: anywhere."""
    paths: tuple[Annotated[str, Field(pattern=r"^/[!-~]{0,200}$")], ...] = ()
    """With a limit of tokens or dollars, or with models: paths it may use beside those of known APIs, whose tokens are counted; * at the end of one is anything."""
    models: Annotated[dict[ModelName, ModelLimitsSection], BeforeValidator(_by_model)] = Field(
        default_factory=dict
    )
    """Limits by the name of a model in requests, beside those of the key; "*" is all other names together, and requests without one."""


class PriceSection(Section):
    input: UsdPerMillion
    """US dollars per million tokens of prompts."""
    output: UsdPerMillion
    """US dollars per million tokens of responses."""


class MetricsSection(Section):
    target_label: bool = False
    """Whether metrics of replicas have a series for each, by the label target; up to 100, the rest is one series."""


class WarmingSection(Section):
    seconds: Annotated[float, _NUMBER, _within(Warming, "seconds")] = _warming.seconds
    """How long a new replica computes prefixes of recent prompts at most, before it gets its share of the requests."""


class LoadBalancerSection(Section):
    stream_timeout_seconds: SomeSeconds = _limits.idle_timeout_s
    """A response that sends nothing for this long is given up."""
    stall_timeout_seconds: Annotated[float, _NUMBER, _within(Limits, "stall_timeout_s")] = (
        _limits.stall_timeout_s
    )
    """A stream without a word for this long is continued on another replica, if it can be."""
    keepalive_seconds: Annotated[float, _NUMBER, _within(Limits, "stream_keepalive_s")] = (
        _limits.stream_keepalive_s
    )
    """A client whose stream is silent for this long is sent a comment, and so again. Default: 0, never."""
    time_to_first_byte_seconds: SomeSeconds = _limits.time_to_first_byte_s
    """A request without a first byte after this long gets 504. A response that is no stream begins when it is complete."""
    max_body_mb: Annotated[int, _NUMBER, _within(Limits, "max_body_bytes", MIB)] = (
        _limits.max_body_bytes // MIB
    )
    """The largest body of a request to a model, in MiB; other paths pass bodies of any size through."""
    min_upload_bytes_per_second: Annotated[int, _NUMBER, _within(Limits, "min_upload_bytes_per_s")] = (
        _limits.min_upload_bytes_per_s
    )
    """A body that arrives more slowly than this for half a minute gets 408. 0: never."""
    pushing: PushingWord = _pushing.mode.value
    """When a replica is given one more request: work, selective (under overload the cache hit rate collapses), fixed_cap or blind."""
    max_concurrency_per_replica: Annotated[int, _NUMBER, _within(Pushing, "cap")] | None = None
    """How many requests a replica has at most; for fixed_cap. Default: 32."""
    queue: QueueSection = QueueSection()
    """Where requests wait that no replica can take yet."""
    retries: RetriesSection = RetriesSection()
    """When a request that has no response yet is tried elsewhere."""
    circuit_breaker: CircuitBreakerSection = CircuitBreakerSection()
    """When a replica that fails is left out."""
    continuation: ContinuationWord = Continue.AUTO.value
    """Whether a stream goes on when its replica fails: exact, auto or off."""
    api_keys: list[ApiKeySection] | None = None
    """Who may call. Default: everybody."""
    api_keys_file: HostPath | None = None
    """A JSON file with further keys where the load balancer runs: a mounted Secret, say. It is watched."""
    prices: Annotated[dict[ModelName, PriceSection], BeforeValidator(_by_model)] = Field(default_factory=dict)
    """For usd_per_month: {input, output} in US dollars per million tokens, by the name of a model in requests; "*" is any other."""
    strict_json: bool = True
    """Whether a request to a model gets 400 if its body is not the JSON of RFC 8259, which all engines read alike."""
    allow_policy_override: bool = False
    """Whether a request may choose its load_balancing_policy by the header X-SkyServe-Policy."""
    api_key_in_query: bool = False
    """Whether clients may send their API key as ?api_key=KEY; logs of proxies and browsers keep it."""
    cors: CorsSection = CorsSection()
    """Which web pages may call from browsers. Default: those of the service's own origin only."""
    trusted_proxies: tuple[Network, ...] = ()
    """Networks of proxies whose X-Forwarded-For, -Proto and -Host, X-Real-IP and Forwarded are passed on. Default: none."""
    session: SessionSection = SessionSection()
    """What keeps a client with one replica."""
    warming: Annotated[WarmingSection, Shorthand({"enum": ["off", False]}), BeforeValidator(_no_warming)] = (
        WarmingSection()
    )
    """How the cache of a new replica is filled; or off."""
    cache_events: bool = False
    """Whether engines report what they have cached, and policies that compare prompts go by it; `run` gets their options."""
    metrics: MetricsSection = MetricsSection()
    """The labels that the load balancer's metrics have."""
    workers: Annotated[
        Annotated[int, _NUMBER, Field(ge=1, le=MOST_WORKERS)] | None,
        Shorthand({"enum": ["auto"]}),
        BeforeValidator(_one_per_core),
    ] = None
    """Cores that move the chunks of streams, beside the one that decides which replica gets a request. Default: auto, one per core, up to 16."""
    host: ListenHost | None = None
    """Address the load balancer listens on."""
    port: Port | None = None
    """Port the load balancer listens on; without it a free one is taken."""


def key_limits(section: KeyLimitsSection) -> KeyLimits:
    said = ((name, getattr(section, name)) for name in LIMITS)
    return KeyLimits(**{name: value for name, value in said if value is not None})


def load_balancer(section: LoadBalancerSection, keys: Sequence[ApiKey]) -> LoadBalancerSpec:
    """`keys` are those of the section (see `keys`)."""
    cap = section.max_concurrency_per_replica
    return LoadBalancerSpec(
        limits=Limits(
            idle_timeout_s=section.stream_timeout_seconds,
            time_to_first_byte_s=section.time_to_first_byte_seconds,
            stall_timeout_s=section.stall_timeout_seconds,
            stream_keepalive_s=section.keepalive_seconds,
            max_body_bytes=section.max_body_mb * MIB,
            min_upload_bytes_per_s=section.min_upload_bytes_per_second,
            max_held=section.queue.size,
            hold_s=section.queue.timeout_seconds,
        ),
        host=section.host,
        port=section.port,
        retries=Retries(
            max_worker_retries=section.retries.max_worker_retries,
            max_total_retries=section.retries.max_total_retries,
            budget_ratio=section.retries.budget_percent / 100,
        ),
        breaker=Breaker(
            failures=section.circuit_breaker.failure_threshold,
            errors_in_row=section.circuit_breaker.error_threshold,
            first_s=section.circuit_breaker.timeout_seconds,
            longest_s=section.circuit_breaker.max_timeout_seconds,
        ),
        pushing=Pushing(PushMode(section.pushing), _pushing.cap if cap is None else cap),
        continuation=Continuation(Continue(section.continuation)),
        access=Access(
            tuple(keys),
            section.allow_policy_override,
            section.strict_json,
            section.api_keys_file or "",
            section.api_key_in_query,
            tuple((name, Price(one.input, one.output)) for name, one in section.prices.items()),
        ),
        cors=cors(section.cors),
        trusted_proxies=section.trusted_proxies,
        session=Session(CookieMode(section.session.cookie), section.session.fields),
        metrics=MetricsOptions(section.metrics.target_label),
        warming=Warming(section.warming.seconds),
        cache_events=CacheEvents(section.cache_events),
        workers=section.workers or AUTO,
    )
