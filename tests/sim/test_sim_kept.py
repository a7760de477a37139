"""What a tick keeps of services that did not change is what it would decide about them, in whole simulations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from skyserve_cli.controller.reconcile.reconciler import Reconciler
from tests.clouds.schedules import is_long
from tests.kit.audit import AuditedReconciler
from tests.kit.controller_pair import PairLife
from tests.kit.life import Life, run_seed

DECIDES_ALL = partial(Reconciler, keeps=False)


@pytest.mark.long
@pytest.mark.parametrize("life", [Life, PairLife])
@pytest.mark.parametrize("seed", range(100, 102 if is_long else 101))
def test_a_seed_tells_the_same_story_whether_results_are_kept_or_not(seed: int, life: type[Life]) -> None:
    kept = run_seed(seed, life=life, busy_s=300.0)
    assert kept.story == run_seed(seed, life=life, busy_s=300.0, reconciler=DECIDES_ALL).story


@pytest.mark.long
@pytest.mark.parametrize("life", [Life, PairLife])
@pytest.mark.parametrize("seed", range(200, 202 if is_long else 201))
def test_a_new_decision_about_a_service_that_is_kept_comes_to_the_same(seed: int, life: type[Life]) -> None:
    made: list[AuditedReconciler] = []

    def audited(*ports: Any, **more: Any) -> AuditedReconciler:
        made.append(AuditedReconciler(*ports, **more))
        return made[-1]

    run_seed(seed, life=life, reconciler=audited)
    assert sum(one.stood for one in made) > 50
