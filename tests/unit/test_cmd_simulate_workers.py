"""Work in processes: all of it done, once, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing

import psutil
import pytest

from skyserve_cli.sim.workers import PieceProgress, WorkerDied, run

Told = Callable[[float], None]


def living() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The children of this test; what an earlier one left to Python's own housekeeping is not among them."""
    before = living()
    return lambda: [process for process in living() if process not in before]


@pytest.mark.parametrize(("count", "processes"), [(0, 2), (1, 4), (7, 1), (7, 3)])
def test_every_piece_is_done_once(
    count: int, processes: int, children: Callable[[], list[psutil.Process]]
) -> None:
    results = [
        progress
        for progress in run(lambda piece, told: piece * piece, count, processes)
        if progress and progress.result is not None
    ]
    assert sorted((progress.piece, progress.result) for progress in results) == [
        (piece, piece**2) for piece in range(count)
    ]
    assert all(progress.fraction == 1.0 for progress in results)
    assert children() == []


def test_no_more_processes_than_pieces_or_than_asked_for() -> None:
    pids = {progress.result for progress in run(lambda piece, told: os.getpid(), 6, 2) if progress}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids


def test_progress_is_told_in_steps_worth_telling() -> None:
    def work(piece: int, told: Told) -> str:
        for step in range(1, 10_001):
            told(step / 10_000)
        return "done"

    progress = [each for each in run(work, 1, 1) if each]
    fractions = [each.fraction for each in progress]
    assert fractions == sorted(fractions)
    assert 50 <= len(fractions) <= 101
    assert progress[-1] == PieceProgress(0, 1.0, "done")


def test_a_worker_that_dies_is_named(
    capfd: pytest.CaptureFixture[str], children: Callable[[], list[psutil.Process]]
) -> None:
    def work(piece: int, told: Told) -> int:
        if piece == 1:
            raise RuntimeError("out of luck")
        return piece

    with pytest.raises(WorkerDied) as raised:
        list(run(work, 2, 1))
    assert raised.value.piece == 1
    assert "out of luck" in capfd.readouterr().err
    assert children() == []


def test_a_worker_that_is_killed_is_noticed() -> None:
    def work(piece: int, told: Told) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return piece

    with pytest.raises(WorkerDied, match="exit code -9"):
        list(run(work, 1, 1))


def test_closing_ends_workers_that_are_busy(children: Callable[[], list[psutil.Process]]) -> None:
    def work(piece: int, told: Told) -> int:
        told(0.5)
        time.sleep(600)
        return piece

    with closing(run(work, 2, 2)) as stream:
        heard = {progress.piece for progress in (next(stream), next(stream)) if progress}
        assert heard <= {0, 1}
        assert len(children()) == 2
    assert children() == []


def test_ctrl_c_is_not_for_the_workers() -> None:
    def work(piece: int, told: Told) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "went on"

    assert [progress.result for progress in run(work, 1, 1) if progress] == ["went on"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
