"""The question before something costs money or is lost."""

from __future__ import annotations

import sys

import typer

from skyserve_cli.output import CommandFailed, WrongUsage


def confirm(question: str, *, yes: bool) -> None:
    """Go on, or raise: WrongUsage without a terminal, CommandFailed where the user says no or presses Ctrl-C."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(
            "cannot ask for confirmation: stdin is not a terminal; pass -y to go ahead without asking"
        )
    try:
        agreed = typer.confirm(question, default=True, err=True)
    except (typer.Abort, KeyboardInterrupt):
        raise CommandFailed("\ninterrupted; nothing has changed", 130) from None
    if not agreed:
        raise CommandFailed("nothing has changed")
