"""`serve notify`: the destinations of notifications (`notify:` in config.yaml)."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from skyserve_cli.commands.options import Format, OutputFormat, home
from skyserve_cli.config import load_config
from skyserve_cli.controller.notify.alarms import Notice
from skyserve_cli.controller.notify.delivery import deliver
from skyserve_cli.controller.notify.message import message_of
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.controller.shell_commands import CommandRunner
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put_json

app = typer.Typer(help="Send a test notification to the destinations in config.yaml.", no_args_is_help=True)
app.callback()(lambda: None)


@app.command("test")
def try_destinations(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Destinations. Default: all.")
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Send a notification now, as config.yaml says at present, and show which destinations confirm it.

    A running controller uses config.yaml as it was when it started: stop and start it after a change.
    """
    destinations = load_config(home().config).notify
    known = [one.name for one in destinations]
    if not known:
        raise WrongUsage("config.yaml has no destination under notify")
    for name in names or ():
        if name not in known:
            raise WrongUsage(f"notify: there is no destination {name}, only {', '.join(known)}")
    now, commands = SystemClock().now(), CommandRunner()
    message = message_of(
        Notice("", "test", True, "test of notifications by serve notify test"), secrets.token_hex(12), now
    )
    chosen = [one for one in destinations if not names or one.name in names]
    why = {one.name: deliver(one, message, now, commands.execute) for one in chosen}
    if output is OutputFormat.JSON:
        put_json([{"name": name, "confirmed": not reason, "why": reason} for name, reason in why.items()])
    else:
        for name, reason in why.items():
            inform(f"{name}: {reason or 'confirmed'}")
    if any(why.values()):
        raise CommandFailed("not every destination has confirmed the notification")
