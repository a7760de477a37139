"""A controller on a machine of AWS: the official SDK against a strict EC2, whose instances really boot, as network namespaces."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from moto.iam.models import iam_backends

from tests.clouds.aws.aws_account import ACCOUNT, Launched
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_world import VmWorld
from tests.e2e.conftest import ROOT, Serve
from tests.e2e.test_cli_aws import Cloud
from tests.integration.sshd import serve_script

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

TARGET = "aws/us-east-1"
PROFILE = "skyserve-controller"


def why_not_shared() -> str | None:
    """Why another user, as the one of a machine is, cannot run this checkout; None if one can."""
    command = [sys.executable, "-c", "import skyserve_cli"]
    try:
        subprocess.run(
            command,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"another user cannot run this checkout: {error}"
    return None


@pytest.fixture
def program() -> Iterator[Path]:
    """A `serve` of this checkout, where machines have it, too: below them is the root of this machine. Nothing is installed there."""
    why_not = why_not_shared()
    if why_not is not None:
        pytest.skip(why_not)
    folder = Path(tempfile.mkdtemp(prefix="skyserve-program-", dir="/tmp"))
    folder.chmod(0o755)
    yield serve_script(folder / "serve", ROOT)
    shutil.rmtree(folder)


def arguments(target: str, program: Path, folder: Path, identity: str) -> list[str]:
    """Arguments of `serve` for a deployment with a configuration of its own."""
    there = folder / "config-there.yaml"
    there.write_text("load_balancer: {first_port: 30900}\nclouds: {local: {}}\n")
    return [
        *("controller", "deploy", target, "--home", "there", "--config", str(there)),
        *("--serve", str(program), "--identity-profile", identity, "-y"),
    ]


@pytest.fixture
def cloud(serve: Serve) -> Iterator[Cloud]:
    with ExitStack() as stack:
        vms = stack.enter_context(VmWorld("172.31.0.0/16"))
        aws = AwsWorld(time.time)
        aws.boot_s = 0.5

        def boot(launched: Launched) -> None:
            vms.boot(launched.id, addresses=[launched.private_ip], user_data=launched.user_data)

        aws.on_launch = boot
        aws.on_gone = lambda instance_id: vms.vms[instance_id].kill()
        stack.enter_context(aws.running())
        accounts = iam_backends[ACCOUNT]["aws"]
        accounts.reset()
        accounts.create_instance_profile(PROFILE, "/", [], [])
        serve.environment |= aws.environment
        serve.configure(
            clouds={"aws": {"poll_seconds": 0.5, "use_private_ip": True, "regions": ["us-east-1"]}}
        )
        yield Cloud(aws, vms)
        if (serve.home / "state.db").exists():
            serve("controller", "start")
            serve("down", "--all", "--purge", "-y", "--timeout", "60")  # while there is a cloud to look at
        assert aws.errors == []


@pytest.fixture
def words(cloud: Cloud, program: Path, tmp_path: Path) -> list[str]:
    return arguments(TARGET, program, tmp_path, PROFILE)


def test_one_machine_is_launched_found_again_kept_by_gc_and_terminated(
    serve: Serve, cloud: Cloud, words: list[str], tmp_path: Path
) -> None:
    first = serve.ok(*words, "-o", "json")
    made = first.json()
    (instance,) = cloud.live()
    assert (made["context"], made["started"]) == ("aws-us-east-1", True)
    assert "one on-demand t3.small in aws/us-east-1, about $0.0208 per hour" in first.err
    (asked,) = cloud.aws.asked("RunInstances")
    assert asked.params["IamInstanceProfile.Name"] == PROFILE
    assert asked.params["InstanceInitiatedShutdownBehavior"] == "stop"
    assert "deadman" not in cloud.vms.vms[instance].console()
    folder = serve.home / "controllers" / "aws-us-east-1"
    for path in (folder, folder / "identity", folder / "machine.key"):
        assert path.stat().st_mode & 0o077 == 0, path

    serve.ok("context", "use", "aws-us-east-1")
    assert serve.ok("controller", "status", "-o", "json").json()["pid"] == made["pid"]
    again = serve.ok(*words, "-o", "json")
    assert (again.json()["started"], cloud.live()) == (False, [instance])
    assert f"found {instance}" in again.err

    # No command that looks for orphans touches the machine.
    serve.ok("context", "use", "local")
    assert serve.ok("gc", "-y", "-o", "json").json()["found"] == []
    owner = cloud.aws.tags_of("us-east-1", instance)["skyserve-owner"]
    others = serve("gc", "--any-owner", "--owner", owner, "-y")
    assert "`serve controller undeploy`" in others.err
    assert cloud.live() == [instance]

    # Services there keep it; then it goes, with all that came with it.
    file = tmp_path / "web.yaml"
    file.write_text(
        "service: {readiness_probe: /, replicas: 1}\nresources: {infra: local}\nrun: sleep 1000\n"
    )
    serve.ok("context", "use", "aws-us-east-1")
    serve.ok("up", file, "-y", "--name", "web", "--no-wait")
    refused = serve("controller", "undeploy", TARGET, "-y")
    assert (refused.code, "services are up there: web" in refused.err) == (1, True), refused.err
    serve.ok("down", "web", "-y")
    gone = serve.ok("controller", "undeploy", TARGET, "-y", "-o", "json").json()
    assert gone["terminated"] == instance
    assert cloud.left() == []
    assert [one["name"] for one in serve.ok("context", "list", "-o", "json").json()] == ["local"]
    assert not (serve.home / "controllers" / "aws-us-east-1").exists()
    refused = serve("controller", "undeploy", TARGET, "-y")
    assert (refused.code, "no controller was deployed" in refused.err) == (2, True)


def test_a_command_that_is_killed_at_any_time_never_leads_to_a_second_machine(
    serve: Serve, cloud: Cloud, words: list[str]
) -> None:
    for after in ("launching", "boots", "starting the controller"):
        process = subprocess.Popen(
            [sys.executable, "-m", "skyserve_cli", *words],
            env=serve.environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if after in line:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert len(cloud.live()) <= 1
    made = serve.ok(*words, "-o", "json").json()
    assert len(cloud.live()) == 1
    # One that was terminated by other means is replaced.
    (instance,) = cloud.live()
    cloud.aws.end(instance, "Client.UserInitiatedShutdown", "by hand")
    serve.ok(*words, "-o", "json")
    assert len(cloud.live()) == 1
    assert cloud.live() != [instance]
    serve.ok("controller", "undeploy", TARGET, "-y", "--force")
    assert cloud.left() == []
    assert made["context"] == "aws-us-east-1"


def test_what_is_wrong_is_named_and_nothing_is_launched(serve: Serve, cloud: Cloud, tmp_path: Path) -> None:
    for words, sentence in (
        ([TARGET], "--identity-profile: name an instance profile"),
        (["aws/mars-east-1", "--identity-profile", "x"], "aws has no region mars-east-1"),
        (["aws", "--identity-profile", "x"], "must be aws/REGION, gcp/REGION, azure/REGION"),
        (["gcp/europe-west4", "--identity-profile", "x"], "gcp is not enabled"),
        ([TARGET, "--image", "x"], "--image: is not for aws/"),
        ([TARGET, "--identity", str(tmp_path)], "--identity: is not for aws/"),
    ):
        refused = serve("controller", "deploy", *words)
        assert (refused.code, sentence in refused.err, refused.err.count("\n")) == (2, True, 1), refused.err
    refused = serve("controller", "deploy", TARGET, "--identity-profile", "x")  # standard input is empty
    assert (refused.code, "pass -y to go ahead" in refused.err) == (2, True), refused.err
    cloud.aws.denied = {"RunInstances"}
    refused = serve("controller", "deploy", TARGET, "--identity-profile", "x", "-y")
    assert (refused.code, "ec2:RunInstances" in refused.err) == (1, True), refused.err
    cloud.aws.denied = set()
    assert cloud.live() == []
    serve.ok("controller", "undeploy", TARGET, "-y")
    assert cloud.left() == []
