"""Every shape of the SkyServe paper's listing and of SkyPilot's service files that has to be understood."""

from textwrap import dedent

import pytest

from lb.config.options import Limits
from policies.goals import ScalingGoal
from skyserve_cli.spec import AcceleratorQps, GitSource, ResourceChoice, ServiceSpec, SpecError, Tls
from skyserve_cli.spec.load import load_text

# Listing 1 of the SkyServe paper (arXiv 2411.01438) without its comments. `setup` and `run` stand under
# `resources` there, there is no `min_replicas`, and `use_spot` is not said.
LISTING_1 = """
service:
  readiness_probe:
    path: /v1/chat/completions
  replica_policy:
    target_qps_per_replica: 1
    num_overprovision: 2
    dynamic_ondemand_fallback: true
    spot_placer: dynamic_fallback
resources:
  ports: 8080
  accelerators: A100
  any_of:
    - cloud: aws
      region: us-east-1
    - cloud: gcp
  setup: pip install -r requirements.txt
  run: python llm_server.py --port 8080
"""


SERVES = "service: {}\nrun: serve\n"


def spec_of(text: str, **options: object) -> ServiceSpec:
    text = dedent(text)
    if "service:" not in text:
        text = f"service: {{}}\n{text}"
    if "run:" not in text:
        text = f"{text}\nrun: serve\n"
    return load_text(text, **options).spec  # type: ignore[arg-type]


def test_the_listing_of_the_paper_is_understood() -> None:
    loaded = load_text(LISTING_1)
    spec = loaded.spec
    assert (spec.setup, spec.run) == (
        "pip install -r requirements.txt",
        "python llm_server.py --port 8080",
    )
    assert spec.port == 8080
    assert spec.probe.path == "/v1/chat/completions"
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (1, 1)
    assert spec.placement.num_overprovision == 2
    assert spec.placement.dynamic_ondemand_fallback
    assert spec.placement.placer == "spothedge"
    assert [(c.cloud, c.region, c.accelerator, c.use_spot) for c in spec.resources] == [
        ("aws", "us-east-1", "A100", True),
        ("gcp", None, "A100", True),
    ]
    assert {"resources.setup", "resources.run"} <= {warning.path for warning in loaded.warnings}


ACCELERATORS = {
    "one": ("L4", [("L4", 1)], False),
    "one with a count": ("L4:2", [("L4", 2)], False),
    "half of one": ("L4:0.5", [("L4", 0.5)], False),
    "a mapping with counts": ("{L4: 1, A100-80GB: 8}", [("L4", 1), ("A100-80GB", 8)], False),
    "a mapping of names": ("{L4, A10g, A100-80GB}", [("L4", 1), ("A10g", 1), ("A100-80GB", 1)], False),
    "a mapping of names with counts": ("{A100-80GB:8, H100:8}", [("A100-80GB", 8), ("H100", 8)], False),
    "a list": ("[L4, A100:8]", [("L4", 1), ("A100", 8)], True),
    "a list of one": ("[L4]", [("L4", 1)], False),
    "a name of two words": ("Gaudi HL-205:8", [("Gaudi HL-205", 8)], False),
    "one with spaces around it": ("' L4 : 2 '", [("L4", 2)], False),
    "a TPU": ("tpu-v5litepod-8", [("tpu-v5litepod-8", 1)], False),
    "none": ("", [(None, 0)], False),
}


@pytest.mark.parametrize("key", ["accelerators", "gpus"])
@pytest.mark.parametrize(("text", "choices", "ordered"), ACCELERATORS.values(), ids=ACCELERATORS.keys())
def test_accelerators(key: str, text: str, choices: list[tuple[str, float]], ordered: bool) -> None:
    spec = spec_of(f"resources: {{{key}: {text}}}")
    assert [(c.accelerator, c.accelerator_count) for c in spec.resources] == choices
    assert spec.resources_ordered is ordered


