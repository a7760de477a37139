"""`serve exec` and `serve ssh` on the local cloud; on machines see `test_cli_ssh_pool`."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Serve

pytestmark = pytest.mark.long

SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 60}
  replicas: 1
envs: {COLOUR: green}
secrets: {TOKEN: null}
resources: {infra: local}
setup: echo hello >greeting.txt
run: exec python3 -m http.server --bind 127.0.0.1 $SKYSERVE_REPLICA_PORT
"""


def up(serve: Serve, folder: Path, *flags: str) -> None:
    file = folder / "web.yaml"
    file.write_text(SERVICE)
    serve.ok("up", file, "-y", "--name", "web", "--secret", "TOKEN=s3cret", *flags)


def test_commands_run_in_the_work_directory_with_the_environment(serve: Serve, tmp_path: Path) -> None:
    up(serve, tmp_path)
    assert serve.ok("exec", "web", "--", "cat", "greeting.txt").out == "hello\n"
    assert (
        serve.ok("exec", "web", "--", 'echo "$COLOUR $TOKEN $SKYSERVE_REPLICA_ID"').out == "green s3cret 1\n"
    )
    words = serve.ok("exec", "web", "--", "printf", "%s|", "$COLOUR", "a b")
    assert words.out == "$COLOUR|a b|"

    failed = serve("exec", "web", "--replica", "1", "--", "echo out; echo err >&2; exit 7")
    assert (failed.code, failed.out, failed.err) == (7, "out\n", "err\n")
    assert serve("exec", "web", "--", "kill -9 $$").code == 128 + signal.SIGKILL
    assert serve.ok("exec", "web", "--", "wc -c").out.strip() == "0", "there is no standard input"
    told = subprocess.run(
        [*serve.command, "exec", "web", "-i", "--", "wc -c"],
        env=serve.environment, input=b"four", capture_output=True, timeout=60,
    )  # fmt: skip
    assert told.stdout.strip() == b"4"

    gone = serve("exec", "web", "--replica", "9", "--", "true")
    assert (gone.code, gone.err) == (1, "web has no live replica 9 (live: 1)\n")
    for wrong in (
        ["web"],
        ["web", "--all", "--replica", "1", "--", "true"],
        ["web", "--all", "-i", "--", "true"],
    ):
        assert serve("exec", *wrong).code == 2
    unknown = serve("exec", "wbe", "--", "true")
    assert (unknown.code, unknown.err) == (1, "there is no service wbe; did you mean web?\n")

    shell = serve.ok("ssh", "web", env={"SHELL": "/bin/pwd"})
    assert shell.out.strip() == serve.ok("exec", "web", "--", "pwd").out.strip()
    asked = tmp_path / "shell"
    asked.write_text('#!/bin/sh\necho "$COLOUR"; exit 4\n')
    asked.chmod(0o755)
    shell = serve("ssh", "web", env={"SHELL": str(asked)})
    assert (shell.code, shell.out) == (4, "green\n")


def test_all_replicas_at_once_and_a_choice_of_one(serve: Serve, tmp_path: Path) -> None:
    up(serve, tmp_path, "--set", "service.replicas=2")
    serve.eventually(lambda: serve.view("web")["ready"] == 2)
    first, second = sorted(replica["id"] for replica in serve.view("web")["replicas"])

    which = serve("exec", "web", "--", "true")
    assert which.code == 2
    assert which.err == f"web has several live replicas: pass --replica ID ({first}, {second})\n"

    script = 'echo a; printf "I am $SKYSERVE_REPLICA_ID"; exit $SKYSERVE_REPLICA_ID'
    both = serve("exec", "web", "--all", "--", script)
    assert both.code == second, both
    assert sorted(both.out.splitlines()) == sorted(
        f"{one} | {line}" for one in (first, second) for line in ("a", f"I am {one}")
    )


@pytest.mark.parametrize("script", ["sleep 7654.5", "trap '' TERM; sleep 7654.5; sleep 7654.5"])
def test_ctrl_c_ends_the_command(serve: Serve, tmp_path: Path, script: str) -> None:
    up(serve, tmp_path)
    with subprocess.Popen(
        [*serve.command, "exec", "web", "--", f"echo started; {script}"],
        env=serve.environment,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"started\n"
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(60) == 130
    assert _sleeping(serve) == []


def _sleeping(serve: Serve) -> list[int]:
    found = []
    for process in serve.processes():
        with suppress(psutil.Error):
            if process.cmdline()[:2] == ["sleep", "7654.5"]:
                found.append(process.pid)
    return found
