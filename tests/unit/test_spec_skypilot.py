"""Shapes of SkyPilot's service files, in samples of our own: each is valid where no cloud is enabled."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyserve_cli.commands import files
from skyserve_cli.spec import SpecError
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.yaml_tree import key_lines, line_of

PROBE = "service: {readiness_probe: /health}\n"
SHAPES = {
    "a probe as a path": "service: {readiness_probe: /v1/models, replicas: 2}",
    "a probe as a mapping": "service: {readiness_probe: {path: /, initial_delay_seconds: 1800, headers: {X-A: b}}}",
    "post_data with a variable": "service: {readiness_probe: {path: /, post_data: {model: $MODEL}}}\nenvs: {MODEL: m}",
    "post_data as JSON": """service: {readiness_probe: {path: /, post_data: '{"n": 1}'}}""",
    "post_data with a variable that has no value": "service: {readiness_probe: {path: /, post_data: {m: $M}}}\nenvs: {M: null}",
    "a replica policy": "service: {readiness_probe: /, replica_policy: {min_replicas: 1, max_replicas: 3, target_qps_per_replica: 5}}",
    "SpotHedge": "service: {replica_policy: {min_replicas: 2, num_overprovision: 1, spot_placer: dynamic_fallback, dynamic_ondemand_fallback: true}}\nresources: {use_spot: true}",
    "a base of on-demand replicas": "service: {replica_policy: {min_replicas: 2, base_ondemand_fallback_replicas: 1}}\nresources: {use_spot: true}",
    "a policy of the load balancer": "service: {load_balancing_policy: round_robin}",
    "a port of the service": "service: {ports: 8080}\nresources: {ports: [8080, 9000]}",
    "a port as text": PROBE + "resources: {ports: '8080', cpus: 4+, memory: 16+}",
    "a set of accelerators": PROBE + "resources: {accelerators: {L4, A10g, A100-80GB}}",
    "a list of accelerators": PROBE + "resources: {accelerators: ['L4:1', 'A100:1']}",
    "a word of accelerators": PROBE + "resources: {accelerators: 'H100:8', disk_size: 512, disk_tier: best}",
    "secrets without values": PROBE + "secrets: {HF_TOKEN: null}",
    "secrets as a list": PROBE + "secrets: [HF_TOKEN]",
    "a container": PROBE + "resources: {image_id: 'docker:vllm/vllm-openai:latest'}",
    "infra with a wildcard": PROBE + "resources: {infra: gcp/*/us-central1-a, accelerators: L4}",
    "places in any_of": PROBE + "resources: {accelerators: L4, any_of: [{infra: aws/us-east-1}, {infra: gcp}]}",
    "places in order": PROBE + "resources: {ordered: [{infra: aws, accelerators: L4}, {infra: gcp, accelerators: A100}]}",
    "nodes": PROBE + "num_nodes: 2",
    "files outside the work directory": PROBE + "file_mounts: {/data: 's3://bucket/data', /vectordb: {name: b, mode: MOUNT}}",
    "TLS": "service: {tls: {keyfile: key.pem, certfile: crt.pem}}",
    "a work directory": PROBE + "workdir: .",
    "setup": PROBE + "setup: pip install vllm",
}  # fmt: skip

#: What SkyPilot rejects, too.
REJECTED = {
    "a range of replicas without a load to follow": "service: {replica_policy: {min_replicas: 1, max_replicas: 2}}",
    "a service that is a pool": PROBE + "pool: {workers: 1}",
}


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file to check; no cloud is enabled and no variable is set."""
    (tmp_path / "config.yaml").write_text("clouds: {}\n")
    monkeypatch.setenv("SKYSERVE_HOME", str(tmp_path))
    for name in ("HF_TOKEN", "M"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("key.pem", "crt.pem"):
        (tmp_path / name).touch()
    return tmp_path / "service.yaml"


@pytest.mark.parametrize("clouds", ["{}", "{local: {}}"], ids=["no cloud", "only this machine"])
@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_a_shape_is_valid_without_clouds_and_secrets(nowhere: Path, text: str, clouds: str) -> None:
    (nowhere.parent / "config.yaml").write_text(f"clouds: {clouds}\n")
    nowhere.write_text(f"{text}\nrun: serve\n")
    assert files.read(nowhere, to_run=False).spec.run == "serve"


@pytest.mark.parametrize("text", REJECTED.values(), ids=REJECTED.keys())
def test_what_skypilot_rejects_is_rejected(nowhere: Path, text: str) -> None:
    nowhere.write_text(f"{text}\nrun: serve\n")
    with pytest.raises(SpecError):
        files.read(nowhere, to_run=False)


def test_a_value_that_is_missing_is_a_warning_to_a_check_and_stops_a_launch(nowhere: Path) -> None:
    nowhere.write_text(f"{PROBE}secrets: {{HF_TOKEN: null}}\nrun: serve\n")
    (warning,) = files.read(nowhere, to_run=False).warnings
    assert (warning.path, "has no value" in warning.message) == ("secrets.HF_TOKEN", True)
    with pytest.raises(SpecError, match=r"secrets\.HF_TOKEN: has no value"):
        files.read(nowhere)


def test_sizes_on_your_own_hosts_are_one_warning() -> None:
    text = "service: {}\nrun: x\nresources: {infra: ssh, cpus: 4, memory: 16, disk_size: 100}"
    (warning,) = load_text(text).warnings
    assert warning.path == "resources.cpus"
    assert warning.message.endswith("the same holds for memory, disk_size")


def test_a_path_has_the_line_of_its_key_or_of_what_encloses_it() -> None:
    lines = key_lines("service:\n  replicas: 1\nresources:\n  any_of:\n    - cpus: 1\n    - infra: aws\n")
    assert [line_of(path, lines) for path in ("service.replicas", "resources.any_of[1].infra")] == [2, 6]
    assert [line_of(path, lines) for path in ("service.tls.keyfile", "run")] == [1, None]
    assert key_lines("a: [") == {}
