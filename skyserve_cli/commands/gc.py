"""`serve gc`: finds what is left in the clouds and belongs to nothing we know, and removes it.

It asks the controller where one runs. Where none does it does the work itself, and holds the home's lock while it is at
it, so that none starts in the middle.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.options import Format, Output, View, Yes, controller, home
from skyserve_cli.commands.prices import ask
from skyserve_cli.config import load_config
from skyserve_cli.controller.books import SpecBook
from skyserve_cli.controller.client import Client, ControllerDownError
from skyserve_cli.controller.clock import SystemClock
from skyserve_cli.controller.janitor import Janitor, Key, janitor_of
from skyserve_cli.controller.opening import opened
from skyserve_cli.controller.seal import seal_of
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage, plural, put_json, say, span, usd
from skyserve_cli.tables import Fitted, put_table, table

GONE_PATIENCE_S = 300.0  # an instance that is asked to end takes a minute or two
POLL_S = 3.0
TRIES = 20  # of what may be removed another time: a card that holds an address goes first


class Hands(Protocol):
    """Who does the work."""

    def look(self, cloud: str) -> View: ...

    def remove(self, stray: View) -> View: ...

    def forget(self, cloud: str) -> Sequence[str]: ...


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what there is.")] = False,
    cloud: Annotated[
        list[str] | None, typer.Option("--cloud", metavar="NAME", help="In this cloud only.")
    ] = None,
    yes: Yes = False,
    output: Format = Output.TABLE,
) -> None:
    """Find what is left in the clouds and belongs to nothing we know, and remove it.

    Instances without a replica, disks, addresses and network cards without an instance; and once no service
    needs a cloud, the groups, keys and networks there. Only what carries this home's own tag is ever looked at.
    Exit code 1 if something could not be listed, or not be removed.
    """
    here = home()
    config = load_config(here.config)
    names = _chosen(cloud or [], [name for name, section in config.clouds.items() if section.enabled])
    with _hands(here) as hands:
        looks = {name: hands.look(name) for name in names}
    found = [stray for look in looks.values() for stray in look["strays"]]
    unlisted = [region for look in looks.values() for region in look["unlisted"]]
    if output is Output.TABLE and found:
        put_table(_table(found, SystemClock().now()))
    for region in unlisted:
        say(f"{_where(region)} cannot be listed: {region['why']}")
    removed: list[View] = []
    failed: list[View] = []
    if found and not dry_run:
        ask(f"Remove {plural(len(found), 'thing')}{_cost(found)}?", yes=yes)
        with _hands(here) as hands:
            removed, failed = _remove(hands, found)
    if output is Output.JSON:
        put_json({"found": found, "unlisted": unlisted, "removed": removed, "failed": failed})
    elif not found and not unlisted:
        say("nothing is left over")
    if failed:
        raise CommandFailed(f"{plural(len(failed), 'thing')} could not be removed; see above")
    if unlisted:
        raise CommandFailed("not everything could be listed; see above")


def _chosen(wanted: Sequence[str], enabled: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in enabled:
            raise WrongUsage(f"no cloud {name} is enabled here (enabled: {', '.join(enabled) or 'none'})")
    return [name for name in enabled if not wanted or name in wanted]


# --- removing -----------------------------------------------------------------------------------------------


def _remove(hands: Hands, found: Sequence[View]) -> tuple[list[View], list[View]]:
    """Instances first, what they left next, what they shared last. A line as each is gone, or is not."""
    failed: list[View] = []
    removed: list[View] = []

    def note(stray: View, why: str) -> None:
        if why:
            failed.append(stray | {"why": why})
            say(f"{_named(stray)} is left: {why}")
        else:
            removed.append(stray)
            say(f"removed {_named(stray)}")

    instances = [stray for stray in found if stray["part"] == "instance"]
    refusals = {_key(stray): _insist(hands, stray) for stray in instances}
    still = _await_gone(hands, [stray for stray in instances if not refusals[_key(stray)]])
    for stray in instances:
        lives = "it has been asked to end, and the cloud still lists it" if _key(stray) in still else ""
        note(stray, refusals[_key(stray)] or lives)
    for stray in found:
        if stray["part"] == "leftover":
            note(stray, _insist(hands, stray))
    shared = [stray for stray in found if stray["part"] == "shared"]
    for cloud in sorted({stray["cloud"] for stray in shared}):
        of_cloud = [stray for stray in shared if stray["cloud"] == cloud]
        problems = hands.forget(cloud)
        left = _left(hands, of_cloud) if problems else set()
        for stray in of_cloud:
            note(stray, "; ".join(problems) if _key(stray) in left else "")
    return removed, failed


def _left(hands: Hands, shared: Sequence[View]) -> set[Key]:
    """What is there of it after something went wrong; all of it, where nobody can tell."""
    keys = {_key(stray) for stray in shared}
    listed = {_key(stray) for stray in hands.look(shared[0]["cloud"])["strays"]}
    return keys & listed or keys


def _insist(hands: Hands, stray: View) -> str:
    """Remove it; why not, if it cannot be."""
    for _ in range(TRIES):
        refusal = hands.remove(stray)
        if not refusal["passes"]:
            break
        time.sleep(POLL_S)
    return str(refusal["why"])


def _await_gone(hands: Hands, instances: Sequence[View]) -> set[Key]:
    """The keys of those that the clouds still list in the end."""
    waited = {_key(stray): stray["cloud"] for stray in instances}
    for _ in range(int(GONE_PATIENCE_S / POLL_S)):
        for cloud in sorted(set(waited.values())):
            look = hands.look(cloud)
            listed = {_key(stray) for stray in look["strays"]}
            if not look["unlisted"]:
                waited = {key: at for key, at in waited.items() if at != cloud or key in listed}
        if not waited:
            break
        time.sleep(POLL_S)
    return set(waited)


# --- who does the work --------------------------------------------------------------------------------------


class _Asked:
    """The controller does it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def look(self, cloud: str) -> View:
        return self._client.leaks(cloud)

    def remove(self, stray: View) -> View:
        return self._client.remove_leak(stray["cloud"], stray["kind"], stray["id"], stray["region"])

    def forget(self, cloud: str) -> Sequence[str]:
        return self._client.forget_cloud(cloud)


