"""`serve gc --any-owner`: what other homes have made in these accounts, found by the key of our tag alone.

For the home that is lost with its keys and its database: nothing there can be logged in to, but all of it can be deleted.
Whether another home still uses what it has is not known here, so each is named, with its services and ages, and `-y` alone
removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from provisioners.port.errors import ProvisionError
from provisioners.port.vm import CONTROLLER_OWNER, OwnerSource
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.confirmation import confirm
from skyserve_cli.commands.deadline import waiting_for
from skyserve_cli.commands.options import OutputFormat, View
from skyserve_cli.commands.removal import cost, key_of, remove_all, stray_table, where
from skyserve_cli.config import load_config
from skyserve_cli.controller.clouds.garbage_collector import GarbageCollector
from skyserve_cli.controller.clouds.orphans import KnownInstances
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json
from skyserve_cli.text_tables import put_table

_NOTHING = KnownInstances(frozenset(), frozenset())


class Collecting:
    """We do it."""

    def __init__(self, garbage_collector: GarbageCollector) -> None:
        self._garbage_collector = garbage_collector

    def inspect(self, cloud: str) -> View:
        return self._garbage_collector.inspect(cloud).view()

    def remove(self, orphan: View) -> View:
        return self._garbage_collector.remove(key_of(orphan)).view()

    def forget(self, cloud: str) -> Sequence[str]:
        return self._garbage_collector.forget(cloud)


def gc(
    here: Home, names: Sequence[str], owners: Sequence[str], *, dry_run: bool, yes: bool, output: OutputFormat
) -> None:
    """List what other homes have in these clouds, and remove it once that is confirmed."""
    if yes and not owners and not dry_run:
        raise WrongUsage(
            "-y with --any-owner needs --owner ID: homes that are in use look the same from here"
        )
    clouds = Clouds(here, load_config(here.config))
    own, unlisted = _own(here), list[View]()
    hands = dict[str, Collecting]()
    found = dict[str, list[View]]()
    for owner, cloud in _owners(clouds, names, unlisted):
        if owner == own or (owners and owner not in owners):
            continue
        if owner.startswith(CONTROLLER_OWNER):
            inform(
                f"{cloud}: {owner} is the machine of a controller; `serve controller undeploy` terminates it where it was deployed"
            )
            continue
        hand = hands.setdefault(owner, owned(clouds, owner))
        with waiting_for(f"the list of what {cloud} has"):
            look = hand.inspect(cloud)
        unlisted += look["unlisted"]
        if look["orphans"]:
            found.setdefault(owner, []).extend(look["orphans"])
    _show(found, unlisted, output)
    removed, failed = list[View](), list[View]()
    for owner, orphans in found.items() if not dry_run else ():
        done, left = remove_of(hands[owner], owner, orphans, yes=yes)
        removed += done
        failed += left
    if output is OutputFormat.JSON:
        listed = [{**one, "owner": owner} for owner, orphans in found.items() for one in orphans]
        put_json({"found": listed, "unlisted": unlisted, "removed": removed, "failed": failed})
    if failed:
        raise CommandFailed(f"{plural(len(failed), 'thing')} could not be removed; see above")
    if unlisted:
        raise CommandFailed("not everything could be listed; see above")


def remove_of(
    hands: Collecting, owner: str, orphans: Sequence[View], *, yes: bool
) -> tuple[list[View], list[View]]:
    """Remove what an owner has, once that is confirmed. Returns what was removed and what is left, with the owner."""
    confirm(f"Remove {plural(len(orphans), 'thing')}{cost(orphans)} of home {owner}?", yes=yes)
    done, left = remove_all(hands, orphans)
    return [{**one, "owner": owner} for one in done], [{**one, "owner": owner} for one in left]


def _owners(clouds: Clouds, names: Sequence[str], unlisted: list[View]) -> Iterator[tuple[str, str]]:
    """(owner, cloud) of everything that carries our tag."""
    for cloud in names:
        provisioner = clouds.get(cloud)
        if not isinstance(provisioner, VmProvisioner):
            continue
        if not isinstance(provisioner.machines, OwnerSource):
            inform(f"{cloud} cannot list the things of other homes")
            continue

        def silent(region: str, error: ProvisionError, cloud: str = cloud) -> None:
            unlisted.append({"cloud": cloud, "region": region, "why": error.message})

        try:
            found = provisioner.machines.owners(silent)
        except ProvisionError as error:
            silent("", error)
            continue
        for owner in found:
            yield owner, cloud


def owned(clouds: Clouds, owner: str) -> Collecting:
    return Collecting(
        GarbageCollector(clouds.get, owner, lambda: _NOTHING, SystemClock(), lambda record: None)
    )


def _own(here: Home) -> str:
    """Return the owner of this home; "" if it has none yet."""
    if not here.root.exists():
        return ""
    with waiting_for("the database"):
        store = opened(here)
    try:
        return store.database.known_owner()
    finally:
        store.close()


def _show(found: Mapping[str, Sequence[View]], unlisted: Sequence[View], output: OutputFormat) -> None:
    if output is OutputFormat.TABLE:
        for owner, orphans in found.items():
            services = sorted({one["service"] for one in orphans if one["service"]})
            inform(f"home {owner}" + (f", services {', '.join(services)}" if services else ""))
            put_table(stray_table(orphans, SystemClock().now()))
        if not found and not unlisted:
            inform("other homes have nothing here")
    for region in unlisted:
        inform(f"{where(region)} cannot be listed: {region['why']}")
