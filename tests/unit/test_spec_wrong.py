"""Every way a service file can be wrong that we know of: the path it is reported at, and its sentence.

Each case is the part that is wrong; `service: {}` and `run: serve` are added where the case does not give its own.
"""

import pytest

from skyserve_cli.spec import SpecError
from skyserve_cli.spec.load import load_file, load_text


def problems_of(text: str, **options: object) -> dict[str, str]:
    if "service:" not in text:
        text = f"service: {{}}\n{text}"
    if "run:" not in text:
        text = f"{text}\nrun: serve\n"
    with pytest.raises(SpecError) as caught:
        load_text(text, **options)  # type: ignore[arg-type]
    return {problem.path: str(problem) for problem in caught.value.problems}


def policy(text: str) -> str:
    return f"service: {{replica_policy: {{{text}}}}}"


def probe(text: str) -> str:
    return f"service: {{readiness_probe: {text}}}"


WRONG = {
    # unknown keys
    "a slip in a key at the top": ("resorces: {}", "resorces", 'did you mean "resources"?'),
    "a slip in a key of the service": ("service: {readyness_probe: /}", "service.readyness_probe", "readiness_probe"),
    "a slip in a key of the policy": (policy("min_replica: 1"), "service.replica_policy.min_replica", "min_replicas"),
    "a slip in a key of the probe": (probe("{path: /, timeout: 3}"), "service.readiness_probe.timeout", "timeout_s"),
    "a slip in a key of an alternative": ("resources: {any_of: [{regoin: x}]}", "resources.any_of[0].regoin", "region"),
    "a key of the service at the top": ("replicas: 2", "replicas", "it belongs at service.replicas"),
    "a key of the top in the service": ("service: {envs: {A: b}}", "service.envs", "it belongs at envs"),
    "a key of SkyServe's first branches": (
        policy("min_on_demand_replicas: 1"),
        "service.replica_policy.min_on_demand_replicas",
        "it is now base_ondemand_fallback_replicas",
    ),
    "a routing policy of before": (
        "service: {load_balancing_policy: Preserve}",
        "service.load_balancing_policy",
        "preserve is no longer a policy: write gorgo",
    ),
    "a pool beside the service": ("pool: {workers: 1}", "pool", "pools are not offered"),
    "a pool inside the service": ("service: {pool: true}", "service.pool", "pools are not offered"),
    "job recovery": ("resources: {job_recovery: failover}", "resources.job_recovery", "always replaced"),
    # the Pod
    "a slip in a key of the Pod": (
        "kubernetes: {pod: {spec: {tolerationz: []}}}",
        "kubernetes.pod.spec.tolerationz",
        "did you mean tolerations?",
    ),
    "a key of the Pod that is ours": (
        "kubernetes: {pod: {spec: {containers: [{name: main, command: [sh]}]}}}",
        "kubernetes.pod.spec.containers[0].command",
        "set run in the service file",
    ),
    "a Pod that is a text": ("kubernetes: {pod: x}", "kubernetes.pod", "is not valid JSON"),
    # the size
    "a negative number of replicas": ("service: {replicas: -1}", "service.replicas", "at least 0 (got -1)"),
    "half a replica": ("service: {replicas: 1.5}", "service.replicas", "whole number (got 1.5)"),
    "yes replicas": ("service: {replicas: yes}", "service.replicas", "must be a number (got true)"),
    "many replicas": ("service: {replicas: many}", "service.replicas", 'whole number (got "many")'),
    "a million replicas": ("service: {replicas: 1000000}", "service.replicas", "at most 10000"),
    "a fixed size and a policy": (
        "service: {replicas: 2, replica_policy: {min_replicas: 1}}",
        "service.replicas",
        "cannot stand next to replica_policy",
    ),
    "a maximum below the minimum": (
        policy("min_replicas: 2, max_replicas: 1"),
        "service.replica_policy.max_replicas",
        "must be >= min_replicas (got 1 < 2)",
    ),
    "a maximum of 0 without a minimum": (
        policy("max_replicas: 0"),
        "service.replica_policy.max_replicas",
        "must be >= min_replicas (got 0 < 1)",
    ),
    "a range without a target": (
        policy("min_replicas: 1, max_replicas: 3"),
        "service.replica_policy.target_qps_per_replica",
        "needed to choose between 1 and 3",
    ),
    "a target of 0": (
        policy("target_qps_per_replica: 0"),
        "service.replica_policy.target_qps_per_replica",
        "above 0 (got 0)",
    ),
    "a target that is not finite": (
        policy("target_qps_per_replica: .nan"),
        "service.replica_policy.target_qps_per_replica",
        "above 0 (got NaN)",
    ),
    "a target of 0 for one accelerator": (
        policy("target_qps_per_replica: {L4: 0}"),
        "service.replica_policy.target_qps_per_replica.L4",
        "above 0",
    ),
    "two targets": (
        policy("target_qps_per_replica: 2, target_ongoing_requests_per_replica: 8"),
        "service.replica_policy.target_ongoing_requests_per_replica",
        "cannot stand next to target_qps_per_replica: choose one of the two (got 8)",
    ),
    "a concurrency of 0": (
        policy("target_ongoing_requests_per_replica: 0"),
        "service.replica_policy.target_ongoing_requests_per_replica",
        "above 0 (got 0)",
    ),
    "a queue alone": (
        policy("target_queue_length: 2"),
        "service.replica_policy.target_queue_length",
        "needs another target beside it, because a queue never says that a fleet is too large",
    ),
    "a full cache and more": (
        policy("target_kv_cache_usage: 80"),
        "service.replica_policy.target_kv_cache_usage",
        "at most 1 (got 80)",
    ),
    "a queue beside an SLO": (
        policy("slo: {ttft_ms: 9}, target_queue_length: 2, target_kv_cache_usage: 0.8"),
        "service.replica_policy.target_queue_length",
        "cannot stand next to slo: choose target_queue_length or slo",
    ),
    "no time to look at": (
        policy("load_window_seconds: 0"),
        "service.replica_policy.load_window_seconds",
        "at least 1 (got 0)",
    ),
    "more time to look at than is remembered": (
        policy("load_window_seconds: 601"),
        "service.replica_policy.load_window_seconds",
        "at most 600 (got 601)",
    ),
    "instance-aware balancing with one target": (
        "service: {load_balancing_policy: instance_aware_least_load, replica_policy: {target_qps_per_replica: 1}}",
        "service.replica_policy.target_qps_per_replica",
        "must be a mapping",
    ),
    "a negative delay": (
        policy("upscale_delay_seconds: -5"),
        "service.replica_policy.upscale_delay_seconds",
        "at least 0 (got -5)",
    ),
    "an aim for a placer that cannot aim": (
        policy("spot_placer: dynamic_fallback, availability_target: 0.99"),
        "service.replica_policy.availability_target",
        "is for spot_placer: risk_hedge; dynamic_fallback cannot aim (got 0.99)",
    ),
    "an availability in percent": (
        policy("availability_target: 99.5"),
        "service.replica_policy.availability_target",
        "at most 0.9999 (got 99.5)",
    ),
    "extra replicas for a placer that chooses them": (
        policy("spot_placer: risk_hedge, num_overprovision: 2"),
        "service.replica_policy.num_overprovision",
        "is chosen by risk_hedge itself (got 2)",
    ),
    "extra replicas beside an aim": (
        policy("availability_target: 0.99, num_overprovision: 2"),
        "service.replica_policy.num_overprovision",
        "is chosen by risk_hedge itself (got 2)",
    ),
    "fallback for a baseline": (
        policy("spot_placer: round_robin, dynamic_ondemand_fallback: true"),
        "service.replica_policy.dynamic_ondemand_fallback",
        "is not for spot_placer: round_robin",
    ),
    "more on-demand replicas than replicas": (
        policy("min_replicas: 1, max_replicas: 2, target_qps_per_replica: 1, base_ondemand_fallback_replicas: 3"),
        "service.replica_policy.base_ondemand_fallback_replicas",
        "must be <= max_replicas (got 3 > 2)",
    ),
    "a spot placer nobody wrote": (
        policy("spot_placer: dynamic_failover"),
        "service.replica_policy.spot_placer",
        'did you mean "dynamic_fallback"?',
    ),
    "spot knobs without spot": (
        policy("dynamic_ondemand_fallback: true") + "\nresources: {use_spot: false}",
        "resources.use_spot",
        "service.replica_policy.dynamic_ondemand_fallback asks for spot",
    ),
    "spot knobs with one alternative without spot": (
        policy("spot_placer: dynamic_fallback") + "\nresources: {any_of: [{use_spot: true}, {use_spot: false}]}",
        "resources.any_of[1].use_spot",
        "must not be false",
    ),
    "a policy that is a word": ("service: {replica_policy: big}", "service.replica_policy", "must be a mapping"),
    # the probe
    "a probe path without slash": (probe("health"), "service.readiness_probe", 'starts with a slash (got "health")'),
    "a probe path without slash in a mapping": (probe("{path: health}"), "service.readiness_probe.path", "slash"),
    "a probe without path": (probe("{timeout_seconds: 3}"), "service.readiness_probe.path", "is required here"),
    "a probe path with a space": (probe('"/a b"'), "service.readiness_probe", "spaces"),
    "a timeout of 0": (probe("{path: /, timeout_seconds: 0}"), "service.readiness_probe.timeout_seconds", "above 0"),
    "an endless delay": (
        probe("{path: /, initial_delay_seconds: .inf}"),
        "service.readiness_probe.initial_delay_seconds",
        "got Infinity",
    ),
    "post_data that is not JSON": (
        probe("{path: /, post_data: '{a: 1}'}"),
        "service.readiness_probe.post_data",
        "is not valid JSON",
    ),
    "post_data that is a number": (probe("{path: /, post_data: 5}"), "service.readiness_probe.post_data", "mapping"),
    "a header with two lines": (
        probe('{path: /, headers: {X: "a\\nb"}}'),
        "service.readiness_probe.headers.X",
        "one line",
    ),
    "a header with an impossible name": (
        probe('{path: /, headers: {"X Y": a}}'),
        'service.readiness_probe.headers["X Y"]',
        "is not a header name",
    ),
    # the rest of the service
    "a balancing policy nobody wrote": (
        "service: {load_balancing_policy: least_loaded}",
        "service.load_balancing_policy",
        'did you mean "least_load"?',
    ),
    "half a certificate": ("service: {tls: {keyfile: k}}", "service.tls.certfile", "is required here"),
    "a port beyond the last": ("service: {ports: 70000}", "service.ports", "at most 65535"),
    "a drain that lasts a year": ("service: {drain_timeout_seconds: 3e+7}", "service.drain_timeout_seconds", "at most"),
    "an update that cannot move": (
        "service: {update: {max_surge: 0, max_unavailable: 0}}",
        "service.update.max_surge",
        "no replica could move",
    ),
    # resources
    "an accelerator count of 0": ("resources: {accelerators: 'L4:0'}", "resources.accelerators", "above 0"),
    "an accelerator that is a sentence": ("resources: {accelerators: an L4}", "resources.accelerators", "like L4"),
    "a negative count in a mapping": ("resources: {accelerators: {L4: -1}}", "resources.accelerators.L4", "above 0"),
    "a count that is given twice": ("resources: {accelerators: {'L4:1': 2}}", 'resources.accelerators["L4:1"]', "twice"),
    "no accelerator in a list": ("resources: {accelerators: []}", "resources.accelerators", "must be an accelerator"),
    "accelerators under two names": ("resources: {gpus: L4, accelerators: L4}", "resources.gpus", "another name"),
    "a cloud nobody knows": ("resources: {cloud: awss}", "resources.cloud", 'did you mean "aws"?'),
    "a cloud we do not have": ("resources: {infra: slurm}", "resources.infra", "not supported yet"),
    "only clouds we do not have": (
        "resources: {any_of: [{infra: slurm/my/partition}, {cloud: RunPod}]}",
        "resources.any_of[1].cloud",
        'not supported yet (got "RunPod")',
    ),
    "an infra with four parts": ("resources: {infra: aws/a/b/c}", "resources.infra", "cloud[/region[/zone]]"),
    "a place in a cluster with five parts": ("resources: {infra: k8s/a/b/c/d}", "resources.infra", "kubernetes[/context"),
    "a namespace of no context": ("resources: {infra: kubernetes/*/ml}", "resources.infra", "of no context"),
    "an infra with a hole": ("resources: {infra: aws//b}", "resources.infra", "cloud[/region[/zone]]"),
    "an infra and a cloud": ("resources: {infra: aws, cloud: aws}", "resources.infra", "use one of the two forms"),
    "any_of and ordered": ("resources: {any_of: [{}], ordered: [{}]}", "resources.ordered", "next to any_of"),
    "no alternative": ("resources: {any_of: []}", "resources.any_of", "names no alternative"),
    "alternatives that are no list": ("resources: {any_of: {cloud: aws}}", "resources.any_of", "must be a list"),
    "an alternative that is a word": ("resources: {any_of: [aws]}", "resources.any_of[0]", "must be a mapping"),
    "two orders": ("resources: {ordered: [{accelerators: [L4, A100]}]}", "resources.ordered", "one accelerator per"),
    "several ports and no main one": ('resources: {ports: "8000-8010"}', "resources.ports", "opens 11 ports"),
    "a main port that is not open": (
        "service: {ports: 80}\nresources: {ports: [8080, 8081]}",
        "service.ports",
        "must be one of the ports of resources.ports (got 80)",
    ),
    "another port on each alternative": (
        "resources: {any_of: [{ports: 80}, {ports: 81}]}",
        "resources.ports",
        "same for every alternative (got 80 and 81)",
    ),
    "a range from the wrong end": ("resources: {ports: 90-80}", "resources.ports", "the lower end first"),
    "a port in a list that is a word": ("resources: {ports: [80, http]}", "resources.ports[1]", "must be a port"),
    "a disk without size": ("resources: {disk_size: big}", "resources.disk_size", "size in GB"),
    "a price of 0": ("resources: {max_hourly_cost: 0}", "resources.max_hourly_cost", "must be above 0"),
    "GPUs by their memory": ("resources: {accelerators: 'nvidia:80GB+:2'}", "resources.accelerators", "name the accelerators"),
    "GPUs by their memory, in a mapping": (
        "resources: {accelerators: {40GB+: 1}}",
        'resources.accelerators["40GB+"]',
        "by their memory yet",
    ),
    "half a gigabyte of disk": ("resources: {disk_size: 512MB}", "resources.disk_size", "a whole size in GB"),
    "memory of an unknown unit": ("resources: {memory: 16 apples}", "resources.memory", "must look like 16"),
    "a disk by its older name": ("resources: {ephemeral_storage: 50}", "resources.ephemeral_storage", "it is now disk_size"),
    "cpus in words": ("resources: {cpus: four}", "resources.cpus", "must look like 4 or 4+"),
    "a disk tier nobody sells": ("resources: {disk_tier: fast}", "resources.disk_tier", "must be one of low, medium"),
    # the rest
    "nothing to run": ("run:", "run", "is missing"),
    "an empty script": ("run: ''", "run", "must not be empty"),
    "a script that is a list": ("run: [a, b]", "run", "must be text"),
    "no node": ("num_nodes: 0", "num_nodes", "at least 1"),
    "a delay of a year": (
        "service: {readiness_probe: {path: /, initial_delay_seconds: 31536000}}",
        "service.readiness_probe.initial_delay_seconds",
        "at most 2592000 (got 31536000)",
    ),
    "load balancers in several regions": (
        "service: {external_load_balancers: [{resources: {cloud: aws}}]}",
        "service.external_load_balancers",
        "load_balancers puts load balancers of ours into regions",
    ),
    "a load balancer on this machine": (
        "service: {load_balancers: {regions: local/a}}", "service.load_balancers.regions[0]", "is this machine",
    ),
    "a load balancer in no region": (
        "service: {load_balancers: {regions: [aws]}}", "service.load_balancers.regions[0]", "must be cloud/region",
    ),
    "a load balancer on a cloud nobody knows": (
        "service: {load_balancers: {regions: [asw/us-east-1]}}", "service.load_balancers.regions[0]", "did you mean",
    ),
    "a load balancer in a namespace of a cluster": (
        "service: {load_balancers: {regions: [k8s/prod/ml]}}", "service.load_balancers.regions[0]", "must be kubernetes/CONTEXT",
    ),
    "a name of load balancers in a cluster": (
        "service: {load_balancers: {regions: [aws/a, k8s/prod], dns: {zone: example.com, name: a}}}",
        "service.load_balancers.dns",
        "cannot lead to load balancers in a cluster",
    ),
    "a region that is there twice": (
        "service: {load_balancers: {regions: [aws/a, aws/b, aws/a]}}",
        "service.load_balancers.regions[2]",
        "count says how many",
    ),
    "load balancers nowhere": (
        "service: {load_balancers: {count: 2}}", "service.load_balancers.regions", "is required here",
    ),
    "one instance type for two clouds": (
        "service: {load_balancers: {regions: [aws/a, gcp/b], instance_type: c6i.large}}",
        "service.load_balancers.instance_type",
        "must be by cloud",
    ),
    "a name that is none": (
        "service: {load_balancers: {regions: aws/a, dns: {zone: example.com, name: a b}}}",
        "service.load_balancers.dns.name",
        "must be a domain name",
    ),
    "a URL with a path": (
        "service: {load_balancers: {regions: aws/a, url: https://example.com/chat}}",
        "service.load_balancers.url",
        "must be http://HOST or https://HOST",
    ),
    "a URL without a scheme": (
        "service: {load_balancers: {regions: aws/a, url: chat.example.com}}",
        "service.load_balancers.url",
        "must be http://HOST or https://HOST",
    ),
    "a name with a space": ("name: my service", "name", "letters, digits and dashes"),
    "a name that begins with a digit": ("name: 3d", "name", "begin with a letter"),
    "a variable without a value": ("envs: {HF_HOME: }", "envs.HF_HOME", "pass --env HF_HOME=VALUE, or export HF_HOME"),
    "a secret without a value": ("secrets: {TOKEN: null}", "secrets.TOKEN", "pass --secret TOKEN=VALUE, or export"),
    "a variable that is a list": ("envs: {A: [1]}", "envs.A", "must be a word"),
    "a variable with an impossible name": ("envs: {A-B: 1}", "envs.A-B", "is not a name for a variable"),
    "a variable of ours": ("envs: {SKYSERVE_REPLICA_ID: 1}", "envs.SKYSERVE_REPLICA_ID", "given by us"),
    "a variable that is a secret as well": ("envs: {A: b}\nsecrets: {A: b}", "secrets.A", "is also one of envs"),
    "variables that are a list": ("envs: [A]", "envs", "must be a mapping"),
    "a secret where it would be shown": (
        "service: {load_balancer: {api_keys_file: /$KEY}}\nsecrets: {KEY: k}",
        "service.load_balancer.api_keys_file",
        "the secret KEY cannot be used here",
    ),
    "a number that is a variable with a word": (
        "service: {replicas: $N}\nenvs: {N: three}",
        "service.replicas",
        'whole number (got "three")',
    ),
    "a mount in a mode nobody has": ("file_mounts: {/a: {mode: mout}}", "file_mounts[\"/a\"].mode", '"mount"?'),
    "a mount that is a number": ("file_mounts: {/a: 5}", 'file_mounts["/a"]', "must be a mapping"),
    "run in both places": ("resources: {run: a}\nrun: b", "resources.run", "where there is a run already"),
    "the same key twice": ("num_nodes: 1\nnum_nodes: 2", "num_nodes", "appears twice (lines 2 and 3)"),
    "the same key twice, deep": ("resources:\n  cpus: 1\n  cpus: 2", "resources.cpus", "(lines 3 and 4)"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "path", "piece"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_its_path(text: str, path: str, piece: str) -> None:
    found = problems_of(text)
    assert path in found
    assert found[path].startswith(f"{path}: ")
    assert piece in found[path]
    assert "\n" not in found[path]


@pytest.mark.parametrize(("text", "path", "piece"), WRONG.values(), ids=WRONG.keys())
def test_one_mistake_is_not_answered_with_a_second_complaint(text: str, path: str, piece: str) -> None:
    # Where one case needs two sentences, both are about the same key or its neighbour in a list.
    parents = {found.partition("[")[0].rsplit(".", 1)[0] for found in problems_of(text)}
    assert len(parents) == 1


UNREADABLE = {
    "nothing": ("", "is empty"),
    "only a comment": ("# service", "is empty"),
    "a list": ("- a\n- b", "must be a mapping"),
    "a word": ("service", "must be a mapping"),
    "a bracket that stays open": ("a: [1", "line 1, column 6"),
    "a tab": ("service:\n\treplicas: 1", "line 2, column 1"),
    "two documents": ("a: 1\n---\nb: 2", "one file describes one service"),
    "a control character": ("a: \x07", "line 1, column 4"),
    "a character beyond Unicode": ('a: "\\UFFFFFFFF"', "not valid YAML"),
    "half a surrogate pair": ('a: "\\ud800"', "half a surrogate pair"),
    "a NUL": ('run: "a\\0b"', "NUL"),
    "an object of Python": ("a: !!python/object:os.system x", "is not allowed here"),
    "an alias without anchor": ("a: *b", "undefined alias"),
    "an alias of itself": ("a: &a [*a]", "nested more than 50 levels"),
    "a bomb of aliases": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
        "more than 10000 values",
    ),
    "a bomb of merges": (
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)),
        "more than 10000 values",
    ),
    "brackets without end": ("[" * 5000, "nested more than 50 levels"),
    "a key that is a list": ("? [a]\n: b", "a key must be a word"),
    "a merge with a number": ("<<: 3", "takes a mapping"),
    "a number that is none": ("a: !!int seven", "cannot be read as a YAML int"),
    "a number of 5000 digits": (f"a: {'9' * 5000}", "cannot be read as a YAML int"),
    "a number of 5000 hexadecimal digits": (f"a: 0x{'f' * 5000}", "cannot be read as a YAML int"),
    "too much text": ("# " + "x" * (256 << 10), "larger than 256 KiB"),
}


