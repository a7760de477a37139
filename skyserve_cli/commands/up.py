"""`serve up`: from a file to an endpoint that serves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

from skyserve_cli.commands import files, progress, sentences
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import (
    Env,
    EnvFile,
    File,
    Format,
    NoWait,
    OutputFormat,
    Secret,
    SecretFile,
    Set,
    Team,
    Timeout,
    View,
    Yes,
    controller,
    home,
)
from skyserve_cli.commands.prices import insist_on_offers, listed_plan, plan_table, plan_total
from skyserve_cli.config import load_config
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import Home
from skyserve_cli.output import DEADLINE, CommandFailed, inform, put, put_json
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import Loaded
from skyserve_cli.text_tables import print_table

_NOT_RENTED = frozenset({"local", "ssh", "kubernetes"})


def up(
    file: File,
    name: Annotated[
        str | None, typer.Option("-n", "--name", help="Default: the file's name key, or its name.")
    ] = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False,
    no_wait: NoWait = False,
    timeout: Timeout = None,
    env: Env = None,
    env_file: EnvFile = None,
    secret: Secret = None,
    secret_file: SecretFile = None,
    changes: Set = None,
    team: Team = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Bring a service up: show the plan and its price, confirm, and wait until it is ready.

    The last line of stdout is the endpoint, and the only one.
    """
    changes = files.with_team(changes, team)
    loaded = files.load(
        file, name=name, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    name = loaded.spec.name
    client = controller()
    if not dry_run and client.ensure_running():
        inform("controller started")
    try:
        _insist_on_new(client, name)
        plan = client.plan(spec_to_json(loaded.spec), loaded.secret_values)
    except ControllerDownError:
        if not dry_run:
            raise
        plan = listed_plan(loaded.spec)
    insist_on_offers(plan, loaded)
    print_table(plan_table(plan))
    inform(f"{name}: {plan_total(plan)}")
    if dry_run:
        if output is OutputFormat.JSON:
            put_json(plan)
        return

    confirm(f"Bring {name} up?", yes=yes)
    seen = progress.last_event(client)
    client.put(name, spec_to_json(loaded.spec), loaded.secret_values, None)
    hint_at_backup(home(), {launch["cloud"] for launch in plan["launches"]})
    if not no_wait:
        _wait(client, loaded, seen, timeout)
    _show(client, name, output)


def hint_at_backup(here: Home, clouds: Collection[str]) -> None:
    """At the first service on machines that are rented say that nothing but this home can log in to them."""
    if here.backup_hinted.exists() or set(clouds) <= _NOT_RENTED:
        return
    if load_config(here.config).controller.backup is not None:
        return
    here.create()
    here.backup_hinted.touch(mode=0o600)
    inform(
        f"machines that are rented can only be found and logged in to with the keys in {here.root}; keep a sealed copy on "
        "another host:\n  serve controller backup FILE --passphrase-file PASSPHRASE\nor set controller.backup in config.yaml"
    )


def _insist_on_new(client: ControllerClient, name: str) -> None:
    for view in client.services(name):
        if view["name"] != name:
            continue
        if view["status"] in ("SHUTTING_DOWN", "FAILED_CLEANUP"):
            raise CommandFailed(f"service {name} is still going down; `serve down {name}` waits for its end")
        raise CommandFailed(
            f"service {name} is up; give it a new version with `serve update {name} FILE`, or take it down first"
        )


def _wait(client: ControllerClient, loaded: Loaded, seen: int, timeout_s: float | None) -> None:
    """Wait until the service is ready. Ctrl-C stops the waiting, not the service."""
    name, wanted = loaded.spec.name, loaded.spec.scaling.min_replicas
    steady, clock = progress.Steady(), SteadyClock()

    def responds(views: dict[str, View]) -> bool:
        view = views[name]
        if view["status"] == "FAILED":
            raise CommandFailed(
                f"service {name} failed: {progress.why_failed(client, name, view['version'])}\n"
                f"fix the file, then: serve update {name} FILE; or give up: serve down {name}\n{sentences.why_hint(name)}"
            )
        if view["status"] in ("SHUTTING_DOWN", "DOWN"):
            raise CommandFailed(f"service {name} was taken down while it came up")
        is_steady = steady.lasts(view, clock.now())
        return progress.serves(view, wanted) and is_steady

    try:
        progress.follow(client, frozenset((name,)), after=seen, timeout_s=timeout_s, done=responds)
    except CommandFailed as error:
        if error.code != DEADLINE:
            raise
        raise CommandFailed(f"{error}\n{sentences.why_hint(name)}", DEADLINE) from None
    except KeyboardInterrupt:
        raise CommandFailed(
            f"\nstopped waiting; {name} keeps coming up. Follow it with `serve status --watch {name}`, "
            f"take it down with `serve down {name}`",
            130,
        ) from None


def _show(client: ControllerClient, name: str, output: OutputFormat) -> None:
    """What was requested: the endpoint, and nothing else."""
    (view,) = [view for view in client.services(name) if view["name"] == name]
    if output is OutputFormat.JSON:
        put_json(view)
        return
    inform(f"Endpoint of {name}:" if view["ready"] else f"Endpoint of {name}, once a replica is ready:")
    if view["endpoint_reach"] == "this_machine":
        inform(f"({sentences.ONLY_HERE})")
    put(view["endpoint"])
