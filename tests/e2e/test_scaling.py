"""A service that scales with its requests, from nothing."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FILE = """
service:
  readiness_probe: {path: /health, initial_delay_seconds: 60, endpoint_probe_interval_seconds: 1}
  replica_policy:
    min_replicas: 0
    max_replicas: 2
    target_qps_per_replica: 1
    upscale_delay_seconds: 1
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def get(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        return int(answer.status)


def test_the_first_request_waits_for_the_first_replica_and_many_bring_another(
    serve: Any, tmp_path: Path
) -> None:
    file = tmp_path / "elastic.yaml"
    file.write_text(FILE)
    url = serve.ok("up", file, "-y").out.strip()
    view = serve.view("elastic")
    assert (view["status"], view["target"], view["replicas"]) == ("NO_REPLICA", 0, [])

    assert get(url) == 200, "held, not refused"
    assert serve.view("elastic")["ready"] == 1

    with ThreadPoolExecutor(8) as pool:  # 100 requests in its window are more than one a second
        assert set(pool.map(lambda _: get(url), range(100))) == {200}
    serve.eventually(lambda: serve.view("elastic")["ready"] == 2)
    assert serve.view("elastic")["target"] == 2
