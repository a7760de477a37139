"""Requests to an endpoint appear in the numbers over time, and survive the death of the controller."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.home import Home

FILE = """
name: small
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local}
run: serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""
BODY = {
    "messages": [{"role": "user", "content": "hello " * 40}],
    "max_tokens": 8,
    "stream": True,
    "stream_options": {"include_usage": True},  # an engine that is late has several tokens in an event
}


def series(serve: Any) -> dict[str, Any]:
    return ControllerClient(Home.from_environment(serve.environment)).series("small")


def call(endpoint: str, times: int) -> None:
    with urllib.request.urlopen(f"{endpoint}/v1/models", timeout=30) as response:
        model = json.load(response)["data"][0]["id"]
    for _ in range(times):
        request = urllib.request.Request(
            f"{endpoint}/v1/chat/completions",
            json.dumps({**BODY, "model": model}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()


@pytest.mark.long
def test_requests_are_counted_once(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    serve.ok("up", file, "-y")
    endpoint = serve.view("small")["endpoint"]
    call(endpoint, 12)  # and one for the list of models
    serve.eventually(lambda: sum(series(serve)["requests"]) == 13)
    found = series(serve)
    assert found["span_s"] == 10
    assert sum(each["requests"] for each in found["replicas"].values()) == 13
    assert (found["total"]["errors"], found["total"]["tokens_out"]) == (0, 96)
    assert 0 < found["total"]["ttft_p50_s"] <= found["total"]["ttft_p90_s"]
    psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"]).kill()
    serve.eventually(lambda: sum(series(serve)["requests"]) == 13)
