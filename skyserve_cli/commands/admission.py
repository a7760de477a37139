"""What the clusters of a plan say of its Pods: their API servers get the very objects as a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from policies.model import Offer, Replica, ReplicaState
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import ProvisionError
from skyserve_cli.clouds import Clouds
from skyserve_cli.commands.options import View
from skyserve_cli.config import ConfigError
from skyserve_cli.controller.reconcile.mappers import order_of, requirements_of
from skyserve_cli.spec import ServiceSpec


@runtime_checkable
class Rehearsing(Protocol):
    """A provisioner whose cloud can decide on a launch without doing it."""

    def rehearse(self, order: LaunchOrder) -> list[tuple[str, ProvisionError | None]]:
        """Return the kinds of the objects of a launch, each with why it would be refused. Nothing is created."""
        ...


def admission_of(spec: ServiceSpec, clouds: Clouds) -> Iterator[View]:
    """Yield for each region of such clouds whether it admits the service's replicas, and the reasons if not.

    Values of secrets are not sent.
    """
    for name in clouds.enabled:
        try:
            cloud = clouds.get(name)
            if not isinstance(cloud, Rehearsing):
                continue
            offers = cloud.offers(clouds.resolve(requirements_of(spec)))
        except (ProvisionError, ConfigError) as error:
            yield {"place": name, "admitted": False, "reasons": [str(error)]}
            continue
        for offer in _of_each_region(offers):
            yield _decision(cloud, spec, offer)


def _decision(cloud: Rehearsing, spec: ServiceSpec, offer: Offer) -> View:
    replica = Replica(1, 1, offer, ReplicaState.REQUESTED, 0.0, 0.0)
    order = order_of("check", spec.name, "", replica, spec, dict.fromkeys(spec.secrets, "x"))
    refused = [f"{kind}: {error.message}" for kind, error in cloud.rehearse(order) if error is not None]
    return {"place": f"{offer.zone.cloud}/{offer.zone.region}", "admitted": not refused, "reasons": refused}


def _of_each_region(offers: Sequence[Offer]) -> list[Offer]:
    first: dict[str, Offer] = {}
    for offer in offers:
        first.setdefault(offer.zone.region, offer)
    return list(first.values())
