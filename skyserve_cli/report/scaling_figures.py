"""The pictures of `serve simulate --autoscaler --report`, each drawn on a figure that the caller owns. Look as in `figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from policies.forecast.demand import Floats
from skyserve_cli.account.runs import percent
from skyserve_cli.report.figures import INK, MUTED
from skyserve_cli.sim.forecasts import Forecasts
from skyserve_cli.sim.scaling import Evaluation, ScalingTrial

LEVELS = tuple(round(0.05 * number, 2) for number in range(1, 20))
BAND = (0.5, 0.9)
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#B0A000", "#8c6bb1", "#a6761d")
_BOUND = "#000000"  # of the oracle
_BAND_COLOUR, _LATE_COLOUR = "#E69F00", "#D55E00"
_BINS = 1200  # of a timeline: about as many as it is wide in pixels
_DAY_MIN = 1440.0
_LATE = tuple(digit * 10.0**power for power in range(-6, 0) for digit in (1, 2, 5))


def colour_of(names: Sequence[str], name: str) -> str:
    return _BOUND if name == "oracle" else _COLOURS[names.index(name) % len(_COLOURS)]


# --- demand against capacity ----------------------------------------------------------------------------------


def draw_capacity(
    figure: FigureBase, runs: Sequence[Evaluation], trial: ScalingTrial, found: Forecasts | None
) -> None:
    """A panel for each autoscaler: demand, what was ready for it, and where the predictive one expected it one cold start before."""
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _capacity(axes, run, trial, found if run.autoscaler == "predictive" else None)
        axes.set_title(run.autoscaler, loc="left", fontsize=9.5, fontweight="bold", pad=5)
        said = f"{run.attainment:.2%} in time, {run.hours_over_ideal:.3f} of the ideal hours, {run.moves_per_day:.0f} moves a day"
        axes.set_title(said, loc="right", fontsize=8.5, color=MUTED, pad=5)
    panels[0].set_ylim(bottom=0.0)
    days_axis(panels[-1])
    figure.supylabel("requests per second", fontsize=9, color=INK)
    low, high = (f"{100 * share:g}" for share in BAND)
    keys: list[Patch | Line2D] = [
        Line2D([], [], color=MUTED, linewidth=0.8, label="came"),
        Line2D([], [], color=_COLOURS[0], linewidth=1.2, label="ready replicas carry"),
        Patch(color=_LATE_COLOUR, label="more than a tenth late"),
    ]
    if found is not None:
        keys.append(Patch(color=_BAND_COLOUR, alpha=0.45, label=f"busiest minute, {low} to {high} % quantile, one cold start before"))  # fmt: skip
    figure.legend(handles=keys, loc="outside upper left", ncols=2, handlelength=1.4)


def _capacity(axes: Axes, run: Evaluation, trial: ScalingTrial, found: Forecasts | None) -> None:
    first, asked, met, ready = run.minutes
    size = max(1, len(asked) // _BINS)
    days = (np.arange(0, len(asked), size)) / _DAY_MIN
    came, carries = binned(asked, size) / 60.0, binned(ready, size) * trial.capacity_qps
    if found is not None:
        at = (found.minutes - first) / _DAY_MIN
        low, high = (found.quantile(share) / 60.0 for share in BAND)
        axes.fill_between(at, low, high, color=_BAND_COLOUR, alpha=0.45, linewidth=0, rasterized=True)
    axes.plot(days, came, color=MUTED, linewidth=0.6, rasterized=True)
    axes.step(days, carries, where="post", color=_COLOURS[0], linewidth=1.1, rasterized=True)
    late = binned(asked, size) - binned(met, size) > 0.1 * binned(asked, size)
    (marks,) = axes.plot(days[late], np.zeros(int(late.sum())), "|", color=_LATE_COLOUR, markersize=9, clip_on=False)  # fmt: skip
    marks.set_in_layout(False)
    axes.set_xlim(0.0, len(asked) / _DAY_MIN)
    axes.grid(axis="y")


def binned(values: Sequence[float], size: int) -> Floats:
    """Return the means of `size` values each; the last of the remainder."""
    array = np.asarray(values, dtype=np.float64)
    starts = np.arange(0, len(array), size)
    found: Floats = np.add.reduceat(array, starts) / np.diff(np.append(starts, len(array)))
    return found


def days_axis(axes: Axes) -> None:
    axes.set_xlabel("days since the first judged minute")


# --- attainment against hours -----------------------------------------------------------------------------------


def draw_hours(figure: FigureBase, rows: Mapping[str, Sequence[Evaluation]], asked: float) -> None:
    """A mark for each autoscaler, small ones for its seeds. Reactive ones with several targets are joined by a line."""
    axes = figure.subplots()
    names = list(rows)
    floor = min([1 - one.attainment for evaluations in rows.values() for one in evaluations if one.attainment < 1.0] or [1e-3]) / 3  # fmt: skip
    reactive = sorted(
        (
            fmean(one.hours_over_ideal for one in evaluations),
            max(floor, 1 - fmean(one.attainment for one in evaluations)),
        )
        for name, evaluations in rows.items()
        if name.partition(":")[0] == "reactive"
    )
    if len(reactive) > 1:
        axes.plot(*zip(*reactive, strict=True), color=MUTED, linewidth=1.2, zorder=2)
    for number, (name, evaluations) in enumerate(rows.items()):
        colour = colour_of(names, name)
        hours, late = (
            [one.hours_over_ideal for one in evaluations],
            [max(floor, 1 - one.attainment) for one in evaluations],
        )
        if len(evaluations) > 1:
            axes.scatter(hours, late, s=9, color=colour, alpha=0.35, linewidths=0, zorder=3)
        axes.scatter([fmean(hours)], [fmean(late)], s=46, color=colour, edgecolors="white", linewidths=0.9, zorder=4)  # fmt: skip
        label = axes.annotate(name, (fmean(hours), fmean(late)), xytext=(6, (4, -11)[number % 2]), textcoords="offset points", fontsize=8.5, color=colour)  # fmt: skip
        label.set_in_layout(False)
    axes.margins(x=0.12, y=0.12)
    axes.axhline(1 - asked, color=INK, linestyle=(0, (4, 2)), linewidth=1.1)
    axes.set_yscale("log")
    axes.invert_yaxis()  # up is better
    least, most = sorted(axes.get_ylim())
    shown = [late for late in _LATE if least <= late <= most]
    axes.set_yticks(shown, [percent(1 - late) for late in shown])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("replica hours, over those of an ideal fleet")
    axes.set_ylabel("requests in time")
    axes.grid()


# --- how far the forecast can be trusted ------------------------------------------------------------------------


def draw_calibration(figure: FigureBase, found: Forecasts) -> None:
    """Of each quantile, how often what came was below it."""
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (4, 2)), linewidth=1.1)
    axes.plot(LEVELS, [found.covered(level) for level in LEVELS], color=_COLOURS[0], marker="o", markersize=4)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("quantile of the forecast")
    axes.set_ylabel("share of the busiest minutes below it")
    axes.grid()


# --- the error budget -------------------------------------------------------------------------------------------


def draw_budget(figure: FigureBase, runs: Sequence[Evaluation], asked: float) -> None:
    """Of each autoscaler, the late requests so far over those that the SLO allows in the whole."""
    axes = figure.subplots()
    names = [run.autoscaler for run in runs]
    for run in runs:
        used = budget_used(run, asked)
        days = np.arange(1, len(used) + 1) / _DAY_MIN
        step = max(1, len(used) // _BINS)
        axes.plot(days[::step], used[::step], color=colour_of(names, run.autoscaler), linewidth=1.5, label=run.autoscaler)  # fmt: skip
    length = max(len(run.minutes.asked) for run in runs) / _DAY_MIN
    axes.plot([0, length], [0, 1], color=MUTED, linestyle=(0, (4, 2)), linewidth=1.1)
    axes.set_xlim(0, length)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylabel("of the late requests allowed")
    days_axis(axes)
    axes.grid()
    axes.legend(loc="upper left")


def budget_used(run: Evaluation, asked: float) -> Floats:
    """Return after each minute the late requests so far over all that a share `asked` in time allows; zeros without requests."""
    came, met = (np.asarray(values, dtype=np.float64) for values in (run.minutes.asked, run.minutes.met))
    allowed = (1.0 - asked) * came.sum()
    found: Floats = np.cumsum(came - met) / allowed if allowed else np.zeros(len(came))
    return found
