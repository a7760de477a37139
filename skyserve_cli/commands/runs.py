"""From the words of a command line to the runs it requests."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from provisioners.port.base import DISK_GB
from skyserve_cli.clouds import extra_usd_hour
from skyserve_cli.commands.durations import seconds
from skyserve_cli.output import WrongUsage, plural, span
from skyserve_cli.sim.arrivals import Arrivals, arrivals_of
from skyserve_cli.sim.settings import OVERPROVISIONING, POLICIES, Job
from skyserve_cli.sim.summary import BOUNDS
from skyserve_cli.sim.trace import Trace, TraceError, find, load, shipped
from skyserve_cli.spec import ServiceSpec

DEFAULT_POLICIES = ("spothedge", "risk_hedge", "on_demand")
DEFAULT_REPLICAS = 4
DEFAULT_OVERPROVISION = 1
DEFAULT_AVAILABILITY = 0.99  # without a target, the saving is computed for this

#: Policies that aim at an availability.
AIMING = frozenset({"risk_hedge", "omniscient"})

MOST_RUNS = 10_000
_LONGEST_NOTICE_S = 3600.0

_T = TypeVar("_T")


# --- lists --------------------------------------------------------------------------------------------------


def items(given: Sequence[str]) -> list[str]:
    """Return the parts of comma lists, in order, each once."""
    return list(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def policies(given: Sequence[str]) -> tuple[str, ...]:
    """Raise WrongUsage for a name that no policy has."""
    names = items(given)
    for name in names:
        if name not in POLICIES:
            close = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f"did you mean {close[0]}?" if close else "--list-policies lists them"
            raise WrongUsage(f"--policy: no policy is called {name}; {hint}")
    return tuple(names)


def availability_targets(given: Sequence[str], option: str = "--availability-target") -> tuple[float, ...]:
    """``0.995`` or ``99.5%``. Raises WrongUsage."""

    def parse(text: str) -> float:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
        if not 0.5 <= share <= 0.9999:
            raise ValueError
        return round(share, 9)

    return _each(option, given, parse, "a share from 0.5 to 0.9999, such as 0.995")


def overprovisions(given: Sequence[str]) -> tuple[int, ...]:
    """Raise WrongUsage."""
    return _each(
        "--overprovision", given, _whole(100), "a number of replicas from 0 to 100, or several: 0,1,2"
    )


def seeds(given: str) -> tuple[int, ...]:
    """``7``, ``1,2,3`` or ``0..9``, the ends included. Raises WrongUsage."""
    found: list[int] = []
    wanted = "a whole number, several (1,2,3), or a range (0..9)"
    for part in items([given]):
        if match := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", part):
            first, last = int(match[1]), int(match[2])
            if not first <= last < first + MOST_RUNS:
                raise WrongUsage(f"--seed: a range goes up, by {MOST_RUNS} at most (got {part!r})")
            found += range(first, last + 1)
        else:
            found += _each("--seed", [part], _whole(10**9), wanted)
    if not found:
        raise WrongUsage(f"--seed takes {wanted}")
    return tuple(dict.fromkeys(found))


def _each(option: str, given: Sequence[str], parse: Callable[[str], _T], wanted: str) -> tuple[_T, ...]:
    values: list[_T] = []
    for text in items(given):
        try:
            values.append(parse(text))
        except ValueError:
            raise WrongUsage(f"{option} takes {wanted} (got {text!r})") from None
    return tuple(dict.fromkeys(values))


def _whole(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) > most:
            raise ValueError
        return int(text)

    return parse


# --- the market and its circumstances -----------------------------------------------------------------------


def market(source: str | None, capacity: str | None, tick_s: float) -> Trace:
    """Return the trace of a folder or of a shipped name. Raises WrongUsage."""
    source = shipped()[0] if source is None else source
    try:
        found = find(source)
    except TraceError as error:
        close = difflib.get_close_matches(source, shipped(), n=1)
        raise WrongUsage(f"--trace {error}" + (f"; did you mean {close[0]}?" if close else "")) from None
    try:
        return load(found, capacity_per_zone=_capacity(capacity), tick_s=tick_s)
    except TraceError as error:
        raise WrongUsage(f"--trace {error}") from None


def _capacity(text: str | None) -> int | Literal["unlimited"] | None:
    if text is None or text == "unlimited":
        return "unlimited" if text else None
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise WrongUsage(
            f"--capacity-per-zone takes a number of instances above 0, or unlimited (got {text!r})"
        )
    return int(text)


def windows(trace: Trace, length: str | None, cold_start_s: float) -> tuple[Trace, ...]:
    """Return the trace, whole or in windows. Raises WrongUsage where one is too short to see a replica ready."""
    parts: tuple[Trace, ...] = (trace,)
    if length is not None:
        length_s = seconds("--window", length)
        if not trace.tick_s <= length_s <= trace.length_s:
            raise WrongUsage(
                f"--window takes a length up to that of the trace, {span(trace.length_s)} (got {length!r})"
            )
        parts = trace.windows(length_s)
    if parts[0].length_s <= cold_start_s + trace.tick_s:
        what = "the trace" if length is None else "a window"
        raise WrongUsage(
            f"--cold-start must be shorter than {what}, {span(parts[0].length_s)} (got {span(cold_start_s)})"
        )
    return parts


def notice(text: str, tick_s: float) -> float:
    """Return how long before a loss it is announced. Raises WrongUsage where the simulation could not show it."""
    notice_s = seconds("--notice", text)
    if not 0 <= notice_s <= _LONGEST_NOTICE_S:
        raise WrongUsage(f"--notice takes a duration up to {span(_LONGEST_NOTICE_S)} (got {text!r})")
    if 0 < notice_s < tick_s:
        raise WrongUsage(f"--notice {text} is shorter than a tick; set --tick to {text} or less")
    return notice_s


def prices(trace: Trace, text: str) -> tuple[float | None, float]:
    """(on-demand over spot as the simulator wants it, the same as a number). Raises WrongUsage."""
    if text == "trace":
        both = [
            zone.on_demand_usd_hour / zone.spot_usd_hour.at(0)
            for zone in trace.zones
            if zone.on_demand_usd_hour and zone.spot_usd_hour and zone.spot_usd_hour.at(0)
        ]
        if len(both) < len(trace.zones):
            raise WrongUsage(
                f"--ondemand-price-ratio trace: {trace.name} does not say the prices of all zones"
            )
        return None, sum(both) / len(both)
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1000:
        raise WrongUsage(f"--ondemand-price-ratio takes a number above 0, or trace (got {text!r})")
    return ratio, ratio


def arrivals(text: str | None, length_s: float) -> Arrivals | None:
    """``constant:2.5``, ``poisson:2.5``, ``poisson:2.5,SEED`` or a file. Raises WrongUsage."""
    if text is None:
        return None
    kind, _, rest = text.partition(":")
    seed = 0
    if kind == "poisson":
        rate, comma, last = rest.partition(",")
        if comma and not last.isdecimal():
            raise WrongUsage(f"--requests poisson:RATE,SEED takes a whole number as seed (got {last!r})")
        seed, text = int(last or 0), f"poisson:{rate}"
    try:
        return arrivals_of(rest if kind == "constant" else text, seed=seed, length_s=length_s)
    except TraceError as error:
        raise WrongUsage(f"--requests {error}") from None


# --- the service --------------------------------------------------------------------------------------------


def sized(spec: ServiceSpec | None, replicas: int | None) -> ServiceSpec | None:
    """Return the file's service; of a fixed size where the command line says so."""
    if spec is None or replicas is None:
        return spec
    return replace(spec, scaling=replace(spec.scaling, min_replicas=replicas, max_replicas=replicas))


