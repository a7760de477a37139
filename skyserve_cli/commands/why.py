"""`serve why`: the cause of what a service or a replica does, and the next command to try."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import typer

from skyserve_cli.causes.explain import Explanation, explain
from skyserve_cli.causes.facts import Address, Facts, subject
from skyserve_cli.causes.log_text import TAIL_BYTES, cleaned
from skyserve_cli.commands.listening import listening, listening_there
from skyserve_cli.commands.options import Format, OutputFormat, View, complete_service, controller, find
from skyserve_cli.commands.sentences import words
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, WrongUsage, printable, put, put_json

LOG_S = 5.0
CONNECT_S = 2.0
LATELY_S = 300.0
EVENTS = 50


def why(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME[/ID]",
            help="A service, or one of its replicas.",
            autocompletion=complete_service,
            show_default=False,
        ),
    ],
    output: Format = OutputFormat.TABLE,
) -> None:
    """Say why a service, or one of its replicas, is not well, and what to do about it.

    The first line has the cause, the last one the next command to try; of a service that is well there is one line. It reads the
    status, the events, the end of the log of the replica that failed, and the endpoint.

    \b
    serve why chat
    serve why chat/3 -o json
    """
    name, replica_id = parsed(target)
    found = explained(controller(), name, replica_id)
    if output is OutputFormat.JSON:
        put_json(found.view())
        return
    for line in found.lines(target):
        put(printable(line))


def parsed(target: str) -> tuple[str, int | None]:
    """Return the service, and the replica if one is named. Raises WrongUsage."""
    name, slash, number = target.partition("/")
    if slash and not (number.isascii() and number.isdecimal()):
        raise WrongUsage(f"name a service, or one of its replicas as in chat/3 (got {target!r})")
    return name, int(number) if slash else None


def explained(client: ControllerClient, name: str, replica_id: int | None = None) -> Explanation:
    """Return the account. Raises CommandFailed, and what calls of the controller raise."""
    view = find(client.services(name, down=True, ended=True), name)
    replica = subject(view, replica_id)
    if replica_id is not None and replica is None:
        raise CommandFailed(
            f"service {name} has no replica {replica_id} that is live or ended within the last hour"
        )
    events = client.events(name, newest=True, limit=EVENTS)
    shown = [{**each, "words": words(each["kind"])} for each in events if _belongs(each, replica_id)]
    requests, errors = _lately(client, view)
    return explain(
        Facts(
            view,
            SystemClock().now(),
            replica,
            replica_id is not None,
            shown,
            "" if replica is None else cleaned(log_tail(client, f"replica/{name}/{replica['id']}")),
            _listening(client, view, replica),
            _endpoint_trouble(client, view),
            requests,
            errors,
        )
    )


def _belongs(event: View, replica_id: int | None) -> bool:
    return event["kind"] != "Progressed" and replica_id in (None, event["replica_id"])


def log_tail(client: ControllerClient, what: str) -> bytes:
    """Return the end of a log; nothing where none is kept, or where it does not arrive in time."""
    try:
        with client.waiting.within(LOG_S, LOG_S):
            content, _ = client.log(what, offset=-TAIL_BYTES)
            return content[-TAIL_BYTES:]
    except (RefusedError, DeadlineError, *AWAY, OSError):
        return b""


def _listening(client: ControllerClient, view: View, replica: View | None) -> list[Address]:
    """Return where the replica listens; of one that has ended, where the next one like it does, if not at its own port."""
    if replica is None:
        return []
    alike = [r for r in view["replicas"] if r["version"] == replica["version"] and r["state"] == "STARTING"]
    for one in (replica, *alike):
        port = urlsplit(one["endpoint"] or "").port
        found = listening(view["name"], one["id"], port) if port and one["state"] != "GONE" else []
        if found and (one is replica or all(each.port != port for each in found)):
            return found
    port = urlsplit(replica["endpoint"] or "").port
    if port and replica["state"] == "STARTING" and "refused" in replica["message"]:
        return listening_there(client, view["name"], replica["id"], port)
    return []


def _endpoint_trouble(client: ControllerClient, view: View) -> str:
    """Return why the endpoint takes no connection from here; "" if it does, or if it is not to be expected."""
    url = urlsplit(view["endpoint"] or "")
    is_elsewhere = "://" in client.where and view["endpoint_reach"] == "this_machine"
    if not view["ready"] or url.hostname is None or is_elsewhere:
        return ""
    try:
        socket.create_connection((url.hostname, url.port or 443), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _lately(client: ControllerClient, view: View) -> tuple[int, int]:
    """Return the requests of the last minutes, and those that got an error; zeros where that is not known."""
    if not view["ready"]:
        return 0, 0
    with suppress(RefusedError, DeadlineError):
        total = client.series(view["name"], since=SystemClock().now() - LATELY_S)["total"]
        return (total["requests"], total["errors"]) if total else (0, 0)
    return 0, 0
