"""Sentences about a service that cannot be decided about. The others go on. Pure."""

from __future__ import annotations

from skyserve_cli.state.values import ServiceRow

BROKEN = "BROKEN"  # the status of a service whose stored state cannot be read


def broken(row: ServiceRow, trouble: str) -> str:
    """Return what to do about a service whose stored state cannot be read."""
    return (
        f"{trouble}; its replicas are left as they are: `serve update {row.name} FILE` replaces what is stored, "
        f"`serve down {row.name}` terminates its machines"
    )


def failed_turn(error: Exception) -> str:
    """Return what is said of a service whose turn raised an error; the log has the rest."""
    return (
        f"its last turn failed ({type(error).__name__}), and its replicas are left as they are; "
        "see `serve logs --controller`"
    )
