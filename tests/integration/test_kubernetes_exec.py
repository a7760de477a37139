"""Commands in Pods by the official client's WebSocket, against the fake cluster."""

from __future__ import annotations

import os
import select
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from provisioners.kubernetes.api import client_of
from provisioners.kubernetes.pod_exec import PodChannel, start_in_pod
from provisioners.port.errors import AuthError, ProvisionError, TransientError
from skyserve_cli.controller.api.over_kubernetes import PodOpener
from skyserve_cli.controller.api.remote import KubernetesPlace, Remote
from skyserve_cli.controller.leader_label import CONTROLLERS, LABEL
from tests.clouds.kubernetes.kube_places import living
from tests.clouds.kubernetes.kube_server import TOKEN
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None,
    reason="only root can enter a container's namespaces",
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    with living(tmp_path, token=TOKEN) as (made, _):
        container = {"name": "main", "image": "i", "command": ["sleep", "1000"]}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p"},
            "spec": {"containers": [container]},
        }
        made.create("pods", NAMESPACE, body)
        wait_for(made, "p")
        yield made


def wait_for(world: KubeWorld, pod: str) -> None:
    until = time.monotonic() + 20
    while world.store.get("pods", NAMESPACE, pod)["status"].get("phase") != "Running":
        assert time.monotonic() < until
        time.sleep(0.05)


def start(folder: Path, *command: str, container: str = "main") -> PodChannel:
    client, namespace = client_of(None, str(folder / "kubeconfig"))
    found = start_in_pod(client, namespace, "p", container, command, 10.0)
    found.settimeout(20.0)
    return found


def read_all(channel: PodChannel) -> bytes:
    data = b""
    while chunk := channel.recv(65536):
        data += chunk
    return data


@pytest.mark.long
def test_any_bytes_go_to_a_command_and_come_back(world: KubeWorld, tmp_path: Path) -> None:
    sent = bytes(range(256)) * 2000  # half a megabyte: many frames
    channel = start(tmp_path, "head", "-c", str(len(sent)))
    channel.sendall(sent)
    assert read_all(channel) == sent
    assert channel.closed
    channel.close()


def test_what_a_command_writes_to_its_standard_error_is_kept_apart(world: KubeWorld, tmp_path: Path) -> None:
    channel = start(tmp_path, "sh", "-c", "echo out; echo wrong >&2; exit 3")
    assert select.select([channel], [], [], 20.0)[0] == [channel]  # as sessions wait for it
    assert read_all(channel) == b"out\n"
    assert channel.printed_errors() == b"wrong\n"


def test_a_closed_channel_ends_the_command(world: KubeWorld, tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    channel = start(tmp_path, "sh", "-c", f"echo begun; cat; touch {mark}")
    assert channel.recv(6) == b"begun\n"
    channel.close()
    until = time.monotonic() + 20
    while not mark.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_refusals_are_errors_of_ours(world: KubeWorld, tmp_path: Path) -> None:
    world.troubles.denied = {("get", "pods/exec")}
    with pytest.raises(AuthError, match="cannot get resource"):
        start(tmp_path, "true")
    world.troubles.denied = set()
    with pytest.raises(ProvisionError, match="container other is not running"):
        start(tmp_path, "true", container="other")
    world.troubles.is_mute = True
    with pytest.raises(TransientError, match="does not respond"):
        start(tmp_path, "true")


@pytest.mark.long
def test_calls_of_a_controller_in_a_pod_may_start_at_the_same_time(world: KubeWorld, tmp_path: Path) -> None:
    leads = {**CONTROLLERS, LABEL: "true"}
    container = {"name": "controller", "image": "i", "command": ["sleep", "1000"]}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "c", "labels": leads},
        "spec": {"containers": [container]},
    }
    world.create("pods", NAMESPACE, body)
    wait_for(world, "c")
    kubeconfig = tmp_path / "kubeconfig"
    context = yaml.safe_load(kubeconfig.read_text())["current-context"]
    url = KubernetesPlace(context, NAMESPACE).url()
    opener = PodOpener(Remote(url, "", home="/nowhere", kubeconfig=str(kubeconfig)))
    with ThreadPoolExecutor(8) as pool:
        for channel in pool.map(lambda _: opener.start_bridge(), range(24)):
            channel.close()
