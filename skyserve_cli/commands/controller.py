"""`serve controller`: the daemon's own verbs. Services go on serving while it is away."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from skyserve_cli.commands.options import Format, Output, home
from skyserve_cli.commands.options import controller as connect
from skyserve_cli.controller.client import ControllerDownError
from skyserve_cli.home import is_held
from skyserve_cli.output import CommandFailed, put, put_json, say, span

STOP_PATIENCE_S = 30.0
POLL_S = 0.05

app = typer.Typer(no_args_is_help=True, help="Start, stop and look at the controller.")


@app.command()
def start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Run it here, until Ctrl-C.")] = False,
) -> None:
    """Start the controller; nothing happens if it is running.

    `serve up` does this by itself. A controller that dies is started again, but not with --foreground: that is
    the service manager's work.
    """
    if foreground:
        arguments = [sys.executable, "-m", "skyserve_cli.controller.daemon"]
        os.execv(sys.executable, arguments)  # noqa: S606 - the daemon is its own program
    started = connect().ensure_running()
    say("controller started" if started else "the controller is running already")


@app.command()
def stop() -> None:
    """Stop the controller; replicas and load balancers go on."""
    try:
        pid = connect().stop()
    except ControllerDownError:
        say("the controller is not running")
        return
    for _ in range(int(STOP_PATIENCE_S / POLL_S)):
        if not is_held(home().lock) and not is_held(home().keeper_lock):
            say("controller stopped; services go on serving")
            return
        time.sleep(POLL_S)
    raise CommandFailed(f"the controller (process {pid}) has not stopped after {span(STOP_PATIENCE_S)}")


@app.command()
def status(output: Format = Output.TABLE) -> None:
    """Show whether the controller is running; exit code 1 if it is not."""
    try:
        health = connect().health()
    except ControllerDownError:
        if output is Output.JSON:
            put_json({"running": False})
        raise
    if output is Output.JSON:
        put_json({"running": True, **health})
        return
    clouds = ", ".join(health["clouds"]) or "none"
    lease = health["lease"]
    if not lease["leads"]:
        say(f"it stands by: {lease['leader'] or 'no controller'} leads")
    put(
        f"running for {span(health['uptime_s'])}, process {health['pid']}, version {health['version']}, "
        f"home {home().root}, clouds: {clouds}"
    )
