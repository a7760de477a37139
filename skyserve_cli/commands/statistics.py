"""SciPy and Matplotlib, which only commands that compute have: the extra `simulate`."""

from __future__ import annotations

from importlib.util import find_spec

from skyserve_cli.output import CommandFailed

_PACKAGES = ("scipy", "matplotlib")


def insist_on_statistics(what: str) -> None:
    """Raises CommandFailed, with what to install, if they are missing. `what` needs them."""
    if any(find_spec(name) is None for name in _PACKAGES):
        raise CommandFailed(
            f"{what} needs SciPy and Matplotlib: install the extra `simulate`, e.g. pip install '.[simulate]'",
            2,
        )
