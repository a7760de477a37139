"""What `serve status` shows of a service with an SLO, as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.model import Json
from skyserve_cli.spec.model import SloSpec
from skyserve_cli.state.values import DemandRow

#: What the scaler saw in the last minute it decided by (`policies.scaling.predictive`), by its name in the view.
_SEEN = {
    "work_per_min": "last",
    "work_per_request": "size",
    "forecast_per_min": "add",
    "forecast_most_per_min": "keep",
    "headroom": "headroom",
    "capacity_qps": "capacity_qps",
    "cold_start_s": "cold_start_s",
    "would_want": "would_want",
}


def slo_view(slo: SloSpec | None, scaling: Json, day: Sequence[DemandRow]) -> dict[str, Any] | None:
    """Return the SLO and how the service keeps it; None where it has none.

    `day` are the minutes of the last 24 hours. `attainment` is the share of their requests in time (null without any),
    `budget_left` the share of the late requests allowed in them that was not used: below 0, the SLO is missed. The other
    figures are null until a minute was decided by; `forecast_per_min` is the busiest minute when a replica launched now would be
    ready. Both and the capacity are work, in requests of the usual size, `work_per_request` of which the last minute's had: null
    where no tokens are known, so that requests are counted. `token_weights` are the work of a request as such, of a token of its
    prompt and of its response. `capacity_learned` means that no number in the file gives the capacity.
    """
    if slo is None:
        return None
    asked, late = sum(row.requests for row in day), sum(row.late for row in day)
    allowed = (1.0 - slo.attainment) * asked
    seen = scaling.get("seen", {})
    last, size = seen.get("last"), seen.get("size")
    return {
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        "attainment_asked": slo.attainment,
        "attainment": max(0.0, 1.0 - late / asked) if asked else None,
        "budget_left": 1.0 - late / allowed if allowed else None,
        "minutes_known": len(day),
        "autoscaler": slo.autoscaler,
        "capacity_learned": slo.capacity_qps is None,
        "requests_per_min": last / size if last and size else last,
        "token_weights": scaling.get("work", {}).get("weights"),
        **{name: seen.get(key) for name, key in _SEEN.items()},
    }
