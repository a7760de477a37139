"""`serve` on Google Cloud and on Azure: the official SDKs against strict clouds on loopback, whose machines really boot, as
network namespaces."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_ground import PROJECT
from tests.clouds.gcp.gcp_parts import RealClock
from tests.clouds.gcp.gcp_server import serving
from tests.clouds.gcp.gcp_world import World as GcpWorld
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_world import VmWorld
from tests.e2e.conftest import ROOT, Serve

pytestmark = pytest.mark.long

NEEDS_VMS = pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not()))

SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replica_policy: {min_replicas: 1, max_replicas: 1, spot_placer: dynamic_fallback, dynamic_ondemand_fallback: false}
resources:
  infra: PLACE
  accelerators: GPU:1
  use_spot: true
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@dataclass
class Cloud:
    """A cloud that `serve` has in its config.yaml."""

    name: str
    place: str
    gpu: str
    zone: str  # as replicas see it begin
    preempt: Callable[[str], None]  # by the instance's id
    left: Callable[[], list[str]]  # whatever costs money
    deny: Callable[[], str]  # take a permission away; its name


def google(serve: Serve, _folder: Path, stack: ExitStack) -> Cloud:
    world = GcpWorld(clock=RealClock(), operation_s=0.5, boot_s=0.5, preemption_s=1.0)
    world.quotas |= {("", "GPUS_ALL_REGIONS"): 8.0, ("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS"): 8.0}
    if vm_world.why_not() is None:
        vms = stack.enter_context(VmWorld("10.128.0.0/16"))
        world.on_launch = lambda facts: (
            vms.boot(
                facts.name, addresses=[facts.private_ip], user_data=facts.user_data, cloud="gcp", gpus=1
            ),
            None,
        )[1]
        world.on_gone = lambda name, why: vms.vms[name].kill()
    url = stack.enter_context(serving(world))
    section = {"project": PROJECT, "endpoint": url, "regions": ["us-central1"], "use_private_ip": True}
    serve.configure(clouds={"gcp": {"poll_seconds": 0.5, **section}})

    def preempt(instance_id: str) -> None:
        (zone,) = [zone for zone, name in world.instances if name == instance_id]
        world.preempt(zone, instance_id)

    def left() -> list[str]:
        assert world.violations == []
        return [*world.alive(), *(name for _, name in world.disks)]

    def deny() -> str:
        world.denied.add("compute.instances.create")
        return "compute.instances.create"

    return Cloud("gcp", "gcp/us-central1", "L4", "us-central1-", preempt, left, deny)


def microsoft(serve: Serve, folder: Path, stack: ExitStack) -> Cloud:
    world = AzureWorld(clock=RealClock(), settle_s=0.1, allocate_s=0.5, boot_s=0.5, delete_s=0.5, evict_s=0.5)
    if vm_world.why_not() is None:
        vms = stack.enter_context(VmWorld("10.64.0.0/16"))
        world.on_launch = lambda facts: (
            vms.boot(
                facts.name, addresses=[facts.private_ip], user_data=facts.user_data, cloud="azure", gpus=1
            ),
            None,
        )[1]
        world.on_gone = lambda facts: vms.vms[facts.name].kill()
    server = stack.enter_context(AzureServer(world, certified(folder)).running())
    token = json.dumps({"accessToken": world.token, "expires_on": int(time.time()) + 86_400})
    (folder / "bin").mkdir()
    (folder / "bin/az").write_text(f"#!/bin/sh\necho '{token}'\n")
    (folder / "bin/az").chmod(0o755)
    serve.environment |= {
        "PATH": f"{folder / 'bin'}:{serve.environment['PATH']}",
        "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
        "REQUESTS_CA_BUNDLE": str(folder / "cert.pem"),
        "HTTPS_PROXY": "http://127.0.0.1:9",  # not used: prices are the catalog's
        "NO_PROXY": "127.0.0.1",
    }
    section = {"subscription_id": world.subscription, "arm_url": server.url, "regions": ["eastus"]}
    serve.configure(clouds={"azure": {"poll_seconds": 0.5, "use_private_ip": True, **section}})

    def left() -> list[str]:
        assert world.violations == []
        return world.parts()

    def deny() -> str:
        world.not_actions.append("Microsoft.Compute/virtualMachines/write")
        return "Microsoft.Compute/virtualMachines/write"

    return Cloud(
        "azure", "azure/eastus", "T4", "eastus-", lambda id_: world.preempt(id_.split("/")[-1]), left, deny
    )


def certified(folder: Path) -> ssl.SSLContext:
    """A certificate for 127.0.0.1, which its own user trusts."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "arm")]),
    )
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    raw = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "key.pem").write_bytes(raw)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.fixture(params=[google, microsoft], ids=["gcp", "azure"])
def cloud(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path) -> Iterator[Cloud]:
    with ExitStack() as stack:
        made: Cloud = request.param(serve, tmp_path, stack)
        yield made
        if (serve.home / "state.db").exists():
            serve("controller", "start")
            serve("down", "--all", "--purge", "-y", "--timeout", "60")
        serve.eventually(lambda: made.left() == [])


