"""The three pictures of a report, each drawn on a figure that the caller owns.

Colours are Okabe and Ito's, which colour-blind readers can distinguish: a hue for each region (lighter from zone to
zone) and for each policy. Vermilion is kept for values below target, and for RiskHedge in the pictures that have no
such marks. No pyplot: nothing is global, and no display is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, StepPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from skyserve_cli.account.curves import DAY_S, Array, Timeline, spend, spend_on_demand, timeline
from skyserve_cli.account.runs import ON_DEMAND, SPOT, Run, Simulation, percent
from skyserve_cli.output import usd
from skyserve_cli.report.text import per_day
from skyserve_cli.sim.frontier import ALL_ON_DEMAND, Point, lower_hull, mixed
from skyserve_cli.sim.summary import BOUNDS, SummaryRow

INK, MUTED, GRID = "#1f2933", "#66707c", "#e4e7eb"
_REGION_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#B0A000")
_ON_DEMAND_COLOUR = "#3d4651"
_SHORT_COLOUR = "#D55E00"

#: Everything in a picture that is not its content.
STYLE: Any = {  # Matplotlib's names: it checks them
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a dollar is a dollar
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "skyserve",  # same runs, same bytes
}

_SLICES = 1600  # of a timeline: about as many as it is wide in pixels
_POINTS = 240  # of a curve
_ROUND = (0.25, 0.5, 1, 2, 3, 5, 6, 7, 10, 14, 30, 60, 90)  # distances of ticks, in hours or days
_ROUND_S = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    *(hours * 3600 for hours in (1, 2, 3, 6, 12, 24, 48, 168)),
)
_LEAST_RED = 0.4  # a slice that was short for a moment is still seen


class _Style(NamedTuple):
    colour: str
    marker: str


_LOOKS: Mapping[str, _Style] = {
    "spothedge": _Style("#0072B2", "o"),
    "spothedge_literal": _Style("#56B4E9", "s"),
    "risk_hedge": _Style("#D55E00", "D"),
    "even_spread": _Style("#CC79A7", "v"),
    "round_robin": _Style("#009E73", "^"),
    "asg": _Style("#E69F00", "P"),
    "single_zone": _Style("#8c6bb1", "<"),
    "single_region": _Style("#a6761d", ">"),
    "on_demand": _Style(_ON_DEMAND_COLOUR, "X"),
    "omniscient": _Style("#000000", "*"),
}
_UNKNOWN = _Style("#7f7f7f", "h")


# --- replicas over time -------------------------------------------------------------------------------------


def draw_timelines(figure: FigureBase, simulation: Simulation, runs: Sequence[Run]) -> None:
    """Draw a panel for each run: replicas by zone and market, stacked, with the target and the times below it."""
    colours = _zone_colours(simulation)
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _timeline(
            axes, timeline(run, _SLICES, tick_s=simulation.tick_s, begin_s=simulation.counted_from_s), colours
        )
        axes.set_title(run.label, loc="left", fontsize=9.5, fontweight="bold", pad=5)
        axes.set_title(_figures_of(simulation, run), loc="right", fontsize=8.5, color=MUTED, pad=5)
    _time_axis(panels[-1], runs[0].days, simulation)
    panels[-1].tick_params(axis="x", pad=13)
    figure.supylabel("replicas", fontsize=9, color=INK)
    keys: list[Patch | Line2D] = [Patch(color=colour, label=zone) for zone, colour in colours.items()]
    keys += [
        Patch(color=_ON_DEMAND_COLOUR, label="on demand, all zones"),
        Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1.1, label="target"),
        Patch(color=_SHORT_COLOUR, label="fewer ready than the target"),
    ]
    figure.legend(handles=keys, loc="outside upper left", ncols=min(len(keys), 6), handlelength=1.4)


def _timeline(axes: Axes, series: Timeline, colours: Mapping[str, str]) -> None:
    edges = series.edges_s
    floor = np.zeros(len(edges) - 1)
    on_demand = [values for (_, market), values in series.alive.items() if market == ON_DEMAND]
    layers = [(colour, series.alive.get((zone, SPOT), floor)) for zone, colour in colours.items()]
    layers.append((_ON_DEMAND_COLOUR, np.sum(on_demand, axis=0) if on_demand else floor))
    bottom = floor
    for colour, values in layers:
        top = bottom + values
        _area(axes, edges, bottom, top, colour)
        bottom = top
    wanted = np.append(series.wanted, series.wanted[-1])
    axes.step(edges, wanted, where="post", color=INK, linestyle=(0, (4, 2)), linewidth=1.1)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(axes.get_ylim()[1], bottom.max() * 1.05, series.wanted.max() * 1.08))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.grid(axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    strip = axes.inset_axes((0.0, -0.105, 1.0, 0.075))
    strength = np.where(series.short > 0, _LEAST_RED + (1 - _LEAST_RED) * series.short, 0.0)
    reds = LinearSegmentedColormap.from_list("short", ["#f0f2f4", _SHORT_COLOUR])
    strip.pcolormesh(edges, [0, 1], strength[np.newaxis, :], cmap=reds, vmin=0, vmax=1, rasterized=True)
    strip.set_axis_off()


def _area(axes: Axes, edges: Array, bottom: Array, top: Array, colour: str) -> None:
    """Draw an area as pixels, so that a page does not grow with the number of steps.

    It is added as an artist, because `stairs` would look for the limits of every corner, which takes most of the time of a
    report.
    """
    lower: Any = bottom  # the stub knows numbers only
    patch = StepPatch(top, edges, baseline=lower, fill=True, color=colour, linewidth=0, rasterized=True)
    axes.add_artist(patch)


def _figures_of(simulation: Simulation, run: Run) -> str:
    said = f"up {run.availability:.2%} of the time, {run.cost_relative:.1%} of the on-demand cost, "
    lost, refused = run.preemptions_per_day, run.failed_launches_per_day
    if simulation.began_at is None:
        return said + f"{per_day(lost)} preemptions and {per_day(refused)} failed launches a day"
    return said + f"{lost * run.days:.0f} preemptions and {refused * run.days:.0f} failed launches"


def _zone_colours(simulation: Simulation) -> dict[str, str]:
    """Return the colours of zones, in the order of their regions, from dark to light within each."""
    regions: dict[str, list[str]] = {}
    for zone, region in sorted(simulation.zones, key=lambda pair: (pair[1], pair[0])):
        regions.setdefault(region, []).append(zone)
    colours = {}
    for number, zones in enumerate(regions.values()):
        hue = np.array(to_rgb(_REGION_HUES[number % len(_REGION_HUES)]))
        for place, zone in enumerate(zones):
            light = 0.62 * place / max(2, len(zones) - 1)
            red, green, blue = (round(255 * part) for part in hue + (1 - hue) * light)
            colours[zone] = f"#{red:02x}{green:02x}{blue:02x}"
    return colours


# --- availability against cost ------------------------------------------------------------------------------


def draw_frontier(figure: FigureBase, rows: Sequence[SummaryRow]) -> None:
    """Draw every run as a dot and every row as a mark; lines are what mixing the settings of a policy over time reaches."""
    axes = figure.subplots()
    families: dict[str, list[SummaryRow]] = {}
    for row in rows:
        families.setdefault(row.policy, []).append(row)
    downs = [1 - run.availability for row in rows for run in row.runs]
    floor = min([down for down in downs if down > 5e-6], default=1e-3) / 6
    for number, (policy, members) in enumerate(families.items()):
        _family(axes, policy, members, floor, above=number % 2 == 1)
    axes.set_yscale("log")
    axes.set_ylim(min(1.0, max(*downs, floor * 30) * 1.6), floor * 0.8)  # up is better
    shown = [down for down in (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 5e-4, 1e-4, 1e-5)
             if floor * 1.4 < down < axes.get_ylim()[0]]  # fmt: skip
    axes.set_yticks([*shown, floor], [*(percent(1 - down) for down in shown), "100%"])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.margins(x=0.06)
    axes.set_xlabel("cost, relative to the target on demand")
    axes.set_ylabel("time with the target ready")
    axes.grid()
    keys = [_key(policy) for policy in families]
    keys.append(Line2D([], [], color=MUTED, linewidth=1.8, label="settings mixed"))
    keys.append(Line2D([], [], color=MUTED, linestyle=":", linewidth=1.2, label="mixed with on demand"))
    axes.legend(handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _family(axes: Axes, policy: str, rows: Sequence[SummaryRow], floor: float, *, above: bool) -> None:
    colour, marker = _LOOKS.get(policy, _UNKNOWN)
    means = [Point(row.cost_relative.mean, 1 - row.availability.mean) for row in rows]
    if policy not in BOUNDS and policy != "on_demand":
        _edge(axes, mixed(lower_hull((*means, ALL_ON_DEMAND))), floor, colour, ":", 1.1)
        _edge(axes, mixed(lower_hull(means)), floor, colour, "-", 1.8)
    runs = [run for row in rows for run in row.runs]
    if len(runs) > len(rows):
        axes.scatter(
            [run.cost_relative for run in runs],
            [max(1 - run.availability, floor) for run in runs],
            s=9, color=colour, alpha=0.35, linewidths=0, zorder=3,
        )  # fmt: skip
    for row, mean in zip(rows, means, strict=True):
        down = max(mean.down, floor)
        size = 120 if marker == "*" else 46
        axes.scatter(
            [mean.cost],
            [down],
            s=size,
            color=colour,
            marker=marker,
            edgecolors="white",
            linewidths=0.9,
            zorder=4,
        )
        knob = row.label.removeprefix(policy).strip()
        if knob:
            beside, side = ((-6, 5), "right") if above else ((6, -11), "left")
            axes.annotate(
                knob,
                (mean.cost, down),
                xytext=beside,
                textcoords="offset points",
                ha=side,
                fontsize=8,
                color=colour,
            )


def _edge(axes: Axes, points: Sequence[Point], floor: float, colour: str, style: str, width: float) -> None:
    """Draw a line as far as the axis goes: a point that is never down lies beyond its end."""
    shown = [point for point in points if point.down >= floor]
    axes.plot(*zip(*shown, strict=True), color=colour, linestyle=style, linewidth=width, alpha=0.85, zorder=2)


def _key(policy: str) -> Line2D:
    colour, marker = _LOOKS.get(policy, _UNKNOWN)
    size = 10 if marker == "*" else 6.5
    return Line2D([], [], color=colour, marker=marker, markersize=size, markeredgecolor="white", label=policy)


# --- spend over time ----------------------------------------------------------------------------------------


def draw_spend(figure: FigureBase, simulation: Simulation, runs: Sequence[Run]) -> None:
    """Draw what each run had cost until when, and what the target would have cost on demand.

    Where prices are unknown, costs are shares of what the target would have cost on demand in all.
    """
    axes = figure.subplots()
    dearest = max(runs, key=lambda run: run.usd_on_demand)
    unit = 1.0 if simulation.priced else dearest.usd_on_demand
    ends: list[tuple[float, str, str]] = []
    for run in runs:
        if run.policy == "on_demand":
            continue  # that line is drawn anyway
        colour, _ = _LOOKS.get(run.policy, _UNKNOWN)
        at, paid = spend(run, simulation.price_ratio, _POINTS, begin_s=simulation.counted_from_s)
        axes.plot(at, paid / unit, color=colour, linewidth=1.8)
        dollars = f"${usd(run.usd)}, " if simulation.priced else ""
        ends.append((float(paid[-1]) / unit, f"{run.label}: {dollars}{run.cost_relative:.1%}", colour))
    at, due = spend_on_demand(dearest, _POINTS, begin_s=simulation.counted_from_s)
    axes.plot(at, due / unit, color=INK, linestyle=(0, (4, 2)), linewidth=1.4)
    dollars = f": ${usd(dearest.usd_on_demand)}" if simulation.priced else ""
    ends.append((float(due[-1]) / unit, f"target on demand{dollars}", INK))
    axes.set_xlim(0, at[-1])
    axes.set_ylim(0, max(end for end, _, _ in ends) * 1.05)
    _time_axis(axes, dearest.days, simulation)
    money = "${:,g}" if simulation.priced else "{:.0%}"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: money.format(value)))
    axes.set_ylabel("spent so far")
    axes.grid()
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names at the right ends of lines, pushed apart where they would overlap."""
    room = axes.get_ylim()[1] * 0.062
    last = -room
    for height, text, colour in sorted(ends):
        last = max(height, last + room)
        axes.annotate(
            text, (1.0, last), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def _time_axis(axes: Axes, days: float, simulation: Simulation) -> None:
    """Set an axis of days or hours since the beginning, or of the time of day, with about ten round ticks."""
    if simulation.began_at is not None:
        _clock_axis(axes, simulation.began_at + simulation.counted_from_s, days * DAY_S)
        return
    unit_s, unit = (DAY_S, "days") if days > 3 else (3600.0, "hours")
    units = days * DAY_S / unit_s
    step = next((size for size in _ROUND if units / size <= 12), units / 10)
    axes.set_xticks(np.arange(0, units + 1e-9, step) * unit_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit_s:g}"))
    axes.set_xlabel(unit)


def _clock_axis(axes: Axes, begin: float, length_s: float) -> None:
    """Set an axis of the reader's local time, with the date at midnight and at the left end."""
    step = next((size for size in _ROUND_S if length_s / size <= 11), _ROUND_S[-1])
    ahead = datetime.fromtimestamp(begin, UTC).astimezone().utcoffset() or timedelta()
    local = begin + ahead.total_seconds()
    first = math.ceil(local / step) * step - local
    ticks = [float(at) for at in np.arange(first, length_s + 1e-9, step)]

    def tick_label(at: float) -> str:
        moment = datetime.fromtimestamp(round(begin + at), UTC).astimezone()
        if at == ticks[0] or (moment.hour, moment.minute, moment.second) == (0, 0, 0):
            return moment.strftime("%H:%M\n%b %d") if step >= 60 else moment.strftime("%H:%M:%S\n%b %d")
        return moment.strftime("%H:%M" if step >= 60 else "%H:%M:%S")

    axes.set_xticks(ticks, [tick_label(at) for at in ticks])
