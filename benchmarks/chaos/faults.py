"""Ten thousand requests through one agent while targets fail in every way and clients behave badly.

Five targets, each of which does to a request what is drawn for it from `--seed` (see `benchmarks.chaos.cases`), while
one target at a time is down, frozen or overloaded (`benchmarks.chaos.toys.weather`); good clients beside such that
leave, dribble, or never read. Then the claims:

* no request is lost that could be served: none to which a target has responded before the agent left it, and none before
  `1 + max_total_retries` attempts have failed, but for streams that broke and that no engine here can continue (a chat
  on an unknown engine), long responses cut halfway, and healthy targets that never send a byte
* a client without a response gets an error status, an error event or a cut, never half a response that looks complete
* none is served twice: no second response to a client, and no request started more often than `1 + max_total_retries`
  times, and as often again for each time that its response broke off, and once more for a connection that had gone stale
* a stream goes on with the right text and the rest of its limit
* in the end nothing is in flight or held, though the clients that never read are still there; all targets are in good
  standing again; no descriptor is left, the memory has stopped growing, and nothing is wrong in the log

With `--soak SECONDS` it goes on for that long with `--streams` concurrent streams and the same faults at a low rate, and
prints the slopes of memory and descriptors.

    python -m benchmarks.chaos.faults [--requests 10000] [--seed 1] [--at-once 100]
    python -m benchmarks.chaos.faults --soak 600 --streams 1000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import uvloop

from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.cases import Case, Kind, Manner, Mix, draw
from benchmarks.chaos.clients import Crowd, Outcome
from benchmarks.chaos.toys import Toy, weather
from lb.core.retry import MAX_DEATHS

TARGETS = 5
RETRIES = 2
BREAKS = 5
UNARY_BYTES = 60_000
SAMPLE_S = 5.0
_COUNTERS = (
    "retries", "moves", "continuations", "ejections", "stalled_streams", "cut_streams", "holds", "client_gone_requests",
)  # fmt: skip
MOST_GROWTH_MIB = 24.0
MOST_SLOPE_MIB_MINUTE = 1.0
_LIMITS = {
    "time_to_first_byte_s": 12.0,
    "idle_timeout_s": 3.0,
    "hold_s": 12.0,
    "suspect_after_s": 0.5,
    "probe_timeout_s": 0.5,
    "stall_timeout_s": 2.5,
    "head_timeout_s": 2.0,
    "keepalive_s": 20.0,
}
_PATIENT = {"time_to_first_byte_s": 60.0, "idle_timeout_s": 20.0, "stall_timeout_s": 8.0, "hold_s": 60.0}
_OPTIONS = {
    "retries": {"max_total_retries": RETRIES, "budget_ratio": 3.0, "budget_floor_per_s": 100.0},
    "breaker": {"longest_s": 4.0},
    "continuation": {"max_breaks": BREAKS},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds`: no new request after that time; `streams`: a soak, with that number of concurrent streams."""

    requests: int = 10_000
    seconds: float = float("inf")
    seed: int = 1
    at_once: int = 100
    calm_s: float = 0.7
    limits: Mapping[str, float] = field(default_factory=lambda: _LIMITS)
    mix: Mix = field(default_factory=Mix)


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    rss_mib: float
    descriptors: int
    done: int


