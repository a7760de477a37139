"""`serve simulate --autoscaler`: autoscalers over recorded requests, judged by what the traffic needed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policies.goals import ScalingGoal
from skyserve_cli.commands import pictures, runs, traffic_options
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import OutputFormat
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json, span
from skyserve_cli.sim import workers
from skyserve_cli.sim.forecasts import forecasts
from skyserve_cli.sim.scaling import AUTOSCALERS, Evaluation, ScalingTrial, goal_for, run
from skyserve_cli.sim.slo_queue import STEP_S, bridged, drawn
from skyserve_cli.sim.summary import Estimate, estimate
from skyserve_cli.sim.token_steps import token_steps
from skyserve_cli.spec import ServiceSpec
from skyserve_cli.text_tables import FittedTable, put_table

LONGEST_S = 60 * 86400.0


@dataclass(frozen=True, slots=True)
class AutoscalerOptions:
    """The options as they were given."""

    autoscalers: Sequence[str]
    attainment: str
    capacity_qps: float | None
    mean_replicas: float
    warm_up: str | None
    cold_start: str
    requests: str | None
    response_weight: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the options mean. `trials` are by seed; `bridges` are bins of the recording that were holes."""

    names: tuple[str, ...]
    goal: ScalingGoal
    trials: Mapping[int, ScalingTrial]
    recording: str
    factor: float
    bridges: int
    response_weight: float | None


def compare(
    words: AutoscalerOptions,
    spec: ServiceSpec | None,
    seeds: Sequence[int],
    jobs: int | None,
    market_only: Mapping[str, object],
    report: Path | None,
    output: OutputFormat,
) -> None:
    """Run every autoscaler with every seed, print a row for each, and draw them to `report`. Raises WrongUsage, CommandFailed."""
    pictures.insist_on_writable("--report", report)
    for option, given in market_only.items():
        if given is not None:
            raise WrongUsage(
                f"{option} belongs to a simulated market; --autoscaler has none: leave one of them out"
            )
    asked = _asked(words, spec, seeds)
    found = _run(asked, jobs)
    rows = {name: [one for one in found if one.autoscaler == name] for name in asked.names}
    setting = _setting(asked, found[0].days)
    cells = [_cells(name, evaluations) for name, evaluations in rows.items()]
    if output is OutputFormat.JSON:
        put_json(_to_json(asked, rows))
    else:
        inform(setting)
        put_table(FittedTable(_HEADER, cells))
        inform(f"{plural(len(found), 'run')}, {sum(one.cpu_s for one in found):.1f} s of CPU")
    if report is not None:
        _draw(asked, rows, setting, cells, report)


_HEADER = ("AUTOSCALER", "ATTAINMENT", "HOURS/IDEAL", "MOVES/DAY", "TURNS/DAY", "REPLICA HOURS")


def _setting(asked: Comparison, days: float) -> str:
    trial = next(iter(asked.trials.values()))
    holes = f", {plural(asked.bridges, 'bin')} without requests bridged" if asked.bridges else ""
    return (
        f"{asked.recording} x {asked.factor:.4g}{holes}: {span(days * 86400)} judged after "
        f"{span(trial.known_min * 60)} of history; {trial.capacity_qps:g} requests/s {_size(asked)}per replica, ready after "
        f"{span(trial.cold_start_s)}; asked: {100 * trial.attainment:g} % within the SLO"
    )


def _size(asked: Comparison) -> str:
    if asked.response_weight is None:
        return "(without tokens: all of one size) "
    return f"of the history's mean size (a response token weighs {asked.response_weight:g} prompt tokens) "


def _draw(
    asked: Comparison,
    rows: Mapping[str, Sequence[Evaluation]],
    setting: str,
    cells: Sequence[Sequence[str]],
    path: Path,
) -> None:
    from skyserve_cli.report import scaling_page  # Matplotlib takes a second to import

    trial = next(iter(asked.trials.values()))
    found = forecasts(trial) if "predictive" in rows else None
    shown = scaling_page.Comparison(asked.recording, setting, (_HEADER, cells), rows, trial, found)
    pictures.draw("--report", path, lambda command: scaling_page.write(shown, path, command=command))


# --- options ------------------------------------------------------------------------------------------


