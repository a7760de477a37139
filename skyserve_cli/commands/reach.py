"""Replicas that commands run on: which ones, and where each of them is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provisioners.local.store import LocalStore
from provisioners.local.user_commands import Inside, NoProcessError, inside
from skyserve_cli.commands import sentences
from skyserve_cli.commands.options import View, find, home
from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.output import CommandFailed, WrongUsage

ReplicaId = Annotated[
    int | None,
    typer.Option("--replica", metavar="ID", help="The id of a replica. Default: the only live one."),
]
Node = Annotated[
    int, typer.Option("--node", metavar="RANK", min=0, help="Which machine of a replica of several.")
]


def live_ids(client: ControllerClient, name: str) -> list[int]:
    """Return the ids of the live replicas. Raises CommandFailed if there is none."""
    view: View = find(client.services(name, down=True), name)
    ids = [int(replica["id"]) for replica in sentences.live_replicas(view)]
    if not ids:
        raise CommandFailed(f"{name} has no live replica")
    return ids


def chosen(client: ControllerClient, name: str, wanted: int | None) -> int:
    """Return the replica `wanted`, or the only live one.

    Raises WrongUsage if there are several, CommandFailed if it is gone.
    """
    ids = live_ids(client, name)
    known = ", ".join(map(str, ids))
    if wanted is not None and wanted not in ids:
        raise CommandFailed(f"{name} has no live replica {wanted} (live: {known})")
    if wanted is None and len(ids) > 1:
        raise WrongUsage(f"{name} has several live replicas: pass --replica ID ({known})")
    return ids[0] if wanted is None else wanted


def local_place(client: ControllerClient, name: str, replica_id: int, node: int) -> Inside | None:
    """Return where the replica runs on this host; None if it runs on a machine. Raises CommandFailed or RefusedError."""
    found: dict[str, Any] = client.access(name, replica_id, node=node)
    if found["kind"] != "local":
        return None
    try:
        return inside(LocalStore(home().root.resolve()).folder(found["token"]).at(found["node"]))
    except NoProcessError as error:
        raise CommandFailed(f"replica {replica_id} of {name} {error}") from error
