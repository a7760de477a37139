"""`serve simulate`: the policies, run by the production loop, on a spot market that was recorded or made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from skyserve_cli.account.runs import Run, Simulation
from skyserve_cli.commands import autoscalers, files, pictures, runs, traffic_options
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import Env, EnvFile, Format, OutputFormat, Secret, SecretFile, Set
from skyserve_cli.commands.racing import run_all
from skyserve_cli.commands.statistics import insist_on_statistics
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put, put_json
from skyserve_cli.report.export import to_json
from skyserve_cli.report.text import availability_sentences, setting, table_cells, verdict
from skyserve_cli.sim.scaling import AUTOSCALERS
from skyserve_cli.sim.settings import POLICIES, Setting
from skyserve_cli.sim.summary import summarize
from skyserve_cli.sim.trace import Trace, named, shipped
from skyserve_cli.spec import ServiceSpec
from skyserve_cli.text_tables import FittedTable, put_table

#: Options about a market, which a comparison of autoscalers has not.
_MARKET_ONLY = ("--trace", "--policy", "--window", "--engine", "--request-timeout")


def complete_policy(incomplete: str) -> list[str]:
    """Return names for the shell; of a comma list, its last part."""
    before, comma, started = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in POLICIES if name.startswith(started)]


def complete_trace(incomplete: str) -> list[str]:
    """Shipped names, and folders."""
    folders = sorted(str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir())
    return [*(name for name in shipped() if name.startswith(incomplete)), *folders]


def complete_autoscaler(incomplete: str) -> list[str]:
    """Return names for the shell; of a comma list, its last part."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in AUTOSCALERS if name.startswith(last)]


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A service file: its replica_policy is the default for what follows.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="DIR|NAME",
            autocompletion=complete_trace,
            help="A folder with a JSON file per zone, or a shipped trace. Default: the first of --list-traces.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME,…",
            autocompletion=complete_policy,
            help="Default: the file's, or spothedge,risk_hedge; and on_demand.",
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, max=1000, help="How many must be ready. Default: 4.")
    ] = None,
    overprovision: Annotated[
        list[str] | None,
        typer.Option("--overprovision", metavar="N,…", help="Spot replicas beyond that. Default: 1."),
    ] = None,
    availability_target: Annotated[
        list[str] | None,
        typer.Option(
            "--availability-target", metavar="SHARE,…", help="For policies that aim: 0.995 or 99.5%."
        ),
    ] = None,
    cold_start: Annotated[
        str, typer.Option("--cold-start", metavar="DURATION", help="From launch to ready.")
    ] = "183s",
    price_ratio: Annotated[
        str,
        typer.Option(
            "--ondemand-price-ratio",
            metavar="N|trace",
            help="On-demand over spot price; or as the trace says.",
        ),
    ] = "3",
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="DURATION", help="Cut the trace into windows. Default: the whole."),
    ] = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N,…|A..B", help="A run for each.")] = "0",
    notice: Annotated[
        str,
        typer.Option(
            "--notice",
            metavar="DURATION",
            help="How long before a loss the cloud announces it: 120s on AWS, 30s on others, 0 for none.",
        ),
    ] = "0s",
    capacity_per_zone: Annotated[
        str | None,
        typer.Option(
            "--capacity-per-zone",
            metavar="N|unlimited",
            help="Room where a trace says only whether there is any; else at most so much.",
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            metavar="constant:RATE|poisson:RATE[,SEED]|FILE",
            help="Requests per second, or a recording: for a file that scales, and to count those in short times.",
        ),
    ] = None,
    autoscaler: Annotated[
        list[str] | None,
        typer.Option(
            "--autoscaler",
            metavar="NAME,…",
            autocompletion=complete_autoscaler,
            help="Compare autoscalers on --requests instead of placement on a market: "
            + ", ".join(AUTOSCALERS)
            + ".",
        ),
    ] = None,
    attainment: Annotated[
        str,
        typer.Option(
            "--attainment", metavar="SHARE", help="For --autoscaler: the share of requests within the SLO."
        ),
    ] = "99.5%",
    capacity: Annotated[
        float | None,
        typer.Option(
            "--capacity",
            metavar="RATE",
            help="Requests per second one replica carries within the SLO. Default: the file's capacity_qps, or 1.25 times its "
            "target_qps_per_replica, or 2.",
        ),
    ] = None,
    mean_replicas: Annotated[
        float | None,
        typer.Option(
            "--mean-replicas",
            metavar="N",
            help="Scale the requests so that N replicas carry their mean; 0: as recorded. Default: 8 for --autoscaler, else 0.",
        ),
    ] = None,
    warm_up: Annotated[
        str | None,
        typer.Option(
            "--warm-up",
            metavar="DURATION",
            help="The part of the recording known beforehand, and not judged. Default: half of it for --autoscaler, else none.",
        ),
    ] = None,
    response_weight: Annotated[
        float | None,
        typer.Option(
            "--response-weight",
            metavar="RATIO",
            help="Where --requests has tokens: the work of a response token, in prompt tokens. Default: the file's response_weight, or 1.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="PROFILE[:PROMPT,RESPONSE]",
            help="How long --requests take (TTFT, end to end) on an engine of `serve engine --list-profiles`; with mean tokens where they have none.",
        ),
    ] = None,
    request_timeout: Annotated[
        str | None,
        typer.Option(
            "--request-timeout",
            metavar="DURATION",
            help="With --engine: clients give up requests that take longer, and these fail. Default: clients wait forever.",
        ),
    ] = None,
    tick: Annotated[str, typer.Option("--tick", metavar="DURATION", help="Of the controller.")] = "30s",
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="With the controller's store and orders: the same figures, several times slower."
        ),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, max=256, help="Processes. Default: one for each core.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html|FILE.png",
            help="Draw it: over time, frontier, spend; or error budget and calibration.",
        ),
    ] = None,
    list_policies: Annotated[bool, typer.Option("--list-policies", help="Say what each does.")] = False,
    list_traces: Annotated[
        bool, typer.Option("--list-traces", help="List the traces that are shipped.")
    ] = False,
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Show what a service would have cost on a spot market, and how often it would have been short.

    The controller's own decisions are made on a record of what zones had room for.
    Launches that fail, preemptions and cold starts are in it; no cloud is called.

    \b
    serve simulate
    serve simulate service.yaml --trace traces/aws1 --report out.html
    serve simulate --policy spothedge --overprovision 0,1,2,3 --seed 0..9
    serve simulate --policy risk_hedge,omniscient --availability-target 99%,99.9%
    serve simulate service.yaml --requests poisson:20 --window 24h -o json
    serve simulate service.yaml --requests trace.csv --autoscaler reactive,predictive,oracle --cold-start 5m
    """
    if list_policies or list_traces:
        _list(output, policies=list_policies, traces=list_traces)
        return
    insist_on_statistics("serve simulate")
    load_spec = partial(_spec, file, env, env_file, secret, secret_file, changes)
    if autoscaler:
        mean = 8.0 if mean_replicas is None else mean_replicas
        words = autoscalers.AutoscalerOptions(
            autoscaler, attainment, capacity, mean, warm_up, cold_start, requests, response_weight
        )
        market_only = dict(zip(_MARKET_ONLY, (trace, policy, window, engine, request_timeout), strict=True))
        autoscalers.compare(words, load_spec(), runs.seeds(seed), jobs, market_only, report, output)
        return
    pictures.insist_on_writable("--report", report)
    spec = load_spec()
    cold_start_s, tick_s = seconds("--cold-start", cold_start), _tick_s(tick)
    market = runs.market(trace, capacity_per_zone, tick_s)
    parts = runs.windows(market, window, cold_start_s)
    ratio, ratio_shown = runs.prices(market, price_ratio)
    targets = runs.wanted_availabilities(spec, availability_target)
    policies, margins = runs.wanted_policies(spec, policy), runs.wanted_overprovisions(spec, overprovision)
    asked = runs.jobs(policies, margins, targets, runs.seeds(seed))
    runs.insist_on_few(len(asked) * len(parts))
    given = traffic_options.TrafficOptions(capacity, mean_replicas, warm_up, response_weight, engine)
    given = given._replace(request_timeout=request_timeout)
    arrivals, traffic = traffic_options.traffic(spec, runs.arrivals(requests, market.length_s), given, tick_s)
    common = Setting(
        trace=market,
        n_target=runs.target_size(spec, replicas),
        cold_start_s=cold_start_s,
        price_ratio=ratio,
        arrivals=arrivals,
        spec=runs.sized(spec, replicas),
        notice_s=runs.notice(notice, tick_s),
        traffic=traffic,
        beside_usd_hour=runs.beside_usd_hour(spec, market),
        whole=whole,
    )
    _check_requests(common)
    settings = [replace(common, trace=part) for part in parts]
    found, interrupted = run_all(settings, asked, jobs, drawn=report is not None)
    simulation = _simulation(common, ratio_shown, tick_s, found)
    goals = targets or (runs.DEFAULT_AVAILABILITY,)
    _show(simulation, market, goals, output)
    _insist_on_all(interrupted, len(found), len(asked) * len(parts))
    _draw(simulation, report, goals)
    inform(f"{plural(len(found), 'run')}, {sum(run.cpu_s for run in found):.1f} s of CPU")


def _insist_on_all(interrupted: bool, finished: int, of: int) -> None:
    """Raises CommandFailed."""
    if interrupted:
        raise CommandFailed(f"interrupted: {finished} of {plural(of, 'run')} finished", 130)


def _tick_s(tick: str) -> float:
    tick_s = seconds("--tick", tick)
    if not 1 <= tick_s <= 3600:
        raise WrongUsage(f"--tick takes a duration from 1s to 1h (got {tick!r})")
    return tick_s


def _check_requests(common: Setting) -> None:
    """Raise WrongUsage if the service cannot scale with the requests given; warn if it scales and none are given."""
    if common.spec is not None and common.arrivals is not None:
        runs.insist_on_rates(common.spec)
    if common.spec is not None and common.arrivals is None and common.spec.autoscaling:
        runs.insist_on_some(common.spec)
        inform(
            f"warning: {common.spec.name} scales with its requests, and none come: --requests says how many"
        )


def _simulation(common: Setting, ratio_shown: float, tick_s: float, found: Sequence[Run]) -> Simulation:
    market = common.trace
    return Simulation(
        trace=market.name,
        n_target=common.n_target,
        cold_start_s=common.cold_start_s,
        price_ratio=ratio_shown,
        tick_s=tick_s,
        days=market.length_s / 86400,
        zones=tuple((zone.name, zone.region) for zone in market.zones),
        priced=market.is_priced,
        runs=tuple(found),
    )


def _spec(
    file: Path | None,
    env: Env,
    env_file: EnvFile,
    secret: Secret,
    secret_file: SecretFile,
    changes: Set,
) -> ServiceSpec | None:
    if file is None:
        if env or env_file or secret or secret_file or changes:
            raise WrongUsage("--env, --secret and --set change a service file, and none is named")
        return None
    return files.load(
        file, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    ).spec


# --- showing ------------------------------------------------------------------------------------------------


def _show(simulation: Simulation, market: Trace, targets: Sequence[float], output: OutputFormat) -> None:
    rows = summarize(simulation.runs)
    if output is OutputFormat.JSON:
        put_json(to_json(simulation, rows, targets, capacity=market.reading))
        return
    if not rows:
        return
    inform(f"{setting(simulation)}; {market.reading}")
    put_table(FittedTable(*table_cells(rows, priced=simulation.priced)))
    for target in targets:
        put(verdict(rows, target, priced=simulation.priced))
    for sentence in availability_sentences(rows):
        put(sentence)


def _draw(simulation: Simulation, path: Path | None, targets: Sequence[float]) -> None:
    if path is None:
        return
    from skyserve_cli.report import page as report

    pictures.draw(
        "--report", path, lambda command: report.write(simulation, path, command=command, targets=targets)
    )


def _list(output: OutputFormat, *, policies: bool, traces: bool) -> None:
    listed: dict[str, Any] = {}
    if policies:
        listed["policies"] = [{"name": name, "what": what} for name, what in POLICIES.items()]
    if traces:
        listed["traces"] = [_trace_json(named(name)) for name in shipped()]
    if output is OutputFormat.JSON:
        put_json(listed)
        return
    if policies:
        put_table(
            FittedTable(
                ("POLICY", "WHAT IT DOES"), [(each["name"], each["what"]) for each in listed["policies"]]
            )
        )
    if traces:
        columns = ("TRACE", "#ZONES", "#REGIONS", "#DAYS", "WHAT IT HOLDS")
        cells = [[str(value) for value in each.values()] for each in listed["traces"]]
        put_table(FittedTable(columns, cells))


def _trace_json(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "zones": len(trace.zones),
        "regions": len({zone.region for zone in trace.zones}),
        "days": round(trace.length_s / 86400, 2),
        "holds": f"{trace.reading}, every {trace.gap_s:g} s",
    }
