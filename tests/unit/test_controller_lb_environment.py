"""What a load balancer beside the controller is started with."""

from __future__ import annotations

from skyserve_cli.controller.balancers.agent_process import agent_environment


def test_an_agent_gets_no_keys_of_clouds_and_databases() -> None:
    secret = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AZURE_CLIENT_SECRET": "c",
        "GOOGLE_APPLICATION_CREDENTIALS": "/d",
        "SKYSERVE_DB": "postgresql://u:e@h/db",
        "HF_TOKEN": "f",
    }
    needed = {
        "PATH": "/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": "/x",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://o",
    }
    assert agent_environment({**secret, **needed}) == needed