PLACES = {
    "a cloud": ("infra: aws", ("aws", None, None)),
    "a cloud in capitals": ("infra: AWS", ("aws", None, None)),
    "a region": ("infra: aws/us-east-1", ("aws", "us-east-1", None)),
    "a zone": ("infra: gcp/us-central1/us-central1-a", ("gcp", "us-central1", "us-central1-a")),
    "a zone in any region": ("infra: gcp/*/us-central1-a", ("gcp", None, "us-central1-a")),
    "a region of any cloud": ("infra: '*/us-east-1'", (None, "us-east-1", None)),
    "anywhere": ("infra: '*'", (None, None, None)),
    "the older keys": ("cloud: GCP, region: us-central1, zone: us-central1-a", ("gcp", "us-central1", "us-central1-a")),
    "a zone that is a number": ("cloud: azure, region: eastus, zone: 1", ("azure", "eastus", "1")),
    "a pool of machines": ("infra: ssh/my-pool", ("ssh", "my-pool", None)),
    "this machine": ("infra: local", ("local", None, None)),
    "nothing": ("", (None, None, None)),
}  # fmt: skip


@pytest.mark.parametrize(("text", "place"), PLACES.values(), ids=PLACES.keys())
def test_places(text: str, place: tuple[str | None, str | None, str | None]) -> None:
    (choice,) = spec_of(f"resources: {{{text}}}").resources
    assert (choice.cloud, choice.region, choice.zone) == place


def test_alternatives_are_laid_over_the_base() -> None:
    spec = spec_of(
        """
        resources:
          infra: gcp
          cpus: 8+
          labels: {team: a}
          use_spot: true
          any_of:
            - region: us-east1
              labels: {tier: b}
            - infra: aws/us-west-2
              cpus: 16
              use_spot: false
        """
    )
    assert spec.resources == (
        ResourceChoice("gcp", "us-east1", use_spot=True, cpus="8+", labels=(("team", "a"), ("tier", "b"))),
        ResourceChoice("aws", "us-west-2", use_spot=False, cpus="16", labels=(("team", "a"),)),
    )
    assert not spec.resources_ordered


def test_an_alternative_on_another_cloud_leaves_the_region_of_the_base_behind() -> None:
    spec = spec_of(
        """
        resources:
          infra: aws/us-east-1
          any_of: [{cloud: aws}, {cloud: gcp}, {cloud: gcp, region: us-west1}, {infra: azure}]
        """
    )
    assert [(c.cloud, c.region) for c in spec.resources] == [
        ("aws", "us-east-1"), ("gcp", None), ("gcp", "us-west1"), ("azure", None),
    ]  # fmt: skip


@pytest.mark.parametrize("base", ["infra: kubernetes/prod", "infra: k8s/prod", "cloud: k8s, region: prod"])
@pytest.mark.parametrize("cloud", ["k8s", "K8s", "kubernetes"])
def test_an_alternative_on_the_same_cloud_by_another_name_keeps_the_region(base: str, cloud: str) -> None:
    (choice,) = spec_of(f"resources: {{{base}, any_of: [{{cloud: {cloud}, accelerators: L4}}]}}").resources
    assert (choice.cloud, choice.region) == ("kubernetes", "prod")


def test_places_of_no_certain_cloud() -> None:
    spec = spec_of("resources: {use_spot: true, any_of: [{zone: us-central1-a}, {region: us-east1}]}")
    assert [(c.cloud, c.region, c.zone) for c in spec.resources] == [
        (None, None, "us-central1-a"), (None, "us-east1", None),
    ]  # fmt: skip


def test_every_accelerator_meets_every_alternative() -> None:
    menu = "resources: {accelerators: %s, any_of: [{cloud: aws}, {cloud: gcp}]}"
    unordered = spec_of(menu % "{L4: 1, A100: 1}")
    assert [(c.accelerator, c.cloud) for c in unordered.resources] == [
        ("L4", "aws"), ("A100", "aws"), ("L4", "gcp"), ("A100", "gcp"),
    ]  # fmt: skip
    preferred = spec_of(menu % "[A100, L4]")
    assert [(c.accelerator, c.cloud) for c in preferred.resources] == [
        ("A100", "aws"), ("A100", "gcp"), ("L4", "aws"), ("L4", "gcp"),
    ]  # fmt: skip
    assert preferred.resources_ordered


def test_an_ordered_list_keeps_its_order() -> None:
    spec = spec_of("resources: {ordered: [{accelerators: V100}, {accelerators: T4}], use_spot: true}")
    assert [c.accelerator for c in spec.resources] == ["V100", "T4"]
    assert spec.resources_ordered


