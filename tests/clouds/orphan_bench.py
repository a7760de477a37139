"""A janitor over any cloud's machines: what the controller would use, with rows that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.port.vm import Machines
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.controller.clouds.garbage_collector import Collected, GarbageCollector
from skyserve_cli.controller.clouds.orphans import KnownInstances, Part
from skyserve_cli.state.values import EventRecord
from tests.clouds.memory_machines import order_of


@dataclass
class LeakBench:
    """One controller of one owner, and its state. Made again it is a controller that has just started."""

    machines: Machines
    owner: str
    now: Callable[[], float]
    tokens: set[str] = field(default_factory=set)
    clouds: set[str] = field(default_factory=set)
    events: list[EventRecord] = field(default_factory=list)
    fleet: VmProvisioner = field(init=False)
    garbage_collector: GarbageCollector = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = fleet_of(self.machines, self.now)
        self.garbage_collector = GarbageCollector(
            lambda name: self.fleet,
            self.owner,
            lambda: KnownInstances(frozenset(self.tokens), frozenset(self.clouds)),
            _Clock(self.now),
            self.events.append,
        )

    @property
    def cloud(self) -> str:
        return self.machines.name

    def orphans(self, part: Part | None = None) -> list[str]:
        """The ids of the findings, in order."""
        look = self.garbage_collector.inspect(self.cloud)
        assert look.unlisted == ()
        return [orphan.id for orphan in look.orphans if part in (None, orphan.part)]

    def tidy(self, services: Iterable[str] | None = None) -> Collected:
        return self.garbage_collector.tidy(self.cloud, services)

    def end_strays(self) -> None:
        """What the tick does with instances that have no row."""
        for orphan in self.garbage_collector.inspect(self.cloud).of(Part.INSTANCE):
            assert self.garbage_collector.remove(orphan.key).why == ""

    def settle(self, sleep: Callable[[float], object]) -> Collected:
        """Tidy until nothing is waited for, in virtual time; all that was removed, and the problems of the last step."""
        done = self.tidy()
        for _ in range(100):
            if not done.waiting:
                return done
            sleep(15.0)
            step = self.tidy()
            done = Collected(done.removed + step.removed, step.waiting, step.problems)
        raise AssertionError(done)


class _Clock:
    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now


def fleet_of(machines: Machines, now: Callable[[], float]) -> VmProvisioner:
    class Fleet(VmProvisioner):
        name: ClassVar[str] = machines.name

    return Fleet(machines, MemoryHosts(now), order_of, lambda need: (), now)
