"""The garbage collector walks new objects, and now and then all."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from skyserve_cli.controller.gc_pauses import GcPauses


class _Cycle:
    """Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


class _Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Iterator[_Clock]:
    clock = _Clock()
    pauses = GcPauses(clock, walk_all_every_s=100.0)
    pauses.install()
    yield clock
    pauses.remove()
    assert gc.get_freeze_count() == 0


@pytest.mark.long
def test_what_survives_a_full_collection_is_not_walked_again(clock: _Clock) -> None:
    kept = [[] for _ in range(10_000)]  # type: ignore[var-annotated]
    gc.collect()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < len(kept)


def test_new_garbage_is_collected(clock: _Clock) -> None:
    gc.collect()
    one = weakref.ref(_Cycle())
    gc.collect()
    assert one() is None


@pytest.mark.long
def test_what_became_garbage_after_it_was_set_aside_is_collected_when_everything_is_walked(
    clock: _Clock,
) -> None:
    lived = _Cycle()
    one = weakref.ref(lived)
    gc.collect()
    del lived
    gc.collect()
    assert one() is not None
    clock.at = 100.0
    gc.collect()
    assert one() is None
    assert gc.get_freeze_count() > 0
