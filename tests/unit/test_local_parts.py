"""Small parts of the local cloud: the log, ports and namespaces as values, the names of clouds, the fake's states."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from policies.model import CapacityType
from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.log import LogWriter, log_window, read_log
from provisioners.local.store import InstanceFolder
from provisioners.local.translate import copy_problems
from provisioners.port.base import (
    Candidate,
    Instance,
    InstanceState,
    LaunchOrder,
    LogSource,
    Provisioner,
    Requirements,
)
from provisioners.port.errors import CapacityError, TransientError
from provisioners.registry import PROVISIONERS, MissingSdkError, UnknownCloudError, provisioner_class
from tests.clouds.fake import FakeProvisioner

# --- Files that it copies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "source", "problem"),
    [
        ("data", "/etc/hostname", ""),
        ("data", "s3://bucket", ""),
        (
            "data",
            "https://account.blob.core.windows.net/b",
            "needs the program az, which this machine does not have",
        ),
        ("data", "ftp://x/y", "ftp://x/y is no bucket that can be fetched"),
        ("/data", "/etc/hostname", "use a relative path"),
        ("~/data", "/etc/hostname", "use a relative path"),
        ("a/../../data", "/etc/hostname", "use a relative path"),
    ],
)
def test_what_cannot_be_copied(
    target: str, source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aws").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = copy_problems(target, source)
    assert len(found) == bool(problem)
    assert problem in "".join(found)


# --- The log ------------------------------------------------------------------------------------------------


def test_a_log_is_read_by_offset_across_its_segments(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=10)
    log.write(b"0123456789abcde")
    log.write(b"fgh")
    assert read_log(tmp_path, 0, 100) == b"0123456789"
    assert read_log(tmp_path, 4, 3) == b"456"
    assert read_log(tmp_path, 10, 100) == b"abcdefgh"
    assert read_log(tmp_path, 18, 100) == b""
    assert log_window(tmp_path) == (0, 18)


def test_only_the_newest_two_segments_are_kept_and_offsets_stay_true(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=10)
    for number in range(10):
        log.write(f"line {number:03d}\n".encode())
    assert log_window(tmp_path) == (70, 90)
    assert read_log(tmp_path, 81, 100) == b"line 009\n"
    assert read_log(tmp_path, 0, 5) == b"7\nlin"  # what was dropped is skipped
    assert sum(path.stat().st_size for path in tmp_path.glob("log.*")) <= 20


@pytest.mark.parametrize(
    ("written", "last"),
    [
        (b"", ""),
        (b"one\ntwo\n\n  \n", "two"),
        (b"no end of line", "no end of line"),
        (b"\xff\xfe broken \xe2", "\ufffd\ufffd broken \ufffd"),
        (b"x" * 10_000, "x" * 300),
    ],
    ids=["nothing", "blank lines", "no newline", "not UTF-8", "a long one"],
)
def test_the_last_line_worth_showing(tmp_path: Path, written: bytes, last: str) -> None:
    log = LogWriter(tmp_path)
    log.write(written)
    assert log.last_line == last


def test_an_instance_without_output_has_an_empty_log(tmp_path: Path) -> None:
    assert (read_log(tmp_path, 0, 10), log_window(tmp_path)) == (b"", (0, 0))


# --- Ports and namespaces -----------------------------------------------------------------------------------


def test_a_free_port_is_one_nobody_was_promised_or_listens_on() -> None:
    first = local_net.free_port((), seed="home")
    assert first is not None
    assert 20_000 <= first < 30_000
    second = local_net.free_port({first}, seed="home")
    assert second not in (None, first)
    with socket.socket() as server:
        server.bind(("127.0.0.1", first))
        server.listen()
        assert not local_net.is_port_free(first)
        assert local_net.free_port((), seed="home") != first


def test_no_port_is_found_when_all_are_promised() -> None:
    assert local_net.free_port(range(20_000, 30_000), seed="home") is None


def test_a_namespace_is_a_list_of_commands() -> None:
    created = local_net.creation(["skyserve-abc123"], "10.0.0.1", ["10.0.0.2"], 30)
    commands = [" ".join(command) for command in created]
    assert commands == [
        "ip netns add skyserve-abc123",
        "ip link add skyserve-abc123 type veth peer name eth0 netns skyserve-abc123",
        "ip address add 10.0.0.1/30 dev skyserve-abc123",
        "ip link set skyserve-abc123 up",
        "ip -n skyserve-abc123 address add 10.0.0.2/30 dev eth0",
        "ip -n skyserve-abc123 link set lo up",
        "ip -n skyserve-abc123 link set eth0 up",
        "ip -n skyserve-abc123 route add default via 10.0.0.1",
    ]


def test_the_nodes_of_a_replica_are_plugged_into_a_bridge_in_the_namespace_of_the_head() -> None:
    created = local_net.creation(["one", "two"], "10.0.0.1", ["10.0.0.2", "10.0.0.3"], 29)
    commands = [" ".join(command) for command in created]
    assert commands[:-8] == [
        "ip netns add one",
        "ip netns add two",
        "ip link add one type veth peer name port0 netns one",
        "ip address add 10.0.0.1/29 dev one",
        "ip link set one up",
        "ip -n one link add eth0 type bridge",
        "ip -n one link add port1 type veth peer name eth0 netns two",
        "ip -n one link set port0 master eth0 up",
        "ip -n one link set port1 master eth0 up",
    ]
    assert [line for line in commands[-8:] if "address" in line] == [
        "ip -n one address add 10.0.0.2/29 dev eth0",
        "ip -n two address add 10.0.0.3/29 dev eth0",
    ]


def test_an_interface_name_fits() -> None:
    assert len(local_net.namespace_name("i-0123456789ab")) == 15


def test_without_the_program_nothing_is_permitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(local_net.NotPermittedError):
        local_net.create_namespaces(["skyserve-nobody"], IPv4Network("10.213.0.0/16"))


# --- Processes ----------------------------------------------------------------------------------------------


def test_processes_are_found_by_kinship_and_by_mark() -> None:
    mark = f"i-{os.getpid():x}"
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo; wait"],
        env={**os.environ, local_process.INSTANCE_MARK: mark},
        stdout=-1,
    )
    assert shell.stdout is not None
    shell.stdout.readline()
    below = local_process.descendants(shell.pid)
    assert len(below) == 1
    for _ in range(500):  # one that has just been forked shows no mark until its program runs
        if len(local_process.marked(mark)) == 2:
            break
        time.sleep(0.01)
    assert sorted(local_process.marked(mark)) == sorted([shell.pid, *below])
    local_process.kill_marked(mark)
    assert shell.wait() == -9
    assert local_process.marked(mark) == []
    shell.stdout.close()


def test_a_host_imports_neither_yaml_nor_pydantic() -> None:
    """A host per replica: it has to be small."""
    code = "import sys, provisioners.local.host; print(sorted({'yaml', 'pydantic', 'asyncio'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_folder_that_is_not_there_is_no_instance(tmp_path: Path) -> None:
    folder = InstanceFolder(tmp_path / "nothing")
    assert (folder.instance(), folder.record(), folder.status()) == (None, None, None)
    assert (folder.is_host_alive(), folder.host_pid(), folder.preempt_at()) == (False, None, None)


# --- Names of clouds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROVISIONERS))
def test_every_registered_name_is_a_cloud_of_that_name(name: str) -> None:
    assert provisioner_class(name).name == name


def test_an_unknown_cloud_lists_the_known_and_guesses() -> None:
    with pytest.raises(
        UnknownCloudError, match=r"no cloud 'locall' \(known: fake, local\); did you mean 'local'\?"
    ):
        provisioner_class("locall", {"local": "x:Y", "fake": "x:Z"})


def test_the_local_cloud_shows_logs(tmp_path: Path) -> None:
    cloud: Provisioner = LocalProvisioner(tmp_path)
    assert isinstance(cloud, LogSource)


# --- The fake, in virtual time ------------------------------------------------------------------------------


class FakeWorld:
    def __init__(self) -> None:
        self.time = 0.0
        self.cloud = FakeProvisioner(lambda: self.time, boot_s=30, setup_s=60)
        self.offer = self.cloud.offers(Requirements((Candidate(use_spot=True),)))[0]

    def launch(self, name: str = "chat-1") -> Instance:
        return self.cloud.launch(LaunchOrder(name, "me", "chat", 1, 1, self.offer, setup=None, run="true"))

    def state(self, at: float) -> InstanceState:
        self.time = at
        return self.cloud.instances("me")[0].state


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.mark.parametrize(
    ("at", "state"),
    [
        (0.0, InstanceState.PENDING),
        (29.9, InstanceState.PENDING),
        (30.0, InstanceState.SETUP),
        (90.0, InstanceState.RUNNING),
        (1e6, InstanceState.RUNNING),
    ],
)
def test_a_fake_instance_grows_with_time(world: FakeWorld, at: float, state: InstanceState) -> None:
    world.launch()
    assert world.state(at) is state


def test_a_fake_preemption_is_announced_and_final(world: FakeWorld) -> None:
    launched = world.launch()
    world.time = 100.0
    world.cloud.preempt(launched.token, notice_s=20)
    assert world.cloud.instances("me")[0].preempt_at == 120.0
    assert world.state(119.9) is InstanceState.RUNNING
    assert world.state(120.0) is InstanceState.PREEMPTED
    world.cloud.terminate(launched)
    assert world.state(121.0) is InstanceState.PREEMPTED


def test_a_fake_failure_has_a_message(world: FakeWorld) -> None:
    launched = world.launch()
    world.cloud.fail(launched.token, InstanceState.SETUP_FAILED, "no such wheel")
    assert world.cloud.instances("me")[0].message == "no such wheel"
    assert world.state(1.0) is InstanceState.SETUP_FAILED


def test_troubles_come_in_the_order_they_were_ordered(world: FakeWorld) -> None:
    world.cloud.fail_next_launch(TransientError("slow down", cloud="fake"))
    world.cloud.fail_next_launch(CapacityError("full", cloud="fake"))
    with pytest.raises(TransientError):
        world.launch()
    with pytest.raises(CapacityError):
        world.launch()
    assert not world.cloud.instances("me")
    assert world.launch().state is InstanceState.PENDING
    assert world.cloud.calls == [("launch", "chat-1")] * 3


def test_fake_capacity_counts_what_lives(world: FakeWorld) -> None:
    world.cloud.set_capacity(world.offer.zone.name, 1, CapacityType.SPOT)
    first = world.launch("chat-1")
    with pytest.raises(CapacityError):
        world.launch("chat-2")
    world.cloud.terminate(first)
    assert world.launch("chat-2").state is InstanceState.PENDING


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import a_module_that_is_nowhere",
            "is not installed: run pip install -e '.[sky]' in the checkout of skyserve",
        ),
        (
            "from json import a_name_that_is_not_there",
            "is too old, or too new: run pip install --upgrade -e '.[sky]' in the checkout of skyserve",
        ),
    ],
)
def test_an_sdk_that_is_missing_and_one_that_does_not_fit_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    name = f"sdk_of_a_test_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingSdkError) as caught:
        provisioner_class("sky", {"sky": f"{name}:Cloud"})
    assert why in str(caught.value)
