"""What a simulation found: the values of `skyserve_cli.account.runs`, which the account of a real service has, too."""

from __future__ import annotations

from skyserve_cli.account.runs import ON_DEMAND, SPOT, FleetSample, Percentiles, Run, Simulation, percent

__all__ = ["ON_DEMAND", "SPOT", "FleetSample", "Percentiles", "Run", "Simulation", "percent"]
