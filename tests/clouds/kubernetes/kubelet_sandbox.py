"""What the containers of a Deployment see: a mount namespace with their volumes at the paths of the manifest, and probes and hooks.

Processes of all Pods share this machine's network, so the address 0.0.0.0 of a container is that of its Pod."""

from __future__ import annotations

import base64
import http.client
import shlex
import ssl
import sys
from pathlib import Path
from typing import Any

from tests.clouds.kubernetes.kube_store import Refused, Store

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
ANY = "0.0.0.0"
#: Folders of this machine that a mount namespace may have empty ones in place of.
_HIDDEN = ("/run", "/var/lib")
_LEFT = ("/tmp",)


def is_sandboxed(pod: Json) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(one["kind"] in ("Deployment", "ReplicaSet") for one in owners)


def make_programs(folder: Path) -> None:
    """Put what an image would have into a folder of the path."""
    for name, words in (("python", [sys.executable]), ("serve", [sys.executable, "-m", "skyserve_cli"])):
        path = folder / name
        path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)


def missing(pod: Json, store: Store) -> str | None:
    """Return why the volumes or variables of the Pod cannot be made yet."""
    space = pod["metadata"]["namespace"]
    for resource, name in _needed(pod):
        try:
            store.get(resource, space, name)
        except Refused as refusal:
            return refusal.message
    return None


def mounted(pod: Json, container: Json, store: Store, folder: Path, command: list[str]) -> list[str]:
    """Return the command that runs `command` with the container's volumes where it expects them."""
    address = pod["status"]["podIP"]
    lines = ["set -e", *(f"mount -t tmpfs tmpfs {hidden}" for hidden in _HIDDEN)]
    volumes = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        if mount["mountPath"] in _LEFT:
            continue
        source = _filled(pod, volumes[mount["name"]], store, folder, address)
        target = shlex.quote(mount["mountPath"])
        lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(source))} {target}"]
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {target}")
    lines.append('exec "$@"')
    replaced = [word.replace(ANY, address) for word in command]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "sh", *replaced]


def _unchecked() -> ssl.SSLContext:
    """As the kubelet probes: the certificate is not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def passes(pod: Json, container: Json, probe: Json) -> bool:
    """Return whether an HTTP probe of the container does."""
    get = probe["httpGet"]
    port = get["port"]
    if isinstance(port, str):
        port = next(one["containerPort"] for one in container["ports"] if one.get("name") == port)
    host, timeout_s = pod["status"]["podIP"], min(probe.get("timeoutSeconds", 1), 2)
    line: http.client.HTTPConnection
    if get.get("scheme") == "HTTPS":
        line = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_unchecked())
    else:
        line = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        line.request("GET", get["path"])
        return 200 <= line.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        line.close()


def _filled(pod: Json, volume: Json, store: Store, folder: Path, address: str) -> Path:
    path = folder / "volumes" / volume["name"]
    if "persistentVolumeClaim" in volume:  # it outlives the Pod
        path = folder.parents[1] / "claims" / volume["persistentVolumeClaim"]["claimName"]
    path.mkdir(parents=True, exist_ok=True)
    space = pod["metadata"]["namespace"]
    if any(path.iterdir()):
        return path  # for a hook: it has what the container had, though its Secret may be gone
    if "secret" in volume:
        for key, value in _secret(volume["secret"], space, store).items():
            (path / key).write_bytes(base64.b64decode(value))
    elif "configMap" in volume:
        texts = store.get("configmaps", space, volume["configMap"]["name"])["data"]
        for key, text in texts.items():
            (path / key).write_text(text.replace(ANY, address))
    return path


def _secret(source: Json, space: str, store: Store) -> Json:
    """Return the data of a Secret; an optional one that is not there is an empty folder."""
    try:
        data: Json = store.get("secrets", space, source["secretName"]).get("data") or {}
    except Refused:
        if not source.get("optional"):
            raise
        return {}
    return data


def _needed(pod: Json) -> list[tuple[str, str]]:
    found = []
    for volume in pod["spec"].get("volumes") or ():
        if "secret" in volume and not volume["secret"].get("optional"):
            found.append(("secrets", volume["secret"]["secretName"]))
        if "configMap" in volume:
            found.append(("configmaps", volume["configMap"]["name"]))
    return found
