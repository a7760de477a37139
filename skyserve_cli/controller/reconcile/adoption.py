"""After a restore: machines that were launched after the backup was made are adopted by their tags.

A backup knows replica ids up to some number. An instance of a service that carries a higher one was launched later, and has no
row. Its token is derived from the service's incarnation, its id and its offer, so the offer with which the same token comes
out is the offer that it was launched for, and the row can be made again. If no offer fits, or the service is down or unknown,
the instance belongs to nothing and is terminated as any orphan.

Until each cloud was listed, no orphan of a restored service is terminated, and for at most PATIENCE_S nothing is planned: a
replica that is about to be adopted need not be launched again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from policies.model import Offer, Replica, ReplicaState, Role
from provisioners.port.base import Instance, InstanceState, Requirements
from skyserve_cli.controller.reconcile.mappers import agent_requirements_of, requirements_of, token_of
from skyserve_cli.controller.reconcile.ports import InstanceListing, Offers, Specs
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import AGENT_WORD, EventRecord, ServiceRow

log = logging.getLogger(__name__)

PATIENCE_S = 120.0

RoleOffers = Sequence[tuple[Role, Offer]]


@dataclass(frozen=True, slots=True)
class Found:
    """What a listing shows of one service: rows to add, and the instances for which there can be none."""

    adopted: tuple[Replica, ...]
    unfit: tuple[Instance, ...]
    highest_id: int


def match(
    owner: str,
    row: ServiceRow,
    instances: Iterable[Instance],
    first_unknown: int,
    offers: RoleOffers,
    now: float,
) -> Found:
    """Return the rows of the instances with ids from `first_unknown` that no row has. Pure."""
    known = {one.id for one in row.attempts}
    adopted, unfit, highest = [], [], 0
    for instance in instances:
        if instance.service != row.name:
            continue
        highest = max(highest, instance.replica_id)
        is_ending = instance.state.is_gone or instance.state is InstanceState.STOPPING
        if is_ending or instance.replica_id < first_unknown or instance.replica_id in known:
            continue
        fitting = (
            (role, offer)
            for role, offer in offers
            if offer.zone.physical == instance.zone.physical
            and token_of(owner, row.name, row.incarnation, instance.replica_id, offer) == instance.token
        )
        found = next(fitting, None)
        if found is None:
            unfit.append(instance)
            continue
        role, offer = found
        adopted.append(
            Replica(
                id=instance.replica_id,
                version=row.version,
                offer=offer,
                state=ReplicaState.PROVISIONING,
                since=now,
                created_at=now,
                instance_id=instance.id,
                launched_at=now,
                role=role,
                message="adopted after a restore",
            )
        )
    return Found(tuple(adopted), tuple(unfit), highest)


class Adoption:
    """`first_unknown`: by service, the first replica id that the backup did not know.

    `done` is called when every cloud was listed and its machines are adopted. Not thread-safe: the tick's own.
    """

    def __init__(
        self,
        first_unknown: Mapping[str, int],
        clouds: Iterable[str],
        owner: str,
        store: Store,
        specs: Specs,
        offers: Offers,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._first_unknown = dict(first_unknown)
        self._open = {(service, cloud) for service in first_unknown for cloud in clouds}
        self._owner = owner
        self._store = store
        self._specs = specs
        self._offers = offers
        self._until: float | None = None  # from the first turn: a controller may stand by for long before it
        self._done = done

    def is_awaited(self, service: str, now: float) -> bool:
        """Return whether planning for the service is to wait for machines that may be adopted."""
        return (
            self._until is not None and now < self._until and any(name == service for name, _ in self._open)
        )

    def spares(self, instance: Instance) -> bool:
        """Return whether an instance without a row may still be adopted."""
        return (instance.service, instance.zone.cloud) in self._open

    def take(self, rows: Iterable[ServiceRow], listings: Sequence[InstanceListing], now: float) -> bool:
        """Adopt what the listings show. Returns whether rows were added."""
        if not self._open:
            return False
        if self._until is None:
            self._until = now + PATIENCE_S
        by_name = {row.name: row for row in rows}
        was_added = False
        for listing in listings:
            for service in [name for name, cloud in self._open if cloud == listing.cloud]:
                row = by_name.get(service)
                if row is None or row.down:
                    self._open.discard((service, listing.cloud))
                    continue
                offers = self._offers_of(row)
                if offers is not None:
                    was_added |= self._adopt(row, listing, offers, now)
                    if listing.silent <= listing.closed:  # one in another region may be adopted later
                        self._open.discard((service, listing.cloud))
        if not self._open:
            log.info("all clouds were listed after the restore")
            self._done()
        return was_added

    def _offers_of(self, row: ServiceRow) -> RoleOffers | None:
        """Return all offers that the service can have launched for; None until the clouds have responded."""
        spec = self._specs.get(row.name, row.version)
        needs: list[tuple[Role, Requirements]] = [(Role.REPLICA, requirements_of(spec))]
        if spec.regional.places:
            needs.append((Role.LOAD_BALANCER, agent_requirements_of(spec.regional)))
        known = [(role, self._offers.get(need)) for role, need in needs]
        if any(offers is None for _, offers in known):
            return None
        return [(role, offer) for role, offers in known for offer in offers or ()]

    def _adopt(self, row: ServiceRow, listing: InstanceListing, offers: RoleOffers, now: float) -> bool:
        # The row as it now stands: an earlier listing of the same turn may have added to it.
        row = next(one for one in self._store.services() if one.name == row.name)
        found = match(self._owner, row, listing.instances, self._first_unknown[row.name], offers, now)
        next_id = max(row.memory.next_replica_id, found.highest_id + 1)
        if not found.adopted and not found.unfit and next_id == row.memory.next_replica_id:
            return False
        self._store.commit(
            row.name,
            now=now,
            changed=found.adopted,
            memory=replace(row.memory, next_replica_id=next_id),
            target=row.target,
            notes=row.notes,
            records=[*map(_adopted, found.adopted), *map(_unfit, found.unfit)],
        )
        return True


def read_restored(path: Path) -> dict[str, int]:
    """Return the content of `Home.restored`; empty if no restore is to be completed."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return {str(name): int(number) for name, number in content.items()}


def _adopted(replica: Replica) -> EventRecord:
    word = "Adopt" if replica.role is Role.REPLICA else f"{AGENT_WORD}Adopt"
    return EventRecord(
        word,
        f"{replica.instance_id} in {replica.zone}, launched after the backup",
        replica.id,
        replica.state.value,
    )


def _unfit(instance: Instance) -> EventRecord:
    text = (
        f"instance {instance.id} in {instance.zone} cannot be adopted: no offer of this version has its token"
    )
    return EventRecord("note", text, instance.replica_id)
