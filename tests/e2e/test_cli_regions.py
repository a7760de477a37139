"""Load balancer agents on machines of their own, in another region than the replicas: `serve` on AWS, whose instances really
boot, as network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from provisioners.own_address import OwnAddresses
from skyserve_cli.controller.balancers.bundle import LIBRARIES
from tests.clouds.aws.aws_account import Launched
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.e2e.conftest import ROOT, Serve
from tests.e2e.regions_client import Client

WHY_NOT = vm_world.why_not() or vm_world.why_other_python()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
  load_balancers: {regions: aws/us-west-2, dns: {zone: example.com, name: chat}}
resources:
  infra: aws/us-east-1
  accelerators: L4:1
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""
REGIONS = ("us-east-1", "us-west-2")
TWO_REGIONS = "regions: [aws/us-east-1, aws/us-west-2]"


@dataclass
class Cloud:
    aws: AwsWorld
    vms: VmWorld
    roles: dict[str, str]  # by instance id
    names: Any  # the client of Route 53
    zone_id: str

    def live(self, role: str) -> list[str]:
        return [name for name, vm in self.vms.vms.items() if vm.is_running and self.roles.get(name) == role]

    def name(self) -> dict[str, list[str]]:
        """What chat.example.com means, by region."""
        records = self.names.list_resource_record_sets(HostedZoneId=self.zone_id)["ResourceRecordSets"]
        return {
            one["Region"]: [each["Value"] for each in one["ResourceRecords"]]
            for one in records
            if "Region" in one
        }

    def agent(self) -> Vm:
        (name,) = self.live("load_balancer")
        return self.vms.vms[name]


@pytest.fixture
def cloud(serve: Serve) -> Iterator[Cloud]:
    with ExitStack() as stack:
        vms = stack.enter_context(VmWorld("172.31.0.0/16"))
        aws = AwsWorld(time.time)
        dns = stack.enter_context(route53())
        keys = {"aws_access_key_id": "AKIATESTTESTTESTTEST", "aws_secret_access_key": "of-nobody"}
        names = boto3.client("route53", endpoint_url=dns, region_name="us-east-1", **keys)
        zone_id = names.create_hosted_zone(Name="example.com.", CallerReference="test")["HostedZone"]["Id"]
        made = Cloud(aws, vms, {}, names, zone_id)

        def boot(launched: Launched) -> None:
            made.roles[launched.id] = launched.tags["skyserve-role"]
            vms.boot(
                launched.id,
                addresses=[launched.private_ip],
                user_data=launched.user_data,
                gpus=int(launched.region == "us-east-1"),
                libraries=LIBRARIES,
            )
            enforce()

        def enforce() -> None:
            """As the account's security groups say."""
            with walling:
                for name, vm in list(vms.vms.items()):
                    if vm.is_running and name in made.roles:
                        vm.wall(aws.openings(name))

        walling = RLock()

        aws.on_launch, aws.on_rules = boot, enforce

        def take_away(instance_id: str) -> None:
            with walling:  # a machine that is gone has no wall to change
                vms.vms[instance_id].kill()

        aws.on_gone = take_away
        stack.enter_context(aws.running())
        serve.environment |= {**aws.environment, "AWS_ENDPOINT_URL_ROUTE_53": dns}
        serve.configure(
            clouds={
                "aws": {"poll_seconds": 0.5, "use_private_ip": True, "regions": ["us-east-1", "us-west-2"]}
            }
        )
        yield made
        serve("controller", "start")
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        assert made.live("replica") == made.live("load_balancer") == []
        assert aws.errors == []


