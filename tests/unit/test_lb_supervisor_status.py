"""The status file of the supervisor of an agent, without processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lb.agent.supervisor import Supervisor


def test_a_status_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    (tmp_path / "wanted.json").write_text('{"release": "r", "bundle": "missing", "arguments": []}')
    in_the_way = tmp_path / "serving.json.new"  # as a full disk would be
    in_the_way.mkdir()
    supervisor = Supervisor(tmp_path)
    with pytest.raises(OSError):
        supervisor.check()
    in_the_way.rmdir()
    supervisor.check()
    assert json.loads((tmp_path / "serving.json").read_text())["refused"] == "r"
