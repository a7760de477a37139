"""What `serve profile` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyserve_cli.output import plural, span
from skyserve_cli.profile.capacity import requests_to_be_sure
from skyserve_cli.profile.measure import Measured, Measurement
from skyserve_cli.profile.weights import Carried, response_weight
from skyserve_cli.text_tables import FittedTable

_STOPPED = {
    "precise": "",
    "time": "--max-time is used up",
    "requests": "--max-requests are used up",
    "machine": "this machine cannot send faster: higher loads were not tried",
    "interrupted": "interrupted",
}


def view(measured: Measurement, others: Sequence[Carried] = ()) -> dict[str, Any]:
    """Return it for ``-o json``: rates are requests per second and replica, times are milliseconds.

    `others` are runs with other lengths; `response_weight` is null without one.
    """
    found = measured.found
    prompt, response = _mean(measured, measured.prompt_tokens), _mean(measured, measured.response_tokens)
    return {
        "url": measured.server.base,
        "model": measured.server.model,
        "ttft_ms": 1000 * measured.slo.ttft_s or None,
        "tpot_ms": 1000 * measured.slo.tpot_s or None,
        "attainment": measured.attainment,
        "capacity_qps": None if found is None else round(found.qps, 4),
        "capacity_qps_low": None if found is None else round(found.low, 4),
        "capacity_qps_high": None if found is None or found.high is None else round(found.high, 4),
        "all_in_time": found is not None and found.beyond,
        "confidence": None if found is None else found.confidence,
        "stopped": measured.stopped,
        "requests": measured.sent,
        "took_s": round(measured.took_s, 1),
        "mean_prompt_tokens": prompt,
        "mean_response_tokens": response,
        "response_weight": _weight(measured, others),
        "steps": [_step_view(step) for step in measured.steps],
    }


def _step_view(step: Measured) -> dict[str, Any]:
    def quantiles(found: tuple[float, float] | None) -> dict[str, float] | None:
        return None if found is None else {"p50": round(found[0], 2), "p99": round(found[1], 2)}

    return {
        "load_qps": round(step.load, 4),
        "replicas": step.replicas,
        "requests": step.requests,
        "late": step.late,
        "failed": step.failed,
        "error": step.error,
        "most_in_flight": step.most_in_flight,
        "ttft_ms": quantiles(step.ttft_ms),
        "tpot_ms": quantiles(step.tpot_ms),
    }


def step_line(step: Measured) -> str:
    """Return a line about a step: ``1.6 requests/s: 98.2 % of 56 in time``."""
    if step.replicas is None:
        return f"{step.load:.3g} requests/s: left out, the number of ready replicas has changed"
    failed = f", {step.failed} failed ({step.error})" if step.failed else ""
    return f"{step.load:.3g} requests/s: {_in_time(step)} of {step.requests} in time{failed}"


def steps_table(measured: Measurement) -> FittedTable:
    rows = [
        (
            f"{step.load:.3g}",
            str(step.requests),
            _in_time(step) if step.replicas is not None else "left out",
            *_cells(step.ttft_ms),
            *_cells(step.tpot_ms),
            str(step.most_in_flight),
        )
        for step in sorted(measured.steps, key=lambda one: one.load)
    ]
    columns = (
        "#REQ/S",
        "#REQUESTS",
        "#IN TIME",
        "#TTFT MS P50",
        "#P99",
        "#TPOT MS P50",
        "#P99 ",
        "#IN FLIGHT",
    )
    return FittedTable(columns, rows)


def sentence(measured: Measurement, file: Path | None, others: Sequence[Carried] = ()) -> str:
    """Return what was found, how sure it is, and what to do with it."""
    found = measured.found
    if found is None:
        return ""
    asked = f"{100 * measured.attainment:g} %"
    least = "at least " if found.beyond else ""
    high = "no bound" if found.high is None else f"{found.high:.3g}"
    parts = [
        f"One replica carries {least}{found.qps:.3g} requests per second with {asked} in time; 90 % interval: {found.low:.3g} to "
        f"{high}; confidence: {found.confidence} ({plural(measured.sent, 'request')} in {span(measured.took_s)}, "
        f"on the mean {_mean(measured, measured.prompt_tokens)} tokens of prompt and "
        f"{_mean(measured, measured.response_tokens)} of response)."
    ]
    if why := _STOPPED.get(measured.stopped):
        parts.append(f"Stopped early: {why}.")
    if found.low <= 0:
        parts.append(
            f"To confirm {asked}, {requests_to_be_sure(measured.attainment)} requests in time are needed at or just above a load: "
            "give it more time with --max-time."
        )
    if found.confidence != "low":
        parts.append(_use(f"replica_policy.slo.capacity_qps={found.qps:.3g}", file))
    weight = _weight(measured, others)
    if weight is not None:
        parts.append(
            f"With {plural(len(others), 'other run')}: a token of a response weighs {weight:g} tokens of a prompt."
        )
        parts.append(_use(f"replica_policy.slo.response_weight={weight:g}", file))
    elif others:
        parts.append(
            "What a token of a response weighs is not known: the runs of --with have about as many tokens of responses per token of "
            "prompts as this one."
        )
    return "\n".join(parts)


def _use(setting: str, file: Path | None) -> str:
    if file is None:
        return f"In the service file: {setting}"
    return f"To use it: serve update {file} --set {setting}"


def _weight(measured: Measurement, others: Sequence[Carried]) -> float | None:
    """Return what a response token weighs in prompt tokens, to three digits; None where the runs do not show it."""
    if measured.found is None or not measured.finished or not others:
        return None
    tokens = measured.prompt_tokens / measured.finished, measured.response_tokens / measured.finished
    found = response_weight([Carried(measured.found.qps, *tokens), *others]) if min(tokens) > 0 else None
    return None if found is None else float(f"{found:.3g}")


def why_nothing(measured: Measurement) -> str:
    """Return why there is no estimate, and what to do."""
    if not any(step.requests for step in measured.counted):
        return "no request was counted: give it more time with --max-time, longer steps with --step, or a higher --start"
    low = min(measured.steps, key=lambda one: one.load)
    return (
        f"even {low.load:.3g} requests per second and replica are too many ({_in_time(low)} in time): ask for less with --ttft-ms, "
        "--tpot-ms or --attainment, or begin lower with --start"
    )


def _mean(measured: Measurement, tokens: int) -> int | None:
    return round(tokens / measured.finished) if measured.finished else None


def _in_time(step: Measured) -> str:
    return f"{100 * (1 - step.late / step.requests):.1f} %" if step.requests else "-"


def _cells(found: tuple[float, float] | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{found[0]:.0f}", f"{found[1]:.0f}")
