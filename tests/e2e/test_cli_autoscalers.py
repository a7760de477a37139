"""`serve simulate --autoscaler`: what its options ask for, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FILE = """\
service:
  readiness_probe: /health
  replica_policy: {min_replicas: 1, max_replicas: 50, target_qps_per_replica: 1.6}
run: serve
"""


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "requests.csv"
    rows = [f"{index * 600},{600 if index % 24 < 12 else 1200}" for index in range(48)]
    path.write_text("t_s,requests\n" + "\n".join(rows) + "\n")
    return path


def test_every_autoscaler_is_judged_by_what_the_traffic_needed(
    serve: Any, service: Path, recording: Path
) -> None:
    said = serve.ok(
        "simulate",
        service,
        "--requests",
        recording,
        "--autoscaler",
        "reactive,oracle",
        "-o",
        "json",
        "--jobs",
        "1",
    )
    told = said.json()
    assert (told["capacity_qps"], told["attainment_asked"], told["known_min"]) == (2.0, 0.995, 240)
    reactive, oracle = told["runs"]
    assert (reactive["autoscaler"], oracle["autoscaler"]) == ("reactive", "oracle")
    assert oracle["attainment"] >= 0.995 > reactive["attainment"]
    assert reactive["requests"] / (4 * 3600) == pytest.approx(16.0, rel=0.02)


def test_requests_are_as_recorded_with_mean_replicas_0(serve: Any, service: Path, recording: Path) -> None:
    said = serve.ok(
        *("simulate", service, "--requests", recording, "--autoscaler", "reactive", "--mean-replicas", "0"),
        *("--seed", "0,1", "-o", "json", "--jobs", "1"),
    )
    told = said.json()
    assert told["factor"] == 1.0
    assert [run["seed"] for run in told["runs"]] == [0, 1]


def test_the_table_has_a_row_for_each(serve: Any, service: Path, recording: Path) -> None:
    said = serve.ok("simulate", service, "--requests", recording, "--autoscaler", "reactive", "--jobs", "1")
    header, row = said.out.splitlines()
    assert header.split()[:4] == ["AUTOSCALER", "ATTAINMENT", "HOURS/IDEAL", "MOVES/DAY"]
    assert row.startswith("reactive")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--autoscaler", "reactiv"], "no autoscaler is called reactiv; did you mean reactive?"),
        (["--autoscaler", "reactive:2"], "only reactive takes a target, as a share of --capacity"),
        (["--autoscaler", "oracle:0.9"], "only reactive takes a target"),
        (["--autoscaler", "reactive", "--policy", "on_demand"], "--policy belongs to a simulated market"),
        (["--autoscaler", "reactive", "--attainment", "2"], "--attainment takes a share"),
        (["--autoscaler", "reactive", "--warm-up", "8h"], "--warm-up takes a duration"),
        (["--autoscaler", "reactive", "--capacity", "0"], "--capacity takes requests per second above 0"),
        (["--autoscaler", "reactive", "--set", "replica_policy.max_replicas=1"], "has a fixed size"),
    ],
)
def test_bad_words_name_the_option(
    serve: Any, service: Path, recording: Path, arguments: list[str], sentence: str
) -> None:
    said = serve("simulate", service, "--requests", recording, *arguments)
    assert said.code == 2
    assert sentence in said.err


def test_without_requests_there_is_nothing_to_judge(serve: Any, service: Path) -> None:
    said = serve("simulate", service, "--autoscaler", "reactive")
    assert said.code == 2
    assert "--autoscaler needs --requests" in said.err


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["html", "png"])
def test_a_comparison_is_drawn(
    serve: Any, service: Path, recording: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"compared.{suffix}"
    said = serve.ok(
        "simulate", service, "--requests", recording, "--autoscaler", "predictive,reactive", "--report", path
    )
    assert f"report: {path}" in said.err
    assert "Warning" not in said.err
    assert path.stat().st_size > 10_000
