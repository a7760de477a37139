"""The port of metrics as a part of the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyserve_cli.controller.part import Kernel, Part

if TYPE_CHECKING:
    from skyserve_cli.controller.metrics.endpoint import MetricsEndpoint


class MetricsPart(Part):
    """Serves metrics on `controller.metrics_port`, if that is configured."""

    name = "metrics"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._endpoint: MetricsEndpoint | None = None

    async def start(self) -> None:
        service, settings = self._kernel.service, self._kernel.config.controller
        if settings.metrics_port is None:
            return
        from skyserve_cli.controller.metrics.endpoint import MetricsEndpoint  # imports Prometheus's client

        self._endpoint = MetricsEndpoint(
            self._kernel.home.metrics_token(),
            self._health,
            lambda: service.services(down=False, ended=False),
            self._kernel.agents,
            teams=lambda: service.teams.view()["teams"],
        )
        self._endpoint.start(settings.metrics_port, settings.metrics_host)

    async def stop(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()

    def _health(self) -> dict[str, Any]:
        return {**self._kernel.service.health(), **self._kernel.parts.rows(before=self)}
