"""`serve init` as a user runs it: what it writes is valid, can be planned, and serves on the local cloud, without editing.

The engines' programs are scripts that start the simulated engine with the model, the address and the port that they were given.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.schedules import only_long
from tests.e2e.test_cli_words import Terminal
from tests.unit.starter_files import COMMANDS, COMPOSE, SKYPILOT

SECRETS = dict.fromkeys(("HF_TOKEN", "VLLM_API_KEY", "AUTH_TOKEN"), "of-the-tests")
CLOUDS = ("--cloud", "aws", "--cloud", "gcp", "--cloud", "azure")
CAN_ISOLATE = os.geteuid() == 0 and shutil.which("ip") is not None

_OPTIONS = """
host=127.0.0.1
while [ $# -gt 0 ]; do
  case "$1" in
    --port) port=$2; shift ;;
    --host|--hostname) host=$2; shift ;;
    --model-id|--model-path|-hf) model=$2; shift ;;
  esac
  shift
done
"""
_ENGINE = f'exec {sys.executable} -m skyserve_cli engine --host "$host" --speed 20 --model "$model" --port "$port"\n'
_OLLAMA = f"""#!{sys.executable}
import json, os, subprocess, sys, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

host, _, port = os.environ["OLLAMA_HOST"].rpartition(":")
pulled = os.path.join(os.environ["MODELS"], "pulled")
if sys.argv[1] == "list":
    urllib.request.urlopen(f"http://127.0.0.1:{{port}}/api/tags").read()
elif sys.argv[1] == "pull":
    open(pulled, "w").write(sys.argv[2])
else:
    model = open(pulled).read() if os.path.exists(pulled) else "none"
    words = ["-m", "skyserve_cli", "engine", "--port", "21434", "--speed", "20", "--model", model]
    engine = subprocess.Popen([sys.executable, *words])

    while engine.poll() is None:
        try:
            urllib.request.urlopen("http://127.0.0.1:21434/health").read()
            break
        except OSError:
            time.sleep(0.1)

    class Front(BaseHTTPRequestHandler):
        def respond(self, body):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def relay(self, data=None):
            request = urllib.request.Request(f"http://127.0.0.1:21434{{self.path}}", data, {{"Content-Type": "application/json"}})
            self.respond(urllib.request.urlopen(request).read())
        def do_GET(self):
            self.respond(json.dumps({{"models": [{{"name": model}}]}}).encode()) if self.path == "/api/tags" else self.relay()
        def do_POST(self):
            self.relay(self.rfile.read(int(self.headers["Content-Length"])))

    try:
        ThreadingHTTPServer((host, int(port)), Front).serve_forever()
    finally:
        engine.kill()
