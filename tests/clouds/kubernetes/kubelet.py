"""The kubelet of every node: the command of a Pod runs as a process of this machine, with a folder for its root.

Volumes are folders, environment variables are read from Secrets when the container is made, the startup probe is run until it
passes, and what the process prints is stamped line by line. `look` does one round; nothing happens in between."""

from __future__ import annotations

import base64
import copy
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.clouds.kubernetes.kube_store import POD_NET, Refused, Store, stamp
from tests.clouds.kubernetes.kubelet_sandbox import is_sandboxed, make_programs, missing, mounted, passes

Json = dict[str, Any]


@dataclass
class Running:
    """A container of a Pod as a process."""

    process: subprocess.Popen[bytes]
    output: Path
    started_at: float
    restarts: int = 0
    read: int = 0
    lines: list[tuple[str, bytes]] = field(default_factory=list)


class Kubelet:
    """`dns` is the folder of the cluster's names: a file with addresses for each."""

    def __init__(self, store: Store, root: Path) -> None:
        self.store = store
        self.root = root
        self.dns = root / "dns"
        self.dns.mkdir(parents=True, exist_ok=True)
        self.bad_images: set[str] = set()
        self.busy_registries: dict[str, str] = {}  # by image: what the registry responds
        self.without_network: set[str] = set()  # nodes on which no sandbox can be made
        self.silent: set[str] = set()  # nodes whose kubelet does nothing
        self.running: dict[tuple[str, str], Running] = {}  # by uid and container
        self.logs: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        self.kubeconfig: Path | None = None  # of the Pods that have a service account's token
        self._hooks: dict[tuple[str, str], subprocess.Popen[bytes]] = {}  # preStop, by uid and container
        self._probed: dict[
            tuple[str, int], tuple[float, bool, int]
        ] = {}  # by uid and start: when, ready, failures in a row
        self._environments: dict[tuple[str, str], dict[str, str]] = {}  # by uid and container
        self._addresses = 0
        self._shims = root / "bin"
        self._shims.mkdir()
        make_programs(self._shims)
        getent = self._shims / "getent"  # as in an image: names of the cluster
        getent.write_text(f'#!/bin/sh\n[ "$1" = hosts ] && [ -f "{self.dns}/$2" ] && cat "{self.dns}/$2"\n')
        getent.chmod(0o755)

    def look(self) -> None:
        with self.store.lock:
            pods = [
                one
                for one in self.store.of("pods")
                if one["spec"].get("nodeName", "") not in ("", *self.silent)
            ]
            for pod in pods:
                self._tend(pod)
            self._write_names()

    def kill(self, pod: Json) -> None:
        """Its node is gone."""
        for (uid, _), running in list(self.running.items()):
            if uid == pod["metadata"]["uid"]:
                _signal(running, signal.SIGKILL)
                running.process.wait()

    def close(self) -> None:
        for running in self.running.values():
            _signal(running, signal.SIGKILL)
            running.process.wait()

    def log_of(self, pod: Json, container: str) -> list[tuple[str, bytes]]:
        key = (pod["metadata"]["uid"], container)
        if key in self.running:
            self._read(*key)
        return self.logs.get(key, [])

    def place_of(self, pod: Json, container: str) -> tuple[int, dict[str, str]] | None:
        """Return the process of a container that runs, and its environment."""
        running = self.running.get((pod["metadata"]["uid"], container))
        if running is None or running.process.poll() is not None:
            return None
        described = next(one for one in pod["spec"]["containers"] if one["name"] == container)
        path = f"{self._shims}:{os.environ['PATH']}"
        return running.process.pid, {"PATH": path, **self._environment(pod, described)}

    # --- inside, with the lock held

    def _tend(self, known: Json) -> None:
        pod = copy.deepcopy(known)
        meta, status = pod["metadata"], pod["status"]
        if status.get("phase") in ("Succeeded", "Failed"):
            if meta.get("deletionTimestamp"):
                self.store.remove_pod(known)
            return
        if meta.get("deletionTimestamp") and self._stop(pod):
            if self._has_begun(pod):
                self._advance(pod)  # how its containers have ended
            status["phase"] = "Failed"
            self.store.update("pods", pod)
            self.store.remove_pod(pod)
            return
        if not meta.get("deletionTimestamp") or self._has_begun(pod):
            self._advance(pod)
        self.store.update("pods", pod)

    def _advance(self, pod: Json) -> None:
        status = pod["status"]
        if "podIP" not in status:
            self._addresses += 1
            status["podIP"] = f"{POD_NET}.{self._addresses // 250}.{self._addresses % 250 + 1}"
            status["podIPs"] = [{"ip": status["podIP"]}]
            status["hostIP"] = "127.0.0.1"
            status["startTime"] = self.store.stamp("node")
        if pod["spec"]["nodeName"] in self.without_network:
            self._hold_without_sandbox(pod)
            return
        sidecars = natives(pod)
        for container in pod["spec"].get("initContainers") or ():
            state = self._run(pod, container, "initContainerStatuses")
            if container in sidecars:
                if state == "Waiting":
                    return
            elif state != "Completed":
                if state == "Error":
                    status["phase"] = "Failed"
                return
        states = [self._run(pod, one, "containerStatuses") for one in pod["spec"]["containers"]]
        if set(states) <= {"Completed", "Error"}:
            status["phase"] = self._phase_at_end(pod, states, sidecars)
        else:
            status["phase"] = "Pending" if "Waiting" in states else "Running"
        ready = set(states) == {"Running"} and all(
            one["started"] and self._is_ready(pod, container)
            for one, container in zip(status["containerStatuses"], pod["spec"]["containers"], strict=True)
        )
        _condition(pod, "Ready", ready, self.store.clock("node"))
        _condition(pod, "ContainersReady", ready, self.store.clock("node"))

    def _phase_at_end(self, pod: Json, states: list[str], sidecars: list[Json]) -> str:
        """The restarted init containers are ended when all others have."""
        uid = pod["metadata"]["uid"]
        left = [one for each in sidecars if (one := self.running[uid, each["name"]]).process.poll() is None]
        for one in left:
            _signal(one, signal.SIGTERM)
        if left:
            return "Running"
        return "Failed" if "Error" in states else "Succeeded"

    def _hold_without_sandbox(self, pod: Json) -> None:
        for container in pod["spec"]["containers"]:
            _report(
                pod,
                container,
                "containerStatuses",
                {"waiting": {"reason": "ContainerCreating"}},
                started=False,
            )
        self.record(pod, "FailedCreatePodSandBox", "Failed to create pod sandbox: plugin type=cni failed")

    def record(self, pod: Json, reason: str, message: str) -> None:
        """Write an event about a Pod, once."""
        meta = pod["metadata"]
        name = f"{meta['name']}.{reason.lower()}"
        about = {"kind": "Pod", "namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name},
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": "Warning",
        }
        if ("events", meta["namespace"], name) not in self.store.objects:
            self.store.create("events", meta["namespace"], body)

    def _run(self, pod: Json, container: Json, statuses: str) -> str:
        """Return the state of the container, which is started if need be."""
        uid, name = pod["metadata"]["uid"], container["name"]
        running = self.running.get((uid, name))
        if running is None:
            held = self._obstacle(pod, container)
            if held is not None:
                _report(pod, container, statuses, {"waiting": held}, started=False)
                return "Waiting"
            running = self._start(pod, container)
        self._read(uid, name)
        code = running.process.poll()
        restarts = (
            is_sandboxed(pod) and statuses == "containerStatuses" and container.get("restartPolicy") is None
        )
        if code is not None and restarts and not pod["metadata"].get("deletionTimestamp"):
            running = self._start(pod, container, restarts=running.restarts + 1)
            code = None
        if code is None:
            known = next((one for one in pod["status"].get(statuses) or () if one["name"] == name), {})
            started = bool(known.get("started")) or self._has_started(pod, container)
            state = {"running": {"startedAt": stamp(running.started_at)}}
            _report(pod, container, statuses, state, started=started, restarts=running.restarts)
            return "Running"
        log = self._folder(pod) / f"{name}.end"
        message = log.read_text()[:4096] if log.exists() else ""
        ended: Json = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": stamp(running.started_at),
            "finishedAt": self.store.stamp("node"),
        }
        _report(
            pod,
            container,
            statuses,
            {"terminated": ended | ({"message": message} if message else {})},
            started=False,
        )
        return "Completed" if code == 0 else "Error"

    def _is_ready(self, pod: Json, container: Json) -> bool:
        probe, uid, now = container.get("readinessProbe"), pod["metadata"]["uid"], self.store.now()
        if probe is None:
            return True
        started = next((one.get("restartCount", 0) for one in pod["status"].get("containerStatuses", ())), 0)
        probed_at, was_ready, failures = self._probed.get((uid, started), (0.0, False, 0))
        if now - probed_at < min(probe["periodSeconds"], 1.0):
            return was_ready
        failures = 0 if passes(pod, container, probe) else failures + 1
        is_ready = failures == 0 or (was_ready and failures < probe.get("failureThreshold", 3))
        self._probed[uid, started] = now, is_ready, failures
        return is_ready

    def _obstacle(self, pod: Json, container: Json) -> Json | None:
        held = missing(pod, self.store) if is_sandboxed(pod) else None
        if held is not None:
            return {"reason": "ContainerCreating", "message": held}
        if container["image"] in self.busy_registries:
            return {"reason": "ErrImagePull", "message": self.busy_registries[container["image"]]}
        if container["image"] in self.bad_images:
            message = f'Back-off pulling image "{container["image"]}": not found'
            return {"reason": "ImagePullBackOff", "message": message}
        for name in _secrets_of_volumes(pod):
            if not self._secret(pod, name):
                return {
                    "reason": "PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating"
                }
        for one in container.get("env") or ():
            ref = (one.get("valueFrom") or {}).get("secretKeyRef")
            if ref and not self._secret(pod, ref["name"]):
                return {
                    "reason": "CreateContainerConfigError",
                    "message": f'secret "{ref["name"]}" not found',
                }
        return None

    def _start(self, pod: Json, container: Json, restarts: int = 0) -> Running:
        folder = self._folder(pod)
        (folder / "skyserve").mkdir(parents=True, exist_ok=True)
        (folder / "skyserve" / "work").mkdir(exist_ok=True)
        (folder / "skyserve" / "state").mkdir(exist_ok=True)
        files = folder / "files"
        files.mkdir(exist_ok=True)
        for name in _secrets_of_volumes(pod):
            for key, value in (self._secret(pod, name) or {}).items():
                (files / key).write_bytes(value)
        environment = self._environment(pod, container)
        command = [_expanded(part, environment) for part in container["command"]]
        output = folder / f"{container['name']}.out"
        own = {
            "PATH": f"{self._shims}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SKYSERVE_ROOT": str(folder / "skyserve"),
            "SKYSERVE_FILES": str(files),
            "SKYSERVE_TERMINATION_LOG": str(folder / f"{container['name']}.end"),
        }
        if is_sandboxed(pod):
            command = mounted(pod, container, self.store, folder, command)
        if pod["spec"].get("automountServiceAccountToken") and self.kubeconfig is not None:
            own["KUBECONFIG"] = str(self.kubeconfig)
        with output.open("ab" if restarts else "wb") as stream:
            process = subprocess.Popen(
                command,
                env={**own, **environment},
                cwd=folder,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        made = Running(process, output, self.store.clock("node"), restarts)
        if restarts:
            made.read = self.running[pod["metadata"]["uid"], container["name"]].read
        self.running[pod["metadata"]["uid"], container["name"]] = made
        return made

    def _environment(self, pod: Json, container: Json) -> dict[str, str]:
        """Return the variables as they were when the container was started first."""
        key = (str(pod["metadata"]["uid"]), str(container["name"]))
        if key not in self._environments:
            self._environments[key] = self._variables(pod, container)
        return self._environments[key]

    def _variables(self, pod: Json, container: Json) -> dict[str, str]:
        found: dict[str, str] = {}
        for one in container.get("env") or ():
            source = one.get("valueFrom") or {}
            if "secretKeyRef" in source:
                secret = self._secret(pod, source["secretKeyRef"]["name"]) or {}
                found[one["name"]] = secret[source["secretKeyRef"]["key"]].decode()
            elif "fieldRef" in source:
                path = source["fieldRef"]["fieldPath"]
                values = {"status.podIP": pod["status"]["podIP"], "metadata.name": pod["metadata"]["name"]}
                found[one["name"]] = values[path]
            else:
                found[one["name"]] = _expanded(one.get("value", ""), found)
        return {name: self._on_node(pod, container, value) for name, value in found.items()}

    def _on_node(self, pod: Json, container: Json, value: str) -> str:
        """A path in a volume of the node, or of a claim, is one of this machine: processes share its file system."""
        volumes = {one["name"]: one for one in pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            source = self.kept(pod, volumes.get(mount["name"], {}))
            if source is not None and f"{value}/".startswith(f"{mount['mountPath']}/"):
                folder = source / mount.get("subPath", "")
                folder.mkdir(parents=True, exist_ok=True)
                return str(folder) + value.removeprefix(mount["mountPath"])
        return value

    def kept(self, pod: Json, volume: Json) -> Path | None:
        """Return the folder of this machine that stands for a volume which outlives the Pod."""
        if "hostPath" in volume:
            return self.root / "nodes" / str(pod["spec"]["nodeName"]) / volume["hostPath"]["path"].lstrip("/")
        if "persistentVolumeClaim" in volume:
            return self.root / "claims" / str(volume["persistentVolumeClaim"]["claimName"])
        return None

    def _secret(self, pod: Json, name: str) -> dict[str, bytes] | None:
        try:
            secret = self.store.get("secrets", pod["metadata"]["namespace"], name)
        except Refused:
            return None
        return {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}

    def _has_started(self, pod: Json, container: Json) -> bool:
        probe = container.get("startupProbe")
        if probe is None:
            return True
        if "httpGet" in probe:
            return passes(pod, container, probe)
        own = {"PATH": os.environ["PATH"], "SKYSERVE_ROOT": str(self._folder(pod) / "skyserve")}
        return subprocess.run(probe["exec"]["command"], env=own, check=False, timeout=10).returncode == 0

    def _has_begun(self, pod: Json) -> bool:
        return any(uid == pod["metadata"]["uid"] for uid, _ in self.running)

    def _stop(self, pod: Json) -> bool:
        """Ask the processes to end, and kill them after the grace. Return whether all are gone."""
        uid = pod["metadata"]["uid"]
        own = [one for (each, _), one in self.running.items() if each == uid and one.process.poll() is None]
        grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 30)
        deadline = datetime.fromisoformat(
            pod["metadata"]["deletionTimestamp"].replace("Z", "+00:00")
        ).timestamp()
        now = self.store.clock("api")  # a kubelet counts the grace period by itself
        if own and now < deadline and not self._has_said_farewell(pod):
            return False
        for one in own:
            _signal(one, signal.SIGKILL if now >= deadline or grace_s == 0 else signal.SIGTERM)
        return all(one.process.poll() is not None for one in own)

    def _has_said_farewell(self, pod: Json) -> bool:
        """Run the preStop hooks; return whether they are over."""
        uid, folder = pod["metadata"]["uid"], self._folder(pod)
        for container in pod["spec"]["containers"]:
            hook = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec")
            if hook is None:
                continue
            if (uid, container["name"]) not in self._hooks:
                own = {"PATH": f"{self._shims}:{os.environ['PATH']}", "HOME": str(folder)}
                self._hooks[uid, container["name"]] = subprocess.Popen(
                    mounted(pod, container, self.store, folder, hook["command"]),
                    env={**own, **self._environment(pod, container)},
                    cwd=folder,
                    start_new_session=True,
                )
            if self._hooks[uid, container["name"]].poll() is None:
                return False
        return True

    def _read(self, uid: str, name: str) -> None:
        """Stamp what has been printed since. A line without an end is one when the process has exited."""
        running = self.running[uid, name]
        ended = running.process.poll() is not None
        with running.output.open("rb") as stream:
            stream.seek(running.read)
            data = stream.read()
        whole = data if ended else data[: data.rfind(b"\n") + 1]
        running.read += len(whole)
        log = self.logs.setdefault((uid, name), [])
        for line in whole.splitlines(keepends=True):
            at = datetime.fromtimestamp(self.store.clock("node"), UTC).strftime("%Y-%m-%dT%H:%M:%S")
            log.append((f"{at}.{len(log):09d}Z", line))

    def _write_names(self) -> None:
        """The cluster's DNS: headless Services, and the host names of the Pods that they select."""
        wanted: dict[str, list[str]] = {}
        for service in self.store.of("services"):
            spec = service["spec"]
            zone = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
            if spec.get("clusterIP") != "None":
                continue
            for pod in self.store.of("pods"):
                labels = pod["metadata"].get("labels") or {}
                if (
                    "hostname" not in pod["spec"]
                    or any(labels.get(key) != value for key, value in spec["selector"].items())
                    or "podIP" not in pod["status"]
                ):
                    continue
                ready = any(
                    one["type"] == "Ready" and one["status"] == "True" for one in pod["status"]["conditions"]
                )
                if ready or spec.get("publishNotReadyAddresses"):
                    wanted[f"{pod['spec']['hostname']}.{zone}"] = [pod["status"]["podIP"]]
        for name in {path.name for path in self.dns.iterdir()} - wanted.keys():
            (self.dns / name).unlink()
        for name, addresses in wanted.items():
            path, text = self.dns / name, "".join(f"{address} {name}\n" for address in addresses)
            if not path.exists() or path.read_text() != text:
                new = self.root / "new-name"
                new.write_text(text)
                new.rename(path)

    def _folder(self, pod: Json) -> Path:
        found = self.root / "pods" / str(pod["metadata"]["uid"])
        found.mkdir(parents=True, exist_ok=True)
        return found

    def forget(self, uid: str) -> None:
        shutil.rmtree(self.root / "pods" / uid, ignore_errors=True)


def natives(pod: Json) -> list[Json]:
    """Return the init containers that run for as long as the Pod does."""
    return [one for one in pod["spec"].get("initContainers") or () if one.get("restartPolicy") == "Always"]


def _expanded(text: str, variables: dict[str, str]) -> str:
    """$(NAME) is a variable, if there is one; $$ is $."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        text,
    )


def _secrets_of_volumes(pod: Json) -> list[str]:
    return [
        source["secret"]["name"]
        for volume in pod["spec"].get("volumes") or ()
        for source in (volume.get("projected") or {}).get("sources") or ()
    ]


def _report(
    pod: Json, container: Json, statuses: str, state: Json, *, started: bool, restarts: int = 0
) -> None:
    known = {one["name"]: one for one in pod["status"].get(statuses) or ()}
    own = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": started,
        "started": started,
        "restartCount": restarts,
        "state": state,
    }
    pod["status"][statuses] = list({**known, own["name"]: own}.values())


def _condition(pod: Json, kind: str, holds: bool, now: float, reason: str = "", message: str = "") -> None:
    conditions = pod["status"].setdefault("conditions", [])
    value = "True" if holds else "False"
    known = next((one for one in conditions if one["type"] == kind), None)
    if known is not None and (known["status"], known.get("reason", "")) == (value, reason):
        return
    made = {"type": kind, "status": value, "lastTransitionTime": stamp(now)}
    made |= {"reason": reason} if reason else {}
    made |= {"message": message} if message else {}
    pod["status"]["conditions"] = [one for one in conditions if one["type"] != kind] + [made]


set_condition = _condition


def _signal(running: Running, number: int) -> None:
    if running.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, number)
