"""The production reconciler over a fleet of one cloud's machines, in virtual time: the calls go to the cloud's own fake by
the official SDK, the machines come up in memory, and every probe passes."""

from __future__ import annotations

from collections import Counter
from random import Random

from policies.goals import ScalingGoal
from policies.model import ProbePassed, ReplicaState
from policies.placement.zone_backoff import market
from policies.rollout import has_failed
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.clouds.execute import perform
from skyserve_cli.controller.clouds.operation_runner import OperationsInFlight
from skyserve_cli.controller.reconcile.mappers import goal_of, order_of, requirements_of
from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.contract.contract_rented import RentedSubject
from tests.unit.test_controller_reconciler import World

STEP_S = 5.0
LISTED_EVERY = 2  # steps
WANTED = 2


class ControllerLife(World):
    """One service of WANTED replicas on the subject's cloud."""

    def __init__(self, subject: RentedSubject, *, use_spot: bool) -> None:
        super().__init__(time=subject.now(), offers=())
        self.subject = subject
        self.spec = ServiceSpec(
            "chat",
            "run",
            probe=Probe(path="/health", initial_delay_s=600.0),
            scaling=ScalingGoal(WANTED, WANTED),
            resources=(
                ResourceChoice(
                    cloud=subject.catalog.cloud,
                    accelerator=subject.accelerator,
                    accelerator_count=1.0,
                    use_spot=use_spot,
                ),
            ),
        )
        self.up(self.spec)
        self.launched: Counter[str] = Counter()  # by market
        self.seen: set[int] = set()
        self.steps = 0
        self.restart()

    def restart(self) -> None:
        """The controller crashes; another begins with the rows alone."""
        self.events.clear()
        self.listings.clear()
        self.book = OperationsInFlight()
        self.subject.cloud = self.subject.restarted()
        self.controller = self.reconciler()

    def run_for(self, seconds: float) -> None:
        until = self.subject.now() + seconds
        while self.subject.now() < until:
            self.step()

    def step(self) -> None:
        self.steps += 1
        self.subject.sleep(STEP_S)
        self.time = self.subject.now()
        cloud = self.subject.cloud
        self.offers = tuple(cloud.offers(requirements_of(self.spec)))
        if self.steps % LISTED_EVERY == 0:
            self._list()
        for order in self.probes:
            if not order.passing:
                self.happens(ProbePassed(order.replica_id))
        self.controller.tick()
        for replica in self.row().replicas:
            if replica.id not in self.seen:
                self.seen.add(replica.id)
                self.launched[market(replica.offer)] += 1
        for call in self.book.startable(self.calls, self.time):
            incarnation, owner = call.incarnation, self.store.database.owner()
            order = order_of(owner, "chat", incarnation, call.replica, self.spec, {})
            outcome = perform(call, cloud, lambda order=order: order, order.token, owner)
            event = self.book.settled(call, outcome, self.time)
            if event is not None:
                self.happens(event)

    def _list(self) -> None:
        cloud, asked_at = self.subject.cloud, self.subject.now()
        try:
            listing = cloud.listing(self.store.database.owner())
        except ProvisionError:
            return
        silent, closed = frozenset(listing.silent), frozenset(listing.closed)
        name = self.subject.catalog.cloud
        self.listings.append(
            InstanceListing(name, asked_at, tuple(listing.instances), silent=silent, closed=closed)
        )

    def is_given_up(self) -> bool:
        row = self.row()
        return has_failed(goal_of(row, self.spec), row.memory.rollout)

    def is_whole(self) -> bool:
        """Whether the service has what it wants, and the cloud bills that alone."""
        live = self.row().replicas
        ready = [one for one in live if one.state is ReplicaState.READY]
        return len(ready) == len(live) == WANTED == self.subject.billed()


def live_through(subject: RentedSubject, seed: int) -> ControllerLife:
    """A schedule of refusals by seed: one region refuses launches for good, each region may be silent or full for a while,
    and the controller crashes now and then."""
    rng = Random(seed)
    life = ControllerLife(subject, use_spot=rng.random() < 0.5)
    zones = sorted({offer.zone for offer in subject.cloud.offers(requirements_of(life.spec))})
    bad = rng.choice(zones).region
    refusal = rng.choice(subject.refusals)
    subject.refuse(bad, refusal)
    for _ in range(6):
        trouble = rng.randrange(4)
        if trouble == 0:
            subject.mute(rng.choice(zones))
        life.run_for(rng.uniform(20.0, 90.0))
        if trouble == 0:
            subject.unmute()
            subject.relent()
            subject.refuse(bad, refusal)
        if trouble == 1:
            life.restart()
    subject.relent()
    subject.refuse(bad, refusal)
    for _ in range(300):
        if life.is_whole():
            break
        life.step()
    return life