"""
STAND_INS = {
    "vllm": f'#!/bin/sh\n[ "$1" = serve ] || exit 2\nmodel=$2\n{_OPTIONS}{_ENGINE}',
    "text-generation-launcher": f"#!/bin/sh\n{_OPTIONS}{_ENGINE}",
    "llama-server": f"#!/bin/sh\n{_OPTIONS}{_ENGINE}",
    "python3": f'#!/bin/sh\n[ "$2" = sglang.launch_server ] || exec {sys.executable} "$@"\n{_OPTIONS}{_ENGINE}',
    "ollama": _OLLAMA,
}


def written(serve: Any, folder: Path, *words: str) -> Path:
    file = folder / "service.yaml"
    serve.ok("init", "--output", file, "--yes", *words, cwd=folder)
    return file


def insist_on_use(serve: Any, file: Path) -> None:
    """What was written is right without a warning, and has a plan."""
    said = serve.ok("validate", file, "-o", "json", env=SECRETS, cwd=file.parent)
    foreign = ("not acted on", "this cloud is not supported", "the name of a service")
    assert [each for each in said.json()["warnings"] if not each["message"].startswith(foreign)] == []
    assert serve.ok("plan", file, "-o", "json", env=SECRETS, cwd=file.parent).json()["candidates"]


@pytest.mark.parametrize("engine", COMMANDS)
def test_the_file_of_a_command_is_right_and_has_a_plan(serve: Any, tmp_path: Path, engine: str) -> None:
    insist_on_use(serve, written(serve, tmp_path, "--from-command", COMMANDS[engine], *CLOUDS))


@pytest.mark.parametrize("name", COMPOSE)
def test_the_file_of_a_compose_file_is_right_and_has_a_plan(serve: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE[name])
    service = ["--service", "vllm"] if "webui" in COMPOSE[name] else []
    insist_on_use(serve, written(serve, tmp_path, "--from-compose", "compose.yaml", *service, *CLOUDS))


@pytest.mark.parametrize("name", SKYPILOT)
def test_the_file_of_skypilot_is_right_and_has_a_plan(serve: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "sky.yaml").write_text(SKYPILOT[name])
    insist_on_use(serve, written(serve, tmp_path, "--from-skypilot", "sky.yaml"))


def test_what_init_cannot_know_is_said_at_once(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "sky.yaml").write_text("service: {}\nfile_mounts: {/data: ./gone}\nrun: server\n")
    said = serve("init", "--from-skypilot", "sky.yaml", cwd=tmp_path)
    assert said.code == 1
    assert "service.yaml is written, and is not right yet:\nfile_mounts" in said.err
    assert (tmp_path / "service.yaml").is_file()


@pytest.mark.long
@pytest.mark.skipif(not CAN_ISOLATE, reason="needs network namespaces, hence root")
@pytest.mark.parametrize(
    "engine", [pytest.param(one, marks=() if one in ("vllm", "ollama") else only_long) for one in COMMANDS]
)
def test_what_was_written_serves(serve: Any, tmp_path: Path, engine: str) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    serve.environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "MODELS": str(tmp_path), **SECRETS}
    file = written(serve, tmp_path, "--from-command", COMMANDS[engine], "--cloud", "local", "--name", "chat")
    serve.ok("up", file, "-y", "--set", "service.readiness_probe.endpoint_probe_interval_seconds=1")
    found = serve.ok("test", "chat", "-o", "json").json()
    assert found["serves"]
    assert {check["check"]: check["result"] for check in found["checks"]} == {
        "models": "ok", "chat": "ok", "stream": "ok", "tools": "note", "latency": "ok",
    }  # fmt: skip
    assert found["checks"][0]["found"] in COMMANDS[engine]


# --- questions ---


def test_every_question_is_an_option(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    said = serve.ok(
        "init", "--engine", "vllm", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "L40S:2", "--cloud", "gcp",
        "--spot", "--name", "mine", "--output", file,
    )  # fmt: skip
    assert f"wrote {file}; next: serve validate {file}" in said.err
    spec = serve.ok("validate", file, "-o", "json").json()["spec"]
    (choice,) = spec["resources"]
    assert (spec["name"], choice["cloud"], choice["accelerator"], choice["accelerator_count"], choice["use_spot"]) == (
        "mine", "gcp", "L40S", 2, True,
    )  # fmt: skip


def test_ctrl_c_at_a_question_writes_nothing(serve: Any, tmp_path: Path) -> None:
    terminal = Terminal(serve, "init", "--output", tmp_path / "s.yaml")
    terminal.until("Engine")
    assert terminal.decline() == 130
    assert "interrupted; nothing was written" in terminal.seen
    assert not (tmp_path / "s.yaml").exists()


@pytest.mark.parametrize(("cloud", "copied"), [("local", False), ("gcp", True)])
def test_a_model_of_this_machine_is_copied_to_others(
    serve: Any, tmp_path: Path, cloud: str, copied: bool
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    file = written(serve, tmp_path, "--from-command", f"llama-server -m {model}", "--cloud", cloud)
    assert ("file_mounts" in file.read_text()) == copied
    insist_on_use(serve, file)


def test_the_tutorial_shows_what_is_written(serve: Any) -> None:
    page = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
    (line,) = re.findall(r"^\$ serve init (--engine .*)$", page, re.MULTILINE)
    block = page.partition("GPUs that the weights fit in:\n\n```yaml\n")[2].partition("```")[0]
    said = serve.ok("init", *line.split(), "--output", "-")
    assert said.out.partition("\n\n")[2] == block


def test_without_a_gpu(serve: Any) -> None:
    said = serve.ok(
        "init", "--engine", "llama.cpp", "--yes", "--gpu", "none", "--cloud", "aws", "--output", "-"
    )
    assert "accelerators" not in said.out
    assert "cpus: 4+" in said.out


def test_questions_are_asked_on_a_terminal(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    terminal = Terminal(serve, "init", "--output", file)
    for question, reply in (
        ("Engine", "sglang\n"),
        ("Model", "Qwen/Qwen2.5-32B-Instruct\n"),
        ("Clouds", "gcp, aws\n"),
        ("GPU", "H100:2\n"),
    ):
        terminal.until(question)
        terminal.type(reply)
    assert terminal.end() == 0
    spec = serve.ok("validate", file, "-o", "json").json()["spec"]
    assert [(choice["cloud"], choice["accelerator"]) for choice in spec["resources"]] == [
        ("gcp", "H100"),
        ("aws", "H100"),
    ]
    assert "sglang.launch_server" in spec["run"]


def test_what_is_lost_is_on_stderr_and_in_a_comment(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE["SGLang alone"])
    said = serve.ok(
        "init", "--from-compose", "compose.yaml", "--yes", "--cloud", "gcp", "--output", "-", cwd=tmp_path
    )
    for lost in ("network_mode", "ulimits", "shm_size: 32g"):
        assert any(line.startswith("note: ") and lost in line for line in said.err.splitlines())
        assert any(line.startswith("#") and lost in line for line in said.out.splitlines())


def test_a_file_is_overwritten_with_force_only(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("mine")
    said = serve("init", "--yes", cwd=tmp_path)
    assert (said.code, file.read_text()) == (2, "mine")
    assert "service.yaml exists; pass --force" in said.err
    serve.ok("init", "--yes", "--force", cwd=tmp_path)
    assert "vllm serve" in file.read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "pass --engine, or --yes to take vllm"),
        (["--engine", "vllm"], "pass --model, or --yes"),
        (["--engine", "vllm", "--model", "m"], "pass --cloud, or --yes"),
        (["--from-command", "vllm serve m", "--cloud", "aws"], "pass --gpu, or --yes"),
        (
            ["--from-command", "python3 server.py", "--yes"],
            "--from-command: the command starts none of: vllm serve",
        ),
        (["--from-command", "vllm serve m", "--model", "m"], "--engine and --model are questions"),
        (["--from-command", "vllm serve m", "--from-compose", "f"], "choose one of"),
        (["--from-compose", "nothing.yaml", "--yes"], "--from-compose nothing.yaml: No such file"),
        (["--from-skypilot", "nothing.yaml"], "--from-skypilot nothing.yaml: No such file"),
        (
            ["--from-skypilot", "nothing.yaml", "--gpu", "L4"],
            "--gpu: --from-skypilot keeps what the file says",
        ),
        (["--yes", "--cloud", "nebula"], "--cloud nebula: no such cloud"),
        (["--yes", "--name", "1a"], "--name 1a"),
        (["--yes", "--service", "a"], "--service is for --from-compose"),
    ],
)
def test_what_makes_no_sense_is_rejected(
    serve: Any, tmp_path: Path, words: list[str], complaint: str
) -> None:
    said = serve("init", *words, cwd=tmp_path)
    assert said.code == 2, said
    assert complaint in said.err
    assert not (tmp_path / "service.yaml").exists()


def test_a_compose_file_with_several_services_needs_a_name(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE["vLLM beside a web page"])
    said = serve("init", "--from-compose", "compose.yaml", "--yes", cwd=tmp_path)
    assert (said.code, "pass --service, one of vllm, webui" in said.err) == (2, True), said


# --- warnings ---


def test_warnings_are_printed_by_validate_plan_and_up(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "service: {readiness_probe: /health}\nresources:\n  infra: local\n  ports: 8000\n"
        "run: vllm serve org/m --port 8001\n"
    )
    warning = "resources.ports: requests go to 8000, and vLLM listens on --port 8001"
    said = serve.ok("validate", file, "-o", "json")
    assert f"{file}:4: warning: {warning}" in said.err
    (found,) = said.json()["warnings"]
    assert (found["path"], found["line"]) == ("resources.ports", 4)
    for words in (["plan", file], ["up", file, "--dry-run"]):
        assert f"warning: {warning}" in serve.ok(*words).err


@pytest.mark.parametrize("words", [["validate"], ["plan"], ["up", "--dry-run"]])
def test_a_size_that_is_fixed_at_0_is_an_error(serve: Any, tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        "service:\n  replica_policy:\n    min_replicas: 0\nresources: {infra: local}\nrun: serve engine\n"
    )
    said = serve(*words, file)
    assert said.code == 2, said
    assert "service.replica_policy.min_replicas: needs max_replicas" in said.err
    assert json.dumps("write max_replicas: 1")[1:-1] in said.err
