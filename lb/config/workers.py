"""`load_balancer.workers`: how many cores move the chunks of streams. Which target gets a request is decided on one."""

from __future__ import annotations

AUTO = 0  # one per core
MOST_WORKERS = 16


def mover_threads(workers: int, cores: int) -> int:
    """Return how many threads move chunks beside the event loop; 0: it moves them itself, which costs least on one core.

    `workers` is what the user wants, AUTO or 1 to MOST_WORKERS.
    """
    wanted = workers or min(cores, MOST_WORKERS)
    return 0 if wanted == 1 else wanted


def workers_argument(workers: int) -> list[str]:
    """Return the words of its command line. AUTO has none: agents that an older controller has started are to stay."""
    return ["--workers", str(workers)] if workers != AUTO else []
