"""A real Prometheus scrapes a live service: every expression of the Grafana boards and of the alerts must return data.

    python -m benchmarks.prometheus_scrape [--seconds 120]

Needs `prometheus` (Debian's package). It brings up a service on the local cloud in a home of its own, with load from one client,
prints a line per expression, and exits with 1 if one has no data. Alerts compare, so their left side is queried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

import yaml

from scripts.boards import BOARDS

ROOT = Path(__file__).parents[1]
SERVICE = """
name: scraped
service:
  readiness_probe: /health
  replica_policy:
    min_replicas: 2
    max_replicas: 2
    slo: {ttft_ms: 10000, attainment: 90%}
resources: {infra: local}
run: serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def expressions() -> list[str]:
    """Those of the boards with all services, then the left sides of the alerts."""
    boards = [expression for board in BOARDS for expression in board.expressions]
    groups = yaml.safe_load((ROOT / "packaging/prometheus/alerts.yml").read_text())["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    sides = [re.split(r" (?:==|<|>) ", re.sub(r"^absent\((.*)\)$", r"\1", alert))[0] for alert in alerts]
    return list(dict.fromkeys([*boards, *sides]))


def points(port: int, expression: str) -> int:
    """Return how many series the expression has now."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as response:
        return len(json.load(response)["data"]["result"])


def serve(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "skyserve_cli", *arguments]
    environment = {**os.environ, "SKYSERVE_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"serve {' '.join(arguments)}: {done.stderr}")
    return done.stdout.strip()


def start_prometheus(folder: Path, home: Path, target: int, port: int) -> subprocess.Popen[bytes]:
    credentials = {"type": "Bearer", "credentials_file": str(home / "metrics.token")}
    agents = f"http://127.0.0.1:{target}/metrics/agents"
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(ROOT / "packaging/prometheus/alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "skyserve",
                "authorization": credentials,
                "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
            },
            {
                "job_name": "skyserve-load-balancers",
                "authorization": credentials,
                "http_sd_configs": [{"url": agents, "authorization": credentials, "refresh_interval": "5s"}],
            },
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "prometheus.log").open("wb"),
    )


def put_load(endpoint: str, seconds: float) -> int:
    """One stream after the other, and some requests that the load balancer rejects; returns how many had status 200."""
    body = json.dumps({"prompt": "hello " * 200, "max_tokens": 8, "stream": True}).encode()
    end, good, sent = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        path = "/v1/completions" if sent % 10 else "/-/none"
        request = urllib.request.Request(
            endpoint + path, data=body, headers={"Content-Type": "application/json"}
        )
        sent += 1
        with suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=10) as response:
            response.read()
            good += response.status == 200
        time.sleep(0.2)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("prometheus is not installed: apt-get install prometheus")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        home, target, port = folder / "home", free_port(), free_port()
        home.mkdir()
        (home / "config.yaml").write_text(f"controller: {{metrics_port: {target}}}\n")
        (folder / "service.yaml").write_text(SERVICE)
        prometheus = None
        try:
            endpoint = serve(home, "up", str(folder / "service.yaml"), "-y").splitlines()[-1]
            prometheus = start_prometheus(folder, home, target, port)
            good = put_load(endpoint, options.seconds)
            found = {expression: points(port, expression) for expression in expressions()}
        finally:
            if prometheus is not None:
                prometheus.terminate()
                prometheus.wait(timeout=30)
            serve(home, "down", "--all", "--purge", "-y")
            serve(home, "controller", "stop")
    for expression, series in found.items():
        print(f"{series:4} series  {expression}")
    empty = [expression for expression, series in found.items() if not series]
    print(f"{good} requests; {len(found) - len(empty)} of {len(found)} expressions have data")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
