"""The label by which a Service of Kubernetes finds the Pod of the controller that leads.

Every controller of a Deployment labels its own Pod with `skyserve.dev/leader`, `true` or `false`; the Service of the API selects
`true`. A controller that begins to lead takes the label from all other Pods, because the one before may have no chance to do so. The
database decides who leads (`persistence.leadership`), the label only where calls go: the API of another controller refuses them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import POD_NAME

if TYPE_CHECKING:
    from provisioners.kubernetes.api import KubeApi

log = logging.getLogger(__name__)

LABEL = "skyserve.dev/leader"
CONTROLLERS = {"app.kubernetes.io/name": "skyserve-controller"}
POLL_S = 0.25
AGAIN_S = 10.0  # after which a label that someone else may have changed is written again
RETRY_S = 2.0
STOP_S = 3.0


class LeaderLabel(threading.Thread):
    """Keeps the label of the Pod `pod` equal to what `leads` returns, until it is stopped."""

    def __init__(
        self,
        api: Callable[[], KubeApi],
        pod: str,
        leads: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        super().__init__(name="leader label", daemon=True)
        self._make = api
        self._api: KubeApi | None = None
        self._pod = pod
        self._leads = leads
        self._now = now
        self._shown: bool | None = None
        self._due = float("-inf")
        self._trouble = ""
        self._stopping = threading.Event()
        self._step = (
            threading.Lock()
        )  # or a step that began before `stop` could write its label after the last one

    def run(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._stopping.wait(POLL_S)

    def stop(self) -> None:
        """Label the Pod as one that does not lead. Returns soon, even if the API does not respond."""
        self._stopping.set()
        self._leads = lambda: False
        last = threading.Thread(target=self.step, name="leader label", daemon=True)
        last.start()
        last.join(STOP_S)

    def step(self) -> None:
        """Write the label, if it is another one than before or was not written for some time."""
        with self._step:
            self._step_alone()

    def _step_alone(self) -> None:
        wanted, now = self._leads(), self._now()
        if wanted is self._shown and now < self._due:
            return
        if wanted is not self._shown and self._trouble and now < self._due:
            return
        try:
            self._write(wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is, the controller goes on
            self._due = now + RETRY_S
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("the Pod %s cannot be labelled with %s: %s", self._pod, LABEL, error)
            return
        self._shown, self._due, self._trouble = wanted, now + AGAIN_S, ""

    def _write(self, wanted: bool) -> None:
        if self._api is None:
            self._api = self._make()
        begins = wanted and not self._shown
        self._label(self._api, self._pod, wanted)
        if begins:
            for pod in self._api.list("pod", {**CONTROLLERS, LABEL: "true"}, managed=False).items:
                if pod["metadata"]["name"] != self._pod:
                    self._label(self._api, pod["metadata"]["name"], False)
            log.info("the Pod %s has the label %s=true", self._pod, LABEL)

    @staticmethod
    def _label(api: KubeApi, pod: str, value: bool) -> None:
        api.patch("pod", pod, {"metadata": {"labels": {LABEL: "true" if value else "false"}}})


def leader_label(environ: Mapping[str, str], leads: Callable[[], bool]) -> LeaderLabel | None:
    """Return the thread that labels this controller's Pod; None outside a Pod whose manifest gives its name."""
    pod = environ.get(POD_NAME)
    return LeaderLabel(_own_cluster, pod, leads, SteadyClock().now) if pod else None


def _own_cluster() -> KubeApi:
    from provisioners.kubernetes.api import KubeApi, client_of  # the SDK is an extra

    return KubeApi("this cluster", None, lambda: client_of(None, None))
