"""How the command line gets to where a replica runs: the controller knows addresses, keys and folders."""

from __future__ import annotations

from dataclasses import asdict
from posixpath import dirname
from typing import Any

from provisioners.port.base import Instance, LoginSource, Provisioner
from provisioners.port.commands import ShellError
from provisioners.port.errors import ProvisionError


class NoAccessError(Exception):
    """No command can be run there. The message goes on after "replica 3 of chat"."""


def access_to(source: Provisioner, instance: Instance | None, node: int) -> dict[str, Any]:
    """`{"kind": "ssh", "login", "folder"}` or `{"kind": "local", "token", "node"}`.

    `folder` is the machine's, below the home of the user who logs in. `instance` is None for a replica that has none, or
    is over. Raises NoAccessError.
    """
    if instance is None:
        raise NoAccessError("has no machine, or none any more")
    if instance.state.is_gone:
        raise NoAccessError(f"is gone ({instance.state.value})")
    if source.name == "local":
        return {"kind": "local", "token": instance.token, "node": node}
    if not isinstance(source, LoginSource):
        raise NoAccessError(f"is on {source.name}, which has no shell to log in to")
    try:
        login = source.login(instance, node)
    except (ProvisionError, ShellError) as error:
        raise NoAccessError(f"cannot be logged in to: {error.message}") from error
    return {
        "kind": "ssh",
        "login": asdict(login),
        "folder": dirname(source.work_folder(instance, node)),
    }
