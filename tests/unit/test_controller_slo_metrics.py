"""The metrics of a service with an SLO, from the view that `serve status` prints."""

from __future__ import annotations

from typing import Any

import pytest

from skyserve_cli.controller.metrics.families import OF_SERVICE

SLO: dict[str, Any] = {
    "attainment": 0.9962,
    "attainment_asked": 0.995,
    "headroom": 1.12,
    "requests_per_min": 230.0,
    "work_per_min": 276.0,
    "work_per_request": 1.2,
    "forecast_per_min": 301.0,
    "forecast_most_per_min": 330.0,
}


def samples(slo: dict[str, Any] | None) -> dict[str, float]:
    """Values of the families by name and labels."""
    return {
        " ".join((family.name, *labels)): value
        for family in OF_SERVICE
        if family.name.startswith(("skyserve_demand", "skyserve_slo", "skyserve_headroom", "skyserve_work"))
        for labels, value in family.read({"slo": slo})
    }


def test_an_slo_has_its_demand_attainment_and_headroom() -> None:
    assert samples(SLO) == pytest.approx(
        {
            "skyserve_demand_forecast now": 4.6,
            "skyserve_demand_forecast at_launch": 301 / 60,
            "skyserve_demand_forecast most": 5.5,
            "skyserve_slo_attainment": 0.9962,
            "skyserve_slo_attainment_asked": 0.995,
            "skyserve_headroom": 1.12,
            "skyserve_work_per_request": 1.2,
        }
    )


@pytest.mark.parametrize(
    ("slo", "names"),
    [
        pytest.param(None, set(), id="no SLO"),
        pytest.param(
            {**dict.fromkeys(SLO), "attainment_asked": 0.9},
            {"skyserve_slo_attainment_asked"},
            id="no request yet",
        ),
    ],
)
def test_what_is_not_known_has_no_series(slo: dict[str, Any] | None, names: set[str]) -> None:
    assert set(samples(slo)) == names
