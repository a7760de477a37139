"""Many simulated runs at once, on all cores, with a bar while it takes and an orderly end at Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from skyserve_cli.account.runs import Run
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, plural
from skyserve_cli.sim import run as engine
from skyserve_cli.sim import workers
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.text_tables import console

BAR_AFTER_S = 2.0


def run_all(
    settings: Sequence[Setting], jobs: Sequence[Job], processes: int | None, *, drawn: bool
) -> tuple[list[Run], bool]:
    """The finished runs, in the order in which they were requested, and whether Ctrl-C came before the last.

    Step by step a run is long. Only where it will be `drawn` its steps are kept: those of the first window and seed.
    """
    pieces = [(window, job) for job in jobs for window in range(len(settings))]

    def work(piece: int, report: Callable[[float], None]) -> Run:
        window, job = pieces[piece]
        run = replace(engine.simulate(settings[window], job, report), window=window)
        kept = drawn and window == 0 and job.seed == jobs[0].seed
        return run if kept else replace(run, steps=(), wanted=())

    cores = len(os.sched_getaffinity(0))
    finished: dict[int, Run] = {}
    fractions = [0.0] * len(pieces)
    try:
        with closing(workers.run(work, len(pieces), processes or cores)) as stream, _bar(len(pieces)) as show:
            for progress in stream:
                if progress is not None:
                    fractions[progress.piece] = progress.fraction
                    if progress.result is not None:
                        finished[progress.piece] = progress.result
                show(sum(fractions), len(finished))
    except workers.WorkerDied as error:
        window, job = pieces[error.piece]
        raise CommandFailed(
            f"the run of {job.policy}, seed {job.seed}, window {window + 1}, {error}"
        ) from None
    except KeyboardInterrupt:
        return [finished[piece] for piece in sorted(finished)], True
    return [finished[piece] for piece in sorted(finished)], False


@contextmanager
def _bar(count: int) -> Iterator[Callable[[float, int], None]]:
    """On a terminal, and once it takes a while, how far everything has come."""
    if not sys.stderr.isatty():
        yield lambda done, finished: None
        return
    clock = SystemClock()
    began = clock.now()
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    progress = Progress(*columns, console=console(sys.stderr), transient=True)
    task = progress.add_task("", total=count)

    def show(done: float, finished: int) -> None:
        progress.update(task, completed=done, description=f"{finished} of {plural(count, 'run')}")
        if not progress.live.is_started and clock.now() - began > BAR_AFTER_S:
            progress.start()

    try:
        yield show
    finally:
        progress.stop()
