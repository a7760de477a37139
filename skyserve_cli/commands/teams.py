"""`serve teams`: what each team uses of its quota and its budget."""

from __future__ import annotations

from skyserve_cli.commands.options import Format, OutputFormat, View, controller
from skyserve_cli.output import inform, put_json
from skyserve_cli.text_tables import FittedTable, put_table


def teams(output: Format = OutputFormat.TABLE) -> None:
    """Show what each team uses of its quota and its budget.

    WAITING are services that want a replica which the limits of the team do not admit. Without the role admin only your own team
    is shown.
    """
    found = controller().teams()
    if output is OutputFormat.JSON:
        put_json(found)
        return
    if not found:
        inform("no team is configured; see `teams` in config.yaml")
        return
    rows = [
        (
            each["name"],
            _of(each, "gpus"),
            _of(each, "replicas"),
            _of(each, "usd_hour", 2),
            _of(each, "usd_month", 2),
            ", ".join(each["services"]) or "-",
            ", ".join(each["waiting"]) or "-",
        )
        for each in found
    ]
    put_table(FittedTable(("TEAM", "GPUS", "REPLICAS", "$/H", "$ THIS MONTH", "SERVICES", "WAITING"), rows))


def _of(team: View, key: str, digits: int = 0) -> str:
    """Return what is used, and of how much if there is a limit: ``6/8``."""
    limit = team["limits"][f"max_{key}"]
    used = f"{team['used'][key]:.{digits}f}" if digits else f"{team['used'][key]:g}"
    return used if limit is None else f"{used}/{limit:g}"
