"""`serve why` on real faults: the right cause in the first line, and the command that cures it in the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SERVICE = """
name: {name}
service: {{readiness_probe: {{path: {path}, initial_delay_seconds: 120}}, replicas: 1}}
resources: {{infra: local}}
run: |
  {run}
"""
SERVER = "exec python3 -m http.server"
#: The probe's path, `run`, the cause, words of the first line, words of the last.
FAULTS = {
    "missing": (
        "/", "no-such-engine serve --port $SKYSERVE_REPLICA_PORT",
        "command_missing", "`run` ended with exit code 127 on replica", "install no-such-engine in `setup`",
    ),
    "module": (
        "/", "exec python3 -c 'import no_such_module'",
        "module_missing", "the Python module no_such_module is not installed", "install no_such_module in `setup`",
    ),
    "port": (
        "/", f"{SERVER} --bind 127.0.0.1 $((SKYSERVE_REPLICA_PORT + 1500))",
        "wrong_port", "but its probes go to port", "let it listen on 0.0.0.0:$SKYSERVE_REPLICA_PORT",
    ),
    "path": (
        "/health", f"{SERVER} --bind 127.0.0.1 $SKYSERVE_REPLICA_PORT",
        "probe_path", "gets 404: its server has no such path", "--set readiness_probe.path=/PATH",
    ),
}  # fmt: skip


def write(folder: Path, name: str, path: str, run: str) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(SERVICE.format(name=name, path=path, run=run))
    return file


@pytest.mark.timeout(300)
def test_four_faults_and_their_cure(serve: Any, tmp_path: Path) -> None:
    for name, (path, run, *_) in FAULTS.items():
        serve.ok("up", write(tmp_path, name, path, run), "-y", "--no-wait")
    for name, (_, _, cause, said, cure) in FAULTS.items():

        def is_known(name: str = name, cause: str = cause) -> bool:
            return bool(serve.ok("why", name, "-o", "json").json()["cause"] == cause)

        serve.eventually(is_known)
        first, *story, last = serve.ok("why", name).out.splitlines()
        assert first.startswith(f"{name}: "), first
        assert said in first
        assert last.startswith("next: "), last
        assert cure in last
        assert f"serve update {name} FILE" in last
        assert len(story) <= 8
    assert "path: the cause, and what to do: serve why path" in serve.ok("status", "path").out
    cured = ("update", "path", tmp_path / "path.yaml", "-y", "--set", "readiness_probe.path=/")
    serve.ok(*cured)
    serve.eventually(lambda: serve.ok("why", "path", "-o", "json").json()["cause"] == "well")
    (well,) = serve.ok("why", "path").out.splitlines()
    assert well.startswith("path: the service is well: 1 of 1 replica ready, version 2 serves")
    assert serve("why", "path/99").code == 1
    assert serve("why", "path/x").code == 2
    assert "did you mean path" in serve("why", "pathh").err


@pytest.mark.timeout(300)
def test_an_up_that_fails_names_the_command(serve: Any, tmp_path: Path) -> None:
    path, run, *_ = FAULTS["missing"]
    up = serve("up", write(tmp_path, "missing", path, run), "-y")
    assert up.code == 1, up
    assert up.err.splitlines()[-1] == "the cause, and what to do: serve why missing"
