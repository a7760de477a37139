"""`serve plan`: the first decision about a service, before anything is launched."""

from __future__ import annotations

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
from skyserve_cli.output import put, put_json, put_table, say
from skyserve_cli.spec import spec_to_json


def plan(
    file: File,
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    output: Format = Output.TABLE,
) -> None:
    """Show where a service would run and what it would cost, without launching it."""
    loaded = files.load(
        file, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    client = controller()
    if client.ensure_running():
        say("controller started")
    decided = client.plan(spec_to_json(loaded.spec), loaded.secret_values)
    insist_on_offers(decided)
    if output is Output.JSON:
        put_json(decided)
        return
    put_table(plan_table(decided))
    put(plan_total(decided))
    for note in decided["notes"]:
        say(note)
