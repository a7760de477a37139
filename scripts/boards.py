"""Writes the Grafana board of services: `python -m scripts.boards`.

The board is a file of the sources, `packaging/grafana/services.json`, for Grafana's "Import". Its panels are the rows of a table
here. The descriptions of panels are the meanings in the table of families, so that they are the same as those of the reference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE

BOARD = Path(__file__).parents[1] / "packaging" / "grafana" / "services.json"
_OF = '{service=~"$service"}'


class Panel(NamedTuple):
    """A graph over time: (expression, legend) per line. `unit` is Grafana's name of it."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = "short"


PANELS = (
    Panel(
        "Replicas: ready, wanted, with overprovisioned ones",
        (
            (f"skyserve_service_ready_replicas{_OF}", "{{service}} ready"),
            (f"skyserve_service_wanted_replicas{_OF}", "{{service}} wanted"),
            (f"skyserve_service_target_replicas{_OF}", "{{service}} target"),
        ),
    ),
    Panel(
        "Replicas by state",
        (
            (
                f"sum by (service, state, capacity_type) (skyserve_service_replicas{_OF})",
                "{{service}} {{state}} {{capacity_type}}",
            ),
        ),
    ),
    Panel(
        "Ready replicas by zone",
        (
            (
                f"skyserve_service_ready_replicas_by_zone{_OF}",
                "{{service}} {{cloud}} {{region}} {{zone}}",
            ),
        ),
    ),
    Panel(
        "Price per hour",
        (
            (f"skyserve_service_usd_per_hour{_OF}", "{{service}}"),
            (f"skyserve_service_on_demand_usd_per_hour{_OF}", "{{service}} on demand"),
            (f"skyserve_service_load_balancers_usd_per_hour{_OF}", "{{service}} load balancers"),
        ),
        "currencyUSD",
    ),
    Panel(
        "Spent",
        (
            (f"skyserve_service_usd_total{_OF}", "{{service}}"),
            (f"skyserve_service_on_demand_usd_total{_OF}", "{{service}} on demand"),
        ),
        "currencyUSD",
    ),
    Panel("Requests", ((f"skyserve_service_requests_per_second{_OF}", "{{service}}"),), "reqps"),
    Panel(
        "Requests on replicas and waiting",
        (
            (f"skyserve_service_in_flight_requests{_OF}", "{{service}} on replicas"),
            (f"skyserve_service_queued_requests{_OF}", "{{service}} waiting"),
        ),
    ),
    Panel("Demand and its forecast", ((f"skyserve_demand_forecast{_OF}", "{{service}} {{of}}"),), "reqps"),
    Panel(
        "Requests within the SLO",
        (
            (f"skyserve_slo_attainment{_OF}", "{{service}} in 24 hours"),
            (f"skyserve_slo_attainment_asked{_OF}", "{{service}} asked"),
        ),
        "percentunit",
    ),
    Panel("Headroom", ((f"skyserve_headroom{_OF}", "{{service}}"),)),
    Panel(
        "Versions",
        (
            (f"skyserve_service_version{_OF}", "{{service}} newest"),
            (f"skyserve_service_serving_version{_OF}", "{{service}} serving"),
            (f"skyserve_service_version_given_up{_OF}", "{{service}} given up"),
        ),
    ),
    Panel(
        "Load balancers",
        (
            (f"skyserve_service_load_balancers_alive{_OF}", "{{service}} alive"),
            (f"skyserve_service_load_balancers_behind{_OF}", "{{service}} behind"),
        ),
    ),
    Panel(
        "Controller",
        (
            ("skyserve_controller_leads", "{{instance}} leads"),
            ("skyserve_controller_store_ok", "{{instance}} store ok"),
            ("skyserve_controller_lease_epoch", "{{instance}} lease epoch"),
        ),
    ),
    Panel(
        "Time since the controller started", (("skyserve_controller_uptime_seconds", "{{instance}}"),), "s"
    ),
    Panel(
        "Time since the state was last good",
        (("time() - skyserve_controller_store_good_timestamp_seconds", "{{instance}}"),),
        "s",
    ),
)


def board() -> str:
    """Return the board as JSON."""
    content = {
        "title": "SkyServe services",
        "uid": "skyserve-services",
        "tags": ["skyserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_data_source(), _service()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }
    return json.dumps(content, indent=1) + "\n"


def _data_source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _service() -> dict[str, Any]:
    return {
        "name": "service",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$source"},
        "query": "label_values(skyserve_service_version, service)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    meanings = {
        one.name + ("_total" if one.type == "counter" else ""): one.help
        for one in (*OF_CONTROLLER, *OF_SERVICE)
    }
    names = re.findall(r"skyserve_\w+", " ".join(expression for expression, _ in panel.lines))
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"`{name}`: {meanings[name]}" for name in names),
        "datasource": {"type": "prometheus", "uid": "$source"},
        "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(panel.lines)
        ],
    }


if __name__ == "__main__":
    BOARD.write_text(board(), encoding="utf-8")
