"""Two controllers of one database under a hostile simulated cloud. `benchmarks/torture.py --pair` runs thousands."""

from __future__ import annotations

import pytest
from sqlalchemy.engine import Connection

from skyserve_cli.state import database
from tests.kit.controller_pair import PairLife
from tests.kit.invariants import InvariantError
from tests.kit.life import HOSTILE, run_seed

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", range(4))
def test_every_invariant_holds_through_a_life_with_two_controllers(seed: int) -> None:
    outcome = run_seed(seed, life=PairLife)
    assert outcome.launches > 0


def test_the_lease_changes_hands() -> None:
    life = PairLife(5, HOSTILE)
    life.run_for(600.0, 1.0)
    assert {name for name, one in life.pair.items() if one.leadership.leads} <= {"a", "b"}
    assert life.store.database.lease().epoch > 1_000_001  # the first term began at 1,000,000


def test_without_the_fence_an_invariant_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(_: Connection, epoch: int) -> None:
        """Whatever the epoch is."""

    monkeypatch.setattr(database, "verify", verify)
    assert any(breaks(seed) for seed in range(8))


def breaks(seed: int) -> bool:
    try:
        run_seed(seed, life=PairLife)
    except InvariantError:
        return True
    return False
