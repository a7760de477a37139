"""The rolling update of example 3 under load: it renames the model, and each name is served while a replica of it is up."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.long

FILE = Path(__file__).parents[2] / "examples" / "03-update" / "service.yaml"
OLD, NEW = "first-model", "second-model"


class Client(threading.Thread):
    """Requests one model, again and again, over one connection."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self.statuses: list[int] = []
        self.stopping = threading.Event()
        self.error: Exception | None = None
        self._host = urlsplit(url).netloc
        self._body = json.dumps(
            {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        )

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        try:
            while not self.stopping.is_set():
                connection.request(
                    "POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                response.read()
                self.statuses.append(response.status)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            connection.close()


def test_both_names_are_served_while_a_replica_of_each_is_up(serve: Any) -> None:
    url = serve.ok("up", FILE, "-y").out.strip()
    clients = {name: [Client(url, name) for _ in range(3)] for name in (OLD, NEW)}
    everyone = [client for those in clients.values() for client in those]
    for client in everyone:
        client.start()
    serve.ok("update", "evolving", FILE, "--env", f"MODEL={NEW}", "-y")
    for client in everyone:
        client.stopping.set()
    for client in everyone:
        client.join(60)
    assert [client.error for client in everyone if client.error is not None] == []
    # One client's requests follow each other. So the status changes once: when the last replica of the old name goes, and
    # when the first one of the new name is there.
    for client in clients[OLD]:
        assert [status for status, _ in groupby(client.statuses)] in ([200, 404], [200])
    for client in clients[NEW]:
        assert [status for status, _ in groupby(client.statuses)] == [404, 200]
    served = Counter(
        name for name, those in clients.items() for one in those for status in one.statuses if status == 200
    )
    assert min(served[OLD], served[NEW]) > 50, served
