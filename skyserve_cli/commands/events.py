"""`serve events`: the event log, as it is and as it grows."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from skyserve_cli.commands.durations import instant
from skyserve_cli.commands.options import OutputFormat, View, complete_service, controller, find
from skyserve_cli.commands.sentences import words
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import date_time, printable, put

POLL_S = 0.5
USUAL_LINES = 100
MOST_LINES = 10_000


def events(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Of this service only.", autocompletion=complete_service),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--lines",
            metavar="N",
            min=0,
            max=MOST_LINES,
            help=f"The last N old lines at most. Default: {USUAL_LINES}, or {MOST_LINES} with --since.",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="Old lines of the last 2h, say, or since 14:05."),
    ] = None,
    output: Annotated[
        OutputFormat, typer.Option("-o", "--output", help="json: an object per line.")
    ] = OutputFormat.TABLE,
) -> None:
    """Show the event log: what happened to services and replicas, and why."""
    begin = 0.0 if since is None else instant("--since", since, SystemClock().now())
    if count is None:
        count = USUAL_LINES if since is None else MOST_LINES
    client = controller()
    if name is not None:
        find(client.services(name, down=True), name)
    # One line at least, to know how far the event log goes.
    found = client.events(name, newest=True, limit=max(1, count))
    _print([event for event in found[-count:] if event["at"] >= begin] if count else [], output)
    after = found[-1]["seq"] if found else 0
    with suppress(KeyboardInterrupt):
        while follow:
            events = client.events(name, after=after)
            _print(events, output)
            after = events[-1]["seq"] if events else after
            time.sleep(POLL_S)


def _print(events: Sequence[View], output: OutputFormat) -> None:
    for event in events:
        put(json.dumps(event) if output is OutputFormat.JSON else _line(event))
    sys.stdout.flush()


def _line(event: View) -> str:
    """Columns of fixed width: lines that come one by one cannot wait for the widest."""
    replica = "" if event["replica_id"] is None else f"/{event['replica_id']}"
    state = event["state"] or ""
    by = f" (by {event['author']})" if event.get("author") not in (None, "owner") else ""
    return printable(
        f"{date_time(event['at'])}  {event['service'] + replica:<20}  {words(event['kind']):<16}  "
        f"{state:<12}  {event['message']}{by}"
    ).rstrip()