def test_a_cloud_we_do_not_have_is_left_out_where_others_remain() -> None:
    loaded = load_text(
        "service: {}\nrun: x\nresources: {any_of: [{infra: slurm/main}, {infra: aws}, {cloud: OCI}]}"
    )
    assert [c.cloud for c in loaded.spec.resources] == ["aws"]
    assert [warning.path for warning in loaded.warnings] == [
        "resources.any_of[0].infra",
        "resources.any_of[2].cloud",
    ]
    assert all("left out" in warning.message for warning in loaded.warnings)


SPOT = {
    "nothing said": ("", "", False),
    "spot asked for": ("", "use_spot: true", True),
    "spot by the placer": ("spot_placer: Dynamic_Fallback", "", True),
    "spot by the fallback": ("dynamic_ondemand_fallback: true", "", True),
    "spot by the base": ("base_ondemand_fallback_replicas: 1", "", True),
    "a fallback that is off": ("dynamic_ondemand_fallback: false", "", False),
    "a base of 0": ("base_ondemand_fallback_replicas: 0", "use_spot: false", False),
    "over-provisioning alone": ("num_overprovision: 1", "", False),
}


@pytest.mark.parametrize(("policy", "resources", "use_spot"), SPOT.values(), ids=SPOT.keys())
def test_what_implies_spot(policy: str, resources: str, use_spot: bool) -> None:
    spec = spec_of(f"service: {{replica_policy: {{{policy}}}}}\nresources: {{{resources}}}")
    assert [choice.use_spot for choice in spec.resources] == [use_spot]


def test_markets_may_be_mixed_where_no_knob_asks_for_spot() -> None:
    spec = spec_of("resources: {any_of: [{use_spot: true}, {use_spot: false}]}")
    assert [choice.use_spot for choice in spec.resources] == [True, False]


SIZES = {
    "nothing said": ("", (1, 1), False),
    "a fixed number": ("replicas: 3", (3, 3), False),
    "a number in quotes": ('replicas: "3"', (3, 3), False),
    "a minimum": ("replica_policy: {min_replicas: 2}", (2, 2), False),
    "a range": (
        "replica_policy: {min_replicas: 0, max_replicas: 3, target_qps_per_replica: 0.5}",
        (0, 3),
        True,
    ),
    "an empty policy": ("replica_policy: {}", (1, 1), False),
    "a policy without anything": ("replica_policy:", (1, 1), False),
}


@pytest.mark.parametrize(("text", "size", "autoscaling"), SIZES.values(), ids=SIZES.keys())
def test_sizes(text: str, size: tuple[int, int], autoscaling: bool) -> None:
    scaling = spec_of(f"service:\n  readiness_probe: /\n  {text}").scaling
    assert (scaling.min_replicas, scaling.max_replicas) == size
    assert scaling.autoscaling is autoscaling


def test_a_target_for_each_accelerator() -> None:
    spec = spec_of(
        """
        service:
          load_balancing_policy: Instance_Aware_Least_Load
          replica_policy: {min_replicas: 1, max_replicas: 4, target_qps_per_replica: {"A100-80GB:2": 5, A10g: 1.5}}
        resources: {accelerators: {A100-80GB: 2, A10g: 1}}
        """
    )
    assert spec.load_balancing_policy == "instance_aware_least_load"
    assert spec.scaling.target_qps_by_accelerator == (
        AcceleratorQps("A100-80GB", 2.0, 5.0),
        AcceleratorQps("A10g", None, 1.5),
    )
    assert spec.scaling.target_qps_per_replica == 1.5


def test_concurrency_may_be_the_target() -> None:
    spec = spec_of(
        """
        service:
          replica_policy:
            {min_replicas: 0, max_replicas: 4, target_ongoing_requests_per_replica: 7.5, load_window_seconds: 20}
        """
    )
    assert spec.scaling == ScalingGoal(0, 4, target_ongoing_requests_per_replica=7.5)
    assert (spec.load_window_s, spec.scaling.autoscaling) == (20.0, True)


def test_engines_may_say_how_large_a_fleet_should_be() -> None:
    def scaling(keys: str) -> ScalingGoal:
        return spec_of(f"service: {{replica_policy: {{max_replicas: 4, {keys}}}}}").scaling

    alone = scaling("target_kv_cache_usage: 0.8")
    assert alone == ScalingGoal(1, 4, target_kv_cache_usage=0.8)
    beside = scaling("target_kv_cache_usage: 1, target_queue_length: 2, target_qps_per_replica: 3")
    assert (beside.target_queue_length, beside.target_qps_per_replica) == (2.0, 3.0)


