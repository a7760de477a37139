"""`serve simulate` and `serve plan --trace` as a user runs them, on a market of six hours."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyserve_cli.app import run
from tests.clouds.schedules import only_long

HELLO = Path("examples/01-hello-engine/service.yaml")
SPOTHEDGE = [
    "--set",
    "replica_policy.spot_placer=dynamic_fallback",
    "--set",
    "replica_policy.num_overprovision=1",
]
SPOTHEDGE += ["--set", "replica_policy.dynamic_ondemand_fallback=true"]

ZONES = {
    "us-east-1a": [4] * 24 + [0] * 12 + [4] * 36,
    "us-east-1b": [0] * 12 + [3] * 60,
    "eu-west-1a": [4] * 30 + [0] * 6 + [2] * 36,
}


@pytest.fixture
def market(tmp_path: Path) -> Path:
    folder = tmp_path / "market"
    folder.mkdir()
    for zone, data in ZONES.items():
        metadata = {"gap_seconds": 300, "spot_usd_hour": 1.0, "on_demand_usd_hour": 3.0}
        (folder / f"{zone}.json").write_text(json.dumps({"metadata": metadata, "data": data}))
    return folder


@only_long  # a dozen runs of the simulator
def test_json_has_a_run_for_each_policy_knob_and_seed_in_the_order_asked(serve: Any, market: Path) -> None:
    arguments = [
        "simulate",
        "--trace",
        market,
        "--policy",
        "on_demand,spothedge,omniscient",
        "--overprovision",
        "0,1",
    ]
    arguments += ["--seed", "0..1", "-o", "json"]
    said = serve.ok(*arguments)
    told = said.json()
    assert (told["trace"], told["n_target"], told["cold_start_s"]) == ("market", 4, 183.0)
    assert [(run["policy"], run["overprovision"], run["seed"]) for run in told["runs"]] == [
        ("on_demand", None, 0),
        ("on_demand", None, 1),
        ("spothedge", 0, 0),
        ("spothedge", 0, 1),
        ("spothedge", 1, 0),
        ("spothedge", 1, 1),
        ("omniscient", None, 0),
    ]
    dear, _, plain, _, hedged, _, knowing = told["runs"]
    assert {
        "capacity_fraction",
        "preemptions_per_day",
        "failed_launches_per_day",
        "on_demand_cost_share",
    } <= set(dear)
    assert (dear["availability"], dear["cost_relative"]) == (1.0, 1.0)
    assert 1 / 3 < plain["cost_relative"] < hedged["cost_relative"] < 1
    assert plain["availability"] < 1
    assert knowing["cost_relative"] <= plain["cost_relative"]
    assert serve.ok(*arguments, "--jobs", "1").out == said.out, "neither order nor processes change a byte"


def test_the_table_ends_with_what_is_saved(serve: Any, market: Path) -> None:
    said = serve.ok(
        "simulate", "--trace", market, "--policy", "spothedge,on_demand", "--availability-target", "90%"
    )
    head, *rows, verdict = said.out.splitlines()
    assert head.split()[:3] == ["POLICY", "EXTRA", "AVAILABLE"]
    assert [row.split()[0] for row in rows] == ["spothedge", "on_demand"]
    assert verdict.startswith("spothedge +1 is the cheapest that is up 90% of the time: ")
    assert "instead of $12.00 per hour" in verdict
    assert "3 zones, 6h" in said.err


@only_long  # several runs of the simulator
def test_windows_are_runs_of_their_own(serve: Any, market: Path) -> None:
    told = serve.ok(
        "simulate", "--trace", market, "--policy", "on_demand", "--window", "3h", "-o", "json"
    ).json()
    assert [run["window"] for run in told["runs"]] == [0, 1]
    (row,) = told["summary"]
    assert (row["runs"], row["availability"]) == (2, {"mean": 1.0, "half_width_95": 0.0})


def test_a_file_says_what_is_simulated_and_what_is_planned(serve: Any, market: Path) -> None:
    told = serve.ok("simulate", HELLO, *SPOTHEDGE, "--trace", market, "-o", "json").json()
    assert told["n_target"] == 3
    assert [(run["policy"], run["overprovision"]) for run in told["runs"]] == [
        ("spothedge", 1),
        ("on_demand", None),
    ]
    plan = serve.ok("plan", HELLO, *SPOTHEDGE, "--trace", market, "-o", "json").json()
    assert {launch["capacity_type"] for launch in plan["launches"]} == {"spot", "on_demand"}
    expected, run = plan["expected"], told["runs"][0]
    assert (expected["n_target"], expected["policy"]) == (3, "spothedge +1")
    assert (expected["availability"], expected["cost_relative"]) == (
        run["availability"],
        run["cost_relative"],
    )
    assert expected["usd_per_hour"] == pytest.approx(
        run["cost_relative"] * expected["usd_per_hour_on_demand"]
    )
    table = serve.ok("plan", HELLO, *SPOTHEDGE, "--trace", market).out
    assert "until they are ready 3 on-demand replicas" in table
    assert table.splitlines()[-1].startswith("Expected on market (5h 57m, spothedge +1): 3 replicas ready ")


def test_a_service_that_scales_is_simulated_under_requests(serve: Any, market: Path) -> None:
    scaling = [
        "--set",
        "service.replica_policy.min_replicas=1",
        "--set",
        "service.replica_policy.max_replicas=4",
    ]
    scaling += ["--set", "service.replica_policy.target_qps_per_replica=1", "--policy", "on_demand"]
    file = market.parent / "scales.yaml"
    file.write_text((HELLO).read_text().replace("  replicas: 3\n", "  replica_policy: {min_replicas: 1}\n"))
    asked = ["simulate", file, *scaling, "--trace", market, "-o", "json"]
    (busy,) = serve.ok(*asked, "--requests", "constant:3").json()["runs"]
    still = serve.ok(*asked)
    (idle,) = still.json()["runs"]
    assert busy["usd_on_demand"] > 2 * idle["usd_on_demand"]
    assert busy["requests"] == pytest.approx(3 * 6 * 3600, rel=0.02)
    assert 0 < busy["requests_short"] < 0.2
    assert idle["requests"] is None
    assert "warning: hello scales with its requests" in still.err


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["html", pytest.param("png", marks=only_long)])
def test_a_report_is_written_beside_the_table(serve: Any, market: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out.{suffix}"
    said = serve.ok("simulate", "--trace", market, "--policy", "spothedge,on_demand", "--report", path)
    assert said.out.startswith("POLICY")
    assert f"report: {path}" in said.err
    content = path.read_bytes()
    assert len(content) < 2_000_000
    if suffix == "html":
        assert f"--policy spothedge,on_demand --report {path}" in content.decode()
    else:
        assert content.startswith(b"\x89PNG")


def test_lists_need_no_trace_and_no_service(serve: Any) -> None:
    listed = serve.ok("simulate", "--list-policies", "--list-traces", "-o", "json").json()
    names = {policy["name"] for policy in listed["policies"]}
    assert names >= {
        "spothedge",
        "spothedge_literal",
        "risk_hedge",
        "even_spread",
        "round_robin",
        "single_zone",
    }
    assert names >= {"single_region", "asg", "on_demand", "omniscient"}
    assert {trace["name"] for trace in listed["traces"]} >= {"synthetic-volatile", "synthetic-wide"}
    assert "spothedge" in serve.ok("simulate", "--list-policies").out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cold-start", "soon"], "--cold-start takes a duration"),
        (["--tick", "0"], "--tick takes a duration from 1s to 1h"),
        (["--ondemand-price-ratio", "trace"], "does not say the prices"),
        (["--requests", "many"], "--requests many"),
        (["--replicas", "0"], "--replicas"),
        (["--jobs", "0"], "--jobs"),
        (["--report", "out.pdf"], "--report takes a file that ends in .html or .png"),
        (["--report", "no/folder/out.png"], "cannot be written there"),
        (["--set", "replicas=3"], "none is named"),
        (["nowhere.yaml"], "cannot read nowhere.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_2_and_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, since starting one for each takes longer than all of the rest."""
    monkeypatch.setenv("SKYSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    code = run(["simulate", *arguments])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert sentence in " ".join(said.err.split())


def test_a_plan_says_what_is_wrong_before_it_is_made(serve: Any) -> None:
    said = serve("plan", HELLO, *SPOTHEDGE, "--cold-start", "60s")
    assert (said.code, said.out) == (2, "")
    assert "say how --trace is played, and none is named" in said.err


@pytest.mark.long
def test_ctrl_c_prints_what_is_finished_and_leaves_no_process(serve: Any) -> None:
    """On a terminal of its own, where Ctrl-C reaches every process; one quick run, then endless ones."""
    controlling, side = pty.openpty()
    process = subprocess.Popen(
        [*serve.command, "simulate", "--policy", "on_demand,even_spread", "--overprovision", "0,1,2",
         "--tick", "2s", "--jobs", "1", "-o", "json"],
        env=serve.environment, stdin=side, stdout=subprocess.PIPE, stderr=side, start_new_session=True, text=True,
    )  # fmt: skip
    os.close(side)
    seen = ""
    while "1 of 4 runs" not in seen:
        seen += os.read(controlling, 65536).decode(errors="replace")
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 1
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    told = json.loads(process.stdout.read())
    assert process.wait(timeout=60) == 130
    assert [run["policy"] for run in told["runs"]] == ["on_demand"]
    assert "interrupted: 1 of 4 runs finished" in _rest(controlling)
    assert not any(worker.is_running() for worker in workers)


def _rest(controlling: int) -> str:
    """The rest of the output of a terminal no one writes to any more."""
    seen = ""
    try:
        while True:
            seen += os.read(controlling, 65536).decode(errors="replace")
    except OSError:  # EIO: the other side is closed
        return seen
    finally:
        os.close(controlling)
