"""Markers of a home whose controller must not start: it was moved away, or it is being filled by a move from another home.

A home has at most one controller, and after `serve controller move` the one that it had runs elsewhere on a copy of its state.
The marker here is written before that controller is started, so that there are never two.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from skyserve_cli.home import Home, write_private


class MovedTo(NamedTuple):
    """`target` is as the command line had it, `context` the name by which commands reach the controller now."""

    target: str
    context: str

    def sentence(self, home: Home) -> str:
        if not self.target:
            return (
                f"{home.moved} cannot be read, and while it is there no controller starts here; "
                "`serve controller start --force` removes it and starts one"
            )
        return (
            f"the controller of {home.root} was moved to {self.target}: call it with `serve context use {self.context}`; "
            f"`serve controller move {self.target}` completes a move that was interrupted, and "
            "`serve controller start --force` starts it here again"
        )


def read_moved(home: Home) -> MovedTo | None:
    """Return where the controller of this home was moved to. A marker that cannot be read counts, with empty names."""
    try:
        found = json.loads(home.moved.read_text())
        return MovedTo(str(found["target"]), str(found["context"]))
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # the latter: there can be no home there, and so none was moved
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return MovedTo("", "")


def write_moved(home: Home, moved: MovedTo) -> None:
    write_private(home.moved, json.dumps(moved._asdict()).encode())


def why_not_to_start(home: Home) -> str | None:
    """Return why no controller may work on this home's state, in a sentence; None if one may."""
    moved = read_moved(home)
    if moved is not None:
        return moved.sentence(home)
    if home.incoming.exists():
        return (
            f"{home.root} is being filled by `serve controller move` on another host: run it there again to complete it, "
            "or use `serve controller start --force` here if that home is lost"
        )
    return None


def remove_markers(home: Home) -> None:
    """Let a controller start here again."""
    home.moved.unlink(missing_ok=True)
    home.incoming.unlink(missing_ok=True)
