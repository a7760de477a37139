"""A cloud under the contract: how to make it, how to empty a zone, how to lose a response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Provisioner, Requirements
from provisioners.port.errors import TransientError

T = TypeVar("T")
SPOT = Candidate(use_spot=True)
ON_DEMAND = Candidate(use_spot=False)
LIVE_STATES = {
    InstanceState.PENDING,
    InstanceState.UNSUPERVISED,
    InstanceState.SETUP,
    InstanceState.RUNNING,
}


class Subject(ABC):
    """One cloud under the contract. What it cannot show skips the test with a reason."""

    cloud: Provisioner
    accelerator = "L4"
    accelerator_count = 2.0  # of it, in one machine
    markets: tuple[Candidate, ...] = (SPOT, ON_DEMAND)  # that it has, the usual one first

    @abstractmethod
    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        """Set the capacity of the zone, in nodes that exist or may be launched."""

    def empty(self, zone: Zone, capacity_type: CapacityType) -> None:
        """Leave no room in the zone for new launches."""
        self.set_room(zone, capacity_type, 0)

    @abstractmethod
    def preempt_node(self, token: str, rank: int) -> None:
        """The cloud takes one node of an instance."""

    def warn_node(self, token: str, rank: int) -> None:
        """The cloud, or the machine's own metadata, says that one node of an instance will be taken, long before."""
        pytest.skip("its machines are not preempted")

    def report_notice(self, token: str, rank: int) -> None:
        """The machine of one node reports a preemption notice; its cloud's lists do not have it."""
        pytest.skip("its machines report nothing by themselves")

    @abstractmethod
    def lose_response(self, order: LaunchOrder) -> None:
        """Send the order; the cloud accepts it and the response never arrives."""

    @abstractmethod
    def pass_time(self) -> None:
        """A moment, for `eventually`."""

    @abstractmethod
    def close(self) -> None:
        """Check and remove leftovers."""

    # --- What not every cloud can show

    def restarted(self) -> Provisioner:
        """Another controller of the same cloud, which remembers nothing."""
        return self.cloud

    def exhaust_quota(self, offer: Offer) -> str:
        """The account may not have the offer any more, nowhere in the region; returns the quota's name."""
        pytest.skip("it has no quotas")

    def refuse_us(self) -> None:
        """The cloud does not know our credentials any more."""
        pytest.skip("it asks for no credentials")

    def know_us_again(self) -> None:
        """The end of `refuse_us`."""
        raise NotImplementedError

    def throttle(self) -> None:
        """The cloud refuses our next few calls for their number."""
        pytest.skip("it takes calls as they come")

    def launch_to_fail(self, order: LaunchOrder) -> None:
        """The cloud accepts the order, and fails it a moment later."""
        pytest.skip("what it accepts it has")

    def mute(self, zone: Zone) -> None:
        """The zone's region, or at least the zone, does not respond."""
        pytest.skip("it has no regions that fail one by one")

    def unmute(self) -> None:
        """The end of `mute`."""
        raise NotImplementedError

    def list_late(self, seconds: float) -> None:
        """From now on a new machine is missing from the cloud's lists for so long."""
        pytest.skip("its lists are never late")

    # --- For tests

    @property
    def usual(self) -> Candidate:
        return self.markets[0]

    def needs(self, candidate: Candidate) -> None:
        if candidate not in self.markets:
            pytest.skip("it has no such market")

    def insist(self, act: Callable[[], T]) -> T:
        """As a controller does: the same again after a transient error, a bounded number of times."""
        for _ in range(20):
            try:
                return act()
            except TransientError:
                self.pass_time()
        return act()

    def eventually(self, holds: Callable[[], bool]) -> bool:
        for _ in range(200):
            if holds():
                return True
            self.pass_time()
        return False

    def offer(self, candidate: Candidate | None = None) -> Offer:
        return self.cloud.offers(Requirements((candidate or self.usual,)))[0]

    def order(
        self,
        replica_id: int = 1,
        owner: str = "owner-1",
        service: str = "chat",
        offer: Offer | None = None,
        num_nodes: int = 1,
    ) -> LaunchOrder:
        return LaunchOrder(
            token=f"{owner}-{service}-{replica_id}",
            owner=owner,
            service=service,
            replica_id=replica_id,
            version=1,
            offer=offer or self.offer(),
            setup=None,
            run="exec sleep 1000",
            num_nodes=num_nodes,
        )

    def listed(self, owner: str = "owner-1", service: str | None = None) -> dict[str, Instance]:
        return {instance.token: instance for instance in self.cloud.instances(owner, service)}

    def living(self) -> set[str]:
        """Return the tokens of listed machines that are not gone."""
        return {token for token, instance in self.listed().items() if not instance.state.is_gone}
