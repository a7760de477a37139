"""The flags that several verbs share, and the two things every verb begins with: the home and the controller."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from skyserve_cli.commands.deadline import time_given
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.remote import RemoteError, remote_of
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, inform

COMPLETION_S = 2.0  # a shell waits for it

View = dict[str, Any]  # a service, a replica or an event as the controller's API gives it


class OutputFormat(str, Enum):
    TABLE = "table"
    JSON = "json"


class Mode(str, Enum):
    ROLLING = "rolling"
    BLUE_GREEN = "blue_green"


def home() -> Home:
    return Home.from_environment(os.environ)


def controller() -> ControllerClient:
    """Return the client of the controller that the commands call. Raises RemoteError."""
    client = ControllerClient(home(), remote_of(home(), os.environ))
    client.on_upload = show_upload
    return bounded(client)


def own_controller() -> ControllerClient:
    """Return the client of the controller of this home, whichever context is in use."""
    return bounded(ControllerClient(home()))


def bounded(client: ControllerClient) -> ControllerClient:
    """Let the command say what it waits for, and end at the deadline of `serve --timeout`."""
    client.waiting.notice = inform
    client.waiting.limit(time_given())
    return client


def show_upload(path: str, sent: int, total: int) -> None:
    """Show how far the sending of local files to a controller on another host is."""
    from skyserve_cli.commands.uploads import UPLOADS

    UPLOADS.show(path, sent, total)


def complete_service(incomplete: str) -> list[str]:
    """Return names for the shell. Silent without a controller."""
    try:
        client = controller()
        client.waiting.notice = None
        client.waiting.limit(COMPLETION_S)
        services = client.services_since("", may_be_old=True).views or []
    except (*AWAY, RemoteError, RefusedError, OSError):
        return []
    return [view["name"] for view in services if view["name"].startswith(incomplete)]


def no_such_service(name: str, known: Iterable[str]) -> CommandFailed:
    """Return the error for a name that no service has."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return CommandFailed(f"there is no service {name}; did you mean {close[0]}?")
    return CommandFailed(f"there is no service {name}" + (f" (known: {', '.join(names)})" if names else ""))


def only_name(names: Collection[str]) -> str:
    """Return the only one; empty: there are several or none, which for a controller is all services."""
    return next(iter(names)) if len(names) == 1 else ""


def find(services: Iterable[View], name: str) -> View:
    """Return the service of that name. Raises CommandFailed."""
    known = {view["name"]: view for view in services}
    if name not in known:
        raise no_such_service(name, known)
    return known[name]


File = Annotated[Path, typer.Argument(metavar="FILE", help="The service file (YAML).", show_default=False)]
ServiceName = Annotated[
    str, typer.Argument(metavar="NAME", autocompletion=complete_service, show_default=False)
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return once the controller knows; do not wait.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Give up waiting after this long.")
]
Format = Annotated[OutputFormat, typer.Option("-o", "--output", help="Output format.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="Set a variable of envs; without VALUE from yours."),
]
EnvFile = Annotated[Path | None, typer.Option("--env-file", help="Variables of envs, a NAME=VALUE per line.")]
Secret = Annotated[
    list[str] | None,
    typer.Option(
        "--secret", metavar="NAME[=VALUE]", help="Set a secret; without VALUE from your environment."
    ),
]
SecretFile = Annotated[Path | None, typer.Option("--secret-file", help="Secrets, a NAME=VALUE per line.")]
Team = Annotated[
    str | None,
    typer.Option(
        "--team",
        metavar="TEAM",
        help="Whose quota it uses, in place of service.team. Another than your own needs admin.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change the file: --set replica_policy.min_replicas=3"),
]
