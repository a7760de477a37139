"""A service that scales with its requests, from nothing and back to it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

FILE = """
service:
  readiness_probe: {path: /health, initial_delay_seconds: 60, endpoint_probe_interval_seconds: 1}
  replica_policy:
    min_replicas: 0
    max_replicas: 2
    target_qps_per_replica: 1
    load_window_seconds: 4
    upscale_delay_seconds: 1
    downscale_delay_seconds: 2
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""
CLIENTS = 4


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


@contextmanager
def clients(url: str) -> Iterator[list[int]]:
    """Requests without a pause, until the end; the responses they got."""
    enough, codes = threading.Event(), []

    def ask() -> None:
        while not enough.wait(0.05):
            codes.append(get(url))

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask) for _ in range(CLIENTS)]
        try:
            yield codes
        finally:
            enough.set()
    for one in asking:
        one.result()


def test_out_of_nothing_and_back_to_it_nobody_is_refused(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "elastic.yaml"
    file.write_text(FILE)
    url = serve.ok("up", file, "-y").out.strip()
    view = serve.view("elastic")
    assert (view["status"], view["target"], view["replicas"]) == ("NO_REPLICA", 0, [])

    assert get(url) == 200, "held, not refused"
    assert serve.view("elastic")["ready"] == 1

    with clients(url) as codes:  # more than one a second
        serve.eventually(lambda: serve.view("elastic")["ready"] == 2)
        assert serve.view("elastic")["target"] == 2
    assert set(codes) == {200}

    serve.eventually(lambda: serve.view("elastic")["replicas"] == [])
    view = serve.view("elastic")
    assert (view["status"], view["target"]) == ("NO_REPLICA", 0)

    with clients(url) as codes:  # many at once find it asleep
        serve.eventually(lambda: serve.view("elastic")["ready"] >= 1)
    assert set(codes) == {200}
