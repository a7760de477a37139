"""`serve catalog`: what machines there are, where, and what they cost; and reading the clouds' price APIs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from policies.model import CapacityType
from provisioners.clock import unix_now
from provisioners.offers.catalog import Catalog, Price, Row, packaged, stock
from provisioners.offers.catalog.discovered import reasons
from provisioners.offers.catalog.fetch import Sources
from provisioners.offers.catalog.refresh import JUMP, PRICE_APIS, Refreshed
from provisioners.offers.catalog.refresh import refresh as ask_anew
from provisioners.offers.catalog.store import save
from provisioners.offers.matching import Reason
from provisioners.port.accelerator_names import canonical, close_to
from provisioners.port.errors import ProvisionError
from skyserve_cli.commands.catalog_discover import discover, steps
from skyserve_cli.commands.options import Format, OutputFormat, View, home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json, span, usd
from skyserve_cli.text_tables import FittedTable, put_table

SHOWN = 40
REFUSALS_SHOWN = 10

app = typer.Typer(
    invoke_without_command=True, help="List what machines the clouds have, where, and what they cost."
)


def complete_accelerator(incomplete: str) -> list[str]:
    return [name for name in packaged().accelerators if name.lower().startswith(incomplete.lower())]


def complete_cloud(incomplete: str) -> list[str]:
    return [name for name in packaged().clouds if name.startswith(incomplete.lower())]


def complete_region(incomplete: str) -> list[str]:
    regions = sorted({row.zone.region for row in packaged().rows})
    return [name for name in regions if name.startswith(incomplete.lower())]


app.command()(discover)

Cloud = Annotated[
    str | None, typer.Option("--cloud", help="Of this cloud only.", autocompletion=complete_cloud)
]


@app.callback()
def catalog(
    context: typer.Context,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            metavar="NAME[:COUNT]",
            help="Machines with this accelerator, or with COUNT of it; `none` for those without any.",
            autocompletion=complete_accelerator,
        ),
    ] = None,
    cloud: Cloud = None,
    region: Annotated[
        str | None, typer.Option("--region", help="In this region only.", autocompletion=complete_region)
    ] = None,
    spot: Annotated[
        bool | None,
        typer.Option("--spot/--on-demand", help="By this price, and only what has one. Default: the lower."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=0, help=f"At most N rows. Default: {SHOWN}; 0: all of them."
        ),
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """List what machines the clouds have, where, and what they cost.

    Cheapest first. Nothing is requested over the network: prices are those that came with the product, those of the last
    `serve catalog refresh`, and your own of catalog/extra.json; their age and quality (exact, derived, approximate, estimated) are
    shown. With -o json all rows, with their sources and, after `serve catalog discover`, why your account cannot have one.
    """
    if context.invoked_subcommand is not None:
        return
    held = stock(home().root)
    known = held.catalog
    kind = None if spot is None else CapacityType.SPOT if spot else CapacityType.ON_DEMAND
    found = sorted(_fitting(known, accelerator, cloud, region, kind), key=lambda row: _rank(row, kind))
    most = (SHOWN if output is OutputFormat.TABLE else 0) if limit is None else limit
    rows, now = found[: most or None], unix_now()
    if output is OutputFormat.JSON:
        reason = reasons(held.discoveries, lambda: now)
        put_json([_view(row, now, reason) for row in rows])
        return
    columns = (
        "CLOUD",
        "ZONE",
        "INSTANCE",
        "ACCELERATOR",
        "#CPUS",
        "#GIB",
        "$/H SPOT",
        "$/H ON DEMAND",
        "AGE",
        "QUALITY",
    )
    put_table(FittedTable(columns, [_line(row, kind, now) for row in rows]))
    if len(rows) < len(found):
        inform(f"{len(found) - len(rows)} more; --limit 0 lists them all")


@app.command()
def refresh(
    cloud: Cloud = None,
    accept: Annotated[
        bool, typer.Option("--accept", help=f"Believe prices that are more than {JUMP:g} times off, too.")
    ] = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Read the current prices from the clouds' price APIs, and keep them.

    AWS is called with your credentials, Google Cloud with the API key in SKYSERVE_GCP_API_KEY, Azure with none. A price
    far from the known one, or spot above on-demand, is refused and the known one kept. Exit code 1 if a cloud could not
    be called.
    """
    if cloud is not None and cloud.lower() not in PRICE_APIS:
        raise _no_such("cloud", cloud, PRICE_APIS)
    here = home()
    here.create()
    known, sources = stock(here.root).listed, Sources.from_environment()
    views: list[View] = []
    for name in PRICE_APIS if cloud is None else (cloud.lower(),):
        view: View = {"cloud": name, "asked": True, "why": "", "taken": 0, "refused": []}
        try:
            with steps(name) as progress:
                done = ask_anew(
                    name, known.of(name).listings, sources, unix_now(), accept=accept, progress=progress
                )
        except ProvisionError as error:
            view |= {"asked": False, "why": str(error)}
        else:
            save(here.root, name, done.listings)
            view |= {"taken": done.taken, "refused": [str(refusal) for refusal in done.refused]}
        views.append(view)
        if output is OutputFormat.TABLE:
            _print(view, done if view["asked"] else None)
    if output is OutputFormat.JSON:
        put_json(views)
    missing = [view["cloud"] for view in views if not view["asked"]]
    if missing:
        raise CommandFailed(f"prices as they were: {', '.join(missing)}")


