"""Tables of commands, on Rich. Apart from `output`, because Rich costs commands that print no table 0.1 s to import.

Colour and motion are for terminals: into a pipe or a file go plain lines, as wide as they need to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from skyserve_cli.output import printable

WIDE_COLUMNS = 1000  # where no terminal sets the width, nothing is wrapped or cut

_FOLDED_CELLS = 20  # a last column that folds is at least as wide as that, or as wide as it needs to be
_GAP = 2  # between columns
_NOTHING: Mapping[int, str] = MappingProxyType({})

_STYLES = {
    "READY": "green",
    "NOT_READY": "yellow",
    "DRAINING": "yellow",
    "REPLICA_INIT": "cyan",
    "REQUESTED": "cyan",
    "PROVISIONING": "cyan",
    "STARTING": "cyan",
    "TERMINATING": "dim",
    "SHUTTING_DOWN": "dim",
    "GONE": "dim",
    "DOWN": "dim",
    "on_demand": "magenta",
    "FAILED": "bold red",
    "BROKEN": "bold red",
    "FAILED_CLEANUP": "bold red",
}


def console(stream: TextIO) -> Console:
    """Rich, without its guesses: no markup, no emoji, no highlighting of what looks like a number."""
    width = None if stream.isatty() else WIDE_COLUMNS
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


@contextmanager
def doing(what: str) -> Iterator[Callable[[str], None]]:
    """A line of standard error with the present step, written over with each sentence; elsewhere than on a terminal nothing."""
    if not sys.stderr.isatty():
        yield lambda sentence: None
        return
    with console(sys.stderr).status(what) as status:
        yield status.update


def put_table(table: FittedTable | Text) -> None:
    console(sys.stdout).print(table)


def print_table(table: FittedTable) -> None:
    console(sys.stderr).print(table)


class FittedTable:
    """A table without lines that shortens no cell.

    Columns called `$…` or `#…` hold numbers and are aligned to the right; a cell that is the name of a state has its
    colour. `drop` names the columns that a narrow terminal does not show, the least important first: they are left out,
    in that order, while the others do not fit. The last column takes what room is left, and is folded there if it
    `folds`. Lines that are still too long go on in the next line. `below` has a line that is shown below a row, by the
    index of the row; it is shortened to the width of the terminal.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        drop: Sequence[str] = (),
        folds: bool = True,
        below: Mapping[int, str] = _NOTHING,
    ) -> None:
        self._columns = list(columns)
        self._rows = [[printable(cell) for cell in row] for row in rows]
        self._drop = drop
        self._folds = folds
        self._below = below

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        shown = self._fitting(room)
        width = max(self._width(shown, folded=self._folds), min(room, self._width(shown, folded=False)))
        lines = console.render_lines(self._table(shown), options.update(width=width), pad=False)
        cuts = [*range(room, width, room), width]
        for number, line in enumerate(lines):
            for piece in Segment.divide(line, cuts) if width > room else (line,):
                if piece:
                    yield from piece
                    yield Segment.line()
            if (
                number - 1 in self._below
            ):  # the first line is the head, and no row with a line below is folded
                text = Text(f"  | {printable(self._below[number - 1])}", style="dim", no_wrap=True)
                text.truncate(room, overflow="ellipsis")
                yield from console.render(text, options)

    def _fitting(self, room: int) -> list[int]:
        """Return the indices of the columns that fit."""
        shown = list(range(len(self._columns)))
        for name in self._drop:
            if self._width(shown, folded=self._folds) <= room:
                break
            shown.remove(self._columns.index(name))
        return shown

    def _width(self, shown: Sequence[int], *, folded: bool) -> int:
        """Return what these columns need; the last one no more than `_FOLDED_CELLS` if it is folded."""
        cells = [max(map(cell_len, self._column(index))) for index in shown]
        if folded:
            cells[-1] = min(cells[-1], _FOLDED_CELLS)
        return sum(cells) + _GAP * (len(cells) - 1)

    def _column(self, index: int) -> list[str]:
        """Return the lines of all cells of a column, its name included."""
        cells = [self._columns[index].removeprefix("#"), *(row[index] for row in self._rows)]
        return [line for cell in cells for line in (cell.splitlines() or [""])]

    def _table(self, shown: Sequence[int]) -> Table:
        built = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for index in shown:
            name, last = self._columns[index], index == shown[-1]
            right = name.startswith(("$", "#"))
            built.add_column(
                name.removeprefix("#"),
                justify="right" if right else "left",
                no_wrap=not (last and self._folds),
                overflow="fold",
            )
        for row in self._rows:
            built.add_row(*(Text(row[index], style=_STYLES.get(row[index], "")) for index in shown))
        return built
