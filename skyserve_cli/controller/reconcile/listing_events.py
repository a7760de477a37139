"""What a listing of a cloud means for the replicas in our rows. Pure: instances in, events out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from policies.model import (
    BootstrapFailed,
    Bootstrapped,
    CapacityType,
    Event,
    LaunchFailed,
    NodeLost,
    Preempted,
    PreemptionNotice,
    Progressed,
    Replica,
    ReplicaState,
    RetireNotice,
    RunExited,
)
from provisioners.port.base import Instance, InstanceState
from skyserve_cli.controller.reconcile.ports import InstanceListing

_SAME_S = 60.0
_WITH_INSTANCE = frozenset(
    {
        ReplicaState.PROVISIONING,
        ReplicaState.STARTING,
        ReplicaState.READY,
        ReplicaState.NOT_READY,
        ReplicaState.DRAINING,
    }
)
_COMING_UP = (ReplicaState.PROVISIONING, ReplicaState.STARTING)


def events_of(
    replicas: Iterable[Replica], instances: Mapping[str, Instance], asked_at: float
) -> Iterator[Event]:
    """Yield the events that `instances` (by instance id, of one cloud) imply for that cloud's replicas.

    A replica is only missing if it had been launched before the cloud was listed. One that is REQUESTED or
    TERMINATING has a call outstanding, whose response has more than a listing.
    """
    for replica in replicas:
        if replica.state not in _WITH_INSTANCE or replica.instance_id is None or replica.launched_at is None:
            continue
        instance = instances.get(replica.instance_id)
        if instance is None:
            if replica.launched_at < asked_at:
                yield _gone(replica, "the cloud no longer lists the instance")
            continue
        is_well = replica.state is ReplicaState.READY and instance.state is InstanceState.RUNNING
        if not is_well or instance.preempt_at is not None or instance.retire_at is not None:
            yield from _events(replica, instance)


def _events(replica: Replica, instance: Instance) -> Iterator[Event]:
    refusal = instance.refusal
    if refusal is not None and replica.ready_at is None and replica.state in _COMING_UP:
        yield LaunchFailed(replica.id, refusal.kind, instance.message, scope=refusal.scope)
        return
    match instance.state:
        case InstanceState.PREEMPTED:
            yield Preempted(replica.id, message=instance.message or "preempted by the cloud")
            return
        case InstanceState.TERMINATED | InstanceState.STOPPING:
            # A spot instance that is distinguished from a preempted one, and was never of use, is no preemption.
            is_lost = instance.state is InstanceState.TERMINATED and replica.state in _COMING_UP
            yield _gone(replica, instance.message or "terminated, and not by this controller", is_lost)
            return
        case InstanceState.BROKEN:
            yield NodeLost(replica.id, instance.message or "the cloud took a part of it")
            return
        case InstanceState.SETUP_FAILED:
            if replica.state is ReplicaState.PROVISIONING:
                yield BootstrapFailed(replica.id, instance.message)
            return
        case InstanceState.RUN_EXITED:
            yield RunExited(replica.id, instance.message)
            return
        case InstanceState.RUNNING if replica.state is ReplicaState.PROVISIONING and instance.endpoint:
            yield Bootstrapped(replica.id, instance.endpoint)
        case _:
            if (
                replica.state is ReplicaState.PROVISIONING
                and instance.message
                and instance.message != replica.message
            ):
                yield Progressed(replica.id, instance.message)
    if instance.preempt_at is not None and instance.preempt_at != replica.preempt_at:
        yield PreemptionNotice(replica.id, instance.preempt_at)
    if instance.retire_at is not None and _is_earlier(instance.retire_at, replica.retire_at):
        yield RetireNotice(replica.id, instance.retire_at or None)


def _is_earlier(retire_at: float, known: float | None) -> bool:
    """Return whether a retirement is announced for earlier than was known.

    Announced instants move a little from one report to the next, and where only "within an hour" is known they move on with an
    agent that is started again.
    """
    return retire_at < known - _SAME_S if known is not None else retire_at > 0.0


def missing_from(listing: InstanceListing, replicas: Iterable[Replica]) -> bool:
    """Return whether a replica has an instance in that cloud which the sighting lacks."""
    return any(
        one.instance_id is not None and one.instance_id not in listing.by_id and listing.shows(one)
        for one in replicas
    )


def same_objects(before: Iterable[Instance], after: Iterable[Instance]) -> tuple[Instance, ...]:
    """`after`, with the objects of `before` where they are equal: to compare such a listing with the last one costs next to nothing."""
    old = {instance.id: instance for instance in before}
    return tuple(was if (was := old.get(one.id)) == one and was is not None else one for one in after)


def _gone(replica: Replica, message: str, is_lost: bool = False) -> Preempted:
    """Spot instances vanish by preemption, unless `is_lost`; anything else that vanishes is a loss without a known reason."""
    lost = is_lost or replica.offer.capacity_type is not CapacityType.SPOT
    return Preempted(replica.id, lost=lost, message=message)


def unattended(listings: Iterable[InstanceListing]) -> frozenset[str]:
    """Return the ids of instances whose order is to be sent again."""
    return frozenset().union(*(listing.unattended for listing in listings))


def orphans(
    listing: InstanceListing, live_tokens: frozenset[str], suspects: frozenset[str]
) -> tuple[list[Instance], frozenset[str]]:
    """Return the instances of ours that no live replica owns, and the suspects for the next listing.

    Rows are committed before machines are requested, so an instance without a row is an orphan. It must be
    seen twice, so that a listing taken before a terminate returned reports no orphan.
    """
    unowned = [i for i in listing.instances if not i.state.is_gone and i.token not in live_tokens]
    return [i for i in unowned if i.id in suspects], frozenset(i.id for i in unowned)
