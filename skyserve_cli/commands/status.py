"""`serve status`: services, their replicas, and their costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.commands.options import (
    View,
    complete_service,
    controller,
    find,
    home,
    no_such_service,
    only_name,
)
from skyserve_cli.commands.sentences import CONTROLLER_DOWN, NO_SERVICE
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.controller.api.reasons import of_activity
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put, put_json, span

REFRESH_S = 1.0
#: The exit code where the database is gone, older, or another one than before, or damaged.
STATE_LOST = 4
OLD_S = 3.0  # a response of a database that is not slow is younger


class Shape(str, Enum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


def status(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Default: all.", autocompletion=complete_service),
    ] = None,
    endpoint: Annotated[
        bool, typer.Option("--endpoint", help="Print the URL of one service, and only that.")
    ] = False,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Go on, once a second, until Ctrl-C.")] = False,
    everything: Annotated[
        bool, typer.Option("-a", "--all", help="Also services that are down and replicas that have ended.")
    ] = False,
    output: Annotated[Shape, typer.Option("-o", "--output", help="Output format.")] = Shape.TABLE,
) -> None:
    """Show services, their replicas, and what they cost."""
    if watch and (endpoint or output is Shape.JSON):
        raise WrongUsage("--watch is for people: it goes with neither --endpoint nor -o json")
    client = controller()
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(client, names or [], everything, wide=output is Shape.WIDE)
        return
    try:
        found = client.services_since(
            "", only_name(names or []), down=everything, ended=everything, may_be_old=True
        )
        services = _named(found.views or [], names or [])
    except ControllerDownError as error:
        services, is_sound = _without_controller(error), True
    else:
        is_sound = _warn(client, found.age_s)
    if endpoint:
        put(_only(services, names or [])["endpoint"])
    elif output is Shape.JSON:
        put_json(services)
    elif not services:
        inform(NO_SERVICE)
    else:
        _put(services, wide=output is Shape.WIDE)
    if not is_sound:
        raise typer.Exit(STATE_LOST)


def _warn(client: ControllerClient, age_s: float) -> bool:
    """First of all: what the controller says may be old. Returns False if its state is not the one it had."""
    with suppress(ControllerDownError, RefusedError):  # the latter: an earlier release
        activity = client.activity()
        database, lease = activity["database"], activity["lease"]
        if lease.get("unfit"):
            inform(f"this controller must not lead: {lease['unfit']}")
            return not lease.get("astray")
        if not lease["leads"]:
            inform(f"this controller stands by: {lease['leader'] or 'no controller'} leads")
        if not database["ok"]:
            ago = span(database["bad_s"])
            inform(
                f"the controller cannot read or write its state ({database['why']}): what follows is {ago} old"
            )
        elif age_s >= OLD_S:
            inform(f"as of {span(age_s)} ago: {of_activity(activity).sentence}")
    return True


def _named(services: list[View], names: Sequence[str]) -> list[View]:
    return [find(services, name) for name in names] if names else services


def _without_controller(error: ControllerDownError) -> list[View]:
    """Services are unknown, unless there never was one. Raises the error, or that the database is gone."""
    url, place_of_sqlite = home().database_url, "sqlite:///"
    file = Path(url.removeprefix(place_of_sqlite))
    if not url.startswith(place_of_sqlite) or file.exists():
        raise error
    from skyserve_cli.controller.persistence.known_state import why_gone

    why = why_gone(home(), file)
    if why:
        raise CommandFailed(f"{CONTROLLER_DOWN}, and {why}", STATE_LOST) from error
    return []


def _only(services: Sequence[View], names: Sequence[str]) -> View:
    if len(services) == 1:
        return services[0]
    if not services:
        raise no_such_service(names[0], ()) if names else CommandFailed(NO_SERVICE)
    raise WrongUsage(f"--endpoint is for one service; name it ({', '.join(v['name'] for v in services)})")


def _put(services: Sequence[View], *, wide: bool) -> None:
    from skyserve_cli.commands.status_tables import tables  # with Rich, which --endpoint and JSON do not need
    from skyserve_cli.text_tables import put_table

    for each in tables(services, SystemClock().now(), wide=wide):
        put_table(each)


def _watch(client: ControllerClient, names: Sequence[str], everything: bool, *, wide: bool) -> None:
    from rich.console import Group
    from rich.live import Live

    from skyserve_cli.commands.status_tables import ages, tables
    from skyserve_cli.text_tables import console

    clock = SystemClock()
    screen = console(sys.stdout)
    services: list[View] = []
    etag = ""
    seen: tuple[str, ...] | None = None
    with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            changed, etag, age_s = client.services_since(
                etag, only_name(names), down=everything, ended=everything, may_be_old=True
            )
            now = clock.now()
            if changed is not None:
                services = _named(changed, names)
            if changed is not None or ages(services, now) != seen:
                seen = ages(services, now)
                shown = [*tables(services, now, wide=wide)] if services else [NO_SERVICE]
                old = [f"as of {span(age_s)} ago: the database responds slowly"] if age_s >= OLD_S else []
                live.update(Group(*old, *shown), refresh=True)
            time.sleep(REFRESH_S)
