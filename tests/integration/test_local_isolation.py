"""Replicas that insist on the same port of one machine."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.store import LocalStore
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import InvalidRequestError
from tests.kit.eventually import eventually

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local cloud needs Linux")

OWNER = "owner-1"
SERVE = 'echo "replica $SKYSERVE_REPLICA_ID" > index.html; exec python3 -u -m http.server '


@pytest.fixture
def permitted() -> None:
    name = local_net.namespace_name("i-permit")
    try:
        local_net.create_namespaces([name], IPv4Network("10.213.0.0/16"))
    except local_net.NotPermittedError as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")
    local_net.remove_namespace(name)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalProvisioner]:
    made = LocalProvisioner(tmp_path)
    yield made
    for instance in made.instances(OWNER):
        made.terminate(instance)
        assert not local_process.marked(instance.id)
        assert not traces(instance)


def launch(cloud: LocalProvisioner, number: int, port: int, run: str | None = None) -> Instance:
    offer = cloud.offers(Requirements((Candidate(),)))[0]
    run = run or f"{SERVE}{port}"
    return cloud.launch(LaunchOrder(f"chat-{number}", OWNER, "chat", number, 1, offer, None, run, port=port))


def traces(instance: Instance) -> list[Path]:
    """The remains of an instance's network: its namespace and its interface."""
    name = local_net.namespace_name(instance.id)
    return [path for path in (Path("/run/netns", name), Path("/sys/class/net", name)) if path.exists()]


def answer(instance: Instance) -> str:
    try:
        with urlopen(instance.endpoint or "", timeout=5) as response:
            return str(response.read().decode().strip())
    except URLError:
        return ""


@pytest.mark.usefixtures("permitted")
def test_each_has_the_port_for_itself_and_leaves_no_network_behind(cloud: LocalProvisioner) -> None:
    first, second = launch(cloud, 1, 8000), launch(cloud, 2, 8000)
    assert first.endpoint != second.endpoint
    assert {endpoint.rpartition(":")[2] for endpoint in (first.endpoint or "", second.endpoint or "")} == {
        "8000"
    }
    eventually(lambda: answer(first) == "replica 1", "the first answers")
    eventually(lambda: answer(second) == "replica 2", "the second answers")
    assert len(traces(first)) == 2
    cloud.terminate(first)
    assert not traces(first)
    assert answer(second) == "replica 2"


@pytest.mark.usefixtures("permitted")
def test_setup_still_has_the_network_of_the_machine(cloud: LocalProvisioner) -> None:
    offer = cloud.offers(Requirements((Candidate(),)))[0]
    show = "echo $(ls -l /proc/self/ns/net | sed 's/.*-> //')"
    order = LaunchOrder("chat-1", OWNER, "chat", 1, 1, offer, setup=show, run=f"{show}; echo END", port=8000)
    instance = cloud.launch(order)
    eventually(lambda: b"END" in cloud.read_log(instance, 0, 1000), "both have run")
    of_setup, of_run, _ = cloud.read_log(instance, 0, 1000).decode().split()
    assert of_setup == str(Path("/proc/self/ns/net").readlink())
    assert of_run != of_setup


@pytest.mark.usefixtures("permitted")
def test_the_network_of_a_host_killed_hard_is_swept_up(cloud: LocalProvisioner, tmp_path: Path) -> None:
    instance = launch(cloud, 1, 8000)
    eventually(lambda: answer(instance) == "replica 1", "it answers")
    pid = LocalStore(tmp_path).folder(instance.token).host_pid()
    assert pid is not None
    psutil.Process(pid).kill()
    eventually(lambda: cloud.instances(OWNER)[0].state is InstanceState.TERMINATED, "its death is noticed")
    assert not traces(instance)


def test_a_replica_that_takes_its_port_is_not_isolated(cloud: LocalProvisioner) -> None:
    first, second = (launch(cloud, number, 8000, SERVE + '"$SKYSERVE_REPLICA_PORT"') for number in (1, 2))
    eventually(lambda: answer(first) == "replica 1", "the first answers")
    eventually(lambda: answer(second) == "replica 2", "the second answers")
    assert all((instance.endpoint or "").startswith("http://127.0.0.1:") for instance in (first, second))
    assert not traces(first)


def test_where_it_is_not_permitted_the_second_is_told_what_to_do(
    cloud: LocalProvisioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the `ip` program no namespace can be made, for root, too."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bash").symlink_to(shutil.which("bash") or "/bin/sh")
    (programs / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(programs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = launch(cloud, 1, port)
    assert first.endpoint == f"http://127.0.0.1:{port}"
    eventually(lambda: answer(first) == "replica 1", "the first answers")
    with pytest.raises(
        InvalidRequestError, match=r"let `run` listen on \$SKYSERVE_REPLICA_PORT, or run as root"
    ):
        launch(cloud, 2, port)
    assert [instance.token for instance in cloud.instances(OWNER)] == [first.token]