@dataclass(slots=True)
class Report:
    """What was seen, and which claims do not hold."""

    cases: list[tuple[Case, Outcome]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    explanations: dict[str, list[str]] = field(default_factory=dict)  # of those that got no response
    counters: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    took_s: float = 0.0
    cpu_s: float = 0.0
    deaf: int = 0
    stale: int = 0

    def slope(self, what: str) -> float:
        """Of `rss_mib` or `descriptors`, per minute, by least squares over the second half of the samples."""
        half = self.samples[len(self.samples) // 2 :]
        at = [sample.at_s for sample in half]
        values = [float(getattr(sample, what)) for sample in half]
        mean_at, mean = sum(at) / len(at), sum(values) / len(values)
        spread = sum((one - mean_at) ** 2 for one in at)
        return 60 * sum((x - mean_at) * (y - mean) for x, y in zip(at, values, strict=True)) / (spread or 1.0)


async def run(plan: Plan) -> Report:
    """All of it, within one event loop; the agent is a process of its own."""
    rng = random.Random(plan.seed)
    cases: dict[str, Case] = {}
    toys = [Toy(f"toy-{number}", cases, UNARY_BYTES) for number in range(TARGETS)]
    report = Report()
    async with Balancer() as balancer:
        crowd = Crowd(balancer.port, random.Random(plan.seed + 1))
        try:
            for toy in toys:
                await toy.start()
            await balancer.push([toy.json for toy in toys], limits=plan.limits, **_OPTIONS)
            await balancer.at_rest()
            first = Sample(0.0, balancer.rss_mib(), balancer.descriptors(), 0)
            report.samples.append(first)
            await _traffic(plan, balancer, crowd, cases, toys, rng, report)
            crowd.hang_up()
            report.broken += await _aftermath(balancer, first)
            report.counters = await balancer.counters()
            last = Sample(report.took_s, balancer.rss_mib(), balancer.descriptors(), len(report.cases))
            report.samples.append(last)
            if last.rss_mib - first.rss_mib > MOST_GROWTH_MIB:
                report.broken.append(f"memory grew from {first.rss_mib:.1f} to {last.rss_mib:.1f} MiB")
            report.broken += balancer.complaints()
        finally:
            crowd.close()
            for toy in toys:
                await toy.end()
    report.stale = crowd.stale
    for case, outcome in report.cases:
        steps = report.explanations.get(case.id, [])
        report.broken += [f"{case.id}: {why}  [{'; '.join(steps)}]" for why in wrong(case, outcome, steps)]
    return report


async def _traffic(
    plan: Plan,
    balancer: Balancer,
    crowd: Crowd,
    cases: dict[str, Case],
    toys: Sequence[Toy],
    rng: random.Random,
    report: Report,
) -> None:
    begun_at, number = time.monotonic(), 0

    async def worker() -> None:
        nonlocal number
        while number < plan.requests and time.monotonic() - begun_at < plan.seconds:
            number += 1
            case = draw(number, plan.mix, rng)
            cases[case.id] = case
            outcome = await crowd.ask(case)
            if case.manner is Manner.WELL:
                del cases[case.id]
                if not outcome.good:
                    report.explanations[case.id] = await _steps(balancer, case)
            report.cases.append((case, outcome))

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            at_s = time.monotonic() - begun_at
            sample = Sample(at_s, balancer.rss_mib(), balancer.descriptors(), len(report.cases))
            report.samples.append(sample)
            if sys.stderr.isatty() or len(report.samples) % 6 == 0:
                text = f"{at_s:5.0f} s: {sample.done} done, {sample.rss_mib:.1f} MiB, {sample.descriptors} descriptors"
                print(text, file=sys.stderr, flush=True)

    others = [asyncio.ensure_future(watch()), asyncio.ensure_future(weather(toys, rng, plan.calm_s))]
    try:
        await asyncio.gather(*(worker() for _ in range(plan.at_once)))
    finally:
        for other in others:
            other.cancel()
            with suppress(asyncio.CancelledError):
                await other
    report.took_s = time.monotonic() - begun_at
    report.cpu_s = balancer.cpu_s()
    report.deaf = crowd.deaf


async def _steps(balancer: Balancer, case: Case) -> list[str]:
    """What the agent itself remembers of a request."""
    with suppress(AssertionError):  # it has forgotten it
        steps = (await balancer.ask(f"/-/explain/{case.id}"))["steps"]
        return [f"{step['event']} {step['target'] or ''} {step['why']}".strip() for step in steps]
    return []


async def _aftermath(balancer: Balancer, first: Sample) -> list[str]:
    """The leftovers when all is over. The clients that never read are still connected."""
    broken = []

    async def recovered() -> bool:
        return set((await balancer.standings()).values()) == {"good"}

    async def as_many_descriptors() -> bool:
        return balancer.descriptors() <= first.descriptors + 2

    for claim, what in (
        (balancer.at_rest, "something is still in flight or held"),
        (recovered, "not all targets are in good standing again"),
        (as_many_descriptors, "descriptors are left"),
    ):
        try:
            await until(claim, what, 30.0)
        except AssertionError as error:
            stats = await balancer.stats()
            broken.append(
                f"{error}: {balancer.descriptors()} descriptors, first {first.descriptors}; {stats}"
            )
    return broken


def wrong(case: Case, outcome: Outcome, steps: Sequence[str]) -> list[str]:
    """Which claims this request breaks."""
    broken = list(case.complaints)
    if case.manner in (Manner.SLOW_HEAD, Manner.SLOW_BODY) and not outcome.good:
        broken.append(f"{case.manner.value}: {outcome.error}")
    if case.manner is not Manner.WELL:
        return broken
    if not outcome.good and not outcome.reported:
        broken.append(f"looks whole and is not: {outcome.error}")
    elif not outcome.good and case.responded > sum(step.startswith("moved ") for step in steps):
        # A target that is in doubt may write its response before it notices that the request has been moved away.
        broken.append(f"{case.responded} targets have answered it, and the client got {outcome.error}")
    elif not outcome.good and could_be_answered(case, steps):
        broken.append(f"lost, {case.failed} attempts failed and {case.broken} broke off: {outcome.error}")
    most = (1 + RETRIES) * (1 + case.broken) + 1
    if case.started > most:
        broken.append(f"started {case.started} times, {most} at most")
    return broken


def could_be_answered(case: Case, steps: Sequence[str]) -> bool:
    """Whether the agent has given up too early. That it has tried as often as it may is its own account: a target that
    is down, frozen or about to close has not read all that was sent to it."""
    if case.mute or case.broken > BREAKS or (case.broken and case.kind in (Kind.CHAT, Kind.LARGE)):
        return False
    if case.failed >= MAX_DEATHS and any(
        step.startswith("no_retry") and "kills targets" in step for step in steps
    ):
        return False  # by rule a request on which two targets died is not given a third
    tries = 0
    for step in steps:
        tries = 0 if step.startswith("answered ") else tries + step.startswith("chose ")
    return tries <= RETRIES


# --- telling


def tell(plan: Plan, report: Report) -> None:
    well = [(case, outcome) for case, outcome in report.cases if case.manner is Manner.WELL]
    print(
        f"{len(report.cases)} requests in {report.took_s:.0f} s, {TARGETS} targets, seed {plan.seed}; "
        f"the agent took {report.cpu_s:.1f} s of CPU"
    )
    print(
        f"\n{'of good clients':26}{'asked':>8}{'answered':>10}{'got an error':>14}{'tried again':>13}{'continued':>11}"
    )
    for kind in Kind:
        mine = [(case, outcome) for case, outcome in well if case.kind is kind]
        good = sum(outcome.good for _, outcome in mine)
        again = sum(case.failed > 0 for case, _ in mine)
        continued = sum(outcome.good and case.broken > 0 for case, outcome in mine)
        print(f"{kind.value:26}{len(mine):8}{good:10}{len(mine) - good:14}{again:13}{continued:11}")
    print("\nnot answered, and could not be")
    errors = Counter(f"{case.kind.value}: {outcome.error}" for case, outcome in well if not outcome.good)
    for error, count in errors.most_common(12):
        print(f"  {count:6}  {error}")
    print("\nbad clients")
    for manner, count in Counter(case.manner for case, _ in report.cases).items():
        if manner is not Manner.WELL:
            print(f"  {count:6}  {manner.value}")
    print(f"  {report.deaf:6}  sockets that were never read, open until the end")
    counts = ", ".join(f"{name} {report.counters[f'{name}_total']:.0f}" for name in _COUNTERS)
    print(f"\nthe agent counted: {counts}; {report.stale} idle client connections were closed")
    first, last = report.samples[0], report.samples[-1]
    print(
        f"memory {first.rss_mib:.1f} -> {last.rss_mib:.1f} MiB "
        f"(highest {max(sample.rss_mib for sample in report.samples):.1f}), "
        f"descriptors {first.descriptors} -> {last.descriptors} "
        f"(most {max(sample.descriptors for sample in report.samples)})"
    )
    for why in report.broken[:20]:
        print(f"BROKEN: {why}", file=sys.stderr)
    if len(report.broken) > 20:
        print(f"BROKEN: and {len(report.broken) - 20} more", file=sys.stderr)


def soak(plan: Plan, report: Report) -> None:
    """The claims of a soak: memory and descriptors grow no more once all streams are there."""
    memory, descriptors = report.slope("rss_mib"), report.slope("descriptors")
    print(
        f"slopes over the second half: memory {memory:+.2f} MiB a minute, descriptors {descriptors:+.1f} a minute"
    )
    if memory > MOST_SLOPE_MIB_MINUTE:
        report.broken.append(f"memory grows by {memory:.2f} MiB a minute")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Requests through an agent while targets and clients misbehave."
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new request after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="streams only, for so long")
    parser.add_argument("--streams", type=int, default=1000, help="of a soak, at once")
    given = parser.parse_args(arguments)
    if given.soak is None:
        plan = Plan(given.requests, given.seconds, given.seed, given.at_once)
    else:
        mix = Mix(fault=0.05, bad_client=0.03, streams=True, words=60, pace_s=0.5)
        plan = Plan(10**9, given.soak, given.seed, given.streams, 10.0, _PATIENT, mix)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # the agent ends with us, however we are terminated
    try:
        report = uvloop.run(run(plan))
    except KeyboardInterrupt:
        return 130
    if given.soak is not None:
        soak(plan, report)
    tell(plan, report)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