# --- Listing -------------------------------------------------------------------------------------------------


def _fitting(
    known: Catalog, accelerator: str | None, cloud: str | None, region: str | None, kind: CapacityType | None
) -> Iterator[Row]:
    """Yield the rows that are requested. Raises WrongUsage for names that the catalog has not."""
    name, count = _accelerator(known, accelerator)
    if cloud is not None and cloud.lower() not in known.clouds:
        raise _no_such("cloud", cloud, known.clouds)
    regions = {row.zone.region for row in known.rows if cloud is None or row.zone.cloud == cloud.lower()}
    if region is not None and region.lower() not in regions:
        raise _no_such("region", region, sorted(regions))
    for row in known.rows if accelerator is None else known.by_accelerator[name]:
        if (
            (count is None or abs(row.shape.accelerator_count - count) < 0.005)
            and (cloud is None or row.zone.cloud == cloud.lower())
            and (region is None or row.zone.region == region.lower())
            and (kind is None or row.price(kind) is not None)
        ):
            yield row


def _accelerator(known: Catalog, written: str | None) -> tuple[str | None, float | None]:
    """Name and count; (None, None) for ``none`` and for no wish."""
    if written is None or written.lower() == "none":
        return None, None
    word, colon, number = written.partition(":")
    name = canonical(word)
    if name not in known.by_accelerator:
        raise _no_such("accelerator", word, known.accelerators)
    try:
        return name, float(number) if colon else None
    except ValueError:
        raise WrongUsage(f"--accelerator takes a name and a count, like L4:4 (got {written!r})") from None


def _no_such(what: str, word: str, known: Iterable[str]) -> WrongUsage:
    names = sorted(known)
    close = close_to(word, names)
    hint = f"did you mean {close!r}?" if close else f"it has {', '.join(names)}"
    return WrongUsage(f"the catalog has no {what} {word!r}; {hint}")


def _price(row: Row, kind: CapacityType | None) -> Price:
    """Return the price that a row is listed by: of the market that was requested, else the lower."""
    chosen = row.price(kind) if kind is not None else None
    known = [price for price in map(row.price, CapacityType) if price is not None]
    return chosen or min(known, key=lambda price: price.usd_hour, default=row.on_demand)


def _rank(row: Row, kind: CapacityType | None) -> tuple[float, object, str]:
    return _price(row, kind).usd_hour, row.zone, row.shape.name


def _line(row: Row, kind: CapacityType | None, now: float) -> tuple[str, ...]:
    shape, origin = row.shape, _price(row, kind).origin
    age_s = origin.age_s(now)
    return (
        shape.cloud,
        row.zone.name,
        shape.name,
        "-" if shape.accelerator is None else f"{shape.accelerator}:{shape.accelerator_count:g}",
        f"{shape.vcpus:g}",
        f"{shape.memory_gib:g}",
        "-" if row.spot is None else usd(row.spot.usd_hour),
        "-" if shape.no_on_demand else usd(row.on_demand.usd_hour),
        "undated" if age_s is None else span(age_s).partition(" ")[0],
        origin.quality.value,
    )


def _view(row: Row, now: float, reason: Reason) -> View:
    shape = row.shape
    return {
        "cloud": shape.cloud,
        "region": row.zone.region,
        "zone": row.zone.name,
        "instance_type": shape.name,
        "accelerator": shape.accelerator,
        "accelerator_count": shape.accelerator_count,
        "vcpus": shape.vcpus,
        "memory_gib": shape.memory_gib,
        "image_family": shape.image_family.value,
        "sold_on_demand": not shape.no_on_demand,
        "on_demand": _price_view(row.on_demand, now),
        "spot": None if row.spot is None else _price_view(row.spot, now),
        "closed": {market.value: why for market in CapacityType if (why := reason(shape, row.zone, market))},
    }


def _price_view(price: Price, now: float) -> View:
    origin = price.origin
    as_of = None if origin.as_of is None else datetime.fromtimestamp(origin.as_of, UTC).isoformat()
    return {
        "usd_hour": price.usd_hour,
        "quality": origin.quality.value,
        "source": origin.source,
        "as_of": as_of,
        "age_s": origin.age_s(now),
    }


# --- Refreshing ----------------------------------------------------------------------------------------------


def _print(view: View, done: Refreshed | None) -> None:
    if done is None:
        inform(f"{view['cloud']}: {view['why']}")
        return
    inform(f"{view['cloud']}: {plural(done.taken, 'price')} taken over, {len(done.refused)} refused")
    for refusal in done.refused[:REFUSALS_SHOWN]:
        inform(f"  {refusal}")
    if len(done.refused) > REFUSALS_SHOWN:
        inform(f"  and {len(done.refused) - REFUSALS_SHOWN} more; -o json lists them")
    if any(refusal.can_be_accepted for refusal in done.refused):
        inform("  --accept takes those over that are only far from the known price")
