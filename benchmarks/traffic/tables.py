"""Figures of several seeds as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from skyserve_cli.sim.summary import Estimate, estimate

T = TypeVar("T")


class Column(NamedTuple, Generic[T]):
    """A column of a table; `form` is a format specification."""

    head: str
    value: Callable[[T], float]
    form: str

    def cell(self, runs: Iterable[T]) -> str:
        """Return the mean over the runs, with half of a 95 % confidence interval."""
        return shown(estimate([self.value(run) for run in runs]), self.form)


def shown(value: Estimate, form: str) -> str:
    return f"{value.mean:{form}}" + (f" ±{value.half_width:{form}}" if value.half_width is not None else "")


def print_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool = True
) -> None:
    lines = [list(heads), *map(list, rows)]
    if markdown:
        print(f"\n{title}\n")
        for index, line in enumerate(lines):
            print("| " + " | ".join(line) + " |")
            if not index:
                print("|" + " --- |" * len(line))
    else:
        widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
        print(f"\n{title}")
        for line in lines:
            cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            print("  " + "  ".join(cells).rstrip())
    print(end="", flush=True)
