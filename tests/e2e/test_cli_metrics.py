"""`controller.metrics_port`: the scraped values equal those of `serve status`, also after the controller was killed."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

FILE = """
name: small
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local}
run: serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""


def scrape(home: Path, port: int) -> dict[str, float]:
    """Values of the families whose only label is the service; empty while the port is closed."""
    token = (home / "metrics.token").read_text()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read().decode()
    except urllib.error.HTTPError:
        raise
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels in ({}, {"service": "small"})
    }


@pytest.mark.long
def test_a_live_service_is_scraped(serve: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (serve.home / "config.yaml").open("a") as config:
        config.write(f"controller: {{metrics_port: {port}}}\n")
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    serve.ok("up", file, "-y")
    view = serve.view("small")  # up to a second old
    found = scrape(serve.home, port)
    assert found["skyserve_service_ready_replicas"] == view["ready"] == 2
    assert found["skyserve_service_usd_per_hour"] == view["cost"]["usd_per_hour"] > 0
    assert found["skyserve_service_on_demand_usd_per_hour"] == view["cost"]["usd_per_hour_on_demand"]
    assert found["skyserve_service_usd_total"] >= view["cost"]["usd_total"] > 0
    assert found["skyserve_service_load_balancers_alive"] == 1
    assert (found["skyserve_controller_leads"], found["skyserve_controller_store_ok"]) == (1, 1)
    token = {"Authorization": f"Bearer {(serve.home / 'metrics.token').read_text()}"}
    listing = f"http://127.0.0.1:{port}/metrics/agents"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(listing, timeout=30)
    with urllib.request.urlopen(urllib.request.Request(listing, headers=token), timeout=30) as response:
        (target,) = json.load(response)
    assert target["targets"] == [f"127.0.0.1:{port}"]
    address = f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}"
    with urllib.request.urlopen(urllib.request.Request(address, headers=token), timeout=30) as response:
        assert 'skyserve_lb_requests_total{policy="gorgo"' in response.read().decode()
    psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"]).kill()
    serve.eventually(lambda: scrape(serve.home, port).get("skyserve_service_ready_replicas") == 2)


def test_a_port_out_of_range_is_a_wrong_configuration(serve: Any) -> None:
    (serve.home / "config.yaml").write_text("controller: {metrics_port: 80}\n")
    said = serve("controller", "start")
    assert said.code == 2
    assert "controller.metrics_port" in said.err
