"""`serve controller undeploy kubernetes/…`: removes what deploy has made. State and keys stay, unless they are to go with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.remote import LOCAL, Contexts
from skyserve_cli.controller.leader_label import CONTROLLERS
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.deployment import cluster_objects as manifests
from skyserve_cli.deployment.cluster import POLL_S, ClusterTarget
from skyserve_cli.deployment.cluster_objects import ClusterValues
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed, WrongUsage, plural

PODS_GONE_S = 120.0  # a controller has a minute to stop
_PART_OF = ("app.kubernetes.io/part-of", "skyserve")
_STATE = (
    ("persistent_volume_claim", manifests.VOLUME),
    ("secret", manifests.TLS),
    ("secret", manifests.KEYS),
)


class Removal(NamedTuple):
    """What was removed, as KIND/NAME, and a sentence for each thing that is left."""

    removed: list[str]
    left: list[str]


class ClusterRemoval:
    """Of the controller in one namespace. `report` shows what happens."""

    def __init__(self, home: Home, target: ClusterTarget, report: Callable[[str], None]) -> None:
        self.home = home
        self.target = target
        self.report = report
        self.api = target.api()

    def insist(self, *, force: bool) -> None:
        """Raise WrongUsage if Helm has installed it; CommandFailed if services are up there, or may be, unless forced."""
        deployment = self.api.find("deployment", manifests.DEPLOYMENT)
        notes = {} if deployment is None else deployment["metadata"].get("annotations") or {}
        if "meta.helm.sh/release-name" in notes:
            release = notes["meta.helm.sh/release-name"]
            raise WrongUsage(
                f"the controller in {self.target.namespace} was installed by Helm; `helm uninstall {release}` removes it"
            )
        if deployment is None or force:
            return
        try:
            services = [one["name"] for one in ControllerClient(self.home, self.target.remote).services()]
        except (*AWAY, RefusedError) as error:
            raise CommandFailed(
                f"{error}; whether services are up there is not known (--force removes the controller anyway)"
            ) from error
        if services:
            raise CommandFailed(f"services are up there: {', '.join(services)}; take them down first")

    def run(self, *, purge: bool) -> Removal:
        """Remove it; with `purge` also its volume and its Secrets. A run that was interrupted is completed by the next one."""
        removed, left = [], []
        for kind, name, shown in self._made(purge=purge):
            try:
                if self._remove(kind, name):
                    removed.append(shown)
                    self.report(f"removed {shown}")
            except ProvisionError as error:
                left.append(f"{shown}: {error.message}")
        left += self._left(purge=purge)
        self._forget()
        return Removal(removed, left)

    # --- inside

    def _made(self, *, purge: bool) -> Iterator[tuple[str, str, str]]:
        """Yield the kinds and names of what deploy makes, the Deployment first, each with how it is shown."""
        bodies: dict[tuple[str, str], str] = {}
        for database in ("", "any"):
            values = ClusterValues(self.target.namespace, "any", {}, database_secret=database)
            for body in reversed(manifests.objects(values)):
                key = manifests.kind_of(body), str(body["metadata"]["name"])
                bodies.setdefault(key, f"{body['kind']}/{key[1]}")
        for (kind, name), shown in bodies.items():
            if kind != "persistent_volume_claim":
                yield kind, name, shown
        for kind, name in _STATE if purge else ():
            yield kind, name, _shown(kind, name)

    def _remove(self, kind: str, name: str) -> bool:
        """Return whether there was one. One of that name that deploy has not made stays."""
        found = self.api.find(kind, name)
        key, value = _PART_OF
        is_ours = found is not None and (found["metadata"].get("labels") or {}).get(key) == value
        if found is None or not (is_ours or (kind, name) in _STATE):
            return False
        self.api.delete(kind, name, str(found["metadata"]["uid"]), after_parts=kind == "deployment")
        if kind == "deployment":
            self._await_pods()
        return True

    def _await_pods(self) -> None:
        """Until its Pods are gone, which still act while their rights and their volume are there."""
        clock, shown = SteadyClock(), False
        ends_at = clock.now() + PODS_GONE_S
        while pods := self._pods():
            if clock.now() >= ends_at:
                raise CommandFailed(
                    f"the Pod {pods[0]} is not gone after {PODS_GONE_S:.0f} s; run the command again when it is"
                )
            if not shown:
                self.report(f"waiting for {plural(len(pods), 'Pod')} of the controller to stop")
                shown = True
            time.sleep(POLL_S)

    def _pods(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.list("pod", CONTROLLERS, managed=False).items]

    def _left(self, *, purge: bool) -> Iterator[str]:
        space = self.target.namespace
        kubectl = f"kubectl --context {self.target.context} -n {space}"
        kept = [] if purge else [one for one in _STATE if self.api.find(*one) is not None]
        if kept:
            names = [_shown(*one).lower() for one in kept]
            yield f"state and keys: {', '.join(names)} (--purge, or {kubectl} delete {' '.join(names)})"
        replicas = self.api.list("pod").items
        if replicas:
            label = "app.kubernetes.io/managed-by=skyserve"
            what = plural(len(replicas), "Pod") + " of services, which no controller looks after"
            yield f"{what} ({kubectl} delete deployments,pods -l {label})"
        yield f"the namespace {space}, and Secrets of yours in it (kubectl --context {self.target.context} delete namespace {space})"

    def _forget(self) -> None:
        contexts = Contexts.of(self.home)
        kept: dict[str, Any] = {
            name: remote for name, remote in contexts.remotes.items() if remote.url != self.target.remote.url
        }
        if len(kept) < len(contexts.remotes):
            current = contexts.current if contexts.current in kept else LOCAL
            Contexts(current, kept).write(self.home)


def _shown(kind: str, name: str) -> str:
    return f"{''.join(map(str.capitalize, kind.split('_')))}/{name}"
