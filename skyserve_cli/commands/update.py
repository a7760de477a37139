"""`serve update`: a new version of a running service, while it goes on serving."""

from __future__ import annotations

from typing import Annotated

import typer

from skyserve_cli.commands import files, progress, sentences
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.options import (
    Env,
    EnvFile,
    File,
    Format,
    Mode,
    NoWait,
    OutputFormat,
    Secret,
    SecretFile,
    ServiceName,
    Set,
    Team,
    Timeout,
    View,
    Yes,
    controller,
    find,
)
from skyserve_cli.commands.prices import insist_on_offers, plan_table, spreading_cost
from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.output import CommandFailed, inform, plural, put, put_json, span, usd
from skyserve_cli.spec import ServiceSpec, spec_to_json
from skyserve_cli.spec.problems import shown
from skyserve_cli.text_tables import print_table


def update(
    name: ServiceName,
    file: File,
    mode: Annotated[Mode | None, typer.Option("--mode", help="Default: the file's update.mode.")] = None,
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
    """Give a running service a new version.

    Shows what changes and which replicas start and end. Replicas are kept where only the `service` section differs,
    else replaced without a gap. A version that does not come up is given up, and the one before goes on serving. A
    file that changes nothing makes no version.
    """
    changes = files.with_team(changes, team)
    loaded = files.load(
        file, name=name, env=env, env_file=env_file, secret=secret, secret_file=secret_file, changes=changes
    )
    spec = loaded.spec
    if loaded.own_name not in (None, name):
        inform(f"warning: name: the file is for service {loaded.own_name}; this updates {name}")
    client = controller()
    running = find(client.services(name), name)
    if running["status"] in ("SHUTTING_DOWN", "FAILED_CLEANUP"):
        raise CommandFailed(f"service {name} is going down and cannot be updated")

    chosen = mode.value if mode else spec.update.mode
    plan = client.plan(spec_to_json(spec), loaded.secret_values, chosen)
    insist_on_offers(plan, loaded)
    if plan["nothing_changes"]:
        if not dry_run:
            client.send_files(spec_to_json(spec))  # a controller that was restored elsewhere may lack them
        _show_nothing_changes(running, plan, dry_run=dry_run, output=output)
        return
    inform(_what_changes(running, plan["keeps_replicas"], chosen))
    for change in plan["changes"]:
        inform(f"  {_difference(change)}")
    if not plan["changes"] and not plan["keeps_replicas"]:
        inform("  the content of files or the value of a secret")
    if plan["launches"]:
        print_table(plan_table(plan))
    for end in plan["ends"]:
        inform(f"replica {end['replica_id']} ends: {end['why']}")
    inform(
        f"{name}: {plural(plan['replicas'], 'replica')} for ${usd(plan['usd_per_hour'])} per hour afterwards"
    )
    if plan["launches"] and plan["ends"]:
        inform(course_sentence(plan["update"]))
    if spread := spreading_cost(plan):
        inform(spread)
    if dry_run:
        if output is OutputFormat.JSON:
            put_json(plan)
        return

    confirm(f"Update {name}?", yes=yes)
    seen = progress.last_event(client)
    version = client.put(name, spec_to_json(spec), loaded.secret_values, chosen)
    if not no_wait:
        _wait(client, spec, version, seen, timeout)
    (view,) = [view for view in client.services(name) if view["name"] == name]
    if output is OutputFormat.JSON:
        put_json(view)
    else:
        inform(f"{name} is at version {version}" if not no_wait else f"{name} goes to version {version}")
        put(view["endpoint"])


def _show_nothing_changes(running: View, plan: View, *, dry_run: bool, output: OutputFormat) -> None:
    inform(f"nothing changes: {running['name']} stays at version {running['version']}")
    if output is OutputFormat.JSON:
        put_json(plan if dry_run else running)
    elif not dry_run:
        put(running["endpoint"])


def _what_changes(running: View, kept: bool, mode: str) -> str:
    replicas = "its replicas are kept" if kept else f"its replicas are replaced ({mode.replace('_', '-')})"
    return f"{running['name']}: version {running['version']} -> {running['version'] + 1}, {replicas}"


def course_sentence(update: View) -> str:
    """Return what the mode means for this update: extra replicas, for how long, at what price."""
    replicas, start_s = plural(update["extra_replicas"], "extra replica"), update["usual_start_s"]
    how = (
        "all new replicas start beside the old ones, then all requests move at once"
        if update["mode"] == "blue_green"
        else f"old replicas are replaced in {plural(update['steps'], 'step')}"
    )
    lasts = "while new replicas start"
    if start_s is not None:
        lasts = (
            f"for about {span(start_s * update['steps'])}, if new replicas start as fast as those that run"
        )
    drain = span(update["drain_timeout_s"])
    return (
        f"{update['mode'].replace('_', '-')}: {how}; up to {replicas} (${usd(update['extra_usd_per_hour'])} per hour more) "
        f"{lasts}; old replicas are paid for while they drain, up to {drain}"
    )


def _difference(change: View) -> str:
    if change["before"] is None and change["after"] is None:
        return f"{change['path']}: changed"
    if all(str(change[side]).startswith("upload://") for side in ("before", "after")):
        return f"{change['path']}: other content"
    return f"{change['path']}: {shown(change['before'])} -> {shown(change['after'])}"


def _wait(
    client: ControllerClient, spec: ServiceSpec, version: int, seen: int, timeout_s: float | None
) -> None:
    """Until the new version serves, and it alone. Ctrl-C stops the waiting, not the update."""
    name, wanted = spec.name, spec.scaling.min_replicas

    def took_over(views: dict[str, View]) -> bool:
        return has_taken_over(client, views[name], version, wanted)

    try:
        progress.follow(client, frozenset((name,)), after=seen, timeout_s=timeout_s, done=took_over)
    except KeyboardInterrupt:
        raise CommandFailed(
            f"\nstopped waiting; the update of {name} goes on. Follow it with `serve status --watch {name}`",
            130,
        ) from None


def has_taken_over(client: ControllerClient, view: View, version: int, wanted: int) -> bool:
    """Return whether the version serves with `wanted` replicas, and no other. Raises CommandFailed if it never will."""
    if view["version"] != version or view["status"] in ("SHUTTING_DOWN", "DOWN"):
        raise CommandFailed(
            f"version {version} of {view['name']} was overtaken: it is now at version {view['version']}"
        )
    if version in view["failed_versions"]:
        raise CommandFailed(_gave_up(client, view))
    replicas = sentences.live_replicas(view)
    wanted_versions = {version, *view["same_versions"]}  # going back keeps the rest of that version
    old = [replica for replica in replicas if replica["version"] not in wanted_versions]
    return not old and len(replicas) == view["target"] and progress.serves(view, wanted)


def _gave_up(client: ControllerClient, view: View) -> str:
    name, version = view["name"], view["version"]
    return (
        f"{name}: {sentences.version_given_up(version, serves=bool(view['ready']))}\n"
        f"{progress.why_failed(client, name, version)}\n"
        f"fix the file and update again"
    )