@pytest.mark.parametrize(
    "key",
    ["target_qps_per_replica", "target_ongoing_requests_per_replica", "target_kv_cache_usage"],
    ids=["rate", "concurrency", "cache"],
)
def test_a_target_of_a_fixed_size_is_pointed_out(key: str) -> None:
    (warning,) = load_text(f"service: {{replica_policy: {{min_replicas: 2, {key}: 1}}}}\nrun: x").warnings
    assert (warning.path, "the size is fixed at 2" in warning.message) == (
        f"service.replica_policy.{key}",
        True,
    )


TARGETS = {
    "every accelerator has one": ("{H100: 3, L4: 1}", []),
    "with and without a count": ('{"H100:1": 3, H100: 2, L4: 1}', []),
    "in another case": ("{h100: 3, l4: 1}", []),
    "one nobody asked for": ("{H100: 3, L4: 1, T4: 1}", ['names "T4"']),
    "one is missing": ("{H100: 3}", ["no value for L4:1"]),
    "of another count": ('{"H100:8": 3, L4: 1}', ['names "H100:8"', "no value for H100:1"]),
}


@pytest.mark.parametrize(("targets", "said"), TARGETS.values(), ids=TARGETS.keys())
def test_targets_that_do_not_match_the_accelerators_are_pointed_out(targets: str, said: list[str]) -> None:
    loaded = load_text(
        f"""
        service:
          load_balancing_policy: instance_aware_least_load
          replica_policy: {{min_replicas: 1, max_replicas: 2, target_qps_per_replica: {targets}}}
        resources: {{accelerators: {{H100: 1, L4: 1}}}}
        run: serve
        """
    )
    path = "service.replica_policy.target_qps_per_replica"
    about = [w.message for w in loaded.warnings if w.path == path]
    assert [piece in message for piece, message in zip(said, about, strict=True)] == [True] * len(said)


PORTS = {
    "one": ("", "8080", (8080,), 8080),
    "one in quotes": ("", '"8080"', (8080,), 8080),
    "one in a list": ("", "[8080]", (8080,), 8080),
    "several with a main one": ("ports: 8001", '["8000-8002", 9000]', (8000, 8001, 8002, 9000), 8001),
    "none": ("", "", (), None),
    "only a main one": ("ports: 80", "", (80,), 80),
}


@pytest.mark.parametrize(("main", "text", "ports", "port"), PORTS.values(), ids=PORTS.keys())
def test_ports(main: str, text: str, ports: tuple[int, ...], port: int | None) -> None:
    spec = spec_of(f"service: {{{main}}}\nresources: {{ports: {text}}}")
    assert (spec.ports, spec.port) == (ports, port)


PROBES = {
    "nothing": ("", "/", None, "GET"),
    "a path": ("/health", "/health", None, "GET"),
    "a mapping": ("{path: /health}", "/health", None, "GET"),
    "a payload": ("{path: /v1, post_data: {n: 1}}", "/v1", '{"n": 1}', "POST"),
    "a payload as text": ("{path: /v1, post_data: '{\"n\": 1}'}", "/v1", '{"n": 1}', "POST"),
}


@pytest.mark.parametrize(("text", "path", "post_data", "method"), PROBES.values(), ids=PROBES.keys())
def test_probes(text: str, path: str, post_data: str | None, method: str) -> None:
    probe = spec_of(f"service: {{readiness_probe: {text}}}").probe
    assert (probe.path, probe.post_data, probe.method) == (path, post_data, method)


IMAGES = {
    "docker": ("docker:vllm/vllm-openai:latest", (("*", "docker:vllm/vllm-openai:latest"),)),
    "docker as a key": ("{docker: 'python:3.12'}", (("*", "docker:python:3.12"),)),
    "one for each region": (
        "{us-east-1: ami-1, us-west-2: ami-2}",
        (("us-east-1", "ami-1"), ("us-west-2", "ami-2")),
    ),
}


@pytest.mark.parametrize(("text", "images"), IMAGES.values(), ids=IMAGES.keys())
def test_images(text: str, images: tuple[tuple[str, str], ...]) -> None:
    assert spec_of(f"resources: {{image_id: {text}}}").resources[0].images == images


