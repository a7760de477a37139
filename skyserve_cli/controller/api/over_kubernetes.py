"""The API of a controller in a cluster, through `exec` in the Pod of the one that leads, to the socket in its home.

Who may run commands in that Pod could read every key of the home: that right is what makes a caller the owner. It needs no
port, no certificate and no token here.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.api.bridge_link import BridgeHttpConnection, BridgeLink
from skyserve_cli.controller.api.remote import KubernetesPlace, Remote
from skyserve_cli.controller.leader_label import CONTROLLERS, LABEL

CONTAINER = "controller"
_BRIDGE = ("python", "-m", "skyserve_cli.controller.api.bridge")
_TIMEOUT_S = 30.0


class PodOpener:
    """Starts programs in the Pod of the controller that leads, whichever it is at that time."""

    is_open = True

    def __init__(self, remote: Remote) -> None:
        """Raise OSError with a sentence if there are no credentials."""
        try:
            from provisioners.kubernetes.api import KubeApi, client_of
        except ImportError:
            raise ConnectionError(
                "the Kubernetes client is not installed: install the extra kubernetes"
            ) from None

        self._remote = remote
        self._place = KubernetesPlace.of(remote.url)
        self._lock = Lock()
        try:
            listing, self._starting = (
                client_of(self._place.context, remote.kubeconfig or None)[0] for _ in range(2)
            )  # while a command is started, all other calls of the same client would be started with it
        except ProvisionError as error:
            raise ConnectionError(error.message) from error
        self._api = KubeApi(
            self._place.context, self._place.namespace, lambda: (listing, self._place.namespace)
        )

    def start_bridge(self) -> Any:
        from provisioners.kubernetes.pod_exec import start_in_pod

        try:
            pod = self._leader()
            command = (*_BRIDGE, self._remote.home)
            with self._lock:
                return start_in_pod(
                    self._starting, self._place.namespace, pod, CONTAINER, command, _TIMEOUT_S
                )
        except ProvisionError as error:
            raise ConnectionError(error.message) from error

    def close(self) -> None:
        """Nothing stays open but sessions, each of which is closed by its user."""

    def _leader(self) -> str:
        """Return the name of the Pod. Raises ProvisionError, or ConnectionError if none leads."""
        found = self._api.list("pod", {**CONTROLLERS, LABEL: "true"}, managed=False).items
        names = [
            str(one["metadata"]["name"]) for one in found if not one["metadata"].get("deletionTimestamp")
        ]
        if not names:
            raise ConnectionError(f"no controller leads in the namespace {self._place.namespace}")
        return names[0]


_LINKS: dict[Remote, BridgeLink] = {}
_LINKS_LOCK = Lock()


def connection_to(remote: Remote, timeout_s: float) -> BridgeHttpConnection:
    """Return a connection that is not open yet, by the one link of this process to that controller."""
    with _LINKS_LOCK:
        link = _LINKS.setdefault(remote, BridgeLink(lambda: PodOpener(remote)))
    return BridgeHttpConnection(link, timeout_s)
