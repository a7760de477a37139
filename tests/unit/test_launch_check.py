"""`serve check --launch`: one machine, and whatever happens nothing of it is left. In virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.model import CapacityType, Offer
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.port.base import InstanceState
from provisioners.port.errors import AuthError, TransientError
from provisioners.port.host_port import HostReport
from provisioners.port.vm import OrphanedResource
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.launch_check import BOOT_PATIENCE_S, CheckReport, LaunchCheck
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines, order_of

OFFERS = [Offer(zone, "g1", "L4", 1.0, CapacityType.ON_DEMAND, 3.6) for zone in ZONES]


class MemoryFleet(VmProvisioner):
    name = CLOUD


class World:
    def __init__(self) -> None:
        self.time = 1000.0
        self.machines = MemoryMachines(self.now)
        self.hosts = MemoryHosts(self.now)
        self.told: list[str] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.respond: Callable[[str, str], str] = lambda endpoint, token: f"{token}\n"

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.on_sleep()

    def check(self) -> LaunchCheck:
        """Of a new process."""
        self.hosts = MemoryHosts(self.now)
        fleet = MemoryFleet(self.machines, self.hosts, order_of, lambda need: (), self.now)
        return LaunchCheck(
            fleet,
            "own",
            self.respond,
            now=self.now,
            sleep=self.sleep,
            on_step=self.told.append,
        )

    def run(self) -> CheckReport:
        return self.check().run(OFFERS)


@pytest.fixture
def w() -> World:
    return World()


def steps(report: CheckReport) -> dict[str, str]:
    return {step.what: step.problem for step in report.steps}


def test_a_machine_goes_through_the_whole_path_and_is_gone(w: World) -> None:
    w.machines.left = [OrphanedResource("disk", "d-1", "us")]
    w.machines.common = [OrphanedResource("group", "g-1", "us")]
    report = w.run()
    assert report.ok
    assert list(steps(report)) == ["launch", "boot, ssh and setup", "response", "removal"]
    assert 90.0 <= report.steps[1].seconds <= 96.0
    assert report.usd == pytest.approx(3.6 * (w.time - 1000.0) / 3600.0, rel=0.1)
    assert (w.machines.live(), w.machines.left, w.machines.common) == ([], [], [])


def test_a_full_zone_is_not_the_end(w: World) -> None:
    w.machines.room[ZONES[0].name, CapacityType.ON_DEMAND] = 0
    report = w.run()
    assert report.ok
    assert report.offer is not None
    assert report.offer.zone == ZONES[1]


def test_where_no_zone_has_room_each_refusal_is_said(w: World) -> None:
    w.machines.room = {(zone.name, CapacityType.ON_DEMAND): 0 for zone in ZONES}
    report = w.run()
    assert not report.ok
    assert steps(report)["launch"].count("is full") == 3
    assert report.usd == 0.0


def test_a_launch_that_is_not_answered_is_sent_again_and_there_is_one_machine(w: World) -> None:
    failures = iter([True, True, False])

    def lose(call: str, token: str) -> None:
        if call == "create" and next(failures, False):
            raise TransientError("no answer", cloud=CLOUD)

    w.machines.after = lose
    assert w.run().ok
    assert len(w.machines.kept) == 1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (InstanceState.SETUP_FAILED, "no wheel"),
        (InstanceState.RUN_EXITED, "exit code 1"),
        (InstanceState.BROKEN, "another host key"),
    ],
)
def test_a_machine_that_fails_is_removed_with_its_reason(
    w: World, state: InstanceState, message: str
) -> None:
    def fail() -> None:
        for token in w.machines.live():
            w.hosts.set_report(token, HostReport(state, 8000, message))

    w.on_sleep = fail
    report = w.run()
    assert steps(report)["boot, ssh and setup"] == f"the machine is {state.value}: {message}"
    assert w.machines.live() == []
    assert report.left == ()
    assert not report.ok


def test_a_machine_that_never_boots_is_given_up(w: World) -> None:
    w.machines.boot_s = 1e9
    report = w.run()
    assert "not running after 1500 s" in steps(report)["boot, ssh and setup"]
    assert report.steps[1].seconds >= BOOT_PATIENCE_S
    assert w.machines.live() == []


def test_a_page_of_somebody_else_and_a_closed_port_are_told_apart(w: World) -> None:
    w.respond = lambda endpoint, token: "a proxy's page"
    assert "it is not the machine's own page" in steps(w.run())["response"]

    def refused(endpoint: str, token: str) -> str:
        raise ConnectionRefusedError("refused")

    other = World()
    other.respond = refused
    assert "no response from http://10.0.0.1:8000: refused" in steps(other.run())["response"]
    assert other.machines.live() == []


def test_ctrl_c_terminates_the_machine_first(w: World) -> None:
    def interrupt() -> None:
        if w.time > 1020.0:
            w.on_sleep = lambda: None
            raise KeyboardInterrupt

    w.on_sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        w.run()
    assert len(w.machines.kept) == 1
    assert w.machines.live() == []


def test_what_a_killed_check_has_left_is_removed_by_the_next(w: World) -> None:
    """A process that is killed removes nothing: its machine is there, and its owner is known."""
    killed = w.check()
    killed._remove_all = lambda: None  # type: ignore[method-assign]
    killed.run(OFFERS)
    assert len(w.machines.live()) == 1
    assert w.check().remove() == ()
    assert w.machines.live() == []


def test_what_cannot_be_removed_is_named(w: World) -> None:
    def deny(call: str, token: str) -> None:
        if call == "destroy":
            raise AuthError("ec2:TerminateInstances is denied", cloud=CLOUD)

    w.machines.before = deny
    report = w.run()
    assert report.left == ("ec2:TerminateInstances is denied",)
    assert not report.ok
    assert "is denied" in steps(report)["removal"]


def test_a_machine_that_is_listed_late_is_not_left(w: World) -> None:
    """Ctrl-C while the cloud accepts the launch, whose machine it lists half a minute later."""
    w.machines.late_s = 30.0

    def interrupt(call: str, token: str) -> None:
        if call == "create":
            raise KeyboardInterrupt

    w.machines.after = interrupt
    with pytest.raises(KeyboardInterrupt):
        w.run()
    assert len(w.machines.kept) == 1
    assert w.machines.live() == []
