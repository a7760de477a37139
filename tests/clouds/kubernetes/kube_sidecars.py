"""A sidecar that others put into Pods, and every order in which it and our container may end.

Files in a folder of the test let each of them go on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from provisioners.port.base import Instance, InstanceState
from tests.clouds.kubernetes.kube_store import Json

SIDECAR = "istio-proxy"
CODES = (0, 1, 137)
S = InstanceState


class Case(NamedTuple):
    """How both end, and which one is the first."""

    is_first: bool
    main: int
    sidecar: int

    @property
    def token(self) -> str:
        return f"{'main' if self.is_first else 'side'}-{self.main}-{self.sidecar}"

    def changes(self, folder: Path) -> dict[str, Any]:
        """Return what is particular about the launch order."""
        return {"run": _ends(folder / f"{self.token}.main", self.main), "env": {"SIDECAR": str(self.sidecar)}}


CASES = [Case(*one) for one in product((True, False), CODES, CODES)]


def sidecar(pod: Json, folder: Path) -> Json:
    """Return the container that belongs into the Pod. It runs until its file is there."""
    env = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0].get("env") or ()}
    end = _ends(folder / f"{pod['metadata']['name']}.side", int(env.get("SIDECAR") or 0))
    return {"name": SIDECAR, "image": "mesh:1", "command": ["/bin/sh", "-c", end.replace("$", "$$")]}


def inject(pod: Json, folder: Path, *, native: bool) -> None:
    """Do what a service mesh does to every Pod: its container comes first."""
    spec, made = pod["spec"], sidecar(pod, folder)
    if native:
        spec.setdefault("initContainers", []).insert(0, {**made, "restartPolicy": "Always"})
    else:
        spec["containers"].insert(0, made)


def play(
    cases: list[Case],
    folder: Path,
    seen: Callable[[str], Instance],
    reaches: Callable[[str, InstanceState], object],
    has_ended: Callable[[str], bool],
    settle: Callable[[Callable[[], bool]], object],
) -> None:
    """Let both containers of each Pod end in order. After each step its state and its message are those of our container alone.

    `has_ended` returns whether the sidecar of a Pod has; `settle` waits until that holds.
    """
    for case in cases:
        reaches(case.token, S.RUNNING)
    for case in cases:
        for ends in ("main", "side") if case.is_first else ("side", "main"):
            (folder / f"{case.token}.{ends}").touch()
            if ends == "side":
                settle(lambda token=case.token: has_ended(token))  # type: ignore[misc]
            is_over = ends == "main" or case.is_first
            reaches(case.token, S.RUN_EXITED if is_over else S.RUNNING)
            message = seen(case.token).message
            assert message.startswith(f"run exited with code {case.main}") if is_over else message == "", case
            assert SIDECAR not in message


def ended(pod: Json) -> bool:
    """Return whether the sidecar has ended, or been started again after it had."""
    both = [
        one
        for kind in ("initContainerStatuses", "containerStatuses")
        for one in pod["status"].get(kind) or ()
    ]
    found = next((one for one in both if one["name"] == SIDECAR), {})
    return "terminated" in found.get("state", {}) or bool(found.get("restartCount"))


def _ends(file: Path, code: int) -> str:
    """Return a script that ends so when the file is there."""
    wait = f"while [ ! -e {file} ]; do sleep 0.1; done"
    return f"{wait}; " + ("kill -KILL $$" if code == 137 else f"exit {code}")
