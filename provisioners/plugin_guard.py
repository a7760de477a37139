"""Isolates the machines of a plug-in: its failures harm no other cloud.

An exception that is no `ProvisionError` is a defect of the plug-in. Here it becomes a TransientError that names plug-in and
exception (the log has the traceback), so that the same order is sent again and the other clouds go on. What a listing has of
other owners is dropped, and one that is no list of machines is an error: a machine missing from a list counts as gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from provisioners.port.errors import ProvisionError, TransientError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import Finding, Level, Machine, MachineOrder, Machines, OrphanedResource, Silent

_log = logging.getLogger(__name__)
T = TypeVar("T")


def guarded(inner: Machines) -> Machines:
    """`Machines` that raise the classes of `provisioners.port.errors` only, also if `inner` raises others."""
    return _Guarded(inner)


class _Guarded:
    def __init__(self, inner: Machines) -> None:
        self._inner = inner
        self.name = inner.name
        self.closed = inner.closed

    def create(self, order: MachineOrder) -> Machine:
        made = self._call("create", lambda: self._inner.create(order))
        if not isinstance(made, Machine) or made.token != order.token:
            raise self._defect("create", f"returned {made!r} for {order.token}")
        return made

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        found = self._call("machines", lambda: list(self._inner.machines(owner, silent)))
        for one in found:
            if not isinstance(one, Machine):
                raise self._defect("machines", f"listed {one!r}, which is no machine")
        return [one for one in found if one.owner == owner]

    def destroy(self, machine: Machine) -> None:
        self._call("destroy", lambda: self._inner.destroy(machine))

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        return self._call(
            "spot_prices", lambda: dict(self._inner.spot_prices(regions, instance_types, silent))
        )

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return self._call("orphans", lambda: list(self._inner.orphans(owner, silent)))

    def remove(self, orphan: OrphanedResource) -> None:
        self._call("remove", lambda: self._inner.remove(orphan))

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return self._call("shared", lambda: list(self._inner.shared(owner, silent)))

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self._call("admit", lambda: self._inner.admit(owner, access))

    def delete_shared(self, owner: str) -> Sequence[str]:
        return self._call("delete_shared", lambda: list(self._inner.delete_shared(owner)))

    def check(self) -> Sequence[Finding]:
        try:
            return self._call("check", lambda: list(self._inner.check()))
        except ProvisionError as error:
            return [Finding("plug-in", Level.MISSING, error.message)]

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ProvisionError:
            raise
        except Exception as error:
            _log.exception("plug-in %s: %s", self.name, name)
            raise self._defect(name, f"{type(error).__name__}: {error}") from error

    def _defect(self, call: str, what: str) -> TransientError:
        return TransientError(
            f"the plug-in for {self.name} has a defect: {call}: {what[:500]}", cloud=self.name
        )