@contextmanager
def route53() -> Iterator[str]:
    """The URL of moto's server, for names only."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def agents(serve: Serve) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = serve.view("web")["load_balancers"]
    return found


def the_agent(serve: Serve) -> dict[str, Any]:
    """The only one; nothing while there is another number of them, or it is not ready."""
    found = agents(serve)
    return found[0] if len(found) == 1 and found[0]["alive"] and found[0]["synced"] else {}


def pid_of_agent(vm: Vm) -> str:
    return vm.run("pgrep -f '[-]m lb ' || true").strip()


@pytest.mark.timeout(240)
def test_an_agent_in_another_region_from_up_over_every_loss_to_down(
    serve: Serve, cloud: Cloud, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    said = serve.ok("up", file, "-y", "--name", "web")
    assert "1 load balancer in aws/us-west-2 for $0.0850 more" in said.err
    printed = said.out.strip().splitlines()[-1]
    vm = cloud.agent()
    endpoint = f"http://{vm.address}:8000"
    assert printed == "http://chat.example.com:8000"
    assert serve.view("web")["endpoints"] == [printed, endpoint]
    serve.eventually(lambda: cloud.name() == {"us-west-2": [vm.address]})
    agent = the_agent(serve)
    assert (agent["region"], agent["endpoint"], agent["ready_targets"]) == ("us-west-2", endpoint, 1)
    assert not (serve.home / "lb" / "web").exists(), "there is none beside the controller"

    with Client(endpoint, b"I am use1-az") as client:
        serve.eventually(lambda: client.responded > 20)

        # The controller crashes: no one notices.
        pid = serve.ok("controller", "status", "-o", "json").json()["pid"]
        os.kill(pid, signal.SIGKILL)
        before = client.responded
        serve.eventually(lambda: client.responded > before + 20)
        serve.ok("controller", "start")
        serve.eventually(lambda: the_agent(serve))

        # New code takes over in place, and not one connection is refused.
        old_version, old_pid = the_agent(serve)["agent_version"], pid_of_agent(vm)
        with new_code(serve, tmp_path):
            serve.ok("controller", "stop")
            serve.ok("controller", "start")
            serve.eventually(lambda: the_agent(serve).get("agent_version") not in (None, old_version))
            assert the_agent(serve)["newest"]
            before = client.responded
            serve.eventually(lambda: client.responded > before + 20)
            serve.eventually(lambda: pid_of_agent(vm) not in ("", old_pid))
            serve.ok("controller", "stop")
        serve.ok("controller", "start")
        serve.eventually(lambda: the_agent(serve).get("agent_version") == old_version)
    assert client.failed == []
    assert cloud.agent() is vm

    # The process exits: the supervisor starts it again, on the same machine, at the same address.
    vm.run("pkill -9 -f '[-]m lb '")
    serve.eventually(lambda: the_agent(serve) and Client.asks(endpoint))
    assert cloud.agent() is vm

    # The machine is lost: another one takes its place.
    lost = agent["instance_id"]
    cloud.aws.end(lost, "Server.InternalError", "Server.InternalError: Internal error on launch")
    serve.eventually(lambda: the_agent(serve).get("instance_id") not in (None, lost))
    assert Client.asks(the_agent(serve)["endpoint"])
    serve.eventually(lambda: cloud.name() == {"us-west-2": [cloud.agent().address]})
    assert serve.ok("status", "web", "--endpoint").out.strip() == printed
    assert "load balancer" in serve.ok("status").out.lower()
    assert "start with table_file" in serve.ok("logs", "web", "--load-balancer").out

    serve.ok("down", "web", "-y")
    assert cloud.name() == {}
    assert cloud.live("replica") == cloud.live("load_balancer") == []


class new_code:
    """A copy of the program, with a change in the agent's code."""

    def __init__(self, serve: Serve, folder: Path) -> None:
        self._serve = serve
        self._folder = folder / "code"

    def __enter__(self) -> None:
        for package in ("lb", "policies", "provisioners", "skyserve_cli"):
            shutil.copytree(
                ROOT / package, self._folder / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        with (self._folder / "lb" / "stream" / "token_usage.py").open("a") as code:
            code.write("\n# another release\n")
        self._before = self._serve.environment.get("PYTHONPATH")
        self._serve.environment["PYTHONPATH"] = str(self._folder)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del self._serve.environment["PYTHONPATH"]
        else:
            self._serve.environment["PYTHONPATH"] = self._before


@pytest.mark.timeout(240)
def test_only_the_controller_and_the_agents_can_open_a_replicas_port(
    serve: Serve, cloud: Cloud, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    stranger = cloud.vms.boot("stranger")
    serve.ok("up", file, "-y", "--name", "web")
    (replica,) = [cloud.vms.vms[name] for name in cloud.live("replica")]
    agent = cloud.agent()

    def can_open(vm: Vm, port: int) -> bool:
        script = f"timeout 2 bash -c '</dev/tcp/{replica.address}/{port}' 2>/dev/null && echo yes || true"
        return bool(vm.run(script).strip())

    def reached() -> list[tuple[str, int]]:
        """By a stranger and by the agent."""
        vms = {"stranger": stranger, "agent": cloud.agent()}
        return [(name, port) for name, vm in vms.items() for port in (22, 8000, 8443) if can_open(vm, port)]

    serve.eventually(lambda: can_open(cloud.agent(), 8443))
    assert reached() == [("agent", 8443)]
    assert cloud.aws.openings(cloud.live("replica")[0]) == {
        (22, f"{cloud.vms.gateway}/32"),
        (8443, f"{cloud.vms.gateway}/32"),
        (8443, f"{agent.address}/32"),
    } | own_addresses(cloud, serve)

    # The agent comes back at another address, while the controller is killed again and again.
    cloud.aws.end(cloud.live("load_balancer")[0], "Server.InternalError", "Server.InternalError: lost")
    for _ in range(3):
        pid = serve.ok("controller", "status", "-o", "json").json()["pid"]
        os.kill(pid, signal.SIGKILL)
        serve.ok("controller", "start")
    serve.eventually(lambda: the_agent(serve) and cloud.agent().address != agent.address)
    serve.eventually(lambda: Client.asks(the_agent(serve)["endpoint"]))
    serve.eventually(lambda: can_open(cloud.agent(), 8443))
    assert reached() == [("agent", 8443)]
    with replica.tapped() as heard:
        assert Client.asks(the_agent(serve)["endpoint"])
    assert heard
    assert b"I am use1" not in heard
    allowed = {block for port, block in cloud.aws.openings(cloud.live("replica")[0]) if port == 8443}
    assert f"{agent.address}/32" not in allowed


@pytest.mark.timeout(400)
@only_long  # a minute and a half; test_regions_wan has the agents, in every run
def test_agents_of_two_regions_own_their_replicas_and_forward_to_each_other(
    serve: Serve, cloud: Cloud, tmp_path: Path
) -> None:
    """The only replica is in us-east-1: what enters in us-west-2 goes there through the agent of us-east-1."""
    file = tmp_path / "web.yaml"
    file.write_text(
        SERVICE.replace("regions: aws/us-west-2, dns: {zone: example.com, name: chat}", TWO_REGIONS)
    )
    serve.ok("up", file, "-y", "--name", "web")

    def by_region() -> dict[str, dict[str, Any]]:
        return {one["region"]: one for one in agents(serve)}

    def are_linked() -> bool:
        found = by_region()
        return all(one["peers"] and one["peers"][0]["rtt_ms"] is not None for one in found.values())

    serve.eventually(are_linked)
    serve.eventually(lambda: [by_region()[name]["ready_targets"] for name in REGIONS] == [1, 0])
    east, west = (by_region()[name] for name in REGIONS)
    assert (east["owned"], west["owned"]) == (["aws/us-east-1"], ["aws/us-west-2"])
    with Client(west["endpoint"], b"I am use1-az") as client:
        serve.eventually(lambda: client.responded > 10)
        serve.eventually(lambda: by_region()["us-west-2"]["peers"][0]["forwarded_out"] > 10)

        # The agent of us-east-1 is lost: that of us-west-2 takes the replica over, and gives it back.
        cloud.aws.end(east["instance_id"], "Server.InternalError", "Server.InternalError: lost")
        serve.eventually(lambda: by_region().get("us-west-2", {}).get("ready_targets") == 1)
        before = client.responded
        serve.eventually(lambda: client.responded > before + 10)
        serve.eventually(lambda: by_region().get("us-west-2", {}).get("ready_targets") == 0)
        before = client.responded
        serve.eventually(lambda: client.responded > before + 10)
    assert client.failed == []


def own_addresses(cloud: Cloud, serve: Serve) -> set[tuple[int, str]]:
    """The other addresses of this host, which its routes to elsewhere have."""
    found = OwnAddresses(None, None, time.time).private([])
    return {(port, f"{address}/32") for port in (22, 8443) for address in found}
