"""One cloud call, from the order to the event with its result. Shared by the daemon and the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.backoff import delay_s
from policies.model import EndReason, Event, FailureKind, GaveUp, Launched, LaunchFailed, Terminated
from provisioners.port.base import (
    Instance,
    InstanceState,
    LaunchOrder,
    Provisioner,
    RegionalSource,
    is_silent,
)
from provisioners.port.errors import ProvisionError, QuotaError, TransientError
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind
from skyserve_cli.controller.secret_box import CannotUnsealError

MAX_LAUNCH_TRIES = 5
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Retry:
    """The call did not settle; make it again, with the same token, after `after_s`.

    `was_made` false: it did not even begin, and so does not count as a try.
    """

    after_s: float
    message: str
    was_made: bool = True


def perform(
    call: CloudOperation,
    provisioner: Provisioner,
    order: Callable[[], LaunchOrder],
    token: str,
    owner: str,
    farewell: Callable[[Instance], object] = lambda instance: None,
) -> Event | Retry | None:
    """Make the call; None if there is nothing to report.

    `farewell` gets the instance about to be terminated. Raises only for a defect.
    """
    if call.kind is OperationKind.TERMINATE:
        return _terminate(call, provisioner, token, owner, farewell)
    try:
        wanted = order()
    except CannotUnsealError as error:
        if call.kind is OperationKind.ATTEND:
            return Retry(LONGEST_RETRY_S, str(error))
        return LaunchFailed(call.replica.id, FailureKind.CONFIG, str(error))
    if call.kind is OperationKind.ATTEND:
        return _attend(provisioner, wanted)
    return _launch(call, provisioner, wanted)


def settle(call: CloudOperation, outcome: Event | Retry | None, tries: int) -> Event | Retry | None:
    """Return what an outcome means after `tries` tries.

    A launch gives up, and is then looked for and terminated, for the cloud may have done what it did not say; a terminate
    never does, for what it would leave behind costs money.
    """
    if isinstance(outcome, Retry) and call.kind is OperationKind.LAUNCH and tries >= MAX_LAUNCH_TRIES:
        return GaveUp(call.replica.id, EndReason.CLOUD_ERROR, f"after {tries} tries: {outcome.message}")
    return outcome


def backoff_s(outcome: Retry, tries: int) -> float:
    """Return how long to wait before try number `tries` + 1."""
    return delay_s(tries, outcome.after_s, LONGEST_RETRY_S)


def _launch(call: CloudOperation, provisioner: Provisioner, order: LaunchOrder) -> Event | Retry:
    try:
        instance = provisioner.launch(order)
    except TransientError as error:
        return Retry(error.retry_after_s, error.message)
    except ProvisionError as error:
        retry_at = error.retry_at if isinstance(error, QuotaError) else None
        return LaunchFailed(call.replica.id, error.kind, error.message, retry_at, error.scope)
    return Launched(call.replica.id, instance.id)


def _attend(provisioner: Provisioner, order: LaunchOrder) -> Retry | None:
    """Resume the supervision of an instance. Returns a retry if that failed; the next listing shows the result."""
    try:
        provisioner.launch(order)
    except ProvisionError as error:
        return Retry(getattr(error, "retry_after_s", 5.0), error.message)
    return None


def _terminate(
    call: CloudOperation,
    provisioner: Provisioner,
    token: str,
    owner: str,
    farewell: Callable[[Instance], object],
) -> Event | Retry:
    try:
        instance = _find(call, provisioner, token, owner)
        if instance is not None and not instance.state.is_gone:
            farewell(instance)
            provisioner.terminate(instance)
    except ProvisionError as error:
        return Retry(getattr(error, "retry_after_s", 1.0), error.message)
    return Terminated(call.replica.id)


def _find(call: CloudOperation, provisioner: Provisioner, token: str, owner: str) -> Instance | None:
    """Return the instance to terminate.

    By id where the launch returned one; else the cloud is searched for the token, because a launch whose response was lost may
    have made one.
    """
    replica = call.replica
    if replica.instance_id is not None:
        return Instance(
            id=replica.instance_id,
            token=token,
            owner=owner,
            service=call.service,
            replica_id=replica.id,
            zone=replica.zone.physical,
            capacity_type=replica.offer.capacity_type,
            state=InstanceState.STOPPING,
        )
    if not isinstance(provisioner, RegionalSource):
        listed = provisioner.instances(owner, call.service)
        return next((instance for instance in listed if instance.token == token), None)
    listing = provisioner.listing(owner)  # only the replica's own region matters
    found = next((instance for instance in listing.instances if instance.token == token), None)
    if found is None and is_silent(replica.zone, listing.silent):
        why = next(error for place, error in listing.silent.items() if is_silent(replica.zone, {place}))
        raise TransientError(why.message, cloud=replica.zone.cloud, zone=replica.zone, retry_after_s=5.0)
    return found
