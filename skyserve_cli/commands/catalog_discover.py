"""`serve catalog discover`: what the accounts can have, by the clouds' own lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from provisioners.offers.catalog import load
from provisioners.offers.catalog.discovered import Discovery, Progress
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.catalog.store import save_discovery
from provisioners.port.errors import ProvisionError
from provisioners.registry import PROVISIONERS
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.options import Format, OutputFormat, View, home
from skyserve_cli.config import ConfigError, load_config
from skyserve_cli.config_clouds import RentedConfig
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json
from skyserve_cli.text_tables import doing

NOTES_SHOWN = 10


def discover(
    cloud: Annotated[
        list[str] | None, typer.Option("--cloud", metavar="NAME", help="In this cloud only.")
    ] = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """List what your accounts can have, by the clouds' own lists, and keep it.

    Instance types with accelerators, their zones, whether they are sold as spot, and the quotas, with the credentials of
    `serve check`. What the catalog lacks is added at an estimated price until `serve catalog refresh`; what an
    account cannot have is not offered, and `serve plan` gives the reason. Nothing is launched. Exit code 1 if a cloud could not be listed.
    """
    here = home()
    here.create()
    config = load_config(here.config)
    clouds = Clouds(here, config)
    rented = [
        name
        for name, section in config.clouds.items()
        if section.enabled and name in PROVISIONERS and isinstance(section, RentedConfig)
    ]
    views: list[View] = []
    for name in _chosen(cloud or [], rented):
        before = load(here.root).of(name)
        try:
            with steps(name) as progress:
                found = clouds.discover(name, progress)
        except (ProvisionError, ConfigError) as error:
            views.append({"cloud": name, "listed": False, "why": str(error)})
        else:
            save_discovery(here.root, found)
            views.append(_view(found, before, load(here.root).of(name)))
        if output is OutputFormat.TABLE:
            _print(views[-1])
    if output is OutputFormat.JSON:
        put_json(views)
    failed = [view["cloud"] for view in views if not view["listed"]]
    if failed:
        raise CommandFailed(f"not listed: {', '.join(failed)}")


def _chosen(wanted: Sequence[str], enabled: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in enabled:
            raise WrongUsage(
                f"{name!r} is no enabled cloud that lists what an account can have (enabled: {', '.join(enabled) or 'none'})"
            )
    if not enabled:
        raise WrongUsage("no cloud that rents machines is enabled; see `serve check`")
    return [name for name in enabled if not wanted or name in wanted]


def _view(found: Discovery, before: Catalog, after: Catalog) -> View:
    known, now = ({row.shape.name for row in each.rows} for each in (before, after))
    zones, zones_now = ({(row.shape.name, row.zone) for row in each.rows} for each in (before, after))
    closed = sorted({why for one in found.offerings for why in one.closed.values()})
    return {
        "cloud": found.cloud,
        "listed": True,
        "why": "",
        "regions": list(found.regions),
        "types": len({one.shape.name for one in found.offerings if one.zones}),
        "new_types": sorted(now - known),
        "new_zones": len(zones_now - zones),
        "closed": closed,
        "notes": list(found.notes),
    }


def _print(view: View) -> None:
    name = view["cloud"]
    if not view["listed"]:
        inform(f"{name}: {view['why']}")
        return
    inform(
        f"{name}: {plural(view['types'], 'instance type')} in {plural(len(view['regions']), 'region')}; new: "
        f"{', '.join(view['new_types']) or 'no type'}, {plural(view['new_zones'], 'place')}"
    )
    for what, sentences in (("closed", view["closed"]), ("not determined", view["notes"])):
        for sentence in sentences[:NOTES_SHOWN]:
            inform(f"  {what}: {sentence}")
        if len(sentences) > NOTES_SHOWN:
            inform(f"  {what}: {len(sentences) - NOTES_SHOWN} more; -o json lists them")


@contextmanager
def steps(cloud: str) -> Iterator[Progress]:
    """How far the requests are."""
    with doing(f"{cloud}: requesting") as say_so:
        yield lambda done, of, what: say_so(f"{cloud}: {what}" + (f" ({done} of {of})" if of else ""))
