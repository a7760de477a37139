"""Whose quota a service uses, whether its least size fits into that, and what each team uses.

The limits are in `config.yaml` (`teams`); a team that is not there has none.

    GET /v1/teams -> {"teams": [{"name", "limits", "used", "services", "waiting"}]}: all to admins, else the caller's own
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from policies.budget import is_refusal
from policies.goals import Amounts, Quota
from policies.model import Offer
from policies.quotas import NOTHING, plus, too_large
from provisioners.port.base import Requirements
from skyserve_cli.clouds import Clouds
from skyserve_cli.config_teams import TeamConfig
from skyserve_cli.controller.api.access import AccessRole, ForbiddenError, calling
from skyserve_cli.controller.clouds.caches import all_offers
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.mappers import requirements_of
from skyserve_cli.controller.reconcile.ports import Specs
from skyserve_cli.controller.reconcile.team_ledger import month_start, use_of
from skyserve_cli.spec.infra import KUBERNETES
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.store import Store


class TeamError(Exception):
    """The team is not configured, or the service can never fit into its quota; the text has the figures."""


class TeamRules:
    """One per daemon."""

    def __init__(self, store: Store, specs: Specs, clouds: Clouds, clock: Clock) -> None:
        self._store = store
        self._specs = specs
        self._clouds = clouds
        self._clock = clock

    @property
    def names(self) -> frozenset[str]:
        """The teams of config.yaml."""
        return frozenset(self._clouds.config.teams)

    @property
    def _quotas(self) -> dict[str, Quota]:
        return {name: team.quota for name, team in self._clouds.config.teams.items()}

    def admit(
        self, name: str, spec: ServiceSpec, *, is_new: bool, offers: Sequence[Offer] | None = None
    ) -> str | None:
        """Return the team to store with a new service, or with an update (None: it stays the same).

        `offers` are those for a replica, if they are known already. Raises ForbiddenError if the caller may not choose this team, or
        what the team's operators may not choose; TeamError if it is not configured or its quota is smaller than the least size of the service.
        """
        caller, chosen = calling(), spec.team
        if chosen is not None and chosen != caller.team and caller.role is not AccessRole.ADMIN:
            own = f"the team {caller.team}" if caller.team else "no team"
            raise ForbiddenError(
                f"service.team: {chosen}: needs the role admin; {caller.label} belongs to {own}"
            )
        team = chosen if chosen is not None or not is_new else caller.team
        counted = self._team_of(name) if team is None else team
        if caller.role is not AccessRole.ADMIN:
            limits = self._clouds.config.teams.get(counted or "", TeamConfig())
            need = self._clouds.resolve(requirements_of(spec))
            beyond = list(beyond_limits(limits, spec, need))
            if beyond:
                where = f" in the team {counted}" if counted else ""
                raise ForbiddenError(f"{'; '.join(beyond)}{where}; others need the role admin")
        if counted:
            self._insist_on_room(counted, spec, offers, is_chosen=team is not None)
        return team

    def view(self) -> dict[str, Any]:
        """Return what each team that the caller may see uses, and its limits."""
        caller, now = calling(), self._clock.now()
        with self._store.still():
            rows = self._store.services()
            month = self._store.spent_by_team(month_start(now), now)
        quotas = self._quotas
        names = {*quotas, *(row.team for row in rows if row.team)}
        if caller.role is not AccessRole.ADMIN:
            names &= {caller.team}
        found = []
        for name in sorted(names):
            ours = [row for row in rows if row.team == name]
            used = NOTHING
            for row in ours:
                used = plus(used, use_of(row, partial(self._nodes, row.name)))
            found.append(
                {
                    "name": name,
                    "limits": asdict(quotas.get(name, Quota())),
                    "used": {**_figures(used), "usd_month": round(month.get(name, 0.0), 6)},
                    "services": [row.name for row in ours],
                    "waiting": [row.name for row in ours if is_refusal(row.notes)],
                }
            )
        return {"teams": found}

    def _nodes(self, service: str, version: int) -> int:
        return self._specs.get(service, version).num_nodes

    def _team_of(self, name: str) -> str:
        return next((row.team for row in self._store.services() if row.name == name), "")

    def _insist_on_room(
        self, team: str, spec: ServiceSpec, offers: Sequence[Offer] | None, *, is_chosen: bool
    ) -> None:
        quotas = self._quotas
        quota = quotas.get(team)
        if quota is None:
            if not is_chosen:  # an update of a service whose team was taken out of the configuration
                return
            known = ", ".join(sorted(quotas)) or "none"
            raise TeamError(f"there is no team {team} in config.yaml (teams: {known})")
        if quota == Quota():
            return
        size = spec.scaling.min_replicas
        if offers is None and size:
            offers = all_offers(self._clouds.all(), self._clouds.resolve(requirements_of(spec)))
        needed = least_use(spec, offers or ())
        over = [f"{key}: {need:g} of {limit:g}" for key, need, limit in too_large(quota, needed)]
        if over:
            what = "1 replica" if size == 1 else f"{size} replicas"
            raise TeamError(
                f"the least size of {spec.name}, {what}, exceeds the quota of the team {team} ({'; '.join(over)})"
            )


def beyond_limits(limits: TeamConfig, spec: ServiceSpec, need: Requirements) -> Iterator[str]:
    """Yield what a spec chooses that operators of the team may not. `need` has the clouds by name."""
    if limits.clouds is not None:
        yield from _other_clouds(limits.clouds, spec, need)
    if limits.images is not None:
        for image in sorted({image for choice in spec.resources for _, image in choice.images}):
            if not any(fnmatchcase(image, one) for one in limits.images):
                yield f"resources.image_id: {image}: operators may use {_listed(limits.images)}"
    if limits.ports is not None:
        yield from _other_ports(limits.ports, spec)
    if spec.pod is not None:
        from provisioners.kubernetes import pod_rules

        patch = json.loads(spec.pod)
        yield from pod_rules.beyond(patch, limits.pod, "kubernetes.pod")
        yield from pod_rules.other_images(patch, limits.images, "kubernetes.pod")
    keeps = spec.cache is not None and spec.cache.kind == "node" and not {"cache", "hostPath"} & {*limits.pod}
    if keeps and any(each.cloud == KUBERNETES for each in need.candidates):
        yield "cache: operators may not keep folders on nodes of Kubernetes"
    host = spec.load_balancer.host
    if limits.hosts is not None and host is not None and host not in limits.hosts:
        yield f"load_balancer.host: {host}: operators may use {_listed(limits.hosts)}"


def _other_clouds(allowed: Sequence[str], spec: ServiceSpec, need: Requirements) -> Iterator[str]:
    patterns = [one if "/" in one else f"{one}/*" for one in allowed]
    places = [("resources", one.cloud or "", one.region or "") for one in need.candidates]
    places += [("load_balancers.regions", place.cloud, place.region) for place in spec.regional.places]
    for key, cloud, region in dict.fromkeys(places):
        if not any(fnmatchcase(f"{cloud}/{region}", one) for one in patterns):
            yield f"{key}: {cloud}/{region or '*'}: operators may use {_listed(allowed)}"


def _other_ports(allowed: Sequence[tuple[int, int]], spec: ServiceSpec) -> Iterator[str]:
    shown = [f"{first}-{last}" if first < last else str(first) for first, last in allowed]
    ports = {"load_balancer.port": spec.load_balancer.port, "load_balancers.port": spec.regional.port}
    for key, port in ports.items():
        if port is not None and not any(first <= port <= last for first, last in allowed):
            yield f"{key}: {port}: operators may use {_listed(shown)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def least_use(spec: ServiceSpec, offers: Sequence[Offer]) -> Amounts:
    """Return what the service uses at its least size, on the smallest and on the cheapest offer."""
    size = float(spec.scaling.min_replicas)
    gpus = min(
        (offer.accelerator_count for offer in offers),
        default=min((choice.accelerator_count for choice in spec.resources), default=0.0),
    )
    usd = min((offer.price_usd_hour for offer in offers), default=0.0)
    return Amounts(size * gpus * spec.num_nodes, size, size * usd)


def _figures(used: Amounts) -> dict[str, float]:
    return {"gpus": used.gpus, "replicas": int(used.replicas), "usd_hour": round(used.usd_hour, 6)}
