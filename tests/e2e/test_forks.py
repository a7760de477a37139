"""Controllers of these tests are forks of a process that has imported them: they look like those that a shell starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.e2e.conftest import Serve
from tests.kit.forks import COLD


def test_a_forked_controller_looks_like_a_started_one(serve: Serve) -> None:
    looks = []
    for environment in ({}, {COLD: "1"}):
        serve.ok("controller", "start", env=environment)
        supervisor, daemon = sorted(serve.processes(), key=lambda one: "daemon" in " ".join(one.cmdline()))
        for process, name in ((supervisor, "supervisor"), (daemon, "daemon")):
            words = [word for word in process.cmdline() if word]
            assert words == [sys.executable, "-m", f"skyserve_cli.controller.{name}"]
        shown = {name: value for name, value in daemon.environ().items() if name not in (COLD, "LC_CTYPE")}
        looks.append(
            (
                shown,
                daemon.cwd(),
                daemon.parent() == supervisor,
                os.getsid(daemon.pid) == os.getsid(supervisor.pid) == supervisor.pid,
                [str(Path(f"/proc/{daemon.pid}/fd/{descriptor}").readlink()) for descriptor in range(3)],
            )
        )
        serve.ok("controller", "stop")
        assert serve.processes() == []
    assert looks[0] == looks[1]
