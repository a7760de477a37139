"""`serve logs --since`, and the command that `event_callback` names."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

RUN = """
  (for number in 1 2 3 4 5; do echo "at $(date +%s)"; sleep 1; done) &
  exec serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""


def stamps(log: str) -> list[int]:
    return [int(line.partition("at ")[2]) for line in log.splitlines() if "at 1" in line]


@pytest.mark.long
def test_lines_are_found_by_their_time(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(
        "name: small\nservice: {readiness_probe: /health, replicas: 2}\nresources: {infra: local}\nrun: |"
        + RUN
    )
    serve.ok("up", file, "-y")
    (one, two) = [str(replica["id"]) for replica in serve.view("small")["replicas"]]
    for replica in (one, two):
        serve.eventually(lambda replica=replica: len(stamps(serve.ok("logs", "small", replica).out)) == 5)
    for which in ([one], [two], ["--no-follow"]):
        every = stamps(serve.ok("logs", "small", *which).out)
        assert stamps(serve.ok("logs", "small", *which, "--since", "1h").out) == every
        since = sorted(every)[len(every) // 2]
        when = datetime.fromtimestamp(since, UTC).isoformat()
        found = stamps(serve.ok("logs", "small", *which, "--since", when).out)
        assert [stamp for stamp in every if stamp >= since] == [stamp for stamp in found if stamp >= since]
        assert min(found) >= since - 2, "a second of precision, and `date` cuts off another"
        assert serve.ok("logs", "small", *which, "--since", "2100-01-01").out == ""
    wrong = serve("logs", "small", "--since", "yesterday")
    assert (wrong.code, "--since takes a duration" in wrong.err) == (2, True)
    assert serve("logs", "--controller", "--since", "1h").code == 2


@pytest.mark.long
def test_a_command_runs_for_each_event_also_after_the_controller_was_killed(
    serve: Any, tmp_path: Path
) -> None:
    file, seen = tmp_path / "service.yaml", tmp_path / "seen"
    file.write_text(
        "name: small\nservice: {readiness_probe: /health}\nresources: {infra: local}\n"
        "run: serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT\n"
        f"envs: {{SEEN: {seen}}}\n"
        "event_callback: |\n"
        '  [ "$SKYSERVE_EVENT" != ProbePassed ] || sleep 1\n'
        '  echo "$TASK_NAME/$SKYSERVE_REPLICA_ID $SKYSERVE_EVENT_ID $JOB_STATUS ${AWS_SECRET_ACCESS_KEY-no key}" >> $SEEN\n'
        '  [ "$SKYSERVE_EVENT" != scale ]\n'
    )
    serve.ok("up", file, "-y", env={"AWS_SECRET_ACCESS_KEY": "secret"})
    psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"]).kill()
    serve.ok("down", "small", "-y")

    def told() -> list[str]:
        return seen.read_text().splitlines()

    serve.eventually(lambda: any("GONE" in line for line in told()))
    lines = told()
    assert any(line.startswith("small/1 ") and "READY" in line for line in lines)
    assert all(line.endswith("no key") for line in lines)
    every = [json.loads(line) for line in serve.ok("events", "small", "-o", "json").out.splitlines()]
    silent = ("Progressed", "CallbackFailed")
    assert {int(line.split()[1]) for line in lines} >= {e["seq"] for e in every if e["kind"] not in silent}
    failures = [event["message"] for event in every if event["kind"] == "CallbackFailed"]
    assert failures, every
    assert "event_callback failed, for scale: exit code 1" in failures[0]
