"""Claims on a user's own host: who has which of its GPUs and ports.

They are files of the host, one per machine token, so that several controllers see each other's and nothing ends with a
process. A process that makes or ends one holds the lock of the folder meanwhile. A claim that is over stays known for a while,
so that an order that is sent again does not bring it back to life.

    claim DIR       with a request (JSON) on standard input: {"claim": {…}} or {"refused": sentence}
    claims DIR      {"claims": […], "orphans": [folders of machines that have no claim]}
    release DIR TOKEN GRACE_S     stop what runs on it, remove its files, end it
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from provisioners.files import write_text
from provisioners.remote.host_agent.files import lock, read_json, unix_now

_RETENTION_S = 3600.0
_RETAINED = 200
_PATIENCE_S = 15.0
_FIRST_PORT = 20_000


def main(verb: str, root: Path, words: list[str]) -> int:
    (root / "claims").mkdir(parents=True, exist_ok=True, mode=0o700)
    if verb == "claim":
        response = claim(root, json.load(sys.stdin), unix_now())
    elif verb == "claims":
        response = {"claims": known(root), "orphans": orphans(root)}
    elif verb == "release":
        response = release(root, words[0], float(words[1]))
    else:
        print(f"there is no verb {verb}", file=sys.stderr)
        return 2
    print(json.dumps(response))
    return 0


def claim(root: Path, request: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the claim of that token, released or not, or a new one if the host has room for it."""
    held = lock(root / "claims" / ".lock", _PATIENCE_S)
    if held is None:
        return {"busy": True}
    try:
        before = read_json(_path(root, request["token"]))
        return {"claim": before} if before is not None else _new_claim(root, request, now)
    finally:
        os.close(held)


def _new_claim(root: Path, request: dict[str, Any], now: float) -> dict[str, Any]:
    """With the lock held."""
    _prune(root, now)
    live = [one for one in known(root) if one["ended_at"] is None]
    refused, gpus = room_for(request, live)
    if refused:
        return {"refused": refused}
    token = request["token"]
    ports = request["ports"] or [free_port({port for one in live for port in one["ports"]})]
    made = {"token": token, "tags": request["tags"], "gpus": gpus, "ports": ports}
    made.update(exclusive=request["exclusive"], claimed_at=now, ending=False, ended_at=None)
    write_text(_path(root, token), json.dumps(made))
    return {"claim": made}


def room_for(request: dict[str, Any], live: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Return why there is none, or which GPUs it gets."""
    if live and (request["exclusive"] or any(one["exclusive"] for one in live)):
        return "it is taken as a whole", []
    taken = {gpu for one in live for gpu in one["gpus"]}
    free = [gpu for gpu in range(request["host_gpus"]) if gpu not in taken]
    if request["gpus"] > len(free):
        return f"{len(free)} of {request['host_gpus']} GPUs are free", []
    clash = sorted(set(request["ports"]) & {port for one in live for port in one["ports"]})
    if clash:
        return f"port {clash[0]} is taken by another replica", []
    return "", free if request["exclusive"] else free[: request["gpus"]]


def free_port(taken: set[int]) -> int:
    """For a replica that takes any port: below the range from which the kernel picks for outgoing connections."""
    for port in range(_FIRST_PORT, _FIRST_PORT + 10_000):
        if port not in taken:
            with suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
                return port
    return 0


def release(root: Path, token: str, grace_s: float) -> dict[str, Any]:
    """Not with the lock held: what runs may take its time to end. Nothing to end is success."""
    from provisioners.remote.host_agent.process_kill import stop

    folder = root / "machines" / token
    path = _path(root, token)
    made = read_json(path)
    if made is not None and made["ended_at"] is None and not made["ending"]:
        _keep(path, {**made, "ending": True})
    if folder.is_dir() and not stop(folder, grace_s):
        return {"left": "a process that does not end"}
    shutil.rmtree(str(folder), ignore_errors=True)
    if made is not None and made["ended_at"] is None:
        _keep(path, {**made, "ending": True, "ended_at": unix_now()})
    return {"released": True}


def known(root: Path) -> list[dict[str, Any]]:
    found = [read_json(path) for path in sorted((root / "claims").glob("*.json"))]
    return [one for one in found if one is not None]


def orphans(root: Path) -> list[dict[str, str]]:
    """Folders of machines without a claim, and whose they are: provisioning went on while the claim was released."""
    live = {one["token"] for one in known(root) if one["ended_at"] is None}
    found = []
    for path in sorted((root / "machines").glob("*")):
        if path.name not in live:
            owner = (read_json(path / "order.json") or {}).get("owner", "")
            found.append({"token": path.name, "owner": owner})
    return found


def _path(root: Path, token: str) -> Path:
    return root / "claims" / f"{token}.json"


def _keep(path: Path, made: dict[str, Any]) -> None:
    """On a disk that is full a claim cannot be changed; but it can be removed, and a released one is."""
    try:
        write_text(path, json.dumps(made))
    except OSError:
        if made["ended_at"] is not None:
            path.unlink()


def _prune(root: Path, now: float) -> None:
    dead = sorted(
        ((one["ended_at"], one["token"]) for one in known(root) if one["ended_at"] is not None), reverse=True
    )
    for place, (ended_at, token) in enumerate(dead):
        if place >= _RETAINED or ended_at < now - _RETENTION_S:
            with suppress(FileNotFoundError):
                _path(root, token).unlink()
