"""The messages of commands, where they are printed, and their exit codes; most of it needs no service."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

HELLO = Path("examples/01-hello-engine/service.yaml")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, serve: Any, *arguments: str | Path) -> None:
        self._controlling, side = pty.openpty()
        self.process = subprocess.Popen(
            [*serve.command, *map(str, arguments)],
            env={**serve.environment, "TERM": "xterm", "COLUMNS": "120"},
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)
        self.seen = ""

    def until(self, text: str) -> None:
        while text not in self.seen:
            self.seen += self._read()

    def type(self, keys: str) -> None:
        os.write(self._controlling, keys.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def decline(self) -> int:
        """Ctrl-C at a question, and the exit code. Once more where it does not act: what comes in the instant before
        Python begins to read the response is kept from it until there is one."""
        self.interrupt()
        for _ in range(10):
            try:
                self.process.wait(timeout=3)
                break
            except subprocess.TimeoutExpired:
                self.interrupt()
        return self.end()

    def end(self) -> int:
        """The exit code, once everything is read."""
        try:
            while True:
                self.seen += self._read()
        except EOFError:
            return self.process.wait(timeout=60)
        finally:
            os.close(self._controlling)

    def _read(self) -> str:
        try:
            content = os.read(self._controlling, 65536)
        except OSError:  # EIO: the other side is closed
            content = b""
        if not content:
            raise EOFError(self.seen)
        return content.decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["statsu"], "Did you mean 'status'?", id="a verb that is not"),
        pytest.param(["up"], "Missing argument", id="up without a file"),
        pytest.param(["up", "nowhere.yaml", "-y"], "cannot read nowhere.yaml", id="a file that is not there"),
        pytest.param(
            ["up", HELLO, "--set", "replicsa=3"],
            'service.replicsa: unknown key; did you mean "replicas"?',
            id="a slip",
        ),
        pytest.param(
            ["up", HELLO, "--env-file", "no.env"], "no.env: No such file", id="an env file that is not there"
        ),
        pytest.param(
            ["up", HELLO, "--secret", "NOWHERE_TO_BE_FOUND"], "is not in your environment", id="no secret"
        ),
        pytest.param(["validate"], "name a service file, or pass --schema", id="validate without a file"),
        pytest.param(["down"], "name the services to take down, or pass --all", id="down of nothing"),
        pytest.param(["down", "a", "--all"], "or pass --all", id="down of one and all"),
        pytest.param(
            ["down", "a", "b", "--replica-id", "1"], "the name of one service", id="replicas of two"
        ),
        pytest.param(["logs"], "name a service, or pass --controller", id="logs of nothing"),
        pytest.param(["logs", "a", "1", "--controller"], "choose one", id="logs of two things"),
        pytest.param(["status", "--watch", "-o", "json"], "--watch is for people", id="watch for a program"),
        pytest.param(["local", "capacity", "us-q", "3"], "did you mean 'us-b'?", id="a zone that is not"),
        pytest.param(
            ["local", "capacity", "us-a", "many"], "a number of instances", id="a number that is not"
        ),
        pytest.param(
            ["local", "preempt", "us-a", "--notice", "soon"], "such as 10s", id="a duration that is not"
        ),
        pytest.param(["local", "market", "nowhere.yaml"], "No such file", id="a market that is not there"),
        pytest.param(
            ["local", "market", ".", "--speed", "0"], "must be above 0", id="a market that stands still"
        ),
        pytest.param(["engine", "--profile", "tpu"], "tpu", id="a profile that is not"),
        pytest.param(["engine", "--speed", "-1"], "must be above 0", id="an engine that goes backwards"),
    ],
)
def test_wrong_usage_is_2_and_a_sentence(serve: Any, arguments: list[str], sentence: str) -> None:
    said = serve(*arguments)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err
    assert "Traceback" not in said.err


def test_every_problem_of_a_file_has_its_line(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("service: {replicas: -1, polcy: x}\nresources: {accelerators: L4}\n")
    said = serve("validate", file)
    assert said.code == 2
    assert {line.partition(": ")[0] + " " + line.split(": ")[1] for line in said.err.splitlines()} == {
        f"{file}:1 service.replicas",
        f"{file}:1 service.polcy",
        f"{file} run",
    }
    answer = json.loads(serve("validate", file, "-o", "json").out)
    assert answer["valid"] is False
    assert {problem["path"] for problem in answer["problems"]} >= {"service.replicas", "service.polcy"}
    assert [problem["line"] for problem in answer["problems"]].count(1) == 2


def test_files_that_are_named_and_not_there_are_said_before_anything_is_launched(
    serve: Any, tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "service: {replicas: 1, tls: {keyfile: no.key, certfile: no.crt}}\nworkdir: nowhere\nrun: serve\n"
    )
    said = serve("up", file, "-y", cwd=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert [line.split(": ")[0] for line in said.err.splitlines()] == [
        "workdir",
        "service.tls.keyfile",
        "service.tls.certfile",
    ]


def test_a_wrong_configuration_is_2_and_names_the_key(serve: Any) -> None:
    kept = (serve.home / "config.yaml").read_text()
    (serve.home / "config.yaml").write_text("clouds: {local: {enabeld: true}}\n")
    said = serve("check")
    assert said.code == 2
    assert "clouds.local.enabeld" in said.err
    (serve.home / "config.yaml").write_text("clouds: {lcoal: {}}\n")
    assert "did you mean 'local'?" in serve("check").err
    (serve.home / "config.yaml").write_text(kept)


def test_before_anything_is_up(serve: Any) -> None:
    empty = serve("status", "-o", "json")
    assert (empty.code, empty.json()) == (0, [])
    assert serve.ok("status").err == "no service is up\n"
    assert serve("controller", "status").code == 1
    assert serve.ok("controller", "stop").err == "the controller is not running\n"
    assert serve("events").code == 1
    (cloud,) = serve.ok("check", "-o", "json").json()
    assert cloud["usable"] is True
    assert "eu/eu-b" in cloud["zones"]
    assert serve.ok("validate", "--schema").json()["type"] == "object"
    assert serve.ok("--version").out.startswith("serve ")
    assert "l4-8b" in serve.ok("engine", "--list-profiles").out


def test_a_plan_is_shown_before_anything_is_asked_and_a_dry_run_ends_there(serve: Any) -> None:
    serve("controller", "stop")
    dry = serve.ok("up", HELLO, "--dry-run")
    assert serve("controller", "status").code == 1, "a dry run needs no controller"
    assert dry.out == ""
    assert "hello: 3 replicas for $1.06 per hour, 68% less than $3.30 on demand." in dry.err
    assert "local/asia/asia-a" in dry.err
    plan = serve.ok("plan", HELLO, "--set", "replicas=2", "-o", "json").json()
    assert [launch["region"] for launch in plan["launches"]] == ["us", "eu"]
    nobody = serve("up", HELLO)
    assert (nobody.code, nobody.out) == (2, "")
    assert "pass -y" in nobody.err
    nowhere = serve("up", HELLO, "--set", "resources.infra=local/mars", "-y")
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "resources.infra: local has no region 'mars'; it has asia, eu, us" in nowhere.err
    assert serve.ok("status", "-o", "json").json() == []


def test_control_c_and_no_at_the_question_change_nothing(serve: Any) -> None:
    interrupted = Terminal(serve, "up", HELLO)
    interrupted.until("Bring hello up?")
    assert interrupted.decline() == 130
    assert "nothing has changed" in interrupted.seen
    declined = Terminal(serve, "up", HELLO)
    declined.until("Bring hello up?")
    declined.type("n\n")
    assert declined.end() == 1
    assert serve.ok("status", "--all", "-o", "json").json() == []


def test_control_c_while_waiting_leaves_the_service_coming_up(serve: Any) -> None:
    waiting = Terminal(serve, "up", HELLO, "-y", "--set", "run=sleep 600")
    waiting.until("STARTING")
    waiting.interrupt()
    assert waiting.end() == 130
    assert "keeps coming up" in waiting.seen
    assert "serve down hello" in waiting.seen
    assert serve.view("hello")["status"] == "REPLICA_INIT"
    watching = Terminal(serve, "status", "--watch", "hello")
    watching.until("hello/3")
    watching.interrupt()
    assert watching.end() == 0


def test_the_market_can_be_played_and_calmed(serve: Any) -> None:
    serve.ok("local", "market", "examples/02-preemption/market.yaml")
    room = {zone["zone"]: zone["spot_capacity"] for zone in serve.ok("local", "zones", "-o", "json").json()}
    assert set(room.values()) == {2}
    serve.ok("local", "capacity", "eu-b", "1")
    assert "0/1" in serve.ok("local", "zones").out
    serve.ok("local", "calm")
    assert "0/1" not in serve.ok("local", "zones").out
    assert serve("local", "preempt", "us-a").err == "no spot instance lives in us-a\n"
    as_status_shows_it = serve("local", "preempt", "local/us/us-a")
    assert (as_status_shows_it.code, as_status_shows_it.err) == (
        1,
        "no spot instance lives in local/us/us-a\n",
    )


def test_a_home_that_cannot_be_made_is_a_sentence(serve: Any, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    said = serve("controller", "start", env={"SKYSERVE_HOME": str(in_the_way / "home")})
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"no home can be made at {in_the_way}/home: ")
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("cloud", "word"), [("aws", "ec2:RunInstances"), ("gcp", "compute.instances.create")]
)
def test_the_permissions_of_a_cloud_are_printed_without_a_cloud(serve: Any, cloud: str, word: str) -> None:
    assert word in serve.ok("check", "--policy", cloud).out


def test_permissions_of_an_unknown_cloud_are_a_usage_error(serve: Any) -> None:
    said = serve("check", "--policy", "mars")
    assert said.code == 2
    assert "azure" in said.err
