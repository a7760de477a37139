"""The files of an installation that is tested: its local cloud, and services of engines without GPUs."""

from __future__ import annotations

import sys

CLOUD_YAML = """\
cold_start_s: 0.1
stop_grace_s: 3
regions:
  us: {us-a: {spot_usd_hour: 0.30, on_demand_usd_hour: 1.0}, us-b: {spot_usd_hour: 0.33, on_demand_usd_hour: 1.0}}
  eu: {eu-a: {spot_usd_hour: 0.36, on_demand_usd_hour: 1.1}, eu-b: {spot_usd_hour: 0.38, on_demand_usd_hour: 1.1}}
  asia: {as-a: {spot_usd_hour: 0.40, on_demand_usd_hour: 1.2}, as-b: {spot_usd_hour: 0.42, on_demand_usd_hour: 1.2}}
"""


def service_yaml(
    name: str,
    replicas: int,
    *,
    model: str = "v1",
    policy: str = "least_load",
    speed: float = 50.0,
    time_to_first_byte_s: float = 20.0,
    drain_timeout_s: float = 60.0,
    failure_threshold_s: float = 180.0,
    notice_drain_s: float = 30.0,
) -> str:
    """A service of engines without GPUs. `model` distinguishes versions: responses carry it."""
    engine = f"{sys.executable} -m skyserve_cli.engine --profile l4-8b --speed {speed:g} --model {model}"
    return f"""\
name: {name}
service:
  readiness_probe:
    path: /health
    endpoint_probe_interval_seconds: 1
    timeout_seconds: 5
    consecutive_failure_threshold_timeout: {failure_threshold_s:g}
  replicas: {replicas}
  load_balancing_policy: {policy}
  load_balancer: {{time_to_first_byte_seconds: {time_to_first_byte_s:g}}}
  drain_timeout_seconds: {drain_timeout_s:g}
  notice_drain_seconds: {notice_drain_s:g}
resources: {{infra: local, use_spot: true}}
run: exec {engine} --port $SKYSERVE_REPLICA_PORT
"""
