"""A simulation, or what a service lived through, as one file to look at: a page (HTML) or a picture (PNG).

Both hold everything: the verdict, the table, the pictures of `report_figures` and the command line that makes them
again. The page has its pictures and its style inside; it loads nothing and runs nothing. The same simulation gives
the same bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill, wrap

from matplotlib import rc_context
from matplotlib.figure import Figure, FigureBase

from provisioners.files import write_bytes
from skyserve_cli.account.runs import Run, Simulation, percent
from skyserve_cli.account.service_history import ServiceHistory
from skyserve_cli.report import history_text
from skyserve_cli.report.figures import MUTED, STYLE, draw_frontier, draw_spend, draw_timelines
from skyserve_cli.report.text import (
    GLOSSARY,
    LEVELS,
    availability_sentences,
    equal_availability,
    setting,
    table_cells,
    verdict,
)
from skyserve_cli.sim.summary import SummaryRow, cheapest, most_available, summarize

SUFFIXES = (".html", ".png")

WIDTH_IN = 11.0
_PANEL_IN, _LEGEND_IN = 1.5, 1.0
_FRONTIER_IN, _SPEND_IN = 4.8, 3.8
LINE_IN = 0.24  # of text
DPI = 130

CSS = """body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933;
  background: #fff; max-width: 1120px; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.55rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .3rem; }
