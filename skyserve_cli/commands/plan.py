"""`serve plan`: the first decision about a service, before anything is launched."""

from __future__ import annotations

from typing import Annotated

import typer

from skyserve_cli.commands import files
from skyserve_cli.commands.options import (
    Env,
    EnvFile,
    File,
    Format,
    Output,
    Secret,
    SecretFile,
    Set,
    controller,
)
from skyserve_cli.commands.prices import insist_on_offers, plan_table, plan_total
from skyserve_cli.output import WrongUsage, put, put_json, put_table, say
from skyserve_cli.spec import spec_to_json


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
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    output: Format = Output.TABLE,
) -> None:
    """Show where a service would run and what it would cost, without launching it.

    With --trace, its policy is also run over a record of a spot market: how often all replicas would have been
    ready, and for how much. `serve simulate` compares policies and draws pictures.
    """
    if trace is None and (cold_start is not None or price_ratio is not None):
        raise WrongUsage(
            "--cold-start and --ondemand-price-ratio say how --trace is played, and none is named"
        )
    loaded = files.load(
        file, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    run = None
    if trace is not None:
        # A second of imports, which plans without a trace need not wait for.
        from skyserve_cli.commands import expectation

        run = expectation.prepared(
            loaded.spec, trace=trace, cold_start=cold_start or "183s", price_ratio=price_ratio or "3"
        )
    client = controller()
    if client.ensure_running():
        say("controller started")
    decided = client.plan(spec_to_json(loaded.spec), loaded.secret_values)
    insist_on_offers(decided)
    if output is Output.TABLE:
        put_table(plan_table(decided))
        put(plan_total(decided))
        for note in decided["notes"]:
            say(note)
    if run is not None:
        expected = expectation.expected(*run, decided)
        decided["expected"] = expected._asdict()
        if output is Output.TABLE:
            put(expected.sentence())
    if output is Output.JSON:
        put_json(decided)
