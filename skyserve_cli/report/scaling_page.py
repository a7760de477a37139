"""`serve simulate --autoscaler --report`: a comparison of autoscalers as one file to look at, a page (HTML) or a picture (PNG).

Made as in `page`: everything is inside, and the same comparison gives the same bytes.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill, wrap

from matplotlib import rc_context
from matplotlib.figure import FigureBase

from provisioners.files import write_bytes
from skyserve_cli.report.figures import STYLE
from skyserve_cli.report.page import (
    CSS,
    FOOT,
    HEAD,
    LINE_IN,
    draw_foot,
    draw_head,
    draw_table,
    html_table,
    stacked,
    svg,
)
from skyserve_cli.report.scaling_figures import draw_budget, draw_calibration, draw_capacity, draw_hours
from skyserve_cli.sim.forecasts import Forecasts
from skyserve_cli.sim.scaling import Evaluation, ScalingTrial

_PANEL_IN, _LEGEND_IN, _FIGURE_IN = 1.7, 0.7, 4.4

_BODY = """<div class="wide">{table}</div>
{pictures}
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The contents. `rows` are the runs of each autoscaler, one per seed; pictures over time show the first, on `trial`.

    `table` are columns and rows of text. `foreseen` is None where nothing was forecast.
    """

    recording: str
    setting: str
    table: tuple[Sequence[str], Sequence[Sequence[str]]]
    rows: Mapping[str, Sequence[Evaluation]]
    trial: ScalingTrial
    forecasts: Forecasts | None

    @property
    def first(self) -> list[Evaluation]:
        return [evaluations[0] for evaluations in self.rows.values()]

    @property
    def title(self) -> str:
        return f"Autoscalers on {self.recording}"


@dataclass(frozen=True, slots=True)
class _Part:
    title: str
    note: str
    height_in: float
    draw: Callable[[FigureBase], None]


def write(comparison: Comparison, path: Path, *, command: str) -> None:
    """Write the report; the suffix of `path` gives the format. Takes the place of an older file in one step. Raises OSError."""
    render = _page if path.suffix == ".html" else _picture
    with rc_context(STYLE):
        content = render(comparison, command)
    write_bytes(path, content)


def _parts(shown: Comparison) -> list[_Part]:
    asked, runs = shown.trial.attainment, shown.first
    parts = [
        _Part(
            "Demand and what was ready for it",
            "One seed. Marks at the bottom: more than a tenth of the requests were late.",
            _LEGEND_IN + _PANEL_IN * len(runs),
            partial(draw_capacity, runs=runs, trial=shown.trial, found=shown.forecasts),
        ),
        _Part(
            "Requests in time against replica hours",
            "Up and to the left is better. The dashed line is what was asked.",
            _FIGURE_IN,
            partial(draw_hours, rows=shown.rows, asked=asked),
        ),
    ]
    if shown.forecasts is not None:
        parts.append(
            _Part(
                "Calibration of the forecast",
                "Of the busiest minute one cold start ahead. On the dashed line a quantile is what it says.",
                _FIGURE_IN,
                partial(draw_calibration, found=shown.forecasts),
            )
        )
    parts.append(
        _Part(
            "Error budget used",
            "One seed. Below the dashed line an autoscaler saves late requests for later.",
            _FIGURE_IN,
            partial(draw_budget, runs=runs, asked=asked),
        )
    )
    return parts


def _page(shown: Comparison, command: str) -> bytes:
    pictures = [
        f'<h2>{html.escape(part.title)}</h2>\n<p class="note">{html.escape(part.note)}</p>\n{svg(part.height_in, part.draw)}'
        for part in _parts(shown)
    ]
    text = (HEAD + _BODY + FOOT).format(
        css=CSS,
        title=html.escape(shown.title),
        setting=html.escape(shown.setting),
        table=html_table(*shown.table),
        pictures="\n".join(pictures),
        command=html.escape(command),
    )
    return text.encode()


def _picture(shown: Comparison, command: str) -> bytes:
    head = wrap(shown.setting, 140, subsequent_indent="    ")
    foot = fill(command, 130, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    parts: list[tuple[float, Callable[[FigureBase], None]]] = [
        (LINE_IN * (len(head) + 1.8), lambda figure: draw_head(figure, shown.title, head)),
        (LINE_IN * (len(shown.table[1]) + 2), partial(draw_table, table=shown.table)),
        *(
            piece
            for part in _parts(shown)
            for piece in (
                (2 * LINE_IN, partial(_draw_title, text=part.title)),
                (part.height_in, part.draw),
            )
        ),
        (LINE_IN * (foot.count("\n") + 2), lambda figure: draw_foot(figure, foot)),
    ]
    return stacked(parts)


def _draw_title(figure: FigureBase, text: str) -> None:
    figure.text(0.012, 0.1, text, fontsize=11, fontweight="bold")
