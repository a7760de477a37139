"""`serve report`: what a service has done, as `serve simulate` shows what it would have done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.account.service_history import NoHistoryError, ServiceHistory, service_history
from skyserve_cli.account.view import report_view
from skyserve_cli.commands import pictures
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import Format, OutputFormat, complete_service, controller, find
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, date_time, inform, put, put_json
from skyserve_cli.report import history_text
from skyserve_cli.text_tables import FittedTable, put_table


def report(
    name: Annotated[str, typer.Argument(autocompletion=complete_service, show_default=False)],
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="DURATION", help="The last 2h, say. Default: since it was brought up."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html|FILE.png", help="Draw it: replicas and spend over time."),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Show how available a service was, on what it ran, and what it cost.

    Counts from the moment the wanted replicas were ready for the first time.
    The picture has the replicas over time by zone and market, and the spend against all on demand.

    \b
    serve report chat
    serve report chat --since 24h --out chat.html
    """
    pictures.insist_on_writable("--out", out)
    last_s = None if since is None else seconds("--since", since)
    client = controller()
    find(client.services(name, down=True), name)
    history = client.history(name, since=0.0 if last_s is None else SystemClock().now() - last_s)
    try:
        account = service_history(history)
    except NoHistoryError as error:
        raise CommandFailed(str(error)) from None
    if history["complete_from"] > history["since"]:
        inform(f"what was before {date_time(history['complete_from'])} is no longer kept one by one")
    if output is OutputFormat.JSON:
        put_json(report_view(account, history))
    else:
        inform(history_text.setting(account))
        put_table(FittedTable(*history_text.totals(account)))
        put("")
        put_table(FittedTable(*history_text.bought(account)))
        put(history_text.verdict(account))
    if out is not None:
        _draw(account, out)


def _draw(account: ServiceHistory, path: Path) -> None:
    from skyserve_cli.report import page as drawn

    pictures.draw("--out", path, lambda command: drawn.write_history(account, path, command=command))