def _asked(words: AutoscalerOptions, spec: ServiceSpec | None, seeds: Sequence[int]) -> Comparison:
    names = tuple(runs.items(words.autoscalers))
    for name in names:
        kind, _, share = name.partition(":")
        if share and (kind != "reactive" or not _is_share(share)):
            raise WrongUsage(
                f"--autoscaler: {name}: only reactive takes a target, as a share of --capacity above 0 and up to 1, such as "
                "reactive:0.9"
            )
        if kind not in AUTOSCALERS:
            close = difflib.get_close_matches(name, AUTOSCALERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(AUTOSCALERS)}"
            raise WrongUsage(f"--autoscaler: no autoscaler is called {name}; {hint}")
    if words.requests is None:
        raise WrongUsage("--autoscaler needs --requests: a recording, constant:RATE or poisson:RATE")
    (attainment,) = _one(runs.availability_targets([words.attainment], "--attainment"), words.attainment)
    goal, capacity_qps = _service(spec, words.capacity_qps)
    cold_start_s = seconds("--cold-start", words.cold_start)
    recording = runs.arrivals(words.requests, 7 * 86400.0)
    if recording is None or recording.mean_rate <= 0:
        raise WrongUsage(f"--requests {words.requests}: no request in it")
    arrivals, bridges = bridged(recording)
    length_s = 7 * 86400.0 if words.requests.startswith("constant:") else min(arrivals.length_s, LONGEST_S)
    warm_up_s = length_s / 2 if words.warm_up is None else seconds("--warm-up", words.warm_up)
    if not 60.0 <= warm_up_s <= length_s - 3600.0:
        raise WrongUsage(
            f"--warm-up takes a duration from 1m to an hour less than the recording, {span(length_s)} "
            f"(got {words.warm_up or span(warm_up_s)})"
        )
    weight = traffic_options.response_weight(arrivals, words.response_weight, spec)
    factor = traffic_options.scaled(arrivals, length_s, warm_up_s, words.mean_replicas, capacity_qps, weight)
    scaled = arrivals.scaled(factor)
    tokens = None if weight is None else token_steps(scaled, length_s, warm_up_s, weight)
    known_min = int(warm_up_s // 60)
    trials = {
        seed: ScalingTrial(
            drawn(scaled, length_s, seed),
            known_min,
            capacity_qps,
            cold_start_s,
            attainment,
            tokens,
            traffic_options.weight_in(spec),
        )
        for seed in seeds
    }
    return Comparison(names, goal, trials, recording.name, factor, bridges, weight)


def _is_share(text: str) -> bool:
    try:
        return 0.0 < float(text) <= 1.0
    except ValueError:
        return False


def _one(found: tuple[float, ...], given: str) -> tuple[float]:
    if len(found) != 1:
        raise WrongUsage(f"--attainment takes one share, such as 99.5% (got {given!r})")
    return (found[0],)


def _service(spec: ServiceSpec | None, capacity_qps: float | None) -> tuple[ScalingGoal, float]:
    """Return the goal of the reactive scaler, and the true capacity of a replica."""
    goal = ScalingGoal(1, traffic_options.MOST_REPLICAS) if spec is None else spec.scaling
    if spec is not None and not spec.autoscaling:
        raise WrongUsage(
            f"service.replica_policy.max_replicas: {spec.name} has a fixed size; give it more than min_replicas"
        )
    if goal.target_qps_by_accelerator or goal.target_ongoing_requests_per_replica is not None:
        raise WrongUsage(
            "service.replica_policy: --autoscaler knows replicas of one kind and requests without a length; give the "
            "file one target_qps_per_replica"
        )
    capacity_qps = traffic_options.capacity_of(spec, capacity_qps)
    target = goal.target_qps_per_replica
    return replace(
        goal, target_qps_per_replica=target or traffic_options.TARGET_SHARE * capacity_qps
    ), capacity_qps


# --- running and showing ------------------------------------------------------------------------------------


def _run(asked: Comparison, jobs: int | None) -> list[Evaluation]:
    pieces = [(name, seed) for name in asked.names for seed in asked.trials]

    def work(piece: int, report: Callable[[float], None]) -> Evaluation:
        name, seed = pieces[piece]
        trial = asked.trials[seed]
        evaluations = run(trial, name, goal_for(name, asked.goal, trial))
        report(1.0)
        return evaluations

    found: dict[int, Evaluation] = {}
    try:
        with closing(workers.run(work, len(pieces), jobs or len(os.sched_getaffinity(0)))) as stream:
            for progress in stream:
                if progress is not None and progress.result is not None:
                    found[progress.piece] = progress.result
    except workers.WorkerDied as error:
        name, seed = pieces[error.piece]
        raise CommandFailed(f"the run of {name}, seed {seed}, {error}") from None
    except KeyboardInterrupt:
        raise CommandFailed(
            f"interrupted: {len(found)} of {plural(len(pieces), 'run')} finished", 130
        ) from None
    return [found[piece] for piece in sorted(found)]


def _cells(name: str, evaluations: Sequence[Evaluation]) -> tuple[str, ...]:
    def shown(value: Callable[[Evaluation], float], digits: int, unit: str = "") -> str:
        found: Estimate = estimate([value(one) for one in evaluations])
        spread = "" if found.half_width is None else f" ± {found.half_width:.{digits}f}"
        return f"{found.mean:.{digits}f}{unit}{spread}"

    return (
        name,
        shown(lambda one: 100 * one.attainment, 2, " %"),
        shown(lambda one: one.hours_over_ideal, 3),
        shown(lambda one: one.moves_per_day, 1),
        shown(lambda one: one.turns_per_day, 1),
        shown(lambda one: one.hours, 0),
    )


def _to_json(asked: Comparison, rows: Mapping[str, Sequence[Evaluation]]) -> dict[str, Any]:
    trial = next(iter(asked.trials.values()))
    return {
        "requests": asked.recording,
        "factor": asked.factor,
        "bridged_bins": asked.bridges,
        "step_s": STEP_S,
        "known_min": trial.known_min,
        "capacity_qps": trial.capacity_qps,
        "response_weight": asked.response_weight,
        "cold_start_s": trial.cold_start_s,
        "attainment_asked": trial.attainment,
        "runs": [
            {
                "autoscaler": one.autoscaler,
                "seed": seed,
                "attainment": one.attainment,
                "hours": one.hours,
                "ideal_hours": one.ideal_hours,
                "hours_over_ideal": one.hours_over_ideal,
                "moves_per_day": one.moves_per_day,
                "turns_per_day": one.turns_per_day,
                "requests": one.requests,
                "days": one.days,
            }
            for evaluations in rows.values()
            for seed, one in zip(asked.trials, evaluations, strict=True)
        ],
    }
