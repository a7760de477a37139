"""The line of `serve status` about a service's SLO."""

from __future__ import annotations

from skyserve_cli.commands.options import View
from skyserve_cli.output import span


def slo_line(slo: View) -> str:
    """Return how the SLO is kept, what is expected, and what the size is computed from."""
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
    ahead = "" if slo["autoscaler"] == "reactive" else f", {slo['forecast_per_min']:.0f} in {start}"
    parts.append(f"{slo['requests_per_min']:.0f} requests/min{ahead}")
    learned = " (learned)" if slo["capacity_learned"] else ""
    parts.append(
        f"headroom {slo['headroom']:.2f}, {slo['capacity_qps']:.3g} requests/s per replica{learned}, a start takes {start}"
    )
    if slo["would_want"] is not None:
        parts.append(f"the forecast would want {slo['would_want']:.0f} replicas")
    return "; ".join(parts)
