"""Whether load balancers can stand where a spec wants them."""

from __future__ import annotations

from dataclasses import replace

from provisioners.offers.lb_instance_types import small_types
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.controller.reconcile.mappers import agent_requirements_of
from skyserve_cli.spec.infra import KUBERNETES
from skyserve_cli.spec.model import ServiceSpec


def insist_on_regions(spec: ServiceSpec, clouds: Clouds) -> None:
    """Raise CloudNotEnabledError if a load balancer could never stand where it is wanted. Calls no cloud."""
    for place in spec.regional.places:
        at = f"service.load_balancers.regions: {place}"
        if place.cloud not in clouds.enabled:
            enabled = ", ".join(clouds.enabled) or "none"
            raise CloudNotEnabledError(f"{at}: {place.cloud} is not enabled here (enabled: {enabled})")
        wanted, known = spec.regional.instance_type(place.cloud), small_types(place.cloud)
        if wanted is not None and known and wanted not in known:
            raise CloudNotEnabledError(
                f"service.load_balancers.instance_type: the price of {wanted} on {place.cloud} is not known; "
                f"take one of {', '.join(known)}"
            )
        if not clouds.listed(agent_requirements_of(replace(spec.regional, places=(place,)))):
            what = (
                "no cluster of that name takes load balancers; name one of clouds.kubernetes.contexts, set "
                "clouds.kubernetes.agent_image, and have a node there that is not a spot node"
                if place.cloud == KUBERNETES
                else f"{place.cloud} offers no machine for a load balancer there"
            )
            raise CloudNotEnabledError(f"{at}: {what}")
