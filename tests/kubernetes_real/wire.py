"""What happens to a controller's requests on their way to a real server: they are counted, and one may be its last, or unanswered."""

from __future__ import annotations

import threading
from typing import Any

import urllib3

from provisioners.kubernetes.api import client_of


class Wire:
    """Makes clients for a `KubernetesProvisioner`.

    `crash`: the call of that number from now is the controller's last; it dies before it is sent, or after it was carried out. `cut`: the
    responses to so many creations are lost. `authorization` is sent in place of the token.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []  # method, path, status
        self.crash: tuple[int, bool] | None = None
        self.is_down = False
        self.cut = 0
        self.authorization: str | None = None
        self._lock = threading.Lock()

    def client(self, context: str | None, kubeconfig: str | None) -> tuple[Any, str]:
        made, namespace = client_of(context, kubeconfig)
        plain = made.rest_client.request

        def request(method: str, url: str, **more: Any) -> Any:
            if self.authorization is not None:
                more["headers"] = {**(more.get("headers") or {}), "authorization": self.authorization}
            is_last = self._begin()
            try:
                found = plain(method, url, **more)
            except Exception as error:
                self._note(method, url, int(getattr(error, "status", None) or 0))
                raise
            self._note(method, url, int(found.status))
            if is_last or self._is_cut(method):
                found.read()
                raise _lost()
            return found

        made.rest_client.request = request
        return made, namespace

    def statuses(self) -> list[int]:
        with self._lock:
            return [status for _, _, status in self.calls]

    # --- inside

    def _begin(self) -> bool:
        """Return whether the controller dies after this request. Raises where it is not sent."""
        with self._lock:
            if self.is_down:
                raise _lost()
            if self.crash is None:
                return False
            number, after = self.crash
            self.crash = number - 1, after
            self.is_down = number == 0
            if self.is_down and not after:
                raise _lost()
            return self.is_down

    def _note(self, method: str, url: str, status: int) -> None:
        with self._lock:
            self.calls.append((method, url, status))

    def _is_cut(self, method: str) -> bool:
        with self._lock:
            is_cut = method == "POST" and self.cut > 0
            self.cut -= is_cut
            return is_cut


def _lost() -> Exception:
    return urllib3.exceptions.ProtocolError("Connection aborted.", ConnectionResetError(104, "reset"))
