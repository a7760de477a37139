"""`cache: node` on this machine: what a replica has written is there for the next one, until `serve down --purge`."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

SERVICE = """
service: {readiness_probe: {path: /weights, endpoint_probe_interval_seconds: 0.2}}
resources: {infra: local}
cache: node
run: |
  echo "replica $SKYSERVE_REPLICA_ID" >>"$HF_HOME/weights"
  cd "$HF_HOME" && exec python3 -m http.server $SKYSERVE_REPLICA_PORT
"""


def weights(endpoint: str) -> list[str]:
    with urllib.request.urlopen(f"{endpoint}/weights", timeout=20) as response:
        return response.read().decode().splitlines()


def ready(serve: Any) -> int | None:
    """Return the replica that is ready."""
    return next((one["id"] for one in serve.view("kept")["replicas"] if one["state"] == "READY"), None)


def starts(serve: Any) -> list[str]:
    lines = map(json.loads, serve.ok("events", "kept", "-o", "json").out.splitlines())
    return [f"{one['replica_id']}: {one['message']}" for one in lines if one["kind"] == "cache"]


def test_weights_outlive_a_replica_that_is_killed_and_the_service_until_it_is_purged(
    serve: Any, tmp_path: Path
) -> None:
    file = tmp_path / "kept.yaml"
    file.write_text(SERVICE)
    assert "Cache: HF_HOME outlives replicas, on the node.\n" in serve.ok("plan", file).out
    assert serve.ok("plan", file, "-o", "json").json()["cache"]["variables"] == ["HF_HOME"]

    endpoint = serve.ok("up", file, "-y").out.strip()
    first = ready(serve)
    assert weights(endpoint) == [f"replica {first}"]
    assert "hf_home is empty\n" in serve.ok("logs", "kept", str(first), "--no-follow").out
    (host,) = (serve.home / "local" / "instances").glob("*/host.pid")
    os.kill(int(host.read_text()), signal.SIGKILL)
    serve.eventually(lambda: ready(serve) not in (None, first))
    second = ready(serve)
    assert weights(endpoint) == [f"replica {first}", f"replica {second}"]
    assert "of earlier replicas\n" in serve.ok("logs", "kept", str(second), "--no-follow").out
    serve.eventually(lambda: len(starts(serve)) == 2)
    empty, warm = starts(serve)
    took = re.fullmatch(rf"{first}: ready after (\d+) s; its cache was empty", empty)
    assert took
    assert re.fullmatch(
        rf"{second}: ready after \d+ s with \S+ in its cache; replica {first} took {took[1]} s with an empty one",
        warm,
    )

    (kept,) = (serve.home / "local" / "cache").glob("*/-/kept")
    assert kept.stat().st_mode & 0o077 == 0
    assert "the cache of kept" not in serve.ok("down", "kept", "-y").err
    endpoint = serve.ok("up", file, "-y").out.strip()
    assert weights(endpoint)[:2] == [f"replica {first}", f"replica {second}"]

    gone = serve.ok("down", "kept", "--purge", "-y")
    assert f"removed the cache of kept on local: {kept}\n" in gone.err
    assert not kept.exists()
