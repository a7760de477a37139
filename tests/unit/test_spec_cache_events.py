"""`cache_events` of a service file: the options that commands of engines get, and the warnings where it has no effect."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from lb.config.options import CacheEvents
from skyserve_cli.spec import spec_from_json, spec_to_json
from skyserve_cli.spec.cache_events import with_options
from skyserve_cli.spec.load import load_text

VLLM = " --kv-events-config "


def words(run: str, port: str = "9000") -> list[str]:
    """The arguments that a shell makes of the command."""
    script = f'vllm() {{ printf "%s\\0" "$@"; }}; SKYSERVE_REPLICA_PORT={port}; {run}'
    made = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return made.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("run", "before"),
    [
        ("vllm serve Qwen/Qwen3-8B --max-model-len 8192", ["serve", "Qwen/Qwen3-8B"]),
        ("vllm serve \\\n  Qwen/Qwen3-8B \\\n  --port 1", ["serve", "Qwen/Qwen3-8B"]),
        ('vllm serve "$MODEL" --port 1', ["serve", ""]),
        ("vllm serve --model m", ["serve"]),
        ("vllm serve", ["serve"]),
        ("cd /tmp && vllm serve m & wait", ["serve", "m"]),
    ],
)
def test_vllm_gets_its_options_after_its_model(run: str, before: list[str]) -> None:
    found = words(with_options(run))
    at = found.index("--kv-events-config")
    assert found[:at] == before
    assert json.loads(found[at + 1]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:10000",
        "replay_endpoint": "tcp://*:11000",
    }
    assert found[at + 2] == "--enable-prompt-tokens-details"
    assert [one for one in found if one not in found[at : at + 3]] == words(run)


def test_without_a_port_of_the_replica_it_is_that_of_the_engine() -> None:
    found = words(with_options("vllm serve m"), port="")
    assert json.loads(found[3])["endpoint"] == "tcp://*:9000"


def test_other_engines_get_theirs() -> None:
    run = with_options("python3 -m sglang.launch_server --model-path m")
    found = shlex.split(run)
    assert found[:4] == ["python3", "-m", "sglang.launch_server", "--kv-events-config"]
    assert found[-3:] == ["--enable-cache-report", "--model-path", "m"]
    assert with_options("serve engine --port 1") == "serve engine --cache-events --port 1"
    assert with_options("python -m skyserve_cli.engine") == "python -m skyserve_cli.engine --cache-events"


@pytest.mark.parametrize(
    "run",
    [
        "vllm serve m --kv-events-config '{}'",
        "serve engine --cache-events",
        "./serve-my-engine",
        "evllm serves m",
    ],
)
def test_other_commands_stay_as_they_are(run: str) -> None:
    assert with_options(run) == run
    assert with_options(with_options(run)) == run


def loaded(
    run: str, *, on: bool = True, policy: str = "gorgo", cloud: str = "kubernetes"
) -> tuple[str, list[str]]:
    text = (
        f"resources: {{infra: {cloud}}}\n"
        f"service: {{load_balancing_policy: {policy}, load_balancer: {{cache_events: {str(on).lower()}}}}}\n"
        f"run: {json.dumps(run)}\n"
    )
    file = load_text(text)
    return file.spec.run, [one.message for one in file.warnings if one.path.endswith("cache_events")]


def test_a_file_turns_it_on() -> None:
    run, warned = loaded("vllm serve m")
    assert run == with_options("vllm serve m") != "vllm serve m"
    assert not warned
    assert loaded("vllm serve m", on=False) == ("vllm serve m", [])


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"policy": "round_robin"}, "no effect with load_balancing_policy round_robin"),
        ({"cloud": "aws"}, "replicas on aws: they are reached over TLS"),
        ({"run": "./mine"}, "publish its events by itself"),
    ],
)
def test_where_it_has_no_effect_the_file_is_warned_of(more: dict[str, str], part: str) -> None:
    _, warned = loaded(more.pop("run", "vllm serve m"), **more)  # type: ignore[arg-type]
    assert len(warned) == 1
    assert part in warned[0]


def test_it_survives_the_database() -> None:
    spec = load_text("service: {load_balancer: {cache_events: true}}\nrun: serve engine").spec
    assert spec.load_balancer.cache_events == CacheEvents(True)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