@pytest.mark.long
@pytest.mark.parametrize(("text", "piece"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_text_that_is_no_service_file_is_refused_in_one_sentence(text: str, piece: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_text(text)
    (problem,) = caught.value.problems
    assert piece in str(problem)
    assert "\n" not in str(problem)


FILES = {
    "a file that is too large": (b"#" * ((256 << 10) + 1), "larger than 256 KiB"),
    "a file in Latin-1": ("name: café".encode("latin-1"), "byte 9 is 0xe9"),
    "a file in UTF-16": ("name: x".encode("utf-16"), "is not UTF-8 text"),
    "an empty file": (b"", "is empty"),
}


@pytest.mark.parametrize(("content", "piece"), FILES.values(), ids=FILES.keys())
def test_a_file_that_cannot_be_used_is_named(tmp_path, content: bytes, piece: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"service\.yaml") as caught:
        load_file(path)
    assert piece in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(SpecError, match=r"cannot read .*gone\.yaml: No such file"):
        load_file(tmp_path / "gone.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        load_file(tmp_path)


def test_all_mistakes_of_a_file_come_at_once_each_on_its_line() -> None:
    text = """
    name: my service
    service:
      readiness_probe: {path: health, timeout: 3}
      replica_policy: {min_replicas: 3, max_replicas: 2, spot_placer: best}
      load_balancing_policy: random
    resources:
      accelerators: L4:0
      any_of: [{infra: aws, region: x}, {cloud: awz}]
      ports: [80, 81]
    envs: {A: }
    num_nodes: none
    """
    with pytest.raises(SpecError) as caught:
        load_text(text)
    assert {problem.path for problem in caught.value.problems} == {
        "envs.A",
        "service.readiness_probe.path",
        "service.readiness_probe.timeout",
        "service.replica_policy.spot_placer",
        "service.load_balancing_policy",
        "resources.accelerators",
        "num_nodes",
        "resources.any_of[1].cloud",
        "resources.any_of[0].infra",
        "run",
        "service.replica_policy.max_replicas",
        "resources.ports",
        "name",
    }
    assert len(str(caught.value).splitlines()) == 13


def test_a_problem_carries_the_value_and_the_hint() -> None:
    with pytest.raises(SpecError) as caught:
        load_text("service: {load_balancing_policy: Round-Robin}\nrun: x")
    (problem,) = caught.value.problems
    assert problem.value == "Round-Robin"
    assert problem.hint == 'did you mean "round_robin"?'


def test_long_values_are_shortened() -> None:
    found = problems_of(f"resources: {{cpus: {'x' * 500}}}")
    assert len(found["resources.cpus"]) < 150
