"""Independent pieces of work in processes of their own, with word of how far each has come.

Workers are forks, so that what the work needs is there already and nothing but its result travels. Each has a pipe of
its own to its parent: it requests nothing, receives the number of the next piece, and sends fractions and at last the
result. Ctrl-C is the parent's; a worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, TypeVar, cast

_R = TypeVar("_R")

_STEP = 0.01  # smaller progress is kept quiet
_BEAT_S = 0.5


class PieceProgress(NamedTuple, Generic[_R]):
    """A piece has come so far; `result` comes with the last news of it."""

    piece: int
    fraction: float
    result: _R | None


class WorkerDied(Exception):
    """A worker exited without a result; what it said is on stderr. `piece` is what it was at."""

    def __init__(self, piece: int, exitcode: int | None) -> None:
        super().__init__(f"ended without a result (exit code {exitcode})")
        self.piece = piece


def run(
    work: Callable[[int, Callable[[float], None]], _R], count: int, processes: int
) -> Generator[PieceProgress[_R] | None, None, None]:
    """News of pieces 0 … `count` - 1, each done once as `work(piece, report)`, as it comes.

    None now and then where there is none, so that the caller can show that time goes on.

    Closing the generator terminates the workers at once. Raises WorkerDied.
    """
    context = get_context("fork")
    workers: dict[Connection, BaseProcess] = {}
    at: dict[Connection, int] = {}
    pieces = iter(range(count))
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the forks keep it blocked
    try:
        for _ in range(min(processes, count)):
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=_worker, args=(there, work), daemon=True)
            process.start()
            there.close()
            workers[here] = process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
    try:
        for pipe in workers:
            _next(pipe, at, pieces)
        while at:
            heard = cast("list[Connection]", wait(list(at), _BEAT_S))
            if not heard:
                yield None
            for pipe in heard:
                try:
                    news: PieceProgress[_R] = pipe.recv()
                    if news.result is not None:
                        _next(pipe, at, pieces)
                except (EOFError, ConnectionError):
                    workers[pipe].join()
                    raise WorkerDied(at[pipe], workers[pipe].exitcode) from None
                yield news
    finally:
        for pipe, process in workers.items():
            process.terminate()
            process.join()
            pipe.close()


def _next(pipe: Connection, at: dict[Connection, int], pieces: Iterator[int]) -> None:
    """Give a worker its next piece; without one it is not listened to any more."""
    at.pop(pipe, None)
    for piece in pieces:
        at[pipe] = piece
        pipe.send(piece)
        return


def _worker(pipe: Connection, work: Callable[[int, Callable[[float], None]], _R]) -> None:
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has exited
        while True:
            piece, said = pipe.recv(), 0.0

            def report(fraction: float, piece: int = piece) -> None:
                nonlocal said
                if fraction - said >= _STEP:
                    said = fraction
                    pipe.send(PieceProgress(piece, fraction, None))

            pipe.send(PieceProgress(piece, 1.0, work(piece, report)))
