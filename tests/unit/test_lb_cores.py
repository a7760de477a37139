"""How many threads move chunks."""

from __future__ import annotations

import pytest

from lb.agent.server_options import available_cores, quota_of
from lb.config.workers import AUTO, MOST_WORKERS, mover_threads, workers_argument


@pytest.mark.parametrize(
    ("workers", "cores", "threads"),
    [
        pytest.param(AUTO, 1, 0, id="one core: the event loop"),
        pytest.param(AUTO, 2, 2, id="one per core"),
        pytest.param(AUTO, 64, MOST_WORKERS, id="not more than the most"),
        pytest.param(1, 8, 0, id="one is the event loop"),
        pytest.param(3, 1, 3, id="as wanted"),
    ],
)
def test_threads_follow_from_workers_and_cores(workers: int, cores: int, threads: int) -> None:
    assert mover_threads(workers, cores) == threads


@pytest.mark.parametrize(
    ("line", "cores"), [("200000 100000\n", 2), ("150000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_is_rounded_up(line: str, cores: int) -> None:
    assert quota_of(line) == cores


@pytest.mark.parametrize("line", ["max 100000", "", "what"])
def test_no_quota(line: str) -> None:
    with pytest.raises(ValueError, match=r"unpack|literal"):
        quota_of(line)


@pytest.mark.parametrize(("workers", "argument"), [(AUTO, []), (1, ["--workers", "1"])])
def test_agents_are_told_what_is_not_the_default(workers: int, argument: list[str]) -> None:
    assert workers_argument(workers) == argument


def test_a_process_has_a_core() -> None:
    assert available_cores() >= 1
