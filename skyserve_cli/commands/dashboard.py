"""`serve dashboard`: the page of this home's controller."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from skyserve_cli.commands.options import Format, OutputFormat, controller
from skyserve_cli.output import inform, put, put_json


def dashboard(
    print_url: Annotated[
        bool, typer.Option("--print-url", help="Print the address instead of opening a browser.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1024,
            max=65535,
            help="Port of 127.0.0.1. Default: the configured one, or the last one.",
        ),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Open the page that shows services, their replicas, spending and requests over time.

    The address works once, within a minute; the page then stays open for 12 hours.
    From another machine: ssh -L PORT:127.0.0.1:PORT HOST, then the printed address.
    """
    client = controller()
    client.ensure_running()
    found = client.dashboard(port)
    if output is OutputFormat.JSON:
        put_json(found)
    elif print_url or not webbrowser.open(found["url"]):
        put(found["url"])
    else:
        inform(f"opened http://127.0.0.1:{found['port']}/")
