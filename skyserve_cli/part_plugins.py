"""Parts of the controller from other packages: entry points of the group `skyserve.parts`, each a subclass of `controller.part.Part`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "skyserve.parts"


class PartError(Exception):
    """A part cannot be used; the message names it and the reason."""


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Return them by name, without importing any."""
    from importlib.metadata import entry_points  # it is slow

    return {one.name: one for one in sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value))}


@cache
def part_class(name: str) -> Any:
    """Return the class. Raises PartError if there is none of that name, or it cannot be imported."""
    entry = installed().get(name)
    if entry is None:
        raise PartError(f"there is no part {name} (installed: {', '.join(installed()) or 'none'})")
    try:
        return entry.load()
    except Exception as error:
        raise PartError(f"the part {name} cannot be loaded: {type(error).__name__}: {error}") from error
