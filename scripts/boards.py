"""Writes the Grafana boards: `python -m scripts.boards`.

The boards are files of the sources below `packaging/grafana/`, for Grafana's "Import". Their panels are the rows of the tables in
`scripts.board_panels`. The descriptions of panels are the meanings in the tables of families, so that they are the same as those
of the reference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from scripts.board_panels import FLEET, LOAD_BALANCERS, SERVICES, Panel
from scripts.reference.metrics import agent
from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE, OF_TEAM

FOLDER = Path(__file__).parents[1] / "packaging" / "grafana"


class Board(NamedTuple):
    """`services_of` is the family whose services the user chooses from; empty: the board shows all."""

    file: str
    title: str
    panels: tuple[Panel, ...]
    services_of: str = ""

    @property
    def expressions(self) -> tuple[str, ...]:
        """The expressions for all services."""
        return tuple(line.replace("$service", ".+") for panel in self.panels for line, _ in panel.lines)


BOARDS = (
    Board("services.json", "SkyServe services", SERVICES, "skyserve_service_version"),
    Board("load-balancers.json", "SkyServe load balancers", LOAD_BALANCERS, "skyserve_lb_requests_total"),
    Board("fleet.json", "SkyServe fleet and controller", FLEET),
)


def meanings() -> dict[str, str]:
    """Return what each exposed name means."""
    found = {
        one.name + ("_total" if one.type == "counter" else ""): one.help
        for one in (*OF_CONTROLLER, *OF_SERVICE, *OF_TEAM)
    }
    suffixes = {"counter": "_total", "histogram": "_bucket"}
    return found | {one.name + suffixes.get(one.type, ""): one.documentation for one in agent()}


def names_in(expression: str) -> list[str]:
    """Return the names of families."""
    return list(dict.fromkeys(re.findall(r"skyserve_\w+", expression)))


def text_of(board: Board) -> str:
    """Return the board as JSON. Raises KeyError for a family that does not exist."""
    known = meanings()
    content = {
        "title": board.title,
        "uid": board.title.lower().replace(" ", "-"),
        "tags": ["skyserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_data_source(), *([_service(board)] if board.services_of else [])]},
        "panels": [_panel(number, panel, known) for number, panel in enumerate(board.panels)],
    }
    return json.dumps(content, indent=1) + "\n"


def _data_source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _service(board: Board) -> dict[str, Any]:
    return {
        "name": "service",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": f"label_values({board.services_of}, service)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel, known: dict[str, str]) -> dict[str, Any]:
    names = names_in(" ".join(expression for expression, _ in panel.lines))
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {known[name]}" for name in names),
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    for each in BOARDS:
        (FOLDER / each.file).write_text(text_of(each), encoding="utf-8")
