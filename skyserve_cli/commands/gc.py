"""`serve gc`: finds orphaned resources in the clouds, and removes them.

It calls the controller where one runs. Where none does it does the work itself, and holds the home's lock while it is at
it, so that none starts in the middle.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.clouds import Clouds
from skyserve_cli.commands import gc_others
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.deadline import waiting_for
from skyserve_cli.commands.options import Format, OutputFormat, View, Yes, controller, home
from skyserve_cli.commands.removal import OrphanRemover, cost, remove_all, stray_table, where
from skyserve_cli.config import load_config
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.garbage_collector import janitor_of
from skyserve_cli.controller.persistence.known_state import read_known
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.secret_box import seal_of
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json
from skyserve_cli.text_tables import put_table


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what there is.")] = False,
    cloud: Annotated[
        list[str] | None, typer.Option("--cloud", metavar="NAME", help="In this cloud only.")
    ] = None,
    any_owner: Annotated[
        bool,
        typer.Option("--any-owner", help="What other homes have made, also what runs, by our tag alone."),
    ] = False,
    owner: Annotated[
        list[str] | None, typer.Option("--owner", metavar="ID", help="With --any-owner: of this home only.")
    ] = None,
    yes: Yes = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Find orphaned resources in the clouds, and remove them.

    Instances without a replica, disks, addresses and network cards without an instance; and once no service
    needs a cloud, the groups, keys and networks there. Only what carries this home's own tag is looked at, or that of a database which
    it had before; except with --any-owner: that shows everything of every other home in these accounts, whether it is in use there or not.
    Exit code 1 if something could not be listed, or not be removed.
    """
    here = home()
    config = load_config(here.config)
    names = _chosen(cloud or [], [name for name, section in config.clouds.items() if section.enabled])
    if owner and not any_owner:
        raise WrongUsage("--owner needs --any-owner")
    if any_owner:
        gc_others.gc(here, names, owner or [], dry_run=dry_run, yes=yes, output=output)
        return
    with _hands(here) as hands:
        looks = {}
        for name in names:
            with waiting_for(f"the list of what {name} has"):
                looks[name] = hands.inspect(name)
    found = [orphan for look in looks.values() for orphan in look["orphans"]]
    unlisted = [region for look in looks.values() for region in look["unlisted"]]
    before = _of_former_owners(here, names, unlisted)
    if output is OutputFormat.TABLE:
        if found:
            put_table(stray_table(found, SystemClock().now()))
        for former, (_, orphans) in before.items():
            inform(f"of a database that this home had before (owner {former}):")
            put_table(stray_table(orphans, SystemClock().now()))
    for region in unlisted:
        inform(f"{where(region)} cannot be listed: {region['why']}")
    removed: list[View] = []
    failed: list[View] = []
    if found and not dry_run:
        confirm(f"Remove {plural(len(found), 'thing')}{cost(found)}?", yes=yes)
        with _hands(here) as hands:
            removed, failed = remove_all(hands, found)
    for former, (others, orphans) in before.items() if not dry_run else ():
        done, left = gc_others.remove_of(others, former, orphans, yes=yes)
        removed += done
        failed += left
    if output is OutputFormat.JSON:
        found += [{**one, "owner": former} for former, (_, orphans) in before.items() for one in orphans]
        put_json({"found": found, "unlisted": unlisted, "removed": removed, "failed": failed})
    elif not found and not before and not unlisted:
        inform("nothing is left over")
    if failed:
        raise CommandFailed(f"{plural(len(failed), 'thing')} could not be removed; see above")
    if unlisted:
        raise CommandFailed("not everything could be listed; see above")


def _of_former_owners(
    here: Home, names: Sequence[str], unlisted: list[View]
) -> dict[str, tuple[gc_others.Collecting, list[View]]]:
    """Return what the clouds have of the databases that this home had before, by owner. Adds to `unlisted`."""
    known = read_known(here)
    if known is None or not known.former:
        return {}
    clouds = Clouds(here, load_config(here.config))
    found = dict[str, tuple[gc_others.Collecting, list[View]]]()
    for owner in known.former:
        hands = gc_others.owned(clouds, owner)
        looks = [hands.inspect(name) for name in names]
        unlisted += [region for look in looks for region in look["unlisted"]]
        orphans = [orphan for look in looks for orphan in look["orphans"]]
        if orphans:
            found[owner] = hands, orphans
    return found


def _chosen(wanted: Sequence[str], enabled: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in enabled:
            raise WrongUsage(f"no cloud {name} is enabled here (enabled: {', '.join(enabled) or 'none'})")
    return [name for name in enabled if not wanted or name in wanted]


# --- who does the work --------------------------------------------------------------------------------------


class _Selection:
    """The controller does it."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client

    def inspect(self, cloud: str) -> View:
        return self._client.leaks(cloud)

    def remove(self, orphan: View) -> View:
        return self._client.remove_leak(orphan["cloud"], orphan["kind"], orphan["id"], orphan["region"])

    def forget(self, cloud: str) -> Sequence[str]:
        return self._client.forget_cloud(cloud)


@contextmanager
def _hands(here: Home) -> Iterator[OrphanRemover]:
    client = controller()
    try:
        client.health()
    except ControllerDownError:
        pass
    else:
        yield _Selection(client)
        return
    here.create()
    with _alone(here.lock):
        with waiting_for("the database"):
            store = opened(here)
        try:
            clouds = Clouds(here, load_config(here.config))
            specs = SpecCache(store, seal_of(here))
            yield gc_others.Collecting(janitor_of(store, specs, clouds, SystemClock()))
        finally:
            store.close()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """With the lock that the home's controller holds as long as it runs."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandFailed(
            "a controller of this home is just starting, or another `serve gc` is at work; try again"
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