@only_long  # test_cli_aws plays this story in every run, and the contract holds for every cloud
@NEEDS_VMS
def test_a_spot_machine_from_up_over_a_preemption_to_down(serve: Serve, cloud: Cloud, tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE.replace("PLACE", cloud.place).replace("GPU", cloud.gpu))
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]

    def ready() -> set[str]:
        return {one["instance_id"] for one in serve.view("web")["replicas"] if one["state"] == "READY"}

    serve.eventually(ready)
    (first,) = ready()
    assert get(endpoint).startswith(f"I am {cloud.zone}")

    cloud.preempt(first)
    serve.eventually(lambda: ready() - {first})
    assert get(endpoint).startswith(f"I am {cloud.zone}")

    serve.ok("down", "web", "-y")
    serve.eventually(lambda: cloud.left() == [])  # both clouds promise a deletion, and take their time


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def test_what_is_missing_is_found_by_check(serve: Serve, cloud: Cloud) -> None:
    (found,) = serve.ok("check", "-o", "json").json()
    assert (found["cloud"], found["usable"], found["why"]) == (cloud.name, True, "")
    assert found["zones"]
    missing = cloud.deny()
    said = serve("check")
    assert said.code == 1
    assert missing in said.out
    assert "not usable" in said.out


@pytest.mark.parametrize(
    ("section", "sdk", "extra"),
    [
        ({"gcp": {"project": "p"}}, "google", "gcp"),
        ({"azure": {"subscription_id": "s"}}, "azure", "azure"),
        ({"aws": {}}, "boto3", "aws"),
    ],
    ids=["gcp", "azure", "aws"],
)
def test_a_missing_sdk_is_one_sentence_that_says_what_to_install(
    serve: Serve, tmp_path: Path, section: dict[str, Any], sdk: str, extra: str
) -> None:
    serve.configure(clouds=section)
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{sdk!r}] = None\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for command, code in ((("check",), 1), (("controller", "start"), 2)):
        said = serve(*command, env=env)
        assert said.code == code, said
        assert f"pip install -e '.[{extra}]'" in said.out + said.err
        assert "Traceback" not in said.err


def test_a_missing_sdk_stops_no_other_cloud(serve: Serve, tmp_path: Path) -> None:
    serve.configure(clouds={"gcp": {"project": "p"}, "local": {"poll_seconds": 0.5}})
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['google'] = None\n")
    serve.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    gcp, local = serve.ok("check", "-o", "json").json()
    assert (gcp["usable"], local["usable"]) == (False, True)
    assert "pip install -e '.[gcp]'" in gcp["why"]
    rows = {line.split()[0]: line for line in serve.ok("check").out.splitlines() if line}
    assert "not usable" in rows["gcp"]
    assert all("not enabled" in rows[name] for name in ("aws", "azure", "ssh"))
    file = tmp_path / "web.yaml"
    file.write_text("service: {}\nrun: exec python3 -m http.server $SKYSERVE_REPLICA_PORT\n")
    serve.ok("up", file, "-y", "--set", "resources.infra=local")
    refused = serve("up", file, "-n", "other", "-y", "--set", "resources={infra: gcp, accelerators: L4}")
    assert refused.code == 2
    assert "pip install -e '.[gcp]'" in refused.err


@only_long  # the steps are tested in virtual time, the path by `serve up`
@NEEDS_VMS
def test_a_launch_is_checked_from_the_firewall_to_the_end(serve: Serve, cloud: Cloud) -> None:
    (checked,) = serve.ok(
        "check", "--launch", "--accelerator", cloud.gpu, "--spot", "-y", "-o", "json"
    ).json()
    assert checked["ok"], checked
    assert [step["what"] for step in checked["steps"]] == [
        "launch",
        "boot, ssh and setup",
        "response",
        "removal",
    ]
    assert checked["usd"] > 0
    assert cloud.left() == []
    assert json.loads((serve.home / "check_launches.json").read_text()) == {}
