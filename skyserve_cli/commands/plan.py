"""`serve plan`: the first decision about a service, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from provisioners.clock import unix_now
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands import files
from skyserve_cli.commands.options import (
    Env,
    EnvFile,
    File,
    Format,
    OutputFormat,
    Secret,
    SecretFile,
    Set,
    View,
    home,
)
from skyserve_cli.commands.prices import candidates_table, insist_on_offers, plan_table, plan_total
from skyserve_cli.config import load_config
from skyserve_cli.controller.reconcile.mappers import requirements_of
from skyserve_cli.controller.reconcile.planning import first_plan, offer_view
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put, put_json
from skyserve_cli.spec import ServiceSpec
from skyserve_cli.text_tables import put_table

MOST_SHOWN = 10


def plan(
    file: File,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="DIR|NAME", help="Also what to expect of a spot market like this one."
        ),
    ] = None,
    cold_start: Annotated[
        str | None,
        typer.Option(
            "--cold-start", metavar="DURATION", help="With --trace: from launch to ready. Default: 183s."
        ),
    ] = None,
    price_ratio: Annotated[
        str | None,
        typer.Option("--ondemand-price-ratio", metavar="N|trace", help="With --trace. Default: 3."),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            "--requests",
            metavar="constant:RATE|poisson:RATE[,SEED]|FILE",
            help="Also the next 24 hours, forecast from this recording as if it ended now.",
        ),
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Also the next 24 hours, forecast from what the running service was asked."
        ),
    ] = False,
    capacity: Annotated[
        float | None,
        typer.Option(
            "--capacity",
            metavar="RATE",
            help="With --requests or --history: requests per second one replica carries. Default: the file's, or what was learned.",
        ),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Also send the Pods to the API servers of Kubernetes, as a dry run: what would they refuse?",
        ),
    ] = False,
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=0, help=f"Candidates to list. Default: {MOST_SHOWN}; all in JSON."
        ),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Show where a service would run and what it would cost, without launching it.

    Lists the zones it could run in, best first, at the prices of the catalog. No cloud is called, so this works without
    credentials, also for a cloud that the file names and that is not enabled here; `serve up` shows the same with the
    spot prices of the moment.

    With --trace, its policy is also run over a record of a spot market: how often all replicas would have been
    ready, and for how much. `serve simulate` compares policies and draws pictures.

    With --requests or --history, the demand of the next 24 hours is forecast: the busiest minute of each hour, at its median and its
    90 % quantile, the replicas for it and what they cost at the prices of the plan.

    With --ask, each cluster of Kubernetes decides on the Pods without creating them: quotas, policies, webhooks, names that do not
    exist. Exit code 1 if none admits them.

    \b
    serve plan service.yaml --requests requests.csv
    serve plan service.yaml --history
    """
    _insist_on_trace(trace, cold_start or price_ratio)
    loaded = files.load(
        file, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    day = None
    if requests is not None or history or capacity is not None:
        from skyserve_cli.commands import day_plan

        day = day_plan.asked(loaded.spec, requests, history, capacity, unix_now())
    run = None
    if trace is not None:
        # A second of imports, which plans without a trace need not wait for.
        from skyserve_cli.commands import expectation

        run = expectation.prepared(
            loaded.spec, trace=trace, cold_start=cold_start or "183s", price_ratio=price_ratio or "3"
        )
    clouds = _clouds_of(loaded.spec)
    offers = clouds.listed(requirements_of(loaded.spec))
    decided = first_plan(loaded.spec, offers, clouds, unix_now())
    insist_on_offers(decided, loaded)
    candidates = [{**offer_view(offer), "num_nodes": loaded.spec.num_nodes} for offer in offers]
    decided |= {"candidates": candidates[:limit], "cache": loaded.spec.cache and asdict(loaded.spec.cache)}
    if output is OutputFormat.TABLE:
        _put_plan(decided, candidates, limit)
    if ask:
        decided["admission"] = _admission(loaded.spec, clouds, output)
    if run is not None:
        expected = expectation.expected(*run, decided)
        decided["expected"] = expected._asdict()
        if output is OutputFormat.TABLE:
            put(expected.sentence())
    if day is not None:
        found = day_plan.planned(loaded.spec, *day, day_plan.price_of(decided, candidates))
        decided["day"] = found.view()
        if output is OutputFormat.TABLE:
            put_table(found.table())
            put(found.sentence())
    if output is OutputFormat.JSON:
        put_json(decided)
    _insist_on_admission(decided)


def _insist_on_trace(trace: str | None, how: str | None) -> None:
    if trace is None and how is not None:
        raise WrongUsage(
            "--cold-start and --ondemand-price-ratio say how --trace is played, and none is named"
        )


def _admission(spec: ServiceSpec, clouds: Clouds, output: OutputFormat) -> list[View]:
    from skyserve_cli.commands.admission import admission_of

    found = list(admission_of(spec, clouds))
    if output is OutputFormat.TABLE:
        for one in found:
            put(f"{one['place']}: {'admitted' if one['admitted'] else '; '.join(one['reasons'])}")
        if not found:
            inform("--ask: no cluster of Kubernetes is enabled that has a place for this service")
    return found


def _insist_on_admission(decided: View) -> None:
    found = decided.get("admission")
    if found and not any(one["admitted"] for one in found):
        raise CommandFailed("no cluster admits the Pods of this service")


def _clouds_of(spec: ServiceSpec) -> Clouds:
    """Return the clouds that are enabled, and those that the file names besides, with a warning for each of these."""
    here = home()
    here.create()
    configured = Clouds(here, load_config(here.config))
    clouds = configured.with_unconfigured(_named_clouds(spec))
    for name in clouds.enabled:
        if name not in configured.enabled:
            inform(
                f"warning: {name} is not enabled here, so these prices are for comparison only; "
                f"to use it, add `{name}:` under `clouds` in {here.config}"
            )
    return clouds


def _put_plan(decided: dict[str, Any], candidates: list[dict[str, Any]], limit: int | None) -> None:
    put_table(plan_table(decided))
    put(plan_total(decided))
    _put_candidates(candidates, MOST_SHOWN if limit is None else limit)
    put(f"Placement: {decided['placement']}. Load balancing: {decided['load_balancing_policy']}.")
    if cache := decided["cache"]:
        where = f"in the claim {cache['claim']}" if cache["claim"] else "on the node"
        put(f"Cache: {', '.join(cache['variables'])} outlives replicas, {where}.")
    for note in decided["notes"]:
        inform(note)


def _named_clouds(spec: ServiceSpec) -> list[str]:
    """Return the clouds that the file names, for replicas or for load balancers, in order."""
    named = [cloud for choice in spec.resources for cloud, _ in choice.places() if cloud is not None]
    return list(dict.fromkeys([*named, *(place.cloud for place in spec.regional.places)]))


def _put_candidates(candidates: Sequence[View], most: int) -> None:
    if not most:
        return
    more = f", the first {most} of {len(candidates)}" if len(candidates) > most else ""
    put(f"Candidates, best first{more}:")
    put_table(candidates_table(candidates[:most]))
