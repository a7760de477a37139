"""`serve plan` as a part of the controller: what a spec would have launched and ended, without doing it.

POST /v1/plan   as PUT /v1/services/NAME takes it
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from policies.goals import UpdateMode
from skyserve_cli.controller.api.access import AccessRole, calling, insist_on, insist_on_other_hosts
from skyserve_cli.controller.api.json_body import json_body, sent_order
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.clouds.caches import all_offers
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.reconcile.mappers import requirements_of
from skyserve_cli.controller.reconcile.planning import first_plan, update_plan
from skyserve_cli.controller.reconcile.update_plan import changes
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ServiceSpec


class PlanPart(Part):
    """Decides as the tick does, and stores nothing."""

    name = "plan"

    def __init__(self, kernel: Kernel) -> None:
        self._service, self._store = kernel.service, kernel.store
        self._specs, self._clock = kernel.specs, kernel.clock

    def routes(self) -> Sequence[Route]:
        return [Route("POST", "/v1/plan", self._plan, AccessRole.OPERATOR)]

    async def _plan(self, request: web.Request) -> web.Response:
        order = await asyncio.to_thread(sent_order, await json_body(request))
        insist_on(calling(), [order.spec.name])
        return web.json_response(await asyncio.to_thread(self.plan, *order))

    def plan(
        self, spec: ServiceSpec, secrets: Mapping[str, str], mode: UpdateMode | None = None
    ) -> dict[str, Any]:
        """Return what would be launched where, and what it costs: on empty ground, or as an update if a service of that name is up.

        `keeps_replicas`: a service of that name is up, and its replicas may serve this spec as they are. `changes` are the
        keys in which its spec differs, and `nothing_changes` means that an update would have no effect. `mode` None is that
        of the spec.
        """
        need = self._service.clouds.resolve(requirements_of(spec))
        insist_on_other_hosts(spec, need)
        offers = all_offers(self._service.clouds.all(), need)
        now = self._clock.now()
        self._service.teams.admit(spec.name, spec, is_new=not self._service.has(spec.name), offers=offers)
        running = next(
            (row for row in self._store.services() if row.name == spec.name and not row.down), None
        )
        if running is None:
            planned = first_plan(spec, offers, self._service.clouds, now)
            return {**planned, "keeps_replicas": False, "changes": [], "nothing_changes": False}
        keeps = self._service.keeps_replicas(running, spec, secrets)
        mode = mode or UpdateMode(spec.update.mode)
        planned = update_plan(spec, offers, self._service.clouds, now, running, keeps=keeps, mode=mode)
        changed = changes(spec_to_json(self._specs.get(running.name, running.version)), spec_to_json(spec))
        gave_up = running.version in running.memory.rollout.get("failed", ())
        same = keeps and not changed and not gave_up
        return {**planned, "keeps_replicas": keeps, "changes": changed, "nothing_changes": same}
