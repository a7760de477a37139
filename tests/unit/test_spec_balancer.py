"""The load balancer's part of a service file: its words, its bounds, and keys that are nowhere to be read."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from lb.config.cors import Cors
from lb.config.decode import WireError
from lb.config.key_limits import LIMITS, KeyLimits, Price
from lb.config.options import (
    Access,
    ApiKey,
    Breaker,
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
from policies.routing.registry import POLICIES
from skyserve_cli.spec import LoadBalancerSpec, SpecError, reference_text, spec_from_json, spec_to_json
from skyserve_cli.spec.editor_schema import json_schema
from skyserve_cli.spec.load import load_text

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


def balancer(text: str, **options: object) -> LoadBalancerSpec:
    loaded = load_text(f"service: {{load_balancer: {{{text}}}}}\nrun: serve", **options)  # type: ignore[arg-type]
    return loaded.spec.load_balancer


def problems(text: str, extra: str = "", **options: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load_text(f"service: {{load_balancer: {{{text}}}}}\nrun: serve\n{extra}", **options)  # type: ignore[arg-type]
    return {problem.path: str(problem) for problem in caught.value.problems}


# --- policies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_had_by_name(name: str) -> None:
    rates = (
        ", replica_policy: {target_qps_per_replica: {L4: 1}}" if name == "instance_aware_least_load" else ""
    )
    loaded = load_text(
        f"service: {{load_balancing_policy: {name.upper()}{rates}}}\nrun: serve\nresources: {{accelerators: L4}}"
    )
    assert loaded.spec.load_balancing_policy == name
    assert not [w for w in loaded.warnings if w.path == "service.load_balancing_policy"]


def test_the_schema_and_the_reference_know_the_policies_there_are() -> None:
    known = json_schema()["$defs"]["ServiceSection"]["properties"]["load_balancing_policy"]["enum"]
    assert sorted(known) == sorted(POLICIES)
    assert [name for name in POLICIES if f"  #   {name}  " not in reference_text()] == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("cache-aware", "cache_aware"),
        ("consistent_hashing", "consistent_hash"),
        ("least-loaded", "least_load"),
    ],
)
def test_a_policy_by_another_name_gets_a_hint(word: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f'did you mean "{meant}"') as caught:
        load_text(f"service: {{load_balancing_policy: {word}}}\nrun: serve")
    assert "must be one of " in str(caught.value)


# --- options ---------------------------------------------------------------------------------------------------


def test_what_is_not_said_is_as_an_agent_has_it() -> None:
    assert balancer("") == LoadBalancerSpec(
        Limits(),
        retries=Retries(),
        breaker=Breaker(),
        pushing=Pushing(),
        continuation=Continuation(),
        access=Access(),
    )


SAID = {
    "a fixed cap": (
        "pushing: Fixed_Cap, max_concurrency_per_replica: 8",
        LoadBalancerSpec(pushing=Pushing(PushMode.FIXED_CAP, 8)),
    ),
    "a fixed cap of the usual size": (
        "pushing: fixed_cap",
        LoadBalancerSpec(pushing=Pushing(PushMode.FIXED_CAP, Pushing().cap)),
    ),
    "blind": ("pushing: blind", LoadBalancerSpec(pushing=Pushing(PushMode.BLIND))),
    "a shorter warming": ("warming: {seconds: 5}", LoadBalancerSpec(warming=Warming(5.0))),
    "no warming": ("warming: off", LoadBalancerSpec(warming=Warming(0.0))),
    "a queue": (
        "queue: {size: 0, timeout_seconds: 0}",
        LoadBalancerSpec(Limits(max_held=0, hold_s=0.0)),
    ),
    "no retries": (
        "retries: {max_total_retries: 0, budget_percent: 0}",
        LoadBalancerSpec(retries=Retries(max_total_retries=0, budget_ratio=0.0)),
    ),
    "a patient breaker": (
        "circuit_breaker: {failure_threshold: 5, timeout_seconds: 10}",
        LoadBalancerSpec(breaker=Breaker(failures=5, first_s=10.0)),
    ),
    "off, which YAML reads as false": (
        "continuation: off",
        LoadBalancerSpec(continuation=Continuation(Continue.OFF)),
    ),
    "off in quotes": ("continuation: 'off'", LoadBalancerSpec(continuation=Continuation(Continue.OFF))),
    "exact": ("continuation: exact", LoadBalancerSpec(continuation=Continuation(Continue.EXACT))),
    "text, as it was spelled": (
        "continuation: text",
        LoadBalancerSpec(continuation=Continuation(Continue.AUTO)),
    ),
    "comments while it thinks": (
        "keepalive_seconds: 15",
        LoadBalancerSpec(Limits(stream_keepalive_s=15.0)),
    ),
    "a session by fields": (
        "session: {fields: [user, metadata.session_id]}",
        LoadBalancerSpec(session=Session(fields=("user", "metadata.session_id"))),
    ),
    "a session by cookie": ("session: {cookie: auto}", LoadBalancerSpec(session=Session(CookieMode.AUTO))),
    "cores by number": ("workers: 4", LoadBalancerSpec(workers=4)),
    "a core each": ("workers: auto", LoadBalancerSpec()),
    "slow uploads": (
        "min_upload_bytes_per_second: 0",
        LoadBalancerSpec(Limits(min_upload_bytes_per_s=0)),
    ),
    "small bodies": ("max_body_mb: 1", LoadBalancerSpec(Limits(max_body_bytes=1024 * 1024))),
    "a policy by header": (
        "allow_policy_override: yes",
        LoadBalancerSpec(access=Access(overrides=True)),
    ),
    "a file of keys": (
        "api_keys_file: /etc/skyserve/keys.json",
        LoadBalancerSpec(access=Access(keys_file="/etc/skyserve/keys.json")),
    ),
    "prices": (
        "prices: {'org/model-7B': {input: 0.5, output: 1}, '*': {input: 0, output: 0}}",
        LoadBalancerSpec(access=Access(prices=(("org/model-7B", Price(0.5, 1.0)), ("*", Price(0.0, 0.0))))),
    ),
    "keys in the query": (
        "api_key_in_query: yes",
        LoadBalancerSpec(access=Access(keys_in_query=True)),
    ),
    "pages of one origin": (
        "cors: {origins: ['https://chat.example.com'], max_age_seconds: 5}",
        LoadBalancerSpec(cors=Cors(("https://chat.example.com",), max_age_s=5)),
    ),
    "a proxy before it": (
        "trusted_proxies: [10.0.0.0/8]",
        LoadBalancerSpec(trusted_proxies=("10.0.0.0/8",)),
    ),
    "no cookie, which YAML reads as false": ("session: {cookie: off}", LoadBalancerSpec()),
    "a series for each replica": (
        "metrics: {target_label: true}",
        LoadBalancerSpec(metrics=MetricsOptions(target_label=True)),
    ),
    "an impatient eye": ("stall_timeout_seconds: 2.5", LoadBalancerSpec(Limits(stall_timeout_s=2.5))),
}


@pytest.mark.parametrize(("text", "spec"), SAID.values(), ids=SAID.keys())
def test_what_is_said_is_meant_and_survives_the_database(text: str, spec: LoadBalancerSpec) -> None:
    loaded = load_text(f"service: {{load_balancer: {{{text}}}}}\nrun: serve")
    assert loaded.spec.load_balancer == spec
    assert loaded.warnings == ()
    assert spec_from_json(json.loads(json.dumps(spec_to_json(loaded.spec)))) == loaded.spec


WRONG = {
    "a slip": ("que: {}", "que", 'did you mean "queue"?'),
    "a slip inside": ("queue: {sise: 1}", "queue.sise", 'did you mean "size"?'),
    "the breaker's other name": ("circuit_breaker: {failures: 3}", "circuit_breaker.failures", "failure_threshold"),
    "a mode nobody has": ("pushing: eager", "pushing", "must be one of work, selective, fixed_cap, blind"),
    "a cap without the mode": (
        "max_concurrency_per_replica: 8",
        "max_concurrency_per_replica",
        "is for pushing: fixed_cap; work has no such bound (got 8)",
    ),
    "a cap of 0": ("pushing: fixed_cap, max_concurrency_per_replica: 0", "max_concurrency_per_replica", "at least 1"),
    "a queue of less than nobody": ("queue: {size: -1}", "queue.size", "at least 0 (got -1)"),
    "a wait that is not a number": ("queue: {timeout_seconds: .nan}", "queue.timeout_seconds", "(got NaN)"),
    "a wait of a month": ("queue: {timeout_seconds: 2592000}", "queue.timeout_seconds", "at most 86400"),
    "half a retry": ("retries: {max_total_retries: 1.5}", "retries.max_total_retries", "whole number"),
    "retries for ever": ("retries: {max_total_retries: 1000}", "retries.max_total_retries", "at most 100"),
    "more budget than there is": ("retries: {budget_percent: 99999}", "retries.budget_percent", "at most 10000"),
    "a breaker that shrinks": (
        "circuit_breaker: {timeout_seconds: 60}",
        "circuit_breaker.max_timeout_seconds",
        "must be >= timeout_seconds (got 30 < 60)",
    ),
    "keys in a folder of somebody": ("api_keys_file: ~/keys.json", "api_keys_file", "must be an absolute path"),
    "half a price": ("prices: {a: {input: 1}}", "prices.a.output", "is required here"),
    "a price of less than nothing": ("prices: {a: {input: -1, output: 1}}", "prices.a.input", "at least 0 (got -1)"),
    "a price that is no number": ("prices: {a: {input: .nan, output: 1}}", "prices.a.input", "at least 0 (got NaN)"),
    "a price of a word": ("prices: {a: {input: free, output: 1}}", "prices.a.input", 'must be a number (got "free")'),
    "a price for everything": ("prices: {a: {input: 1, output: 1, cached: 1}}", "prices.a.cached", "unknown key"),
    "a price of no model": ("prices: {'': {input: 1, output: 1}}", 'prices[""]', "1 to 512 visible characters"),
    "prices in a list": ("prices: [1]", "prices", "must be a mapping"),
    "on": ("continuation: on", "continuation", "must be one of exact, auto, off (got true)"),
    "a body of 5 GiB": ("max_body_mb: 5000", "max_body_mb", "at most 4096"),
    "no patience at all": ("stall_timeout_seconds: 0", "stall_timeout_seconds", "at least 0.001"),
    "an origin with a path": ("cors: {origins: ['https://a.example/']}", "cors.origins[0]", "https://example.com"),
    "a method in lower case": ("cors: {methods: [get]}", "cors.methods[0]", "a method in upper case"),
    "cookies of all pages": ("cors: {origins: ['*'], credentials: yes}", "cors.credentials", "origins contains *"),
    "a network with a host in it": ("trusted_proxies: [10.0.0.1/8]", "trusted_proxies[0]", "such as 10.0.0.0/8"),
    "a session by part of a text": ("session: {fields: ['a b']}", "session.fields[0]", "such as user or metadata.session_id"),
    "nine fields of a session": (
        "session: {fields: [a, b, c, d, e, f, g, h, i]}",
        "session.fields",
        "8",
    ),
    "no core": ("workers: 0", "workers", "at least 1"),
    "more cores than it uses": ("workers: 17", "workers", "at most 16"),
    "all cores": ("workers: all", "workers", "a whole number"),
    "comments that never end": ("keepalive_seconds: -1", "keepalive_seconds", "at least 0"),
    "a cookie of one's own": ("session: {cookie: mine}", "session.cookie", "must be one of auto, off"),
    "a warming of an hour": ("warming: {seconds: 3600}", "warming.seconds", "at most 600"),
    "a label that is a word": ("metrics: {target_label: all}", "metrics.target_label", "true or false"),
    "a metric of one's own": ("metrics: {user_label: true}", "metrics.user_label", "unknown key"),
    "an override that is a word": ("allow_policy_override: perhaps", "allow_policy_override", "true or false"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "path", "piece"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_its_path(text: str, path: str, piece: str) -> None:
    ((place, said),) = problems(text).items()
    assert place == f"service.load_balancer.{path}"
    assert piece in said


# --- API keys --------------------------------------------------------------------------------------------------


def test_a_key_is_hashed_and_nothing_else_of_it_is_kept() -> None:
    loaded = load_text(
        """
        service:
          load_balancer:
            api_keys:
              - {name: research, key_env: RESEARCH_KEY, requests_per_minute: 60, tokens_per_minute: 9000, weight: 2, max_concurrent: 4}
              - {name: guests, key_env: GUEST_KEY}
        secrets: {GUEST_KEY: }
        run: serve
        """,
        environ={"RESEARCH_KEY": KEY, "GUEST_KEY": OTHER},
    )
    assert loaded.spec.load_balancer.access.keys == (
        ApiKey("research", DIGEST, KeyLimits(60.0, 9000.0, max_concurrent=4), weight=2.0),
        ApiKey("guests", hashlib.sha256(OTHER.encode()).hexdigest()),
    )
    stored = json.dumps(spec_to_json(loaded.spec))
    assert KEY not in stored
    assert OTHER not in stored
    assert KEY not in repr(loaded)
    assert loaded.spec.secrets == ("GUEST_KEY",)  # a key of the environment alone is no replica's business


def test_a_digest_may_be_given_instead() -> None:
    assert balancer(f"api_keys: [{{name: a, sha256: {DIGEST.upper()}}}]").access.keys == (
        ApiKey("a", DIGEST),
    )


def test_a_secret_goes_before_the_environment() -> None:
    loaded = load_text(
        "service: {load_balancer: {api_keys: [{name: a, key_env: K}]}}\nsecrets: {K: }\nrun: serve",
        secret_overrides={"K": KEY},
        environ={"K": OTHER},
    )
    assert loaded.spec.load_balancer.access.keys == (ApiKey("a", DIGEST),)


def test_every_limit_of_a_key_and_of_its_models_reaches_the_access_and_survives_the_database() -> None:
    numbers = {name: number + 1 for number, name in enumerate(LIMITS)}
    said = ", ".join(f"{name}: {number}" for name, number in numbers.items())
    loaded = load_text(
        f"""
        service:
          load_balancer:
            api_keys:
              - {{name: a, sha256: "{DIGEST}", {said}, models: {{org/model-7B.gguf: {{{said}}}, "*": {{requests_per_day: 5}}}}}}
            prices: {{"*": {{input: 1, output: 2}}}}
        run: serve
        """
    )
    limits = KeyLimits(**numbers)
    models = (("org/model-7B.gguf", limits), ("*", KeyLimits(requests_per_day=5.0)))
    assert loaded.spec.load_balancer.access == Access(
        (ApiKey("a", DIGEST, limits, models=models),), prices=(("*", Price(1.0, 2.0)),)
    )
    assert spec_from_json(json.loads(json.dumps(spec_to_json(loaded.spec)))) == loaded.spec


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_has_the_bounds_of_an_agent(name: str) -> None:
    most = 1_000_000 if name == "max_concurrent" else 10**12
    text = (
        f"prices: {{'*': {{input: 1, output: 1}}}}, api_keys: [{{name: a, sha256: '{DIGEST}', {name}: %d}}]"
    )
    (key,) = balancer(text % most).access.keys
    assert ApiKey.from_json(key.to_json()) == key
    with pytest.raises(WireError, match=name):
        ApiKey.from_json(key.to_json() | {name: most + 1})
    ((place, said),) = problems(text % (most + 1)).items()
    assert place == f"service.load_balancer.api_keys[0].{name}"
    assert "must be at most" in said


def test_a_key_that_an_earlier_version_stored_keeps_its_limits() -> None:
    key = {"name": "a", "sha256": DIGEST, "weight": 2.0, "residency": "", "paths": ["/x"]}
    of_key = {"requests_per_minute": 60.0, "tokens_per_minute": 9000.0, "max_concurrent": 4}
    document = {"name": "chat", "run": "serve", "load_balancer": {"access": {"keys": [key | of_key]}}}
    spec = spec_from_json(document)
    limits = KeyLimits(60.0, 9000.0, max_concurrent=4)
    assert spec.load_balancer.access.keys == (ApiKey("a", DIGEST, limits, 2.0, paths=("/x",)),)
    (stored,) = spec_to_json(spec)["load_balancer"]["access"]["keys"]  # which that version reads in turn
    assert {name: stored[name] for name in key | of_key} == key | of_key


@pytest.mark.parametrize(
    ("access", "path"),
    [
        ({"keys": [{"name": "a", "sha256": DIGEST, "tokens_per_day": "many"}]}, "keys[0].tokens_per_day"),
        ({"keys": [{"name": "a", "sha256": DIGEST, "models": 5}]}, "keys[0].models"),
        ({"keys": [5]}, "keys[0]"),
        ({"keys": 5}, "keys"),
        ({"prices": 5}, "prices"),
    ],
)
def test_a_stored_access_that_does_not_fit_is_named(access: object, path: str) -> None:
    with pytest.raises(ValueError, match=rf"^load_balancer\.access\.{re.escape(path)}: "):
        spec_from_json({"name": "chat", "run": "serve", "load_balancer": {"access": access}})
    with pytest.raises(ValueError, match=r"^load_balancer\.access: "):
        spec_from_json({"name": "chat", "run": "serve", "load_balancer": {"access": [access]}})


def test_a_new_key_replaces_no_replica() -> None:
    plain, guarded = (
        load_text(f"service: {{load_balancer: {{{text}}}}}\nrun: serve").spec
        for text in ("", f"api_keys: [{{name: a, sha256: '{DIGEST}'}}]")
    )
    assert plain.replica_hash() == guarded.replica_hash()


WRONG_KEYS = {
    "none": ("", "", "names no key, so no client could call"),
    "without a name": (f"{{sha256: '{DIGEST}'}}", "[0].name", "is required here"),
    "neither": ("{name: a}", "[0]", "has neither key_env nor sha256"),
    "both": (f"{{name: a, key_env: K, sha256: '{DIGEST}'}}", "[0]", "has both key_env and sha256"),
    "in the clear": (f"{{name: a, key: {KEY}}}", "[0].key", "is never written in the file"),
    "as a word": (f"{KEY}", "[0]", "must be a mapping"),
    "a variable that holds nothing": ("{name: a, key_env: GONE}", "[0].key_env", "GONE has no value: export it"),
    "a variable with a dollar": ("{name: a, key_env: $GONE}", "[0].key_env", "without a $"),
    "a variable that is stored": ("{name: a, key_env: STORED}", "[0].key_env", "one of envs, which are stored"),
    "too short": ("{name: a, key_env: SHORT}", "[0].key_env", "fewer than 16 characters"),
    "two words": ("{name: a, key_env: WORDS}", "[0].key_env", "one word of printable ASCII"),
    "half a digest": ("{name: a, sha256: abc123}", "[0].sha256", "64 hexadecimal digits"),
    "the same twice": ("{name: a, key_env: K}, {name: b, key_env: K}", "[1]", "is the same key as api_keys[0]"),
    "no requests": ("{name: a, key_env: K, requests_per_minute: 0}", "[0].requests_per_minute", "above 0"),
    "none at once": ("{name: a, key_env: K, max_concurrent: 0}", "[0].max_concurrent", "at least 1"),
    "half a request": ("{name: a, key_env: K, max_concurrent: 1.5}", "[0].max_concurrent", "whole number"),
    "no share": ("{name: a, key_env: K, weight: 0}", "[0].weight", "at least 0.001"),
    "a slip": ("{name: a, key_env: K, request_per_minute: 1}", "[0].request_per_minute", "requests_per_minute"),
    "infinite tokens": ("{name: a, key_env: K, tokens_per_day: .inf}", "[0].tokens_per_day", "must be at most 1e+12"),
    "a month of no number": ("{name: a, key_env: K, tokens_per_month: .nan}", "[0].tokens_per_month", "above 0"),
    "dollars without prices": ("{name: a, key_env: K, usd_per_month: 5}", "[0].usd_per_month", 'needs an entry "*" in load_balancer.prices'),
    "dollars of a model without prices": (
        "{name: a, key_env: K, models: {m: {usd_per_month: 5}}}",
        "[0].models.m.usd_per_month",
        "models without a price would be free",
    ),
    "a model without a limit": ("{name: a, key_env: K, models: {org/m: {}}}", '[0].models["org/m"]', "has no limit"),
    "a model with a number": ("{name: a, key_env: K, models: {m: 5}}", "[0].models.m", "must be a mapping"),
    "a list of models": ("{name: a, key_env: K, models: [m]}", "[0].models", "must be a mapping"),
    "a model without a name": (
        "{name: a, key_env: K, models: {'': {requests_per_day: 5}}}", '[0].models[""]', "must be the name of a model"
    ),
    "a model of a long name": (
        f"{{name: a, key_env: K, models: {{{'m' * 513}: {{requests_per_day: 5}}}}}}",
        f'[0].models["{"m" * 58}\u2026]',
        "1 to 512 visible characters",
    ),
    "a model of two lines": (
        '{name: a, key_env: K, models: {"a\\nb": {requests_per_day: 5}}}', '[0].models["a\\nb"]', "visible characters"
    ),
    "a weight of a model": ("{name: a, key_env: K, models: {m: {weight: 2}}}", "[0].models.m.weight", "unknown key"),
    "a slip of a model": (
        "{name: a, key_env: K, models: {m: {token_per_day: 2}}}", "[0].models.m.token_per_day", "tokens_per_day"
    ),
    "none at once of a model": (
        "{name: a, key_env: K, models: {m: {max_concurrent: 0}}}", "[0].models.m.max_concurrent", "at least 1"
    ),
    "a name of two lines": ('{name: "a\\nb", key_env: K}', "[0].name", "printable characters"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "path", "piece"), WRONG_KEYS.values(), ids=WRONG_KEYS.keys())
def test_a_wrong_key_is_named_and_not_quoted(text: str, path: str, piece: str) -> None:
    environ = {"K": KEY, "SHORT": "sk-1", "WORDS": f"{KEY} {KEY}"}
    found = problems(f"api_keys: [{text}]", f"envs: {{STORED: {KEY}}}", environ=environ)
    (place, said) = next(iter(found.items()))
    assert place == f"service.load_balancer.api_keys{path}"
    assert piece in said
    assert len(found) == 1
    assert KEY not in said
    assert "sk-1" not in said


def test_a_model_may_have_the_longest_name_that_an_agent_takes() -> None:
    name = "m" * 512
    (key,) = balancer(
        f"api_keys: [{{name: a, sha256: '{DIGEST}', models: {{{name}: {{requests_per_day: 5}}}}}}]"
    ).access.keys
    assert ApiKey.from_json(key.to_json()).models == ((name, KeyLimits(requests_per_day=5.0)),)


def test_dollars_need_a_price_for_every_model() -> None:
    key = f"api_keys: [{{name: a, sha256: '{DIGEST}', usd_per_month: 5}}]"
    assert problems(f"{key}, prices: {{m: {{input: 1, output: 1}}}}").keys() == {
        "service.load_balancer.api_keys[0].usd_per_month"
    }
    assert balancer(f"{key}, prices: {{'*': {{input: 1, output: 1}}}}").access.prices
    # A mistake in prices is not complained of twice.
    assert problems(f"{key}, prices: {{'*': {{input: 1, output: -1}}}}").keys() == {
        'service.load_balancer.prices["*"].output'
    }


def test_what_is_refused_for_being_in_the_clear_is_not_handed_on() -> None:
    with pytest.raises(SpecError) as caught:
        load_text(f"service: {{load_balancer: {{api_keys: [{{name: a, key: {KEY}}}]}}}}\nrun: serve")
    assert [problem.value for problem in caught.value.problems] == [None]


def test_a_secret_without_a_value_is_complained_of_once() -> None:
    assert problems("api_keys: [{name: a, key_env: K}]", "secrets: {K: }").keys() == {"secrets.K"}


def test_engines_with_a_key_of_their_own_do_not_go_with_ours() -> None:
    loaded = load_text(
        f"""
        service:
          readiness_probe: {{path: /health, headers: {{authorization: Bearer $K}}}}
          load_balancer: {{api_keys: [{{name: a, sha256: "{DIGEST}"}}]}}
        secrets: {{K: k}}
        run: serve
        """
    )
    assert [warning.path for warning in loaded.warnings] == ["service.load_balancer.api_keys"]
