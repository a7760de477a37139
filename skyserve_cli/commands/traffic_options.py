"""What requests a simulated market gets, and what its replicas carry, from the words of a command line."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from policies.forecast.work import RESPONSE_WEIGHT
from skyserve_cli.commands.durations import seconds
from skyserve_cli.engine.profiles import Profile, UnknownProfile, profile_named
from skyserve_cli.output import WrongUsage, span
from skyserve_cli.sim.arrivals import Arrivals, TokenMeans
from skyserve_cli.sim.latency import EngineTimes, Tokens
from skyserve_cli.sim.served import MINUTE_S, Traffic
from skyserve_cli.sim.token_steps import work_share
from skyserve_cli.spec import ServiceSpec

TARGET_SHARE = 0.8  # of its capacity, a target that was not measured loads a replica with
DEFAULT_CAPACITY_QPS = 2.0
MOST_REPLICAS = 1000
MOST_WEIGHT = 1000.0
DAY_S = 86_400.0


def capacity_of(spec: ServiceSpec | None, capacity_qps: float | None) -> float:
    """Return the requests per second that one replica carries within its SLO. Raises WrongUsage."""
    if capacity_qps is not None:
        if not 0 < capacity_qps <= 1e6:
            raise WrongUsage(f"--capacity takes requests per second above 0 (got {capacity_qps:g})")
        return capacity_qps
    if spec is not None and spec.slo is not None and spec.slo.capacity_qps is not None:
        return spec.slo.capacity_qps
    target = None if spec is None else spec.scaling.target_qps_per_replica
    return DEFAULT_CAPACITY_QPS if target is None else target / TARGET_SHARE


def weight_in(spec: ServiceSpec | None) -> float | None:
    """Return what the file says that a response token weighs."""
    return None if spec is None or spec.slo is None else spec.slo.response_weight


def response_weight(
    arrivals: Arrivals, weight: float | None, spec: ServiceSpec | None = None
) -> float | None:
    """Return what a response token weighs in prompt tokens: what is given, or the file's, or as much as one.

    None where the recording has no tokens. Raises WrongUsage.
    """
    if weight is not None and not 0 < weight <= MOST_WEIGHT:
        raise WrongUsage(
            f"--response-weight takes a number above 0 and up to {MOST_WEIGHT:g} (got {weight:g})"
        )
    if arrivals.tokens is None:
        if weight is not None:
            raise WrongUsage(
                f"--response-weight: {arrivals.name} has no tokens, so all its requests weigh the same: leave it out"
            )
        return None
    return weight or weight_in(spec) or RESPONSE_WEIGHT


def scaled(
    arrivals: Arrivals,
    length_s: float,
    warm_up_s: float,
    mean_replicas: float,
    capacity_qps: float,
    weight: float | None = None,
) -> float:
    """Return by what the requests from `warm_up_s` to `length_s` are multiplied, so that replicas carry their mean.

    That is the mean of their work, where a response token has a `weight`. Raises WrongUsage.
    """
    if not 0 <= mean_replicas <= MOST_REPLICAS:
        raise WrongUsage(f"--mean-replicas takes a number from 0 to {MOST_REPLICAS} (got {mean_replicas:g})")
    if not mean_replicas:
        return 1.0
    came = float(arrivals.count(warm_up_s, length_s))
    if not came:
        raise WrongUsage(f"--requests: no request after the --warm-up of {span(warm_up_s)}")
    if weight is not None:
        came *= work_share(arrivals, length_s, warm_up_s, weight)
    return mean_replicas * capacity_qps * (length_s - warm_up_s) / came


class TrafficOptions(NamedTuple):
    """The options about the requests of a market, as they were given."""

    capacity_qps: float | None = None
    mean_replicas: float | None = None
    warm_up: str | None = None
    response_weight: float | None = None
    engine: str | None = None
    request_timeout: str | None = None


def engine_of(words: str | None, arrivals: Arrivals) -> tuple[Profile | None, Arrivals]:
    """Return the profile that ``NAME[:PROMPT,RESPONSE]`` names, and the requests with tokens. Raises WrongUsage."""
    if words is None:
        return None, arrivals
    name, _, given = words.partition(":")
    try:
        profile = profile_named(name)
        sizes = [float(one) for one in given.split(",")] if given else []
    except UnknownProfile as error:
        raise WrongUsage(f"--engine: {error}") from None
    except ValueError:
        sizes = [0.0]
    if sizes and (len(sizes) != 2 or not all(1 <= one <= 1e6 for one in sizes)):
        raise WrongUsage(
            f"--engine takes a profile, and the mean tokens of prompts and responses: {name}:700,200 (got {words!r})"
        )
    if arrivals.tokens is None and not sizes:
        raise WrongUsage(
            f"--engine: {arrivals.name} has no tokens; add those of a mean request: {name}:700,200"
        )
    if arrivals.tokens is not None and sizes:
        raise WrongUsage(f"--engine: {arrivals.name} has tokens of its own: {name} is enough")
    if sizes:
        bins = len(arrivals.at_s) - 1
        arrivals = replace(arrivals, tokens=TokenMeans(*((one,) * bins for one in sizes)))
    return profile, arrivals


def _carried_qps(engine: Profile, arrivals: Arrivals) -> float:
    """Return the requests per second that an engine carries of this mean length."""
    requests = [later - before for before, later in pairwise(arrivals.counts)]
    means = [fmean(each, requests) for each in arrivals.tokens or ()]
    return EngineTimes(engine, Tokens(*means)).capacity_qps()


def _timeout_s(words: TrafficOptions) -> float:
    """Return how long a request may take. Raises WrongUsage."""
    if words.request_timeout is None:
        return math.inf
    if words.engine is None:
        raise WrongUsage("--request-timeout: how long requests take is known with --engine")
    timeout_s = seconds("--request-timeout", words.request_timeout)
    if not 1 <= timeout_s <= DAY_S:
        raise WrongUsage(f"--request-timeout takes a duration from 1s to 24h (got {words.request_timeout!r})")
    return timeout_s


def traffic(
    spec: ServiceSpec | None, arrivals: Arrivals | None, words: TrafficOptions, tick_s: float
) -> tuple[Arrivals | None, Traffic | None]:
    """Return the requests of the market, and by what they are judged: None where it is not known what a replica carries.

    Raises WrongUsage.
    """
    if arrivals is None:
        _insist_on_nothing_about_requests(spec, words)
        return None, None
    known_s = _known_s(words, arrivals)
    engine, arrivals = engine_of(words.engine, arrivals)
    timeout_s = _timeout_s(words)
    given = words.capacity_qps
    if engine is not None:
        _insist_on_what_engines_need(spec, tick_s)
        if not _names_capacity(spec, given):
            given = _carried_qps(engine, arrivals)
    capacity = capacity_of(spec, given)
    weight = response_weight(arrivals, words.response_weight, spec)
    mean = words.mean_replicas or 0.0
    arrivals = arrivals.scaled(scaled(arrivals, arrivals.length_s, known_s, mean, capacity, weight))
    has_slo = spec is not None and spec.slo is not None
    if has_slo and tick_s > MINUTE_S:
        raise WrongUsage(
            f"--tick: a service with an SLO is decided about every minute; take 60s or less (got {tick_s:g}s)"
        )
    is_known = (has_slo or _names_capacity(spec, given)) and not _is_of_several_accelerators(spec)
    judged = None
    if is_known and tick_s <= MINUTE_S:
        judged = Traffic(arrivals, capacity, known_s, weight, engine, timeout_s)
    return arrivals.later(known_s), judged


def _insist_on_nothing_about_requests(spec: ServiceSpec | None, words: TrafficOptions) -> None:
    options = (
        "--capacity",
        "--mean-replicas",
        "--warm-up",
        "--response-weight",
        "--engine",
        "--request-timeout",
    )
    for option, given in zip(options, words, strict=True):
        if given is not None:
            raise WrongUsage(f"{option} says something about requests: name them with --requests")
    if spec is not None and spec.slo is not None:
        raise WrongUsage(f"{spec.name} has an SLO: say with --requests which requests come")


def _known_s(words: TrafficOptions, arrivals: Arrivals) -> float:
    known_s = 0.0 if words.warm_up is None else seconds("--warm-up", words.warm_up)
    if not 0.0 <= known_s < arrivals.length_s:
        raise WrongUsage(
            f"--warm-up takes a duration below that of the recording, {span(arrivals.length_s)} (got {words.warm_up})"
        )
    return known_s


def _insist_on_what_engines_need(spec: ServiceSpec | None, tick_s: float) -> None:
    if tick_s > MINUTE_S:
        raise WrongUsage(
            f"--tick: requests wait for less than that; take 60s or less with --engine (got {tick_s:g}s)"
        )
    if _is_of_several_accelerators(spec):
        raise WrongUsage("--engine is of one accelerator, and target_qps_per_replica of several")


def _names_capacity(spec: ServiceSpec | None, given: float | None) -> bool:
    """Return whether the option or the file says what a replica carries."""
    if given is not None or spec is None:
        return given is not None
    learns = spec.slo is None or spec.slo.capacity_qps is None
    return spec.scaling.target_qps_per_replica is not None or not learns


def _is_of_several_accelerators(spec: ServiceSpec | None) -> bool:
    return spec is not None and bool(spec.scaling.target_qps_by_accelerator)