p.setting, p.note, dl { color: #66707c; margin: .2rem 0 .8rem; font-size: .9rem; }
p.verdict { border-left: 4px solid #0072B2; background: #f2f7fb; padding: .6rem .9rem; margin: 1.2rem 0 .6rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; margin: .6rem 0; }
th { text-align: left; font-size: .74rem; letter-spacing: .03em; color: #66707c; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #e4e7eb; white-space: nowrap; }
th.number, td.number { text-align: right; }
div.wide { overflow-x: auto; }
svg { width: 100%; height: auto; }
pre { background: #f5f6f8; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; }
dt { float: left; clear: left; font-weight: 600; margin-right: .5rem; }
dd { margin: 0; }
"""

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<h1>{title}</h1>
<p class="setting">{setting}</p>
"""
FOOT = """<h2>Made by</h2>
<pre>{command}</pre>
</body>
</html>
"""

_BODY = """{verdicts}
{tables}
<dl>{glossary}</dl>
<h2>Replicas over time</h2>
<p class="note">{timelines_note}</p>
{timelines}
{frontier}
<h2>Spend over time</h2>
{spend}
"""


_FRONTIER = """<h2>Availability against cost</h2>
<p class="note">Up and to the left is better. Lines join what mixing settings over time reaches; dotted, what mixing
with on demand reaches.</p>
{frontier}
<div class="wide">{levels}</div>"""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # columns, named as `FittedTable` wants them, and rows


@dataclass(frozen=True, slots=True)
class _Document:
    """The content of a page. `rows` are on the frontier; what happened only once has none."""

    title: str
    setting: str
    verdicts: Sequence[str]
    tables: Sequence[Table]
    glossary: Sequence[tuple[str, str]]
    timelines_note: str
    simulation: Simulation
    runs: Sequence[Run]
    rows: Sequence[SummaryRow]
    command: str


def write(simulation: Simulation, path: Path, *, command: str, targets: Sequence[float]) -> None:
    """Write the report; the suffix of `path` gives the format. `targets` are the availabilities of interest.

    Takes the place of an older file in one step. Raises OSError, and ValueError where there is nothing to show.
    """
    if not simulation.runs:
        raise ValueError("a report needs a run")
    rows = summarize(simulation.runs)
    runs = shown_runs(rows, targets[0])
    _write(
        _Document(
            title=f"What spot would have done: {simulation.trace}",
            setting=setting(simulation),
            verdicts=[
                *(verdict(rows, target, priced=simulation.priced) for target in targets),
                *availability_sentences(rows),
            ],
            tables=[table_cells(rows, priced=simulation.priced)],
            glossary=GLOSSARY,
            timelines_note=_timelines_note(simulation, runs),
            simulation=simulation,
            runs=runs,
            rows=rows,
            command=command,
        ),
        path,
    )


def write_history(history: ServiceHistory, path: Path, *, command: str) -> None:
    """The same of what a service lived through. Raises OSError."""
    _write(
        _Document(
            title=history_text.title(history),
            setting=history_text.setting(history),
            verdicts=[history_text.verdict(history)],
            tables=[history_text.totals(history), history_text.bought(history)],
            glossary=history_text.GLOSSARY,
            timelines_note=f"{_AREA}. {history_text.KNOWN}.",
            simulation=history.simulation,
            runs=history.simulation.runs,
            rows=(),
            command=command,
        ),
        path,
    )


def _write(document: _Document, path: Path) -> None:
    render = _page if path.suffix == ".html" else _picture
    with rc_context(STYLE):
        content = render(document)
    write_bytes(path, content)


def shown_runs(rows: Sequence[SummaryRow], availability: float) -> list[Run]:
    """Return the first run of each policy's cheapest setting that is available enough, or else of its most available."""
    policies = dict.fromkeys(row.policy for row in rows)
    chosen = []
    for policy in policies:
        family = [row for row in rows if row.policy == policy]
        row = cheapest(family, availability) or most_available(family) or family[0]
        chosen.append(row.runs[0])
    return chosen


# --- the page -----------------------------------------------------------------------------------------------


def _page(document: _Document) -> bytes:
    simulation, runs = document.simulation, document.runs
    text = (HEAD + _BODY + FOOT).format(
        css=CSS,
        title=html.escape(document.title),
        setting=html.escape(document.setting),
        verdicts="\n".join(f'<p class="verdict">{html.escape(line)}</p>' for line in document.verdicts),
        tables="\n".join(f'<div class="wide">{html_table(*table)}</div>' for table in document.tables),
        glossary="".join(
            f"<dt>{html.escape(term)}</dt><dd>{html.escape(said)}</dd>" for term, said in document.glossary
        ),
        timelines_note=html.escape(document.timelines_note),
        timelines=svg(
            _LEGEND_IN + _PANEL_IN * len(runs), lambda figure: draw_timelines(figure, simulation, runs)
        ),
        frontier=_html_frontier(document.rows) if document.rows else "",
        spend=svg(_SPEND_IN, lambda figure: draw_spend(figure, simulation, runs)),
        command=html.escape(document.command),
    )
    return text.encode()


def _html_frontier(rows: Sequence[SummaryRow]) -> str:
    levels = [[policy, *(f"{cost:.1%}" for cost in costs)] for policy, costs in equal_availability(rows)]
    return _FRONTIER.format(
        frontier=svg(_FRONTIER_IN, lambda figure: draw_frontier(figure, rows)),
        levels=html_table(["COST AT", *(f"#{percent(level)}" for level in LEVELS)], levels),
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_NUMBER if column[0] in '#$' else ''}>{html.escape(cell)}</{tag}>"
            for column, cell in zip(columns, cells, strict=True)
        )

    head = line("th", [column.removeprefix("#") for column in columns])
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line('td', row)}</tr>" for row in rows) + "</table>"


_NUMBER = ' class="number"'


def svg(height_in: float, draw: Callable[[FigureBase], None]) -> str:
    figure = Figure((WIDTH_IN, height_in), layout="constrained")
    draw(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", dpi=DPI, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # An HTML page has no place for the XML prologue, and knows the namespaces.
    bare = re.sub(r"\A.*?(?=<svg)", "", out.getvalue(), count=1, flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", bare)


# --- the picture --------------------------------------------------------------------------------------------


def _picture(document: _Document) -> bytes:
    simulation, runs, rows = document.simulation, document.runs, document.rows
    head = [
        line
        for text in (document.setting, *document.verdicts)
        for line in wrap(text, 140, subsequent_indent="    ")
    ]
    foot = fill(
        document.command, 130, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    parts: list[tuple[float, Callable[[FigureBase], None]]] = [
        (LINE_IN * (len(head) + 1.8), lambda figure: draw_head(figure, document.title, head)),
        *((LINE_IN * (len(table[1]) + 2), partial(draw_table, table=table)) for table in document.tables),
        (_LEGEND_IN + _PANEL_IN * len(runs), lambda figure: draw_timelines(figure, simulation, runs)),
    ]
    if rows:
        parts.append((_FRONTIER_IN, lambda figure: draw_frontier(figure, rows)))
    parts += [
        (_SPEND_IN, lambda figure: draw_spend(figure, simulation, runs)),
        (LINE_IN * (foot.count("\n") + 2), lambda figure: draw_foot(figure, foot)),
    ]
    return stacked(parts)


def stacked(parts: Sequence[tuple[float, Callable[[FigureBase], None]]]) -> bytes:
    """Return a picture (PNG) of parts below each other, each with its height in inches."""
    heights = [height for height, _ in parts]
    figure = Figure((WIDTH_IN, sum(heights)), layout="constrained")
    places = figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for place, (_, draw) in zip(places, parts, strict=True):
        draw(place)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def draw_head(figure: FigureBase, title: str, lines: Sequence[str]) -> None:
    figure.text(0.012, 0.92, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.012, 0.92 - 1.4 / (len(lines) + 1.8), "\n".join(lines), va="top", linespacing=1.5)


def draw_foot(figure: FigureBase, text: str) -> None:
    figure.text(0.012, 0.9, text, va="top", family="monospace", fontsize=8, color=MUTED)


def draw_table(figure: FigureBase, table: Table) -> None:
    columns, rows = table
    widths = [max(len(cell) for cell in column) + 2 for column in zip(columns, *rows, strict=True)]
    line = 1 / (len(rows) + 2)
    started = 0
    for index, (name, width) in enumerate(zip(columns, widths, strict=True)):
        right = name[0] in "#$"
        x = 0.012 + 0.976 * (started + (width - 2 if right else 0)) / max(sum(widths), 120)
        started += width
        for number, cell in enumerate([name.removeprefix("#"), *(row[index] for row in rows)]):
            figure.text(
                x, 1 - line * (number + 1), cell, ha="right" if right else "left", va="center",
                fontsize=7.5 if number == 0 else 9, color=MUTED if number == 0 else None,
            )  # fmt: skip


# --- what both say ------------------------------------------------------------------------------------------

_AREA = "The area is what was paid for; the strip below marks when fewer than the target were ready, widened to be seen"


def _timelines_note(simulation: Simulation, runs: Sequence[Run]) -> str:
    of_several = len(simulation.runs) > len(runs)
    which = f" (seed {runs[0].seed}, window {runs[0].window + 1})" if of_several else ""
    return f"One run of each policy{which}, from the end of the first cold start on. {_AREA}."
