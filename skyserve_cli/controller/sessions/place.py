"""Where commands of a user run: the controller knows addresses, keys and folders, and gives none of them away."""

from __future__ import annotations

from posixpath import dirname
from typing import Any, NamedTuple

from provisioners.port.base import Instance, LoginSource, Provisioner
from provisioners.port.commands import Login, UnreachableError
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.rejected import RejectedError


class NoAccessError(RejectedError):
    """No command can be run there."""

    status = 409


class Place(NamedTuple):
    """One node of a replica. `instance` is None for a replica that has none, or is over."""

    service: str
    replica_id: int
    node: int
    source: Provisioner
    instance: Instance | None

    def view(self) -> dict[str, Any]:
        """Return `{"kind": "session"}`, or `{"kind": "local", "token", "node"}` on the controller's host. Raises NoAccessError."""
        instance = self._instance()
        if self.source.name == "local":
            return {"kind": "local", "token": instance.token, "node": self.node}
        self._login_source()
        return {"kind": "session"}

    def login(self) -> tuple[Login, str]:
        """Return how to log in there, and the folder of the machine below the home of that user.

        It may have to be connected to for that. Raises NoAccessError, ShellError.
        """
        source, instance = self._login_source(), self._instance()
        try:
            return source.login(instance, self.node), dirname(source.work_folder(instance, self.node))
        except ProvisionError as error:
            raise UnreachableError(error.message) from error

    def _login_source(self) -> LoginSource:
        self._instance()
        if not isinstance(self.source, LoginSource):
            raise self._none(f"is on {self.source.name}, which has no shell to log in to")
        return self.source

    def _instance(self) -> Instance:
        if self.instance is None:
            raise self._none("has no machine, or none any more")
        if self.instance.state.is_gone:
            raise self._none(f"is gone ({self.instance.state.value})")
        return self.instance

    def _none(self, why: str) -> NoAccessError:
        return NoAccessError(f"replica {self.replica_id} of {self.service} {why}")
