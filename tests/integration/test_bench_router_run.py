"""A short run of `benchmarks.router`: systems that need no download start, respond rightly, and report how they run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CELLS = ("unary", "half", "extras")
LIMIT_S = 240

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="needs cores 0 and 1"),
]


def test_both_agents_are_measured_and_report_how_they_run(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    arguments = ["--agent", "both", "--systems", "skyserve,regional,direct", "--interpreted", "--keys", "20"]
    arguments += ["--tls", "targets", "--only", ",".join(CELLS), "--rounds", "1", "--seconds", "0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.router", *arguments, "--json", str(kept)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(kept.read_text())["rows"]
    facts = {(row["system"], row["cell"]): row["facts"] for row in rows if row["system"] != "direct"}
    assert set(facts) == {(system, cell) for system in ("skyserve", "regional") for cell in CELLS}
    for (system, _), found in facts.items():
        assert found["agent"] == {"skyserve": "local", "regional": "regional"}[system]
        assert found["build"].startswith("interpreted")
        assert (found["keys"], found["workers"]) == ("20 limited", 1)
    half = [row["wanted_s"] for row in rows if row["cell"] == "half"]
    assert len(set(half)) == 1
    assert half[0] > 0
