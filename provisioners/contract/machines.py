"""A cloud that rents machines, under the contract: the fleet over the cloud's own `Machines`, with hosts in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import pytest

from provisioners.assembly import VmSettings, order_of
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.contract.subject import Subject
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.matching import offers_of
from provisioners.plugin_guard import guarded
from provisioners.plugins import CloudPlugin, Setup, listings_of
from provisioners.port.base import Candidate, InstanceState, LaunchOrder
from provisioners.port.errors import TransientError
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machines, machine_token
from provisioners.vm_provisioner import VmProvisioner


class MachinesSubject(Subject):
    """Where nothing is said of accelerators, the subject's own is meant: only of machines with some do we know spot prices.

    `stack` closes what `open` has opened.
    """

    now: Callable[[], float]
    sleep: Callable[[float], None]
    secret = b""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.open()
        self.cloud = self.restarted()

    @abstractmethod
    def open(self) -> None:
        """Make the world; set `now` and `sleep`."""

    @abstractmethod
    def machines(self) -> Machines:
        """As after a restart: nothing is remembered."""

    @abstractmethod
    def listed_types(self) -> Catalog:
        """Return what the cloud has, in a few zones."""

    @abstractmethod
    def cut_answers(self) -> None:
        """Launches are done, and no response arrives, until `calm`."""

    @abstractmethod
    def calm(self) -> None:
        """No trouble any more."""

    def restarted(self) -> VmProvisioner:
        """The keys are rotated at every start: an order that is sent again has others than its machine was made with."""
        self.secret = bytes([len(self.secret) % 255]) * 32 + self.secret
        secret, catalog, machines = self.secret, self.listed_types(), self.machines()
        self.hosts = MemoryHosts(self.now)

        class Fleet(VmProvisioner):
            name: ClassVar[str] = machines.name

        def accelerated(candidate: Candidate) -> Candidate:
            return candidate if candidate.accelerator else replace(candidate, accelerator=self.accelerator)

        return Fleet(
            machines,
            self.hosts,
            lambda order, rank: order_of(order, rank, secret, VmSettings()),
            lambda need: offers_of(
                replace(need, candidates=tuple(map(accelerated, need.candidates))), catalog
            ),
            self.now,
        )

    def warn_node(self, token: str, rank: int) -> None:
        """By the machine's own metadata service; hosts watch it."""
        self.report_notice(token, rank)

    def report_notice(self, token: str, rank: int) -> None:
        report = HostReport(InstanceState.RUNNING, 8000, preempt_at=self.now() + 1e6)
        self.hosts.set_report(machine_token(token, rank), report)

    def lose_response(self, order: LaunchOrder) -> None:
        self.cut_answers()
        with pytest.raises(TransientError):
            self.cloud.launch(order)
        self.calm()

    def know_us_again(self) -> None:
        self.calm()

    def pass_time(self) -> None:
        self.sleep(10.0)

    def close(self) -> None:
        self.stack.close()


class PluginSubject(MachinesSubject):
    """A plug-in. `open` sets `plugin` and `section` as well."""

    plugin: CloudPlugin
    section: object

    def machines(self) -> Machines:
        setup = Setup(self.section, self.listed_types(), self.now, self.sleep)
        return guarded(self.plugin.machines(setup))

    def listed_types(self) -> Catalog:
        return Catalog(listings_of(self.plugin))
