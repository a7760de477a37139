"""`serve logs --since`: lines by their time, of one replica and of all."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RUN = """
  (for number in 1 2 3 4 5; do echo "at $(date +%s)"; sleep 1; done) &
  exec serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""


def stamps(log: str) -> list[int]:
    return [int(line.partition("at ")[2]) for line in log.splitlines() if "at 1" in line]


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
