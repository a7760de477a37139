"""`serve up` reports success once the same replicas have been ready for a moment."""

from __future__ import annotations

import pytest

from skyserve_cli.commands.progress import STEADY_S, Steady


@pytest.mark.parametrize(
    ("ready", "lasts"),
    [
        pytest.param([{1}, {1}, {1}], [False, False, True], id="it stays"),
        pytest.param([{1}, set(), {2}, {2}, {2}], [False, True, False, False, True], id="it ends, and another one comes"),
        pytest.param([{1}, {1, 2}, {1, 2}], [False, False, True], id="more become ready"),
        pytest.param([{1, 2}, {1}, {1}, {1}], [False, False, False, True], id="one of two ends"),
        pytest.param([set(), set()], [True, True], id="none is wanted"),
    ],
)  # fmt: skip
def test_ready_for_a_moment_is_not_steady(ready: list[set[int]], lasts: list[bool]) -> None:
    steady = Steady()
    views = [
        {"replicas": [*({"id": one, "state": "READY"} for one in ids), {"id": 9, "state": "STARTING"}]}
        for ids in ready
    ]
    found = [steady.lasts(view, 100.0 + turn * STEADY_S / 2) for turn, view in enumerate(views)]
    assert found == lasts
