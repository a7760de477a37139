"""The load balancer's part of a service file, from `serve up` to the port."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

KEY, OTHER = "sk-of-the-house-0123456789", "sk-of-the-guests-0123456789"
YAML = """
name: guarded
service:
  readiness_probe: {path: /health, endpoint_probe_interval_seconds: 1}
  replicas: 2
  load_balancing_policy: POLICY
  load_balancer:
    queue: {size: 7}
    allow_policy_override: true
    api_keys:
      - {name: house, key_env: HOUSE_KEY, requests_per_minute: 3}
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 50 --port $SKYSERVE_REPLICA_PORT
"""


def models(url: str, key: str | None = None, policy: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if policy is not None:
        headers["X-SkyServe-Policy"] = policy
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def options(serve: Any) -> dict[str, Any]:
    """What the load balancer has received, as it stored it."""
    table = json.loads((serve.home / "lb" / "guarded" / "table.json").read_text())
    assert isinstance(table, dict)
    return table


def test_keys_policies_and_limits_of_a_file_reach_the_endpoint(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(YAML.replace("POLICY", "cache_aware"))
    refused = serve("up", file, "-y")
    assert refused.code == 2
    assert "service.load_balancer.api_keys[0].key_env: HOUSE_KEY has no value: export it" in refused.err

    url = serve.ok("up", file, "-y", env={"HOUSE_KEY": KEY}).out.strip()
    assert [models(url), models(url, OTHER), models(url, KEY)] == [401, 401, 200]
    assert models(url, KEY, policy="round_robin") == 200
    assert models(url, KEY, policy="whoever") == 400
    assert models(url, KEY) == 429
    assert (options(serve)["policy"], options(serve)["limits"]["max_held"]) == ("cache_aware", 7)
    assert serve.view("guarded")["load_balancing_policy"] == "cache_aware"
    kept = [path for path in serve.home.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert kept == [], "a key is nowhere in the home"

    before = {replica["id"] for replica in serve.view("guarded")["replicas"]}
    file.write_text(YAML.replace("POLICY", "prefix_tree").replace("requests_per_minute: 3", "weight: 2"))
    serve.ok("update", "guarded", file, "-y", env={"HOUSE_KEY": OTHER})
    serve.eventually(lambda: options(serve)["policy"] == "prefix_tree")
    assert [models(url, KEY), models(url, OTHER)] == [401, 200]
    assert {replica["id"] for replica in serve.view("guarded")["replicas"]} == before
