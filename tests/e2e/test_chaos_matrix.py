"""The short form of the fault matrix: each of its cells hurts a whole installation."""

from __future__ import annotations

import pytest

from benchmarks.chaos.matrix import why_not
from benchmarks.chaos.matrix_cells import CELLS, Cell

pytestmark = pytest.mark.long


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in CELLS if cell.is_short])
def test_a_cell_holds(cell: Cell) -> None:
    why = why_not(cell)
    if why:
        pytest.skip(why)
    assert cell.run().broken == {}