MEMORIES = {
    "a number": ("16", "16"),
    "part of one": ("0.5", "0.5"),
    "at least": ("16+", "16+"),
    "with a unit": ("16GB", "16"),
    "at least, with a unit": ("16gb+", "16+"),
    "in gibibytes": ("16Gi", "16"),
    "in megabytes": ("1536MB", "1.5"),
    "in terabytes": ("1TB+", "1024+"),
    "for each CPU": ("4x", "4x"),
}


@pytest.mark.parametrize(("text", "memory"), MEMORIES.values(), ids=MEMORIES.keys())
def test_memory_is_in_gigabytes(text: str, memory: str) -> None:
    assert spec_of(f"resources: {{memory: {text}}}").resources[0].memory == memory


DISKS = {
    "a number": ("512", 512),
    "a number in quotes": ('"512"', 512),
    "with a unit": ("512gb", 512),
    "in gibibytes": ("512Gi", 512),
    "in megabytes": ("102400MB", 100),
    "in terabytes": ("2Ti", 2048),
    "in petabytes": ("1PB", 1 << 20),
}


@pytest.mark.parametrize(("text", "size_gb"), DISKS.values(), ids=DISKS.keys())
def test_disks_are_in_gigabytes(text: str, size_gb: int) -> None:
    assert spec_of(f"resources: {{disk_size: {text}}}").resources[0].disk_size_gb == size_gb


def test_disks_and_sizes() -> None:
    (choice,) = spec_of(
        "resources: {disk_size: 1TB, disk_tier: BEST, cpus: 4+, memory: 16, max_hourly_cost: 2}"
    ).resources
    assert (choice.disk_size_gb, choice.disk_tier, choice.cpus, choice.memory, choice.max_usd_hour) == (
        1024, "best", "4+", "16", 2.0,
    )  # fmt: skip


def test_everything_else_in_a_service() -> None:
    spec = spec_of(
        """
        service:
          tls: {keyfile: k.pem, certfile: c.pem}
          load_balancer: {stream_timeout_seconds: 5, time_to_first_byte_seconds: 7}
          load_balancing_policy: Round_Robin
          drain_timeout_seconds: 0
        workdir: .
        num_nodes: 2
        """
    )
    assert spec.tls == Tls("k.pem", "c.pem")
    assert spec.load_balancer.limits == Limits(idle_timeout_s=5.0, time_to_first_byte_s=7.0)
    assert (spec.load_balancing_policy, spec.drain_timeout_s) == ("round_robin", 0.0)
    assert (spec.workdir, spec.workdir_git, spec.num_nodes) == (".", None, 2)


def test_paths_may_be_given_as_secrets() -> None:
    loaded = load_text(
        """
        service: {tls: {keyfile: $KEY_PATH, certfile: "${FOLDER}/cert.pem"}}
        envs: {FOLDER: /etc/certs}
        secrets: {KEY_PATH: , CODE: ./server}
        workdir: $CODE
        run: serve
        """,
        environ={"KEY_PATH": "/etc/certs/key.pem"},
    )
    assert loaded.spec.tls == Tls("/etc/certs/key.pem", "/etc/certs/cert.pem")
    assert loaded.spec.workdir == "./server"
    assert [str(warning) for warning in loaded.warnings] == [
        "service.tls.keyfile: the secret KEY_PATH is used as a path: its value is stored and shown",
        "workdir: the secret CODE is used as a path: its value is stored and shown",
    ]


def test_a_token_in_the_address_of_a_repository_stays_a_reference() -> None:
    spec = spec_of("workdir: {url: 'https://$TOKEN@example.com/r.git'}\nsecrets: {TOKEN: hunter2}")
    assert spec.workdir_git == GitSource("https://$TOKEN@example.com/r.git")


def test_secrets_may_be_written_as_references_to_a_server() -> None:
    loaded = load_text(f"secrets: {{'secrets:TOKEN': }}\n{SERVES}", environ={"TOKEN": "hunter2"})
    assert (loaded.spec.secrets, dict(loaded.secret_values)) == (("TOKEN",), {"TOKEN": "hunter2"})


NAMES = {
    "dashes": ("llama-3-1", "llama-3-1", 0),
    "underscores and dots": ("Llama_3.1", "Llama-3-1", 1),
    "runs of them": ("my__chat.-x", "my-chat--x", 1),
}


