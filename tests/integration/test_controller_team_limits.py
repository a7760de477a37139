"""What operators of a team may not choose in a service file, by the limits of the team in `config.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from skyserve_cli.config_teams import TeamConfig
from skyserve_cli.controller.api.team_rules import beyond_limits
from skyserve_cli.controller.reconcile.mappers import requirements_of
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from tests.integration.test_controller_sent_specs import running
from tests.integration.test_controller_team import call

CONFIG = """
clouds:
  local: {}
  ssh:
    pools:
      lab: {user: me, ssh_agent: true, hosts: [{name: one, address: 127.0.0.8}]}
      den: {user: me, ssh_agent: true, hosts: [{name: two, address: 127.0.0.9}]}
teams:
  bound:
    clouds: [ssh/lab, aws/us-*]
    images: ["docker:vllm/*"]
    ports: [8443, "9000-9010"]
    hosts: ["127.0.0.1"]
"""

BOUND = {
    "a pool of others": ("infra: ssh/den", "", "resources: ssh/den: operators may use ssh/lab, aws/us-*"),
    "any pool": ("infra: ssh", "", "resources: ssh/*: operators may use ssh/lab, aws/us-*"),
    "an image": (
        "infra: ssh/lab, image_id: 'docker:miner'",
        "",
        "resources.image_id: docker:miner: operators may use docker:vllm/*",
    ),
    "a port": ("infra: ssh/lab", "port: 8444", "load_balancer.port: 8444: operators may use 8443, 9000-9010"),
    "an address": (
        "infra: ssh/lab",
        "host: 0.0.0.0",
        "load_balancer.host: 0.0.0.0: operators may use 127.0.0.1",
    ),
    "nothing of these": (
        "infra: ssh/lab, image_id: 'docker:vllm/vllm-openai:latest'",
        "port: 9005, host: 127.0.0.1",
        "",
    ),
}


@pytest.mark.parametrize(("resources", "balancer", "says"), BOUND.values(), ids=BOUND)
async def test_what_operators_of_a_team_may_choose(
    tmp_path: Path, resources: str, balancer: str, says: str
) -> None:
    text = f"name: chat\nservice: {{load_balancer: {{{balancer}}}}}\nresources: {{{resources}}}\nrun: x\n"
    order = {"spec": spec_to_json(load_text(text).spec)}
    async with running(tmp_path, CONFIG) as (here, _):
        held = {}
        for role in ("operator", "admin"):
            wanted = {"name": role, "role": role, "team": "bound"}
            held[role] = str((await here.call("POST", "/v1/tokens", wanted))[1]["token"])
        for method, path in (("POST", "/v1/plan"), ("PUT", "/v1/services/chat")):
            status, answer = await call(here, held["operator"], method, path, order)
            assert status == (403 if says else 200), answer
            assert answer.get("error", "")[: len(says)] == says
        if says:
            assert here.store.services() == []
            assert (await call(here, held["admin"], "PUT", "/v1/services/chat", order))[0] == 200


HOST_PATH = "volumes: [{name: root, hostPath: {path: /}}]"
PATCHES = {
    "the host's files": (
        HOST_PATH,
        "",
        "kubernetes.pod.spec.volumes[0].hostPath: operators may not set hostPath",
    ),
    "the host's files, which the team may": (HOST_PATH, "pod: [hostPath]", ""),
    "an account": (
        "serviceAccountName: admin",
        "pod: [hostPath]",
        "kubernetes.pod.spec.serviceAccountName: operators may not set serviceAccountName",
    ),
    "a sidecar of another image": (
        "containers: [{name: x, image: miner}]",
        "images: ['docker:vllm/*']",
        "kubernetes.pod.spec.containers[0].image: miner: operators may use docker:vllm/*",
    ),
    "what concerns the Pod alone": ("priorityClassName: high", "", ""),
}


@pytest.mark.parametrize("team", ["bound", ""])
@pytest.mark.parametrize(("spec", "limits", "says"), PATCHES.values(), ids=PATCHES)
async def test_what_operators_may_set_in_a_pod(
    tmp_path: Path, spec: str, limits: str, says: str, team: str
) -> None:
    """An operator without a team may set what one of a team without limits may."""
    text = f"name: chat\nservice: {{}}\nresources: {{infra: ssh/lab}}\nkubernetes: {{pod: {{spec: {{{spec}}}}}}}\nrun: x\n"
    order = {"spec": spec_to_json(load_text(text).spec)}
    config = f"{CONFIG.partition('teams:')[0]}teams: {{bound: {{{limits}}}}}\n"
    if not team and limits:
        pytest.skip("its team's limits are not those of an operator without one")
    async with running(tmp_path, config) as (here, _):
        held = {}
        for role in ("operator", "admin"):
            wanted = {"name": role, "role": role, "team": team}
            held[role] = str((await here.call("POST", "/v1/tokens", wanted))[1]["token"])
        status, answer = await call(here, held["operator"], "POST", "/v1/plan", order)
        assert status == (403 if says else 200), answer
        assert answer.get("error", "")[: len(says)] == says
        assert (await call(here, held["admin"], "POST", "/v1/plan", order))[0] == 200


CACHES = {
    "a folder of nodes": (
        "infra: kubernetes",
        "cache: node",
        "",
        "cache: operators may not keep folders on nodes",
    ),
    "a folder of nodes among others": (
        "any_of: [{infra: ssh/lab}, {infra: kubernetes}]",
        "cache: node",
        "pod: [privileged]",
        "cache: operators may not keep folders on nodes of Kubernetes",
    ),
    "a folder of nodes, which the team may": ("infra: kubernetes", "cache: node", "pod: [cache]", ""),
    "with every folder of nodes": ("infra: kubernetes", "cache: node", "pod: [hostPath]", ""),
    "a claim": ("infra: kubernetes", "cache: {kind: pvc, claim: weights}", "", ""),
    "a folder of hosts": ("infra: ssh/lab", "cache: node", "", ""),
}


@pytest.mark.parametrize(("infra", "cache", "limits", "says"), CACHES.values(), ids=CACHES)
def test_what_operators_may_keep_on_nodes(infra: str, cache: str, limits: str, says: str) -> None:
    spec = load_text(f"name: chat\nservice: {{}}\nresources: {{{infra}}}\n{cache}\nrun: x\n").spec
    team = TeamConfig.model_validate(yaml.safe_load(f"{{{limits}}}"))
    found = list(beyond_limits(team, spec, requirements_of(spec)))
    assert [one[: len(says)] for one in found] == [says] * bool(says)


async def test_the_api_checks_a_pod_as_a_file_is_checked(tmp_path: Path) -> None:
    spec = spec_to_json(load_text("name: chat\nservice: {}\nrun: x\n").spec)
    async with running(tmp_path, "clouds: {local: {}}\n") as (here, _):
        spec["pod"] = '{"spec": {"restartPolicy": "Always"}}'
        status, answer = await here.call("POST", "/v1/plan", {"spec": spec})
        assert status == 400
        assert "pod.spec.restartPolicy: it cannot be set" in str(answer)
        spec["pod"] = '{"spec": {"schedulerName": "volcano"}}'
        assert (await here.call("POST", "/v1/plan", {"spec": spec}))[0] == 200