def target_size(spec: ServiceSpec | None, replicas: int | None) -> int:
    """N_tar, as far as it does not follow the load."""
    if spec is not None:
        return max(1, spec.scaling.min_replicas)
    return DEFAULT_REPLICAS if replicas is None else replicas


def beside_usd_hour(spec: ServiceSpec | None, market: Trace) -> float | None:
    """Return about what the disk and the address of a machine cost: the most of the file's alternatives.

    None where one of these may be in any cloud, or costs nothing of the kind, and where the market has no prices.
    """
    if spec is None or not market.is_priced:
        return None
    each = [
        0.0
        if choice.cloud is None
        else extra_usd_hour(choice.cloud, choice.disk_size_gb or DISK_GB, has_address=True)
        for choice in spec.resources
    ]
    return max(each) if each and all(each) else None


def wanted_policies(spec: ServiceSpec | None, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the given ones, else those the file requests beside on demand, else a choice. Raises WrongUsage."""
    if given:
        return policies(given)
    if spec is None:
        return DEFAULT_POLICIES
    spot = any(choice.use_spot for choice in spec.resources)
    name = spec.placement.placer if spot else "on_demand"
    if name not in POLICIES:
        raise WrongUsage(f"the file's placement, {name}, is not one that is simulated; choose with --policy")
    return tuple(dict.fromkeys((name, "on_demand")))


def wanted_overprovisions(spec: ServiceSpec | None, given: Sequence[str] | None) -> tuple[int, ...]:
    """Raise WrongUsage."""
    if given:
        return overprovisions(given)
    return (DEFAULT_OVERPROVISION if spec is None else spec.placement.num_overprovision,)


def wanted_availabilities(spec: ServiceSpec | None, given: Sequence[str] | None) -> tuple[float, ...]:
    """Empty without one. Raises WrongUsage."""
    if given:
        return availability_targets(given)
    target = None if spec is None else spec.placement.availability_target
    return () if target is None else (target,)


def insist_on_some(spec: ServiceSpec) -> None:
    """A service that scales to zero is nothing without requests. Raises WrongUsage."""
    if spec.scaling.min_replicas == 0:
        raise WrongUsage(
            f"{spec.name} scales from 0 with its requests: say with --requests how many come, or fix a size with "
            "--replicas"
        )


def insist_on_rates(spec: ServiceSpec) -> None:
    """Recorded arrivals do not say how long a request takes. Raises WrongUsage."""
    policy = spec.scaling
    if policy.autoscaling and policy.target_ongoing_requests_per_replica is not None:
        raise WrongUsage(
            f"{spec.name} scales by its ongoing requests, and --requests says only when they come: leave it out, or "
            "give the file target_qps_per_replica"
        )


def jobs(
    names: Iterable[str], extras: Sequence[int], targets: Sequence[float], of_seeds: Sequence[int]
) -> list[Job]:
    """Return a job for each policy, each value of the knob it has, and each seed if there is chance in it, in this order."""
    return [
        Job(name, extra, target, seed)
        for name in names
        for extra in (extras if name in OVERPROVISIONING else (None,))
        for target in ((targets or (None,)) if name in AIMING else (None,))
        for seed in (of_seeds if name not in BOUNDS else of_seeds[:1])
    ]


def insist_on_few(count: int) -> None:
    """Reject a mistyped range before anything runs. Raises WrongUsage."""
    if count > MOST_RUNS:
        raise WrongUsage(f"that makes {plural(count, 'run')}; at most {MOST_RUNS} are made at once")