@pytest.mark.parametrize(("text", "name", "warnings"), NAMES.values(), ids=NAMES.keys())
def test_the_name_of_a_task_names_the_service(text: str, name: str, warnings: int) -> None:
    loaded = load_text(f"name: {text}\n{SERVES}")
    assert loaded.spec.name == name
    assert [warning.path for warning in loaded.warnings] == ["name"] * warnings


def test_an_empty_setup_is_none() -> None:
    assert spec_of("setup: ''").setup is None


def test_a_working_directory_from_git() -> None:
    spec = spec_of("workdir: {url: 'https://example.com/r.git', ref: main}")
    assert (spec.workdir, spec.workdir_git) == (None, GitSource("https://example.com/r.git", "main"))


def test_file_mounts() -> None:
    spec = spec_of(
        """
        file_mounts:
          /a: ./local
          /b: s3://bucket/path
          /c: {name: bucket, source: ~/x, store: S3, mode: MOUNT, persistent: false}
          /d: {name: bucket}
          /e: {source: [x, y], mode: COPY}
        """
    )
    mounts = {mount.path: mount for mount in spec.file_mounts}
    assert (mounts["/a"].sources, mounts["/a"].mode) == (("./local",), "copy")
    assert mounts["/b"].sources == ("s3://bucket/path",)
    assert (mounts["/c"].store, mounts["/c"].mode, mounts["/c"].persistent) == ("s3", "mount", False)
    assert (mounts["/d"].bucket, mounts["/d"].mode) == ("bucket", "mount")
    assert mounts["/e"].sources == ("x", "y")


def test_anchors_and_merges() -> None:
    spec = spec_of("envs: &e {A: a, B: b}\nsecrets: {<<: [{C: c}], D: d}\nservice: {}\nrun: x")
    assert (spec.envs, spec.secrets) == ((("A", "a"), ("B", "b")), ("C", "D"))
    overridden = spec_of("resources: {cpus: 2, any_of: [&x {cloud: aws, cpus: 4}, {<<: *x, cpus: 8}]}")
    assert [c.cpus for c in overridden.resources] == ["4", "8"]


NOT_ACTED_ON = {
    "volumes: {/a: v}": "volumes",
    "config: {kubernetes: {}}": "config",
    "inputs: {a: 1}": "inputs",
    "outputs: {a: 1}": "outputs",
    "managed_secrets: [A]": "managed_secrets",
    "file_mounts: {/a: {name: b, mode: mount}}": 'file_mounts["/a"]',
    "file_mounts: {/a: {name: b, source: c, mode: copy}}": 'file_mounts["/a"]',
    "file_mounts: {/a: {source: c, mount_options: x}}": 'file_mounts["/a"].mount_options',
    "workdir: {url: 'https://example.com'}": "workdir",
    "resources: {infra: local, labels: {a: b}}": "resources.labels",
    "resources: {infra: ssh/rack, cpus: 4+}": "resources.cpus",
    "resources: {infra: local, image_id: 'docker:x'}": "resources.image_id",
    "resources: {infra: ssh, image_id: x}": "resources.image_id",
    "resources: {infra: local, any_of: [{disk_size: 9}, {cloud: aws}]}": "resources.any_of[0].disk_size",
    "resources: {autostop: 5}": "resources.autostop",
    "resources: {any_of: [{}, {infra: ssh, memory: 16+}]}": "resources.any_of[1].memory",
}


@pytest.mark.parametrize(("text", "path"), NOT_ACTED_ON.items(), ids=NOT_ACTED_ON.keys())
def test_what_is_not_acted_on_is_said(text: str, path: str) -> None:
    text = text if "service:" in text else f"service: {{}}\n{text}"
    (warning,) = load_text(f"{text}\nrun: x").warnings
    assert warning.path == path
    assert warning.message.startswith("not acted on ")


ACTED_ON = {
    "a command for events": "event_callback: echo x",
    "sizes on a cloud": "resources: {infra: aws, cpus: 4+, memory: 4x, disk_size: 100, instance_type: g6.xlarge}",
    "an image by cloud": "resources: {image_id: {aws: /ssm/name, gcp: project/family}}",
    "a container on a host": "resources: {infra: ssh, image_id: 'docker:vllm/vllm-openai'}",
    "labels on a cloud": "resources: {cloud: gcp, labels: {a: b}}",
    "a price": "resources: {infra: local, max_hourly_cost: 2}",
    "copies": "file_mounts: {/a: b, /c: 's3://d', /e: {source: [f, g]}}",
    "sizes in an alternative that is on a cloud": "resources: {infra: ssh, any_of: [{}, {infra: aws, cpus: 4}]}",
}