class _Own:
    """We do it."""

    def __init__(self, janitor: Janitor) -> None:
        self._janitor = janitor

    def look(self, cloud: str) -> View:
        return self._janitor.look(cloud).view()

    def remove(self, stray: View) -> View:
        return self._janitor.remove(_key(stray)).view()

    def forget(self, cloud: str) -> Sequence[str]:
        return self._janitor.forget(cloud)


@contextmanager
def _hands(here: Home) -> Iterator[Hands]:
    client = controller()
    try:
        client.health()
    except ControllerDownError:
        pass
    else:
        yield _Asked(client)
        return
    here.create()
    with _alone(here.lock):
        store = opened(here)
        try:
            clouds = Clouds(here, load_config(here.config))
            specs = SpecBook(store, seal_of(here))
            yield _Own(janitor_of(store, specs, clouds, SystemClock()))
        finally:
            store.close()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """With the lock that the home's controller holds as long as it lives."""
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


# --- how it looks -------------------------------------------------------------------------------------------


def _table(found: Sequence[View], now: float) -> Fitted:
    return table(
        ("CLOUD", "REGION", "KIND", "$/MONTH", "AGE", "ID"),
        [
            (
                stray["cloud"],
                stray["region"],
                stray["kind"],
                "-" if stray["usd_month"] is None else usd(stray["usd_month"]),
                "-" if stray["created_at"] is None else span(now - stray["created_at"]),
                stray["id"],
            )
            for stray in found
        ],
    )


def _cost(found: Sequence[View]) -> str:
    month = sum(stray["usd_month"] or 0.0 for stray in found)
    return f", about ${usd(month)} per month" if month else ""


def _named(stray: View) -> str:
    return f"{stray['kind']} {stray['id']} in {_where(stray)}"


def _where(thing: Mapping[str, object]) -> str:
    return "/".join(str(thing[key]) for key in ("cloud", "region") if thing[key])


def _key(stray: View) -> Key:
    return stray["cloud"], stray["kind"], stray["id"], stray["region"]
