"""The doors of the controller: what a part is, and what the kernel lends it.

*The kernel* keeps services up: the tick and the reconciler, the store, leases, clouds, load balancers, and the core of the API. It
imports no part and works without any. *A part* is everything else, such as the dashboard or notifications: a subclass of `Part`, which
overrides what it needs. Nothing that a part does is part of a tick.

*Where parts come from.* BUILT_IN names those of the product by their modules, which are imported when the daemon starts. Another
package offers one with an entry point of the group `skyserve.parts`. It is used if `parts` in `config.yaml` has its name, with its
settings.

*How a part lives.* Parts are made in order, `start` is called before the API is served, and `stop`, in reverse, when the daemon stops.
`lead` is called when this controller's term begins; a controller that stands by may never be called. A part from another package
whose code fails is logged and left out; the kernel goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import sqlalchemy as sa
from aiohttp import web
from pydantic import BaseModel

from skyserve_cli.config import Config, ConfigError
from skyserve_cli.controller.api.access import OWNER, Caller, StillValid
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.api.routes import KernelRoutes
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.balancers.agent_reader import AgentReader
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.home import Home
from skyserve_cli.part_plugins import part_class
from skyserve_cli.state.store import Store

log = logging.getLogger(__name__)

_HERE = "skyserve_cli.controller"
#: In the order in which they are made: a part sees the rows and the callers of those before it.
BUILT_IN = (
    f"{_HERE}.teams.part:TeamsPart",
    f"{_HERE}.plan_part:PlanPart",
    f"{_HERE}.sessions.part:SessionsPart",
    f"{_HERE}.upload_part:UploadsPart",
    f"{_HERE}.backup.part:BackupPart",
    f"{_HERE}.output_part:OutputPart",
    f"{_HERE}.metrics.part:MetricsPart",
    f"{_HERE}.notify.part:NotifyPart",
    f"{_HERE}.callbacks:CallbacksPart",
    f"{_HERE}.dashboard.part:DashboardPart",
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a part may use. `agents` reads admin ports of load balancers, `parts` are those made before it."""

    home: Home
    config: Config
    store: Store
    clock: Clock
    specs: SpecCache
    service: ControllerService
    routes: KernelRoutes
    agents: AgentReader
    parts: Parts


class Part:
    """Plugs into the controller. Every method has a default that does nothing.

    `section` is the model of its section in `parts` of `config.yaml`, and `tables` are its own, whose names begin with `part_`: they are
    made if they are missing, and are in no backup.
    """

    name: ClassVar[str]
    section: ClassVar[type[BaseModel] | None] = None
    tables: ClassVar[sa.MetaData | None] = None

    def __init__(self, kernel: Kernel) -> None:
        """Raise ConfigError if something is configured wrongly. Calls nothing yet. Its section is `kernel.config.parts[self.name]`."""

    async def start(self) -> None:
        """Begin, on the event loop."""

    def lead(self) -> None:
        """Begin what only one controller of a database may do. Called once at most, on a thread."""

    async def stop(self) -> None:
        """Stop what was started. A killed controller never calls this."""

    def routes(self) -> Sequence[Route]:
        """Return its routes of the API."""
        return ()

    def row(self) -> Mapping[str, Any]:
        """Return what it adds to `GET /v1/health`, on a thread. A text is also a line of `serve controller status`."""
        return {}

    def admit(self, spec: Mapping[str, Any]) -> None:
        """Raise RejectedError if a version with this spec must not be stored. Called on a thread."""

    def tidy(self, now: float) -> None:
        """Remove what is no longer needed. Called once an hour while this controller leads, on a thread."""

    async def caller_of(self, request: web.Request, is_remote: bool) -> tuple[Caller, StillValid] | None:
        """Return who sends this request, and how to look that up again; None if it does not know. Raises RejectedError.

        `is_remote`: it came to the port.
        """
        return None

    async def named(self, name: str) -> Caller | None:
        """Return the caller of this name, if it knows one who still may call."""
        return None

    def callers_revision(self) -> object:
        """Return what differs once a caller may call no more. Called on a thread, often."""
        return None


class Parts:
    """The parts of one controller."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self.routes: list[Route] = []

    def make(self, kernel: Kernel, built_in: Sequence[str] = BUILT_IN) -> None:
        """Make those of the product, then those of other packages that the configuration names. Raises ConfigError."""
        for place in built_in:
            module, _, name = place.partition(":")
            self._add(getattr(import_module(module), name)(kernel))
        for name in kernel.config.parts:
            try:
                made = part_class(name)(kernel)
                if made.tables is not None:
                    kernel.store.database.create(made.tables)
                self._add(made)
            except ConfigError:
                raise
            except Exception:
                log.exception("the part %s is left out", name)

    def _add(self, part: Part) -> None:
        self.routes += part.routes()
        self._parts.append(part)

    async def start(self) -> None:
        for part in self._parts:
            with _left_out(part, "does not start"):
                await part.start()

    def lead(self) -> None:
        for part in self._parts:
            with _left_out(part, "does not begin"):
                part.lead()

    async def stop(self) -> None:
        for part in reversed(self._parts):
            with _left_out(part, "does not stop"):
                await part.stop()

    def rows(self, before: Part | None = None) -> dict[str, Any]:
        """Return the rows of all, or of those that were made before that one."""
        rows: dict[str, Any] = {}
        for part in self._parts:
            if part is before:
                break
            with _left_out(part, "has no row"):
                rows |= part.row()
        return rows

    def admit(self, spec: Mapping[str, Any]) -> None:
        for part in self._parts:
            part.admit(spec)

    def tidy(self, now: float) -> None:
        for part in self._parts:
            part.tidy(now)

    async def caller_of(self, request: web.Request, is_remote: bool) -> tuple[Caller, StillValid] | None:
        for part in self._parts:
            found = await part.caller_of(request, is_remote)
            if found is not None:
                return found
        return None

    async def named(self, name: str) -> Caller | None:
        """Return the caller of this name, or the owner; None if no part knows one."""
        if name == OWNER.name:
            return OWNER
        for part in self._parts:
            found = await part.named(name)
            if found is not None:
                return found
        return None

    def callers_revision(self) -> tuple[object, ...]:
        return tuple(part.callers_revision() for part in self._parts)


@contextmanager
def _left_out(part: Part, what: str) -> Iterator[None]:
    """Log what fails in a part. The others, and the kernel, go on."""
    try:
        yield
    except Exception:
        log.exception("the part %s %s", part.name, what)
