"""`serve local`: the hand on the local cloud. Works with and without a controller."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from policies.model import CapacityType
from provisioners.local import controls as local_controls
from provisioners.local.store import LaunchRecord, LocalStore
from skyserve_cli.commands.durations import seconds
from skyserve_cli.commands.options import Format, OutputFormat, home
from skyserve_cli.output import CommandFailed, WrongUsage, inform, plural, put_json, usd
from skyserve_cli.text_tables import FittedTable, put_table

app = typer.Typer(
    no_args_is_help=True, help="Play with the local cloud: its zones, its capacity, its spot market."
)


class Kind(str, Enum):
    SPOT = "spot"
    ON_DEMAND = "on_demand"


@app.command()
def zones(output: Format = OutputFormat.TABLE) -> None:
    """List the zones: prices, and how many instances they have and have room for."""
    found = local_controls.zones(_root())
    if output is OutputFormat.JSON:
        put_json([{name: getattr(zone, name) for name in zone.__slots__} for zone in found])
        return
    rows = [
        (
            f"{zone.region}/{zone.zone}",
            usd(zone.spot_usd_hour),
            _of(zone.spot_live, zone.spot_capacity),
            usd(zone.on_demand_usd_hour),
            _of(zone.on_demand_live, zone.on_demand_capacity),
        )
        for zone in found
    ]
    put_table(FittedTable(("ZONE", "$/H SPOT", "#SPOT", "$/H ON DEMAND", "#ON DEMAND"), rows))


@app.command()
def capacity(
    zone: Annotated[str, typer.Argument(show_default=False)],
    room: Annotated[
        str, typer.Argument(metavar="N", help="A number, or `default` for what cloud.yaml says.")
    ],
    capacity_type: Annotated[Kind, typer.Option("--capacity-type", help="Which room.")] = Kind.SPOT,
) -> None:
    """Set the room in a zone; spot instances that no longer fit are preempted, the newest first."""
    if room != "default" and not room.isdecimal():
        raise WrongUsage(f"room is a number of instances, or `default` (got {room!r})")
    count = None if room == "default" else int(room)
    local_controls.set_capacity(_root(), zone, count, CapacityType(capacity_type.value))
    shown = "as in cloud.yaml" if count is None else f"room for {count}"
    inform(f"{zone}, {capacity_type.value.replace('_', '-')}: {shown}")


@app.command()
def preempt(
    target: Annotated[str, typer.Argument(metavar="REPLICA|ZONE", help="NAME/3, NAME-3, or 3; or a zone.")],
    notice: Annotated[
        str, typer.Option("--notice", metavar="DURATION", help="Warn so long before: 10s.")
    ] = "0s",
    node: Annotated[
        int | None, typer.Option("--node", metavar="RANK", min=0, help="Only this machine of several.")
    ] = None,
) -> None:
    """Take a spot replica away, or all of a zone, as a cloud would."""
    wanted = (
        target.rsplit("/", 1)[-1] if target.startswith("local/") else target
    )  # a zone as `status` shows it
    taken = local_controls.preempt(_root(), _token(_root(), wanted), seconds("--notice", notice), node=node)
    which = "" if node is None else f"node {node} of "
    if not taken:
        raise CommandFailed(
            f"no spot instance lives in {target}" if node is None else f"{target} has no node {node}"
        )
    inform(f"preempted {which}{plural(len(taken), 'instance')}: {', '.join(taken)}")


@app.command()
def market(
    source: Annotated[
        Path, typer.Argument(metavar="FILE|TRACE", help="A timeline (YAML), or a trace's folder.")
    ],
    speed: Annotated[
        float | None, typer.Option("--speed", help="How many times as fast as recorded to play it.")
    ] = None,
) -> None:
    """Let the spot market follow a timeline or a recorded trace, from now on."""
    if speed is not None and not 0 < speed < float("inf"):
        raise WrongUsage(f"--speed must be above 0 (got {speed:g})")
    playing = local_controls.play_market(_root(), source, speed)
    inform(
        f"the market plays {playing.source} at {playing.speed:g} times its speed; `serve local calm` ends it"
    )


@app.command()
def calm() -> None:
    """End the market's play: every zone has the room cloud.yaml gives it."""
    local_controls.calm(_root())
    inform("the market is calm")


def _root() -> Path:
    here = home()
    here.create()
    return here.root


def _of(live: int, room: int | None) -> str:
    return f"{live}/{'any' if room is None else room}"


def _token(root: Path, target: str) -> str:
    """Return the token of the live replica called `target`; anything else is left for the cloud to understand."""
    records = [
        record for folder in LocalStore(root).folders() if folder.is_live() and (record := folder.record())
    ]
    called = [record for record in records if target in _names(record)]
    if len(called) > 1:
        names = ", ".join(f"{record.service}/{record.replica_id}" for record in called)
        raise WrongUsage(f"{target} may be any of {names}")
    return called[0].token if called else target


def _names(record: LaunchRecord) -> tuple[str, ...]:
    number = str(record.replica_id)
    return f"{record.service}/{number}", f"{record.service}-{number}", number