@pytest.mark.parametrize("text", ACTED_ON.values(), ids=ACTED_ON.keys())
def test_what_is_acted_on_is_not_warned_about(text: str) -> None:
    assert load_text(f"service: {{}}\n{text}\nrun: x").warnings == ()


@pytest.mark.parametrize(
    ("enabled", "said"),
    [
        pytest.param(["local"], "not acted on by local", id="only this machine"),
        pytest.param(["local", "aws"], None, id="any cloud is not this machine"),
        pytest.param(["local", "aws", "ssh"], None, id="hosts are not chosen"),
        pytest.param(["local", "ssh"], "not acted on by ssh", id="only hosts"),
    ],
)
def test_any_cloud_means_those_that_are_enabled(enabled: list[str], said: str | None) -> None:
    warnings = load_text("service: {}\nrun: x\nresources: {memory: 16+}", enabled=enabled).warnings
    assert [warning.message.partition(":")[0] for warning in warnings] == [said] * (said is not None)


IMAGES = {
    "of no cloud": ("{image_id: ami-1}", "is an image of one cloud"),
    "of no region": ("{infra: aws, image_id: ami-1}", "is an image of one region"),
    "of no region, by cloud": ("{image_id: {aws: ami-1}}", "is an image of one region"),
    "not for this cloud": ("{infra: gcp, image_id: {aws: /ssm/name}}", "has no image for gcp"),
    "not for this region": (
        "{infra: aws/eu-west-1, image_id: {us-east-1: ami-1}}",
        "has no image for aws/eu-west-1",
    ),
}


@pytest.mark.parametrize(("text", "said"), IMAGES.values(), ids=IMAGES.keys())
def test_an_image_of_a_machine_belongs_somewhere(text: str, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_text(f"service: {{}}\nrun: x\nresources: {text}")
    (problem,) = raised.value.problems
    assert (problem.path, said in problem.message) == ("resources.image_id", True)


def test_alternatives_remember_which_key_says_what() -> None:
    loaded = load_text(
        """
        service: {}
        run: x
        resources:
          accelerators: {L4: 1, T4: 1}
          cpus: 4+
          any_of: [{infra: aws}, {cloud: gcp, accelerators: A100, max_hourly_cost: 2}]
        """
    )
    paths = [
        tuple(
            loaded.path_of(index, name)
            for name in ("cloud", "accelerator", "cpus", "max_hourly_cost", "memory")
        )
        for index in range(len(loaded.spec.resources))
    ]
    first, second = "resources.any_of[0]", "resources.any_of[1]"
    assert paths == [
        (f"{first}.infra", "resources.accelerators", "resources.cpus", first, first),
        (f"{first}.infra", "resources.accelerators", "resources.cpus", first, first),
        (f"{second}.cloud", f"{second}.accelerators", "resources.cpus", f"{second}.max_hourly_cost", second),
    ]


def test_a_key_that_is_false_is_what_an_alternative_says() -> None:
    loaded = load_text(
        """
        service: {}
        run: x
        resources: {use_spot: true, any_of: [{use_spot: false}, {cpus: 4}]}
        """
    )
    paths = [loaded.path_of(index, "use_spot") for index in range(2)]
    assert paths == ["resources.any_of[0].use_spot", "resources.use_spot"]


def test_a_file_that_is_acted_on_whole_gives_no_warning() -> None:
    loaded = load_text(
        """
        service:
          readiness_probe: {path: /health, initial_delay_seconds: 60}
          replica_policy: {min_replicas: 1, max_replicas: 3, target_qps_per_replica: 2, num_overprovision: 1}
          load_balancing_policy: round_robin
          tls: {keyfile: k, certfile: c}
        resources: {infra: local, accelerators: L4, ports: 8080, use_spot: true}
        num_nodes: 2
        workdir: .
        envs: {A: b}
        secrets: {B: c}
        setup: x
        run: y
        """
    )
    assert loaded.warnings == ()
