"""The line of `serve status` about a service's SLO."""

from __future__ import annotations

import math

from skyserve_cli.commands.options import View
from skyserve_cli.output import span


def _replicas(slo: View, rate: str) -> int:
    """Return how many replicas a rate needs with the headroom, before the limits of the file."""
    carried = 60.0 * float(slo["capacity_qps"]) / float(slo["headroom"])
    return max(0, math.ceil(float(slo[rate]) / carried - 1e-9))


def slo_line(slo: View) -> str:
    """Return how the SLO is kept, the expectation, and what the size is computed from."""
    asked = f"{100 * slo['attainment_asked']:g} %"
    if slo["attainment"] is None:
        return f"SLO {asked}: no request has been counted yet"
    parts = [
        f"SLO {100 * slo['attainment']:.2f} % of {asked} in time (24 h), "
        + (f"budget {100 * slo['budget_left']:.0f} % left" if slo["budget_left"] >= 0 else "budget used up")
    ]
    if slo["requests_per_min"] is None:
        return parts[0]
    start = span(slo["cold_start_s"])
    needed, rate = (
        f"needs {_replicas(slo, 'work_per_min')}",
        f"{slo['requests_per_min']:.0f} requests/min",
    )
    size = slo["work_per_request"]
    rate += " (tokens not known)" if size is None else f" x {size:.2f} of the usual tokens"
    if slo["autoscaler"] != "reactive":
        needed += f" -> {_replicas(slo, 'forecast_per_min')}"
        rate += f" -> {slo['forecast_per_min']:.0f} in {start}"
    parts.append(f"{needed} replicas: {rate}")
    learned = " (learned)" if slo["capacity_learned"] else ""
    parts.append(
        f"headroom {slo['headroom']:.2f}, {slo['capacity_qps']:.3g} requests/s per replica{learned}, a start takes {start}"
    )
    if slo["would_want"] is not None:
        parts.append(f"the forecast would want {slo['would_want']:.0f} replicas")
    return "; ".join(parts)
