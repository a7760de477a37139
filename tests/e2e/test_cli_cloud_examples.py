"""Examples for rented machines: each is planned on the clouds it names, at the cost its README gives, and its file serves.

There is no GPU and no container here. So `resources` is the local cloud's, `setup` is left out, and the engines' programs are scripts
that start the simulated engine with the model and the port they were given. The rest of the file is as it is. Where there is
llama.cpp's server (see test_lb_llamacpp), the example of llama.cpp runs it, with a model of random weights.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.chaos.fleet import llama_server
from benchmarks.chaos.tiny_model import write_tiny_model
from tests.e2e.conftest import Serve, living_in

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FILES = {path.parent.name: path for path in sorted(ROOT.glob("examples/*/service.yaml"))}
RENTED = [name for name, path in FILES.items() if 10 < int(name[:2]) < 19]
LLAMA = "15-llama-cpp-without-a-gpu"
TOKEN = {"HF_TOKEN": "hf_not_a_real_token"}
CAN_ISOLATE = os.geteuid() == 0 and shutil.which("ip") is not None

_ENGINE = f'exec {sys.executable} -m skyserve_cli engine --host 0.0.0.0 --speed 20 --model "$model" --port "$port"\n'
_OPTIONS = """
while [ $# -gt 0 ]; do
  case "$1" in
    --port) port=$2; shift ;;
    --model-id|--model-path|--alias) model=$2; shift ;;
  esac
  shift
done
"""
STAND_INS = {
    "vllm": f'#!/bin/sh\n[ "$1" = serve ] || exit 2\nmodel=$2\n{_OPTIONS}{_ENGINE}',
    "text-generation-launcher": f"#!/bin/sh\n{_OPTIONS}{_ENGINE}",
    "llama-server": f"#!/bin/sh\n{_OPTIONS}{_ENGINE}",
    "python3": f"""#!/bin/sh
[ "$2" = sglang.launch_server ] || exec {sys.executable} "$@"
{_OPTIONS}{_ENGINE}""",
    "ray": '#!/bin/sh\ncase "$*" in *--block*) exec sleep infinity ;; esac\n',
    "text-embeddings-router": f"""#!/bin/sh
{_OPTIONS}exec {sys.executable} -c '
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Embeddings(BaseHTTPRequestHandler):
    def respond(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.respond(b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = [dict(index=i, embedding=[float(len(t))]) for i, t in enumerate(asked["input"])]
        self.respond(json.dumps(dict(data=data)).encode())

ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Embeddings).serve_forever()
' "$port"
""",
}


def described(example: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FILES[example].read_text())
    return content


def clouds(example: str) -> set[str]:
    resources = described(example)["resources"]
    alternatives = resources.get("any_of") or resources["ordered"]
    return {one["infra"].partition("/")[0] for one in alternatives}


def plan(serve: Any, example: str) -> Any:
    return serve.ok("plan", FILES[example], "-o", "json", "--limit", "5000", env=TOKEN).json()


@pytest.mark.parametrize("example", RENTED)
def test_it_is_valid_and_costs_what_its_readme_says(serve: Any, example: str) -> None:
    assert serve.ok("validate", FILES[example], "-o", "json", env=TOKEN).json()["warnings"] == []
    assert {one["cloud"] for one in plan(serve, example)["candidates"]} == clouds(example) - {"ssh"}
    printed = serve.ok("plan", FILES[example], env=TOKEN).out
    (usd,) = re.findall(r"^\d+ replicas? for \$([0-9.]+) per hour", printed, re.MULTILINE)
    expected = re.findall(r"\$([0-9.]+)\s+per\s+hour", (FILES[example].parent / "README.md").read_text())
    assert f"{float(usd):.2f}" in expected


def test_own_hosts_come_before_spot_instances(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not read by a plan")
    host = "{name: gpu-1, address: 10.0.0.1, accelerators: {L4: 1}}"
    with (serve.home / "config.yaml").open("a") as config:
        config.write(
            "clouds:\n  ssh:\n    pools:\n      rack:\n        user: ubuntu\n"
            f"        identity_file: {tmp_path / 'key'}\n        hosts: [{host}]\n  aws: {{}}\n  gcp: {{project: my-project}}\n"
        )
    launches = plan(serve, "18-own-hosts-and-spot")["launches"]
    assert [(one["cloud"], one["capacity_type"]) for one in launches] == [
        ("ssh", "on_demand"),
        ("aws", "spot"),
    ]


def localized(example: str, folder: Path) -> Path:
    """Return the example's file for this machine."""
    content = described(example)
    content.pop("setup", None)
    if example == LLAMA and llama_server():
        write_tiny_model(folder / "tiny.gguf")
        content["envs"]["MODEL"] = str(folder / "tiny.gguf")
        content["setup"] = "cp $MODEL model.gguf"
    content["resources"] = {"infra": "local", "use_spot": True, "ports": content["resources"]["ports"]}
    content["service"]["readiness_probe"] = {"path": "/health", "endpoint_probe_interval_seconds": 1}
    file = folder / f"{example}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        content: bytes = response.read()
    return content


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A home for all examples, whose controller has the stand-ins in its path."""
    folder = tmp_path_factory.mktemp("examples")
    programs = folder / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        real = llama_server() if name == "llama-server" else ()
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(real)} "$@"\n' if real else text)
        (programs / name).chmod(0o755)
    program = living_in(folder)
    serve = next(program)
    serve.environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    yield serve
    next(program, None)


@pytest.mark.skipif(not CAN_ISOLATE, reason="needs network namespaces, hence root")
@pytest.mark.parametrize("example", RENTED)
def test_it_serves(host: Serve, tmp_path: Path, example: str) -> None:
    url = host.ok("up", localized(example, tmp_path), "-y", env=TOKEN).out.strip()
    if example == "16-embeddings":
        data = json.loads(post(f"{url}/v1/embeddings", {"model": "m", "input": ["a", "bc"]}))["data"]
        assert [one["embedding"] for one in data] == [[1.0], [2.0]]
    elif example == "17-web-app-with-cookies":
        host.eventually(lambda: is_settled(host, url))
        seen = [visits(url, 3) for _ in range(12)]
        homes = [texts[0].split()[-1] for texts in seen]
        for home, texts in zip(homes, seen, strict=True):
            assert texts == [f"visit {visit} to replica {home}\n" for visit in (1, 2, 3)]
        assert len(set(homes)) > 1, "all visitors are with one replica"
    else:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            model = json.load(response)["data"][0]["id"]
        assert model in FILES[example].read_text()
        body = {
            "model": model,
            "stream": True,
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "hi"}],
        }
        assert b"data: [DONE]" in post(f"{url}/v1/chat/completions", body)
    host.ok("down", "--all", "--purge", "-y")


def is_settled(serve: Any, url: str) -> bool:
    """Return whether the fleet is as it stays: a replica that joins takes a share of the sessions, one that leaves gives its own up."""
    replicas = serve.view("counter")["replicas"]
    if [(one["state"], one["capacity_type"]) for one in replicas] != [("READY", "spot")] * 3:
        return False
    homes = {visits(url, 1)[0].split()[-1] for _ in range(12)}
    return homes == {str(one["id"]) for one in replicas}


def visits(url: str, times: int) -> list[str]:
    """Return the page as one browser sees it, several times."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    texts = []
    for _ in range(times):
        with browser.open(f"{url}/", timeout=30) as response:
            texts.append(response.read().decode())
    return texts
