"""`serve` on AWS: the official SDK against a strict EC2 on loopback, whose instances really boot, as network namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clouds.aws.aws_account import Launched
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_world import VmWorld
from tests.e2e.conftest import Serve
from tests.e2e.regions_client import Client

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replica_policy: {min_replicas: 2, max_replicas: 2, spot_placer: dynamic_fallback}
resources:
  infra: aws/us-east-1
  accelerators: L4:1
  use_spot: true
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@dataclass
class Cloud:
    aws: AwsWorld
    vms: VmWorld

    def live(self) -> list[str]:
        return [name for name, vm in self.vms.vms.items() if vm.is_running]

    def left(self) -> list[str]:
        """All that anybody pays for, or has to clean up: of the account as it was handed out there is nothing in it."""
        return [*self.live(), *self.aws.live(), *self.aws.belongings("us-east-1")]


def amazon(serve: Serve, stack: ExitStack) -> Cloud:
    """An account with a region, as the home's only cloud."""
    vms = stack.enter_context(VmWorld("172.31.0.0/16"))
    aws = AwsWorld(time.time)
    aws.boot_s = 0.5

    def boot(launched: Launched) -> None:
        vms.boot(launched.id, addresses=[launched.private_ip], user_data=launched.user_data, gpus=1)

    aws.on_launch = boot
    aws.on_gone = lambda instance_id: vms.vms[instance_id].kill()
    stack.enter_context(aws.running())
    serve.environment |= aws.environment
    serve.configure(clouds={"aws": {"poll_seconds": 0.5, "use_private_ip": True, "regions": ["us-east-1"]}})
    return Cloud(aws, vms)


@pytest.fixture
def cloud(serve: Serve) -> Iterator[Cloud]:
    with ExitStack() as stack:
        made = amazon(serve, stack)
        yield made
        serve("controller", "start")
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        assert made.live() == []
        assert made.aws.errors == []


@pytest.mark.timeout(240)
def test_spot_instances_from_up_over_preemptions_and_a_dead_controller_to_down(
    serve: Serve, cloud: Cloud, tmp_path: Path
) -> None:
    (found,) = serve.ok("check", "-o", "json").json()
    assert (found["cloud"], found["usable"], found["why"]) == ("aws", True, "")
    assert "us-east-1/use1-az1" in found["zones"]

    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]

    def ready() -> dict[int, str]:
        replicas = serve.view("web")["replicas"]
        return {one["id"]: one["instance_id"] for one in replicas if one["state"] == "READY"}

    serve.eventually(lambda: len(ready()) == 2)
    first = ready()
    assert sorted(first.values()) == sorted(cloud.live())

    pid = serve.ok("controller", "status", "-o", "json").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    serve.ok("controller", "start")

    with Client(endpoint, b"I am use1-az") as client:
        serve.eventually(lambda: client.responded > 20)
        warned = min(first.values())
        cloud.vms.vms[warned].metadata.announce(time.time() + 60.0)
        serve.eventually(lambda: len(ready()) == 2 and warned not in ready().values())
        taken = min(ready().values())
        cloud.aws.preempt(taken)  # without a word
        serve.eventually(lambda: len(ready()) == 2 and taken not in ready().values())
        before = client.responded
        serve.eventually(lambda: client.responded > before + 20)
    assert client.failed == []
    assert len(cloud.live()) == 2

    assert {thing.partition("-")[0] for thing in cloud.left()} >= {"i", "vol", "eni", "sg", "skyserve"}
    cloud.aws.denied = {"DeleteSecurityGroup"}
    said = serve("down", "web", "-y")
    (group,) = cloud.left()  # and nothing else
    assert (said.code, f"security-group {group} in us-east-1 is left" in said.err) == (1, True)
    assert "ec2:DeleteSecurityGroup" in said.err
    assert "serve gc" in said.err
    cloud.aws.denied = set()
    serve.ok("gc", "-y")
    assert cloud.left() == []

    # And all that was removed is made again, even by one who does not wait.
    serve.ok("up", file, "-y", "--name", "web")
    serve.eventually(lambda: len(ready()) == 2)
    serve.ok("down", "--all", "-y")
    assert cloud.left() == []
