"""Who calls the API, and what they may do: the owner of the home, or the holder of a token with a role.

Each route names the role that it needs (`route.Route`). A token may be limited to some services. What runs or reads on the controller's own host needs `admin` too, because it could read the keys of the home.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import orjson

from provisioners.port.base import Requirements, is_url
from skyserve_cli.controller.reconcile.resource_match import copies_of
from skyserve_cli.controller.references import read_reference
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.spec.model import ServiceSpec

#: Ports below it are those of the host's own services.
FIRST_FREE_PORT = 1024


class AccessRole(str, Enum):
    """Each role may do what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: AccessRole) -> bool:
        order = list(AccessRole)
        return order.index(self) >= order.index(other)


class ForbiddenError(RejectedError):
    """The caller may not do this; the text names what is missing."""

    status = 403


class Caller(NamedTuple):
    """`services` None: all. `team` is that of the services which the caller starts; "": none. `by_proxy`: a proxy has logged them in."""

    name: str
    role: AccessRole
    services: frozenset[str] | None = None
    team: str = ""
    by_proxy: bool = False

    @property
    def label(self) -> str:
        """What sentences call the caller."""
        return f"the {'user' if self.by_proxy else 'token'} {self.name}"

    def covers(self, service: str) -> bool:
        return self.services is None or service in self.services


OWNER = Caller("owner", AccessRole.ADMIN)
#: Of the request that is being served. Threads of `asyncio.to_thread` have it too.
_caller: ContextVar[Caller] = ContextVar("caller", default=OWNER)

#: Returns whose request it still is; None if it may not go on.
StillValid = Callable[[], Awaitable[object | None]]
_still_valid: ContextVar[StillValid | None] = ContextVar("still_valid", default=None)


def calling() -> Caller:
    """Return the caller of the request that is being served; the owner where there is none."""
    return _caller.get()


def set_caller(caller: Caller, still_valid: StillValid | None = None) -> None:
    """Of the request that is being served. `still_valid` is for a response that goes on for long; None: it may."""
    _caller.set(caller)
    _still_valid.set(still_valid)


def still_valid() -> StillValid | None:
    """Return what `set_caller` was given for the request that is being served."""
    return _still_valid.get()


def valid_for(seconds: float) -> StillValid:
    """Return what is valid from now on for this time."""
    until = asyncio.get_running_loop().time() + seconds

    async def check() -> object | None:
        return True if asyncio.get_running_loop().time() < until else None

    return check


def authorize(caller: Caller, needed: AccessRole, service: str | None) -> None:
    """Raise ForbiddenError unless the caller has the role, and the caller's token covers the service, if one is named."""
    if not caller.role.includes(needed):
        raise ForbiddenError(
            f"{caller.label} has the role {caller.role.value}; this needs the role {needed.value}"
        )
    insist_on(caller, [] if service is None else [service])


def insist_on(caller: Caller, services: Sequence[str]) -> None:
    """Raise ForbiddenError unless the caller's token covers all of these services."""
    for service in services:
        if not caller.covers(service):
            raise ForbiddenError(f"{caller.label} does not cover the service {service}")


def insist_on_other_hosts(spec: ServiceSpec, need: Requirements) -> None:
    """Raise ForbiddenError if the spec uses the controller's host and the caller is no admin. Uploaded files are not of that host.

    `need` is what the clouds are requested for, with their names.
    """
    caller = calling()
    if caller.role is AccessRole.ADMIN:
        return
    used = {
        "event_callback": spec.event_callback is not None,
        "workdir": spec.workdir is not None and read_reference(spec.workdir) is None,
        "file_mounts": any(not is_url(source) for source in copies_of(spec.file_mounts).values()),
        "service.tls": spec.tls is not None,
        "load_balancer.api_keys_file": bool(spec.load_balancer.access.keys_file) and not spec.regional.places,
        "load_balancer.port": not spec.regional.places
        and 0 < (spec.load_balancer.port or 0) < FIRST_FREE_PORT,
        "resources.infra: local": any(candidate.cloud == "local" for candidate in need.candidates),
        "load_balancers.regions: local": any(place.cloud == "local" for place in spec.regional.places),
    }
    named = [key for key, is_used in used.items() if is_used]
    if named:
        raise ForbiddenError(
            f"{', '.join(named)}: uses the controller's host, which needs the role admin; "
            f"{caller.label} has the role {caller.role.value}"
        )


def visible(body: bytes) -> bytes:
    """Return a JSON object without the `services` that the caller's token does not cover."""
    caller = calling()
    if caller.services is None:
        return body
    content: dict[str, Any] = orjson.loads(body)
    content["services"] = [view for view in content["services"] if caller.covers(view["name"])]
    return orjson.dumps(content)
