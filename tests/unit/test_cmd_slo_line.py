"""The line of `serve status` about an SLO: attainment, needs now and later, and their inputs."""

from __future__ import annotations

from typing import Any

import pytest

from skyserve_cli.commands.status_tables import slo_line

SEEN: dict[str, Any] = {
    "attainment_asked": 0.995,
    "attainment": 0.9962,
    "budget_left": 0.24,
    "autoscaler": "predictive",
    "requests_per_min": 276.0,
    "work_per_min": 276.0,
    "work_per_request": None,
    "forecast_per_min": 341.0,
    "headroom": 1.12,
    "capacity_qps": 1.9,
    "capacity_learned": True,
    "cold_start_s": 360.0,
    "would_want": None,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        pytest.param(
            {},
            "SLO 99.62 % of 99.5 % in time (24 h), budget 24 % left; needs 3 -> 4 replicas: 276 requests/min (tokens not known) -> 341 in 6m; "
            "headroom 1.12, 1.9 requests/s per replica (learned), a start takes 6m",
            id="what comes needs more",
        ),
        pytest.param(
            {"work_per_min": 331.2, "work_per_request": 1.2, "forecast_per_min": 410.0},
            "SLO 99.62 % of 99.5 % in time (24 h), budget 24 % left; needs 4 -> 5 replicas: 276 requests/min x 1.20 of the usual "
            "tokens -> 410 in 6m; headroom 1.12, 1.9 requests/s per replica (learned), a start takes 6m",
            id="requests are longer than usual",
        ),
        pytest.param(
            {"autoscaler": "reactive", "capacity_learned": False},
            "SLO 99.62 % of 99.5 % in time (24 h), budget 24 % left; needs 3 replicas: 276 requests/min (tokens not known); "
            "headroom 1.12, 1.9 requests/s per replica, a start takes 6m",
            id="reactive looks at the present only",
        ),
        pytest.param(
            {
                "autoscaler": "forecast_only",
                "would_want": 5.0,
                "requests_per_min": 0.0,
                "work_per_min": 0.0,
                "budget_left": -0.1,
            },
            "SLO 99.62 % of 99.5 % in time (24 h), budget used up; needs 0 -> 4 replicas: 0 requests/min (tokens not known) -> 341 in 6m; "
            "headroom 1.12, 1.9 requests/s per replica (learned), a start takes 6m; the forecast would want 5 replicas",
            id="a forecast that does not act says what it would want",
        ),
        pytest.param(
            {"attainment": None}, "SLO 99.5 %: no request has been counted yet", id="nothing counted"
        ),
        pytest.param(
            {"requests_per_min": None},
            "SLO 99.62 % of 99.5 % in time (24 h), budget 24 % left",
            id="no minute was decided by yet",
        ),
    ],
)
def test_the_line_of_an_slo(changes: dict[str, Any], line: str) -> None:
    assert slo_line(SEEN | changes) == line
