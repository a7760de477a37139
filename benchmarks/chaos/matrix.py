"""The fault matrix: what can befall a controller, its database, its host, its programs and its shells, one cell each.

In each cell a service of two replicas has open-loop traffic while the fault lasts. Columns, each a claim:

* not twice: no replica was launched twice, and no machine is too many
* none ended: no replica that was well is gone
* no orphan: the machines that run are those of rows; in the end nothing at all is left
* answers: no request failed
* first line: the first line of a command names what is the case
* recovers: by itself, or by the commands which that line names, run as printed

    python -m benchmarks.chaos.matrix [--short] [--cell NAME…] [--list]

The whole matrix takes about half an hour, the short form a minute and a half. It needs root for two file systems of its own and for PostgreSQL
(Debian's package `postgresql`); cells that cannot be run are named, and count as not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos.matrix_cells import CELLS, Cell
from benchmarks.chaos.patient import Examination

COLUMNS = ("not twice", "none ended", "no orphan", "answers", "first line", "recovers")


def why_not(cell: Cell) -> str:
    """Return why a cell cannot be run here; "" if it can."""
    if cell.is_root and os.geteuid() != 0:
        return "needs root"
    if cell.database == "postgresql" and not sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        return "needs PostgreSQL"
    return ""


def examined(cell: Cell) -> Examination:
    """Run one cell. What was not foreseen breaks all of it."""
    try:
        return cell.run()
    except Exception as error:  # noqa: BLE001 - the other cells are run
        traceback.print_exc()
        found = Examination()
        found.claim(
            "no orphan" if type(error).__name__ == "Leftovers" else "recovers", False, f"{error!r}"[:400]
        )
        return found


def line(cell: Cell, found: Examination, took_s: float) -> str:
    marks = ["broken" if column in found.broken else "holds" for column in COLUMNS]
    remark = "; ".join(found.remarks)
    return f"| {cell.name} | {cell.database} | {' | '.join(marks)} | {took_s:.0f} s | {remark} |"


def run(cells: Sequence[Cell]) -> list[str]:
    """Run cells and print a row for each. Returns what does not hold, as sentences."""
    print(f"| fault | database | {' | '.join(COLUMNS)} | took | by |")
    print("|---|---|" + "---|" * (len(COLUMNS) + 2), flush=True)
    broken = []
    for cell in cells:
        why = why_not(cell)
        if why:
            print(f"| {cell.name} | {cell.database} | not run: {why} |", flush=True)
            continue
        began = time.monotonic()
        found = examined(cell)
        print(line(cell, found, time.monotonic() - began), flush=True)
        for column, sentences in found.broken.items():
            for sentence in sentences:
                broken.append(f"{cell.name} ({cell.database}), {column}: {sentence}")
                print(f"BROKEN: {broken[-1]}", file=sys.stderr, flush=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="those that are fast, as in every test run")
    parser.add_argument("--cell", nargs="+", metavar="NAME", help="cells whose name begins so")
    parser.add_argument("--list", action="store_true", help="list the cells and run none")
    given = parser.parse_args()
    cells = [cell for cell in CELLS if cell.is_short or not given.short]
    if given.cell:
        cells = [cell for cell in cells if cell.name.startswith(tuple(given.cell))]
    if given.list:
        for cell in cells:
            print(f"{cell.name} ({cell.database})")
        return 0
    return 1 if run(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
