"""A controller that crashes at any call to AWS, and one that has any trouble in any order: one machine in the end, and none
that no one knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from policies.model import CapacityType
from provisioners.aws.machines import AwsMachines
from provisioners.port.errors import CapacityError, ProvisionError, QuotaError, TransientError
from provisioners.port.vm import MachineOrder
from tests.clouds.aws.aws_bench import EAST, ORDER, AwsBench, Killed, aws_bench
from tests.clouds.schedules import by_decades

pytestmark = pytest.mark.long

_LAUNCH_CALLS = 12  # more than a first launch makes


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        opened.settings = replace(opened.settings, regions=("us-east-1",))
        yield opened


@pytest.mark.parametrize("after", [False, True], ids=["before-the-call", "after-the-call"])
def test_killed_at_any_call_of_a_launch(bench: AwsBench, after: bool) -> None:
    deaths = 0
    for at in range(_LAUNCH_CALLS):
        owner = f"own-{at}"  # with nothing set up for it yet
        order = replace(ORDER, owner=owner, token=f"{owner}-chat-1")
        bench.tripwire.arm(at, after)
        try:
            bench.fresh().create(order)
        except Killed:
            deaths += 1
        bench.tripwire.disarm()
        machine = bench.fresh().create(order)
        assert bench.world.live(skyserve_owner=owner) == [machine.id]
        assert [one.id for one in bench.fresh().machines(owner)] == [machine.id]
        assert len([group for group in bench.groups() if owner in group["GroupName"]]) == 1
    assert 8 <= deaths < _LAUNCH_CALLS  # every call was hit, and the last rounds had none left to hit


@pytest.mark.parametrize("after", [False, True], ids=["before-the-call", "after-the-call"])
def test_killed_at_any_call_of_an_end(bench: AwsBench, after: bool) -> None:
    for at in range(8):
        owner = f"own-{at}"
        machine = bench.fresh().create(replace(ORDER, owner=owner, token=f"{owner}-chat-1"))
        bench.tripwire.arm(at, after)
        try:
            _take_down(bench.fresh(), owner)
        except Killed:
            pass
        else:
            assert at >= 5
        bench.tripwire.disarm()
        _take_down(bench.fresh(), owner)
        assert machine.id not in bench.world.live()
        assert not [group for group in bench.groups() if owner in group["GroupName"]]


@by_decades
def test_any_trouble_in_any_order(bench: AwsBench, seeds: range) -> None:
    """Random schedules, by seed: what EC2 does wrong, when the controller crashes, and what it does next."""
    bystander = bench.fresh().create(replace(ORDER, owner="other", token="other-chat-1"))
    for seed in seeds:
        _Schedule(bench, seed).play()
        assert bench.world.live() == [bystander.id], f"seed {seed}"
        bench.world.forget_the_dead()


class _Schedule:
    """One owner's life with AWS. It keeps what a controller keeps: its intents, and nothing else."""

    def __init__(self, bench: AwsBench, seed: int) -> None:
        self.bench = bench
        self.rng = Random(seed)
        self.owner = f"own{seed}"
        self.intents: dict[str, MachineOrder] = {}
        self.refused: set[str] = set()
        self.machines: AwsMachines = bench.fresh()

    def play(self) -> None:
        self.bench.world.listed_after_s = self.rng.choice((0.0, 0.0, 15.0))
        self.bench.world.boot_s = self.rng.choice((0.0, 40.0))
        for _ in range(6):
            self._cause_trouble()
            try:
                self.rng.choice((self._launch, self._launch, self._send_again, self._end_one))()
            except Killed:
                self.machines = self.bench.fresh()
            except TransientError:
                pass  # the same again, sooner or later
            except (CapacityError, QuotaError):
                self._check_refused()
            self._check_singles()
        self._settle()

    def _cause_trouble(self) -> None:
        world, rng = self.bench.world, self.rng
        world.calm()
        self.bench.tripwire.disarm()
        trouble = rng.randrange(8)
        if trouble == 0:
            world.cut(rng.choice(("RunInstances", "*")), times=rng.randint(1, 8), after=rng.random() < 0.5)
        elif trouble == 1:
            code = rng.choice(("InternalError", "Unavailable", "RequestLimitExceeded"))
            world.fail("RunInstances", code, times=rng.randint(1, 8), after=code != "RequestLimitExceeded")
        elif trouble == 2:
            self.bench.tripwire.arm(rng.randrange(8), after=rng.random() < 0.5)
        elif trouble == 3:
            world.room[EAST.name, ORDER.instance_type, "spot"] = 0
        elif trouble == 4:
            world.quota_vcpus["us-east-1", "L-DB2E81BA"] = 0
        elif trouble == 5 and (live := world.live(skyserve_owner=self.owner, skyserve_capacity="spot")):
            world.preempt(rng.choice(live))
            world.room.clear()
        self.bench.time.sleep(rng.choice((0.0, 5.0, 100.0)))

    def _launch(self) -> None:
        token = f"{self.owner}-chat-{len(self.intents)}"
        capacity_type = self.rng.choice(tuple(CapacityType))
        order = replace(ORDER, owner=self.owner, token=token, capacity_type=capacity_type)
        self.intents[token] = order
        self._send(order)

    def _send_again(self) -> None:
        open_intents = [order for token, order in self.intents.items() if token not in self.refused]
        if open_intents:
            self._send(self.rng.choice(open_intents))

    def _send(self, order: MachineOrder) -> None:
        try:
            machine = self.machines.create(order)
        except (CapacityError, QuotaError):
            self.refused.add(order.token)
            raise
        assert machine.token == order.token

    def _end_one(self) -> None:
        listed = [one for one in self.machines.machines(self.owner) if not one.state.is_gone]
        if listed:
            self.machines.destroy(self.rng.choice(listed))

    def _check_refused(self) -> None:
        for token in self.refused:
            assert self.bench.world.live(skyserve_token=token) == []

    def _check_singles(self) -> None:
        for token in self.intents:
            assert len(self.bench.world.live(skyserve_token=token)) <= 1

    def _settle(self) -> None:
        """A restart in fair weather: every intent is resolved, everything is listed, and all of it can be taken down."""
        self.bench.world.calm()
        self.bench.tripwire.disarm()
        machines = self.bench.fresh()
        for token, order in self.intents.items():
            if token not in self.refused:
                assert machines.create(order).token == token
        self._check_singles()
        self.bench.time.sleep(100.0)
        listed = {one.id for one in self.bench.fresh().machines(self.owner) if not one.state.is_gone}
        assert listed == set(self.bench.world.live(skyserve_owner=self.owner))
        _take_down(self.bench.fresh(), self.owner)
        self.bench.time.sleep(100.0)
        assert self.bench.fresh().orphans(self.owner) == []


def _take_down(machines: AwsMachines, owner: str) -> None:
    for machine in machines.machines(owner):
        machines.destroy(machine)
    assert machines.delete_shared(owner) == []


def test_a_definite_refusal_after_a_lost_answer_does_not_hide_the_machine(bench: AwsBench) -> None:
    """The zone fills up between a launch and its lost response: EC2 knows the token, and that is what counts."""
    bench.world.room[EAST.name, ORDER.instance_type, "spot"] = 1
    bench.world.cut("RunInstances", after=True)
    machine = bench.fresh().create(ORDER)
    assert bench.world.live() == [machine.id]
    with pytest.raises(ProvisionError):
        bench.fresh().create(replace(ORDER, token="own-chat-2"))
