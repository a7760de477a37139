"""Reports as files: what `--report` of `serve simulate` and `--out` of `serve report` have in common."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from skyserve_cli.commands.statistics import insist_on_statistics
from skyserve_cli.output import CommandFailed, WrongUsage, inform

_SUFFIXES = (".html", ".png")  # those of `sim.report`, which takes a second to import


def insist_on_writable(option: str, path: Path | None) -> None:
    """Better said before the work than after it. Raises WrongUsage."""
    if path is None:
        return
    if path.suffix not in _SUFFIXES:
        raise WrongUsage(f"{option} takes a file that ends in {' or '.join(_SUFFIXES)} (got {str(path)!r})")
    insist_on_statistics(option)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise WrongUsage(f"{option} {path}: cannot be written there")


def draw(option: str, path: Path, write: Callable[[str], None]) -> None:
    """Call `write` with this command line, and say where the report is. Raises CommandFailed."""
    try:
        write(shlex.join(["serve", *sys.argv[1:]]))
    except OSError as error:
        raise CommandFailed(f"{option} {path}: {error.strerror}") from error
    inform(f"report: {path}")
