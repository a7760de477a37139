"""`serve check`: which clouds can be used from here, and the reasons for the others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import typer

from provisioners import permissions, plugins
from provisioners.port.base import Candidate, Requirements
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Checked, Finding
from provisioners.registry import PROVISIONERS
from skyserve_cli.buckets.port import BucketError
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.deadline import waiting_for
from skyserve_cli.commands.options import Format, OutputFormat, View, Yes, home
from skyserve_cli.config import ConfigError, aws_profile, load_config
from skyserve_cli.config_backup import BackupConfig
from skyserve_cli.output import CommandFailed, WrongUsage, date_time, inform, plural, put, put_json
from skyserve_cli.text_tables import FittedTable, put_table

ANYTHING = Requirements((Candidate(use_spot=True), Candidate(use_spot=False)))


#: The clouds whose permissions can be printed.
PolicyCloud = Enum("PolicyCloud", {name: name for name in permissions.FILES}, type=str)  # type: ignore[misc]
Policy = Annotated[
    PolicyCloud | None,
    typer.Option(
        "--policy", help="Print the smallest set of permissions for a cloud, as the cloud takes it."
    ),
]


def check(
    output: Format = OutputFormat.TABLE,
    policy: Policy = None,
    launch: Annotated[
        bool,
        typer.Option(
            "--launch",
            help="Rent one machine per cloud, serve a page from it, and terminate it: the whole path, for a few cents.",
        ),
    ] = False,
    cloud: Annotated[
        list[str] | None, typer.Option("--cloud", metavar="NAME", help="With --launch: in this cloud only.")
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator", metavar="NAME[:COUNT]", help="With --launch: a machine with it. Default: none."
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="With --launch: a spot machine.")] = False,
    yes: Yes = False,
) -> None:
    """Check which clouds can be used from here.

    Shows a row for each cloud, also for those that are not enabled, and what was found: `missing` keeps machines from
    being rented, a `note` does not. Nothing is launched or changed without --launch. Exit code 1 if no cloud can be used; with --launch
    if one of them cannot. `serve test NAME` is for services.
    """
    if policy is not None:
        put(permissions.text_of(policy.value).rstrip())
        return
    if not launch and (cloud or accelerator or spot):
        raise WrongUsage("--cloud, --accelerator and --spot need --launch")
    here = home()
    here.create()
    clouds = Clouds(here, load_config(here.config))
    if launch:
        from skyserve_cli.commands import check_launch  # which loads SSH and HTTP libraries

        check_launch.launch(
            clouds,
            here,
            _chosen(cloud or [], clouds.enabled),
            accelerator,
            use_spot=spot,
            yes=yes,
            output=output,
        )
        return
    found = []
    for name in clouds.enabled:
        with waiting_for(f"{name} to respond"):
            found.append(_ask(clouds, name))
    backup = clouds.config.controller.backup
    if backup is not None:
        inform(backup_line(backup, aws_profile(clouds.config)))
    if output is OutputFormat.JSON:
        put_json(found)
    else:
        rows = [
            (cloud["cloud"], "usable" if cloud["usable"] else "not usable", _shortly(cloud))
            for cloud in found
        ]
        rows += [
            (name, "not enabled", f"add `{name}:` under `clouds` in {here.config}")
            for name in rentable()
            if name not in clouds.enabled
        ]
        put_table(FittedTable(("CLOUD", "STATUS", "ZONES"), rows))
        checked = [
            (cloud["cloud"], one["what"], one["level"], one["message"])
            for cloud in found
            for one in cloud["findings"]
            if one["message"]
        ]
        if checked:
            put("")
            put_table(FittedTable(("CLOUD", "CHECKED", "LEVEL", "FOUND"), checked))
    if not any(cloud["usable"] for cloud in found):
        raise CommandFailed(f"no cloud can be used; enable one in {here.config}")


def backup_line(backup: BackupConfig, profile: str | None) -> str:
    """Return whether the bucket of `controller.backup` can be listed from here, and its newest backup. Nothing is written."""
    from skyserve_cli.buckets.opening import bucket_at
    from skyserve_cli.controller.backup.archive import BackupError, read_passphrase
    from skyserve_cli.controller.backup.schedule import newest_first

    key = "controller.backup"
    try:
        read_passphrase(backup.passphrase_file)
        there = newest_first(each.name for each in bucket_at(backup.place, aws_profile=profile).objects())
    except (BackupError, BucketError) as error:
        return f"{key}: not usable: {error}"
    except OSError as error:
        return f"{key}.passphrase_file: {backup.passphrase_file}: {error.strerror or error}"
    newest = f"the newest of {date_time(there[0].made_at)}" if there else "none was made yet"
    return f"{key}: {backup.place.url} has {plural(len(there), 'backup')}, {newest}"


def _chosen(wanted: Sequence[str], enabled: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in enabled:
            raise WrongUsage(f"{name!r} is no enabled cloud (enabled: {', '.join(enabled) or 'none'})")
    return [name for name in enabled if not wanted or name in wanted]


def _anything(name: str) -> Requirements:
    """Return a need that any machine of the cloud meets. Ours have machines without accelerators."""
    if name not in plugins.installed():
        return ANYTHING
    shapes = {each.shape for each in plugins.listings_of(plugins.plugin(name))}
    candidates = [
        Candidate(accelerator=shape.accelerator, accelerator_count=shape.accelerator_count, use_spot=use_spot)
        for shape in sorted(shapes, key=lambda one: one.name)
        for use_spot in (True, False)
    ]
    return Requirements((*ANYTHING.candidates, *candidates))


def rentable() -> tuple[str, ...]:
    """Every cloud a user can enable, in the order of the table: ours, then plug-ins."""
    return (*PROVISIONERS, *plugins.installed())


def _shortly(cloud: View) -> str:
    """Return its zones, or the first obstacle."""
    wrong = [one for one in cloud["findings"] if not one["ok"]]
    if len(wrong) > 1:
        return f"{wrong[0]['what']}, and {len(wrong) - 1} more (below)"
    return cloud["why"] or _some(cloud["zones"])


def _some(zones: Sequence[str]) -> str:
    """Return all of a few; of many their number."""
    if len(zones) <= 8:
        return ", ".join(zones)
    regions = {zone.partition("/")[0] for zone in zones}
    return f"{len(zones)} zones in {len(regions)} region{'s' * (len(regions) > 1)}"


def _ask(clouds: Clouds, name: str) -> View:
    """Return whether the cloud can be used: what it offers, and where it rents machines, credentials, permissions and quotas.

    Costs nothing.
    """
    findings: Sequence[Finding] = ()
    try:
        cloud = clouds.get(name)
        if isinstance(cloud, Checked):
            findings = cloud.check()
        offers = cloud.offers(_anything(name))
    except (ProvisionError, ConfigError) as error:
        if name not in rentable():
            raise  # a slip in the configuration, not a cloud
        return {"cloud": name, "usable": False, "why": str(error), "zones": [], "findings": []}
    zones = sorted({f"{offer.zone.region}/{offer.zone.name}" for offer in offers})
    wrong = [f"{finding.what}: {finding.message}" for finding in findings if not finding.ok]
    return {
        "cloud": name,
        "usable": bool(zones) and not wrong,
        "why": "; ".join(wrong) if zones else "it offers nothing",
        "zones": zones,
        "findings": [
            {"what": one.what, "ok": one.ok, "level": one.level.value, "message": one.message}
            for one in findings
        ],
    }
