"""The lease of Pods: what the controller renews, and the CronJob that deletes them when it no longer does.

Both are made only if config.yaml names the service account under which the CronJob runs. What is written into the Lease is the time of
the API server's clock: the CronJob runs on another machine than the controller.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path

from provisioners.kubernetes import reaper
from provisioners.kubernetes.api import ConflictError, Json, KubeApi
from provisioners.kubernetes.quantities import rfc3339
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.sightings import Instant
from provisioners.kubernetes.translate import MANAGED, MANAGER
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import OWNER_TAG

_log = logging.getLogger(__name__)
RENEW_S = 60.0
_SCHEDULE = "*/10 * * * *"


class DeadMan:
    """Of one namespace. Not thread-safe: one thread lists."""

    def __init__(self, cluster: Cluster, api: KubeApi, at: Callable[[], Instant]) -> None:
        self._cluster = cluster
        self._api = api
        self._at = at
        self._renewed_at: dict[str, float] = {}
        self._has_job: set[str] = set()

    def visit(self, owner: str) -> None:
        """Renew the owner's lease, unless that was just done. What fails is tried again at the next visit."""
        if (
            not self._cluster.reaper_account
            or self._at().steady - self._renewed_at.get(owner, float("-inf")) < RENEW_S
        ):
            return
        try:
            self._renew(owner)
            if owner not in self._has_job:
                self._make_job(owner)
                self._has_job.add(owner)
        except ProvisionError as error:
            _log.warning("the lease of Pods in %s is not renewed: %s", self._cluster.region, error.message)
            return
        self._renewed_at[owner] = self._at().steady

    def _renew(self, owner: str) -> None:
        server_s = self._api.server_s()
        wanted = lease_of(owner, self._cluster.dead_man_s, self._at().unix if server_s is None else server_s)
        if self._api.patch("lease", lease_name(owner), {"spec": wanted["spec"]}) is None:
            try:
                self._api.create("lease", wanted)
            except ConflictError:
                return  # another controller of this owner was faster

    def _make_job(self, owner: str) -> None:
        wanted = job_of(owner, self._api.namespace, self._cluster)
        try:
            self._api.create("cron_job", wanted)
        except ConflictError:
            self._api.patch("cron_job", lease_name(owner), {"spec": wanted["spec"]})


def lease_name(owner: str) -> str:
    """Return the name of the Lease, and of the CronJob: that of the owner, if it can be one."""
    plain = re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", owner) is not None
    return f"skyserve-{owner if plain else hashlib.sha256(owner.encode()).hexdigest()[:16]}"


def lease_of(owner: str, lasts_s: int, now: float) -> Json:
    whole, fraction = divmod(now, 1.0)
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": lease_name(owner), "labels": {MANAGED: MANAGER, OWNER_TAG: owner}},
        "spec": {
            "holderIdentity": "skyserve",
            "leaseDurationSeconds": lasts_s,
            "renewTime": f"{rfc3339(whole)[:-1]}.{int(fraction * 1e6):06d}Z",
        },
    }


def job_of(owner: str, namespace: str, cluster: Cluster) -> Json:
    """Return the CronJob that looks at the Lease, with the program in it."""
    program = Path(reaper.__file__).read_text(encoding="utf-8").replace("$", "$$")
    name = lease_name(owner)
    labels = {MANAGED: MANAGER, OWNER_TAG: owner, "skyserve-role": "reaper"}
    container = {
        "name": "reaper",
        "image": cluster.reaper_image,
        "command": ["python3", "-c", program, namespace, name, owner],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    pod = {
        "serviceAccountName": cluster.reaper_account,
        "restartPolicy": "Never",
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "schedule": _SCHEDULE,
            "concurrencyPolicy": "Forbid",
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {
                "spec": {"backoffLimit": 0, "activeDeadlineSeconds": 300, "template": {"spec": pod}}
            },
        },
    }
