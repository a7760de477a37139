"""What cannot be moved to another host, by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyserve_cli.controller.references import references_of
from skyserve_cli.deployment import host as there
from skyserve_cli.deployment.deploy import Deployment
from skyserve_cli.output import WrongUsage

#: The rows of a database, by table; see `controller.backup.archive`.
Rows = Mapping[str, Sequence[Mapping[str, Any]]]
View = Mapping[str, Any]


def insist_on_movable(
    views: Sequence[View], rows: Rows, deployment: Deployment, *, moves_endpoints: bool
) -> None:
    """Raise WrongUsage if a service cannot be moved."""
    host = deployment.target.host
    for view in views:
        local = [
            str(one["id"]) for one in view["replicas"] if one["cloud"] == "local" and one["state"] != "GONE"
        ]
        local += [str(one["id"]) for one in view["load_balancers"] if one["cloud"] == "local"]
        if local:
            raise WrongUsage(
                f"{view['name']}: replicas on the local cloud ({', '.join(local)}) are processes of this host and cannot be moved; "
                "take the service down, or update it to another cloud"
            )
        if view["load_balancer"] is not None and not moves_endpoints:
            raise WrongUsage(
                f"{view['name']}: its load balancer runs beside the controller, so its endpoint {view['endpoint']} would move to "
                f"{host}; use service.load_balancers.regions, or accept that with --move-endpoints"
            )
    paths = {path: name for name, path in files_of(rows, deployment.at("uploads/trees"))}
    missing = there.missing_files(deployment.shell, list(paths))
    if missing and missing[0].startswith(deployment.at("uploads/trees")):
        raise WrongUsage(
            f"{paths[missing[0]]}: its uploaded files are not on {host}, where later launches need them; copy the folder "
            f"{deployment.home.uploads} to {deployment.at('uploads')} there"
        )
    if missing:
        raise WrongUsage(
            f"{paths[missing[0]]}: {missing[0]} is not on {host}, where later launches need it; put it there at the same path"
        )
    _insist_on_clouds(views, deployment)


def files_of(rows: Rows, trees: str) -> Iterator[tuple[str, str]]:
    """Yield the services that are up, with each file that their newest version names: of this host, or in `trees` there."""
    newest = {row["name"]: row["version"] for row in rows["services"] if not row["down"]}
    for row in rows["versions"]:
        if newest.get(row["service"]) != row["version"]:
            continue
        spec = json.loads(row["spec"]) if isinstance(row["spec"], str) else row["spec"]
        sources = [source for mount in spec.get("file_mounts") or () for source in mount["sources"]]
        sources += [spec["workdir"]] if spec.get("workdir") else []
        sources += list((spec.get("tls") or {}).values())
        for source in sources:
            if isinstance(source, str) and "://" not in source:
                yield row["service"], source
        for reference in references_of(spec):
            yield row["service"], f"{trees}/{reference.id}/{reference.name}"


def _insist_on_clouds(views: Sequence[View], deployment: Deployment) -> None:
    """Raise WrongUsage if the host cannot use a cloud in which replicas are, and this one can.

    A controller there could not follow them.
    """
    used = sorted({one["cloud"] for view in views for one in view["replicas"] if one["state"] != "GONE"})
    if not used:
        return
    said = there.serve_there(
        deployment.shell, deployment.facts, deployment.serve, "check", "-o", "json", check=False
    )
    try:
        wrong_there = _wrong(said.out, used)
    except ValueError:
        raise WrongUsage(f"{deployment.target.host}: `serve check` failed there: {said.said}") from None
    if not wrong_there:
        return
    environment = {**os.environ, "SKYSERVE_HOME": str(deployment.home.root)}
    command = [sys.executable, "-m", "skyserve_cli", "check", "-o", "json"]
    here = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    for (cloud, what), why in wrong_there.items():
        if (cloud, what) not in _wrong(here.stdout, used):
            raise WrongUsage(f"{deployment.target.host} cannot use {cloud}, where replicas are: {why}")


def _wrong(checked: bytes, used: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return what is wrong by cloud and by what was looked at. Raises ValueError."""
    found = {one["cloud"]: one for one in json.loads(checked)}
    wrong = {}
    for cloud in used:
        if cloud not in found:
            wrong[cloud, ""] = "it is not enabled there"
            continue
        failed = [one for one in found[cloud]["findings"] if not one["ok"]]
        wrong |= {(cloud, one["what"]): f"{one['what']}: {one['message']}" for one in failed}
        if not failed and not found[cloud]["usable"]:
            wrong[cloud, ""] = str(found[cloud]["why"])
    return wrong
