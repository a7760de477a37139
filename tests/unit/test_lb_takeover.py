"""Which regions an agent serves in place of their dead agents."""

from __future__ import annotations

import pytest

from lb.config.schema import Readiness, Standby, Table, Target
from lb.core.takeover import FLAPS_S, RETURNING_S, WENT_ON_AFTER_S, PeerLiveness, Takeovers
from policies.regions.ownership import BACK_AFTER_S

EU = Target("2", "http://eu")
TABLE = Table("chat", "r1", (Target("1", "http://us"),), standby=(Standby("c/eu", (EU,)),))


def peer(
    silent_s: float, others: int = 1, others_silent: int = 0, name: str = "eu#1", boot: int = 0
) -> PeerLiveness:
    return PeerLiveness(name, "c/eu", silent_s, others, others_silent, boot)


def targets(takeovers: Takeovers) -> list[tuple[str, Readiness]]:
    return [(one.id, one.state) for one in takeovers.extended(TABLE).targets]


OWN = ("1", Readiness.READY)
TAKEN = ("2", Readiness.READY)
RETURNED = ("2", Readiness.DRAINING)


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        (peer(4.9, 1, 1), False),
        (peer(5.0, 1, 1), True),
        (peer(60.0, 1, 0), False),
        (peer(5.0, 0, 0), True),
        (peer(5.0, 3, 1), False),
        (peer(5.0, 4, 2), True),
    ],
    ids=["not yet", "all agree", "a broken link", "nobody else", "a minority agrees", "half agree"],
)
def test_an_agent_is_dead_if_half_of_the_others_do_not_hear_it_either(
    seen: PeerLiveness, taken: bool
) -> None:
    takeovers = Takeovers()
    assert takeovers.observe([seen], 100.0) is taken
    assert targets(takeovers) == ([OWN, TAKEN] if taken else [OWN])


def test_one_living_agent_keeps_its_region() -> None:
    takeovers = Takeovers()
    takeovers.observe([peer(9.0, 1, 1), peer(0.1, name="eu#2")], 100.0)
    assert targets(takeovers) == [OWN]
    assert takeovers.is_dead("eu#1")
    assert not takeovers.is_dead("eu#2")


def test_a_region_is_handed_back_after_a_while_without_a_break_and_drains_here() -> None:
    takeovers = Takeovers()
    takeovers.observe([peer(5.0, 0)], 100.0)
    takeovers.observe([peer(0.1, 0)], 110.0)
    assert not takeovers.observe([peer(0.1, 0)], 110.0 + BACK_AFTER_S - 0.1)
    takeovers.observe([peer(6.0, 0)], 139.95)  # it was gone again
    takeovers.observe([peer(0.1, 0)], 150.0)
    assert not takeovers.observe([peer(0.1, 0)], 150.0 + BACK_AFTER_S - 0.1)
    assert targets(takeovers) == [OWN, TAKEN]
    back_at = 150.0 + BACK_AFTER_S
    assert takeovers.observe([peer(0.1, 0)], back_at)
    assert targets(takeovers) == [OWN, RETURNED]
    assert not takeovers.observe([peer(0.1, 0)], back_at + RETURNING_S - 0.1)
    assert takeovers.observe([peer(0.1, 0)], back_at + RETURNING_S)
    assert targets(takeovers) == [OWN]


@pytest.mark.parametrize(
    ("boot", "died_before_s", "back_after_s"),
    [
        (7, None, WENT_ON_AFTER_S),
        (8, None, BACK_AFTER_S),
        (7, FLAPS_S - 1.0, BACK_AFTER_S),
        (7, FLAPS_S, WENT_ON_AFTER_S),
    ],
    ids=["it goes on", "it was restarted", "not for the first time", "long ago"],
)
def test_a_process_that_goes_on_gets_its_region_back_soon(
    boot: int, died_before_s: float | None, back_after_s: float
) -> None:
    takeovers = Takeovers()
    if died_before_s is not None:
        takeovers.observe([peer(5.0, 0, boot=7)], 1000.0 - died_before_s)
        takeovers.observe([peer(0.1, 0, boot=9)], 1001.0 - died_before_s)
        takeovers.observe([peer(0.1, 0, boot=9)], 1001.0 - died_before_s + BACK_AFTER_S)
    takeovers.observe([peer(5.0, 0, boot=7)], 1000.0)
    takeovers.observe([peer(0.1, 0, boot=boot)], 1010.0)
    assert not takeovers.observe([peer(0.1, 0, boot=boot)], 1010.0 + back_after_s - 0.1)
    assert takeovers.observe([peer(0.1, 0, boot=boot)], 1010.0 + back_after_s)
    assert targets(takeovers)[:2] == [OWN, RETURNED]


def test_an_agent_that_leaves_the_table_is_forgotten() -> None:
    takeovers = Takeovers()
    takeovers.observe([peer(5.0, 0)], 100.0)
    assert takeovers.observe([], 101.0)
    assert targets(takeovers) == [OWN, RETURNED]


def test_what_the_controller_has_given_is_not_there_twice() -> None:
    takeovers = Takeovers()
    takeovers.observe([peer(5.0, 0)], 100.0)
    whole = Table("chat", "r2", (*TABLE.targets, EU), standby=TABLE.standby)
    assert takeovers.extended(whole) is whole
