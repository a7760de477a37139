"""`serve profile`: of a server by its URL, of a service by its file, and what it rejects."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

FILE = """
name: small
service:
  readiness_probe: /health
  replica_policy: {min_replicas: 1, max_replicas: 1, slo: {ttft_ms: 60000, attainment: 90%}}
resources: {infra: local}
run: serve engine --speed 100 --port $SKYSERVE_REPLICA_PORT
"""
FEW = (
    "--prompt-tokens",
    "20",
    "--response-tokens",
    "4",
    "--start",
    "20",
    "--step",
    "500ms",
    "--max-requests",
    "30",
    "-y",
)


def test_a_server_is_measured_by_its_url(serve: Any, engine: str) -> None:
    said = serve("profile", engine, "--ttft-ms", "60000", "--attainment", "90%", "-o", "json", *FEW)
    found = said.json()
    assert said.code == 0, said
    assert (found["url"], found["ttft_ms"], found["tpot_ms"], found["attainment"]) == (
        engine,
        60000,
        None,
        0.9,
    )
    assert (found["stopped"], found["requests"], found["all_in_time"]) == ("requests", 30, True)
    assert found["capacity_qps"] == max(step["load_qps"] for step in found["steps"] if step["requests"])
    assert found["capacity_qps_high"] is None
    assert found["confidence"] == "low"
    assert sum(step["late"] + step["failed"] for step in found["steps"]) == 0


@pytest.mark.long
def test_a_service_is_measured_with_the_slo_of_its_file(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    early = serve("profile", file, *FEW)
    assert (early.code, "The controller is not running" in early.err) == (1, True), early
    serve.ok("up", file, "-y")
    said = serve.ok("profile", file, *FEW)
    assert "One replica carries at least" in said.out
    assert "with 90 % in time" in said.out
    assert "100.0 % of" in said.err


def test_ctrl_c_ends_it_with_what_is_known(serve: Any, engine: str) -> None:
    words = ["profile", engine, "--ttft-ms", "60000", "--start", "20", "--step", "500ms", "-y", "-o", "json"]
    process = subprocess.Popen(
        [*serve.command, *words],
        env=serve.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    process.stderr.readline()  # the first step is over
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    found = json.loads(out)
    assert (process.returncode, found["stopped"]) == (130, "interrupted")
    assert found["steps"][0]["load_qps"] == 20
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["http://127.0.0.1:1", "-y"], 2, "when is a request late?"),
        (["http://127.0.0.1:1", "--ttft-ms", "100"], 2, "pass -y"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "-y"], 1, "cannot reach http://127.0.0.1:1"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "--attainment", "120%"], 2, "--attainment"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "--step", "soon"], 2, "--step"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "--start", "0"], 2, "--start"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "--lengths", "nothing.csv"], 2, "nothing.csv"),
        (["http://127.0.0.1:1", "--ttft-ms", "100", "--api-key-file", "nothing"], 2, "--api-key-file"),
        (["nothing.yaml"], 2, "nothing.yaml"),
    ],
)
def test_what_makes_no_sense_is_rejected(serve: Any, words: list[str], code: int, complaint: str) -> None:
    said = serve("profile", *words)
    assert said.code == code, said
    assert complaint in said.err
    assert "Traceback" not in said.err
