"""`serve test`: whether a service that is up serves, by a few requests to its endpoint."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import Format, OutputFormat, controller, find
from skyserve_cli.output import CommandFailed, WrongUsage, inform, put_json
from skyserve_cli.profile.trial import FAILED, Check, checks
from skyserve_cli.text_tables import FittedTable, doing, put_table

KEY_VARIABLE = "SKYSERVE_API_KEY"
#: Without these a client gets nothing.
NEEDED = ("models", "chat", "stream", "latency")


def test(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME|URL",
            help="A service that is up, or the URL of an OpenAI-compatible server.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Model to request. Default: the first that is listed.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="FILE", help=f"File with the API key to send. Default: ${KEY_VARIABLE}."
        ),
    ] = None,
    max_time: Annotated[
        str, typer.Option("--max-time", metavar="DURATION", help="All requests end within this time.")
    ] = "60s",
    output: Format = OutputFormat.TABLE,
) -> None:
    """Test a running service with a few requests: models, a chat, a stream, tools, latency.

    Prints a row for each check. A `note` is something that the server does not do and that clients may not need, such as calls of tools. Exit code 1
    if the endpoint does not serve. `serve check` is about clouds.

    \b
    serve test chat
    serve test http://127.0.0.1:8000 -o json
    """
    within = seconds("--max-time", max_time)
    if within <= 0:
        raise WrongUsage(f"--max-time must be above 0 (got {max_time})")
    key = _key(api_key_file)
    url = target if target.startswith(("http://", "https://")) else _endpoint(target)
    found = _checked(url, model, key, within)
    failed = [each for each in found if each.name in NEEDED and each.result == FAILED]
    if output is OutputFormat.JSON:
        put_json({"endpoint": url, "serves": not failed, "checks": [_view(each) for each in found]})
    else:
        put_table(
            FittedTable(
                ("CHECK", "RESULT", "FOUND"), [(each.name, each.result, each.detail) for each in found]
            )
        )
    if failed:
        raise CommandFailed(f"{url} does not serve: {failed[0].name}: {failed[0].detail}")


def _endpoint(name: str) -> str:
    """Return where the service is. Raises CommandFailed."""
    view = find(controller().services(name), name)
    if not view["endpoint"]:
        raise CommandFailed(f"{name} has no endpoint yet: wait for it (serve status {name})")
    if not view["ready"]:
        inform(f"no replica of {name} is ready: the first request waits for one")
    return str(view["endpoint"])


def _checked(url: str, model: str | None, key: str | None, within_s: float) -> list[Check]:
    async def run() -> list[Check]:
        found = []
        async for check in checks(url, model, key, within_s):
            found.append(check)
            show(f"testing {url}: {check.name} {check.result}")
        return found

    with doing(f"testing {url}") as show:
        try:
            return asyncio.run(run())
        except ValueError as error:
            raise WrongUsage(f"{url} is no URL that can be requested: {error}") from None


def _view(check: Check) -> dict[str, object]:
    figures = {name: round(value, 2) for name, value in check.figures.items()}
    return {"check": check.name, "result": check.result, "found": check.detail, "figures": figures}


def _key(file: Path | None) -> str | None:
    """Return the API key of the file, or of the environment. Raises WrongUsage."""
    if file is None:
        key, where = os.environ.get(KEY_VARIABLE), f"${KEY_VARIABLE}"
        if not key:
            return None
    else:
        where = f"--api-key-file: {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUsage(f"--api-key-file: cannot read {file}: {error}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise WrongUsage(f"{where} has no key on one line")
    return key
