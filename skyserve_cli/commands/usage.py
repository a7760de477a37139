"""`serve usage`: what the requests of each API key and model have used, by day."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Annotated, Any

import typer

from skyserve_cli.commands.options import ServiceName, View, controller, find
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import WrongUsage, inform, printable, put_json, usd
from skyserve_cli.text_tables import FittedTable, put_table

_NUMBERS = ("requests", "tokens_in", "tokens_out")
_HEADINGS = ("REQUESTS", "TOKENS IN", "TOKENS OUT")


class Group(str, Enum):
    KEY = "key"
    MODEL = "model"
    DAY = "day"


class UsageFormat(str, Enum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def usage(
    name: ServiceName,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="DAY", help="First day: 2026-11-01, or 7d for the last 7 days. Default: 30d."
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="DAY", help="Last day, which is included. Default: today (UTC)."),
    ] = None,
    by: Annotated[
        list[Group] | None,
        typer.Option(
            "--by", help="A row per key, model or day. Repeat it for finer rows. Default: key and model."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top", metavar="N", min=1, help="Only the N rows with the most tokens, largest first."
        ),
    ] = None,
    output: Annotated[UsageFormat, typer.Option("-o", "--output", help="Output format.")] = UsageFormat.TABLE,
) -> None:
    """Show what the requests of each API key and model have used.

    Tokens are those that engines report, or estimates where they report none. Days are in UTC; a request belongs to the day on
    which it ended. 400 days are kept, also of services that are down. A key "-" is of requests that needed none, a model "-" of
    requests without one that a replica has served. A service with load_balancer.prices shows what the tokens cost, those of earlier
    days at the prices of today, too.

    \b
    serve usage chat
    serve usage chat --since 2026-11-01 --by key
    serve usage chat --since 7d --by day --by key -o csv
    """
    first, last = _days(since, until, datetime.fromtimestamp(SystemClock().now(), UTC).date())
    groups = [each.value for each in by or (Group.KEY, Group.MODEL)]
    groups = [group for index, group in enumerate(groups) if group not in groups[:index]]
    client = controller()
    find(client.services(name, down=True), name)
    found = client.usage(name, since=first.isoformat(), until=last.isoformat(), by=groups, top=top)
    if output is UsageFormat.JSON:
        put_json(found)
    elif output is UsageFormat.CSV:
        _put_csv(found)
    else:
        _put_table(found)


def _put_csv(found: View) -> None:
    """One line per row, without the total, for programs that add up themselves."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [*found["by"], *_NUMBERS, *(["usd"] if "usd" in found["total"] else [])]
    writer.writerow(columns)
    writer.writerows([row[column] for column in columns] for row in found["rows"])
    sys.stdout.flush()


def _put_table(found: View) -> None:
    inform(f"{found['name']}, {found['since']} to {found['until']} (UTC)")
    groups = found["by"]
    rows = [(*(printable(row[group]) or "-" for group in groups), *_numbers(row)) for row in found["rows"]]
    if not rows:
        inform("no request has ended in this time")
        return
    total = ("total", *("" for _ in groups[1:]), *_numbers(found["total"]))
    priced = ("USD",) if "usd" in found["total"] else ()
    columns = (*(group.upper() for group in groups), *_HEADINGS, *priced)
    put_table(FittedTable(columns, [*rows, total]))


def _numbers(row: Any) -> tuple[str, ...]:
    cost = (usd(row["usd"]),) if "usd" in row else ()
    return (*(f"{row[number]:,}" for number in _NUMBERS), *cost)


def _days(since: str | None, until: str | None, today: date) -> tuple[date, date]:
    """Return the first and the last day. Raises WrongUsage."""
    last = today if until is None else _day("--until", until)
    text = "30d" if since is None else since.strip()
    number = text.removesuffix("d")
    if text.endswith("d") and number.isascii() and number.isdigit() and 1 <= int(number) <= 10_000:
        return last - timedelta(days=int(number) - 1), last
    first = _day("--since", text)
    if first > last:
        raise WrongUsage(f"--since {first} is after --until {last}")
    return first, last


def _day(option: str, text: str) -> date:
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        also = " or 7d" if option == "--since" else ""
        raise WrongUsage(f"{option} takes a day such as 2026-11-27{also} (got {text!r})") from None
