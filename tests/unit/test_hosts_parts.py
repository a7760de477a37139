"""The parts of bringing hosts up that need no host: keys, steps, packing, notices, claims, pools, the log."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.port.base import Candidate, LaunchOrder, Requirements
from provisioners.port.commands import HostKeyError, LoginRefusedError, UnreachableError
from provisioners.port.lease import FIRST_S, LEASE_S, LeaseTerms
from provisioners.port.vm import MAX_TOKEN, MachineOrder
from provisioners.remote.archive import PackingError, pack
from provisioners.remote.bootstrap_runner import BootstrapError, BootstrapRunner, boot_timeout_factor
from provisioners.remote.bootstrap_steps import ReplicaNode, missing_sources, steps_for, task_for
from provisioners.remote.host_agent import claims, files, notices, process_kill
from provisioners.remote.host_agent.bundle import agent_bundle
from provisioners.remote.host_agent.log import log_window, pipe_of, pump, read_log
from provisioners.remote.host_agent.notices import MetadataResponse
from provisioners.remote.host_agent.scripts import container_command, exec_command, exit_message
from provisioners.remote.ssh import Shell
from provisioners.remote.ssh_keys import MAX_USER_DATA_BYTES, Keys, user_data
from provisioners.remote.step import Content
from provisioners.ssh.pool import PoolError, load_pools, offers_of

KEYS = Keys(bytes(range(32)), "owner-1")
AGENT = Path(__file__).parents[2] / "provisioners" / "host_agent"


# --- keys


def test_keys_follow_from_secret_owner_and_token_alone() -> None:
    again = Keys(bytes(range(32)), "owner-1")
    assert (again.login("chat"), again.host("a")) == (KEYS.login("chat"), KEYS.host("a"))
    others = [
        KEYS.host("b"),
        Keys(bytes(range(32)), "owner-2").login("chat"),
        Keys(bytes(32), "owner-1").login("chat"),
        KEYS.host(""),
    ]
    assert len({key.public.split()[1] for key in [KEYS.login("chat"), KEYS.host("a"), *others]}) == 6


def test_ssh_keygen_reads_the_same_public_key_out_of_the_private_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEYS.login("chat").private)
    path.chmod(0o600)
    said = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True).stdout
    assert said.strip() == KEYS.login("chat").public
    listed = subprocess.run(
        ["ssh-keygen", "-l", "-f", path], capture_output=True, text=True, check=True
    ).stdout
    assert listed.split()[1] == KEYS.login("chat").fingerprint


def test_secrets_are_not_shown() -> None:
    assert "PRIVATE" not in repr(KEYS.login("chat"))
    assert "secret" not in repr(KEYS)


def machine_order(**facts: Any) -> MachineOrder:
    return MachineOrder(
        token="t" * MAX_TOKEN,
        owner="owner-1",
        service="s",
        replica_id=1,
        rank=0,
        num_nodes=1,
        zone=Zone("aws", "us-east-1", "use1-az1"),
        instance_type="x",
        capacity_type=CapacityType.SPOT,
        public_key=KEYS.login("chat").public,
        **facts,
    )


def test_user_data_is_small_and_the_same_every_time_and_sh_can_read_it() -> None:
    order = machine_order(user="u" * 32)
    script = user_data(order, KEYS.host(order.token))
    assert script == user_data(order, KEYS.host(order.token))
    assert len(script.encode()) < MAX_USER_DATA_BYTES
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


def test_a_user_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="is no user name"):
        user_data(machine_order(user="x; reboot"), KEYS.host("t"))


@pytest.mark.parametrize(
    ("terms", "every_s", "periods"),
    [
        pytest.param(LeaseTerms(1800, 1800), 60, (30, 30), id="half an hour is counted in minutes"),
        pytest.param(LeaseTerms(90, 90), 3, (30, 30), id="short leases are counted in thirtieths"),
        pytest.param(LeaseTerms(1, 1), 1, (2, 2), id="one miss is never the end"),
        pytest.param(
            LeaseTerms(LEASE_S, FIRST_S), 60, (4320, 720), id="unless it is set: three days, or twelve hours"
        ),
    ],
)
def test_the_dead_mans_switch_counts(terms: LeaseTerms, every_s: int, periods: tuple[int, int]) -> None:
    script = user_data(machine_order(), KEYS.host("t"), terms)
    lease, first = periods
    assert f"while sleep {every_s}; do" in script
    assert f"l={first}\n" in script
    assert f"[ ! -e served ] || l={lease}\n" in script


def test_ubuntu_does_not_upgrade_itself_meanwhile() -> None:
    script = user_data(machine_order(), KEYS.host("t"))
    assert "systemctl disable --now unattended-upgrades apt-daily.timer apt-daily-upgrade.timer" in script
    assert 'DPkg::Lock::Timeout "600";' in script


def test_a_host_that_refuses_our_login_is_tried_less_and_less_often() -> None:
    """sshd from 9.8 on locks an address out for seconds after each refused login."""
    time, pauses = [0.0], list[float]()

    def connect() -> Shell:
        if len(pauses) < 4:
            raise UnreachableError("no sshd yet")
        if len(pauses) < 9:
            raise LoginRefusedError("no key yet")
        raise HostKeyError("the image's key")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time[0] += seconds

    bring_up = BootstrapRunner(connect, "folder", (), now=lambda: time[0], pause=pause, boot_timeout_s=30.0)
    with pytest.raises(BootstrapError, match="no login in time"):
        bring_up.drive()
    assert pauses[:11] == [1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 1.0]


def test_without_a_lease_no_machine_ends_itself() -> None:
    script = user_data(machine_order(), KEYS.host("t"), None)
    assert "shutdown" not in script
    assert user_data(machine_order(), KEYS.host("t")).startswith(script)


# --- steps


def order(**facts: Any) -> LaunchOrder:
    accelerator = facts.pop("accelerator", None)
    count = facts.pop("count", 0.0)
    zone = Zone(facts.pop("cloud", "gcp"), "us-central1", "us-central1-a")
    return LaunchOrder(
        token="t-1",
        owner="owner-1",
        service="chat",
        replica_id=3,
        version=1,
        offer=Offer(zone, "g2", accelerator, count, CapacityType.SPOT, 1.0),
        setup=None,
        run="serve",
        **facts,
    )


NODE = ReplicaNode("t-1-n1", 1, ("10.0.0.1", "10.0.0.2"), 8080)


@pytest.mark.parametrize(
    ("facts", "image", "names"),
    [
        pytest.param({}, None, ["order", "start"], id="a script alone"),
        pytest.param({"accelerator": "L4", "count": 4}, None, ["gpus", "order", "start"], id="with GPUs"),
        pytest.param(
            {"accelerator": "tpu-v5e-8", "count": 1},
            None,
            ["order", "start"],
            id="a TPU is not asked for by nvidia-smi",
        ),
        pytest.param({"accelerator": "MI300X", "count": 8}, None, ["gpus", "order", "start"], id="AMD's"),
        pytest.param({"workdir": "."}, None, ["workdir", "order", "start"], id="with a work directory"),
        pytest.param(
            {"file_mounts": {"a": "/x", "/m": "s3://b"}},
            None,
            ["mount-0", "mount-1", "order", "start"],
            id="with mounts",
        ),
        pytest.param({}, "vllm", ["docker", "image", "order", "start"], id="in a container"),
        pytest.param(
            {"cloud": "ssh"}, "vllm", ["image", "order", "start"], id="in a container on an own host"
        ),
        pytest.param(
            {"secrets": {"A": "b"}},
            None,
            ["secrets", "order", "start"],
            id="secrets before whoever reads them",
        ),
    ],
)
def test_what_an_order_takes(facts: dict[str, Any], image: str | None, names: list[str]) -> None:
    node = ReplicaNode("t-1", 0, ("10.0.0.1",), 8000, image)
    assert [step.name for step in steps_for(order(**facts), node)] == names


def test_every_script_can_be_read_by_sh_and_has_no_secret_in_it() -> None:
    facts = order(
        accelerator="L4",
        count=1,
        workdir="/it's here",
        file_mounts={"~/a b": "/x", "/m": "gs://b/p/", "c": "az://account/container/path", "d": "s3://it's"},
        secrets={"TOKEN": "hf_secret"},
    )
    for step in steps_for(facts, ReplicaNode("t-1", 0, ("10.0.0.1",), 8000, "it's")):
        assert subprocess.run(["sh", "-n"], input=step.script, text=True).returncode == 0, step.name
        assert "hf_secret" not in repr(step)
    assert "hf_secret" not in json.dumps(task_for(facts, NODE))


def test_nodes_are_told_who_they_are() -> None:
    env = task_for(order(num_nodes=2, env={"MODEL": "m"}, accelerator="L4", count=2), NODE)["env"]
    assert env == {
        "MODEL": "m",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYSERVE_SERVICE": "chat",
        "SKYSERVE_REPLICA_ID": "3",
        "SKYPILOT_SERVE_REPLICA_ID": "3",
        "SKYSERVE_REGION": "us-central1",
        "SKYSERVE_ZONE": "us-central1-a",
        "SKYSERVE_REPLICA_PORT": "8080",
    }


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("s3://bucket/model", "aws s3 cp --only-show-errors s3://bucket/model /m", id="s3"),
        pytest.param("gs://bucket/model/", "$g cp gs://bucket/model /m", id="gs"),
        pytest.param("az://account/box/model", "--account-name account --auth-mode login", id="az"),
        pytest.param(
            "https://account.blob.core.windows.net/box/model/",
            "--account-name account --auth-mode login --output none --container-name box --name model",
            id="a blob's URL",
        ),
    ],
)
def test_buckets_are_fetched_by_their_vendors_program_which_must_be_there(source: str, said: str) -> None:
    (step, *_) = steps_for(order(cloud="ssh", file_mounts={"/m": source}), NODE)
    assert said in step.script
    missing = subprocess.run(
        ["/bin/sh", "-c", step.script], env={"PATH": "/nowhere"}, capture_output=True, text=True
    )
    assert missing.returncode == 127
    assert "which this machine's image does not have" in missing.stderr


@pytest.mark.parametrize(
    ("source", "program", "given", "seen"),
    [
        pytest.param("s3://b/m", "aws", {"AWS_SECRET_ACCESS_KEY": "it's"}, {"AWS_SECRET_ACCESS_KEY": "it's"}, id="s3"),
        pytest.param(
            "gs://b/m", "gcloud", {"CLOUDSDK_AUTH_ACCESS_TOKEN": "t", "AWS_PROFILE": "p"},
            {"CLOUDSDK_AUTH_ACCESS_TOKEN": "t"}, id="gs, and nobody else's",
        ),
        pytest.param("az://a/box/m", "az", {"AZURE_STORAGE_KEY": "a b$c"}, {"AZURE_STORAGE_KEY": "a b$c"}, id="az"),
        pytest.param("s3://b/m", "aws", {"HF_TOKEN": "hf"}, {}, id="none of them"),
    ],
)  # fmt: skip
def test_a_vendors_program_gets_its_credentials_by_its_environment(
    tmp_path: Path, source: str, program: str, given: dict[str, str], seen: dict[str, str]
) -> None:
    (step, *_) = steps_for(order(file_mounts={"m/model": source}, secrets=given), NODE)
    assert not any(value in step.script for value in given.values() if len(value) > 1)
    fake = tmp_path / "bin" / program
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nenv >seen\necho "$*" >said\n')
    fake.chmod(0o755)
    content = step.sends.data if isinstance(step.sends, Content) else b""
    done = subprocess.run(
        ["/bin/sh", "-c", step.script],
        input=content,
        env={"PATH": f"{fake.parent}:/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 0
    environment = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines())
    assert {key: environment[key] for key in given if key in environment} == seen
    assert ("--auth-mode login" in (tmp_path / "said").read_text()) == (program == "az" and not seen)


def test_sources_that_are_not_there_are_named_all_at_once(tmp_path: Path) -> None:
    wrong = order(
        workdir="/nowhere", file_mounts={"a": str(tmp_path), "b": "/none", "c": "ftp://x", "d": "s3://y"}
    )
    assert missing_sources(wrong) == [
        "workdir /nowhere is not a folder of this machine",
        "file_mounts: b: /none is not a file or folder of this machine",
        "file_mounts: c: ftp://x is no bucket we know (s3://, gs://, https://ACCOUNT.blob.core.windows.net/CONTAINER)",
    ]


# --- packing


def packed(source: Path, name: str = "work", **limits: int) -> dict[str, tarfile.TarInfo]:
    stream = io.BytesIO()
    pack(source, name, stream, **limits)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as archive:
        return {member.name: member for member in archive.getmembers()}


@pytest.mark.parametrize(
    ("files", "names"),
    [
        pytest.param({"a": "", "sub/b": ""}, ["work", "work/a", "work/sub", "work/sub/b"], id="everything"),
        pytest.param({".git/config": "", "a": ""}, ["work", "work/a"], id="not what git keeps"),
        pytest.param(
            {".gitignore": "*.bin\nout/", "a.bin": "", "out/x": ""},
            ["work", "work/.gitignore"],
            id="what git ignores",
        ),
        pytest.param(
            {".skyignore": "/b", ".gitignore": "a", "a": "", "b": "", "sub/b": ""},
            ["work", "work/.gitignore", "work/.skyignore", "work/a", "work/sub", "work/sub/b"],
            id="skyignore comes first",
        ),
        pytest.param(
            {".gitignore": "*\n!keep", "keep": "", "drop": ""}, ["work", "work/keep"], id="exceptions"
        ),
    ],
)
def test_what_is_sent_of_a_folder(tmp_path: Path, files: dict[str, str], names: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(packed(tmp_path)) == names


def test_links_stay_links_and_pipes_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "program").write_text("x")
    (tmp_path / "program").chmod(0o755)
    members = packed(tmp_path)
    assert sorted(members) == ["work", "work/link", "work/program"]
    assert members["work/link"].issym()
    assert members["work/program"].mode & stat.S_IXUSR
    assert (members["work/program"].uid, members["work/program"].uname) == (0, "")


def test_what_is_too_large_or_not_there_is_a_sentence_before_a_byte_is_sent(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(2000))
    stream = io.BytesIO()
    with pytest.raises(
        PackingError, match=r"are the most that is sent: name what is not needed in its \.skyignore"
    ):
        pack(tmp_path, "work", stream, max_bytes=1000)
    with pytest.raises(PackingError, match="there is no /nowhere on this machine"):
        pack(Path("/nowhere"), "work", stream)
    assert stream.getvalue() == b""


def test_an_archive_that_was_cut_off_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(100_000))
    stream = io.BytesIO()
    pack(tmp_path, "work", stream)
    (tmp_path / "out").mkdir()
    unpack = ["tar", "--extract", "--gzip", "--directory", str(tmp_path / "out")]
    whole = stream.getvalue()
    for length in (len(whole) - 1, len(whole) // 2, 100):
        assert subprocess.run(unpack, input=whole[:length], capture_output=True).returncode != 0
    assert subprocess.run(unpack, input=whole, capture_output=True).returncode == 0


# --- notices


class Service:
    """Canned responses by path; the rest is 404."""

    def __init__(self, **answers: MetadataResponse) -> None:
        self.answers = {path.replace("__", "/"): answer for path, answer in answers.items()}
        self.asked: list[str] = []

    def __call__(
        self, path: str, headers: dict[str, str], method: str = "GET", timeout_s: float = 5.0
    ) -> MetadataResponse:
        self.asked.append(path)
        return next((answer for part, answer in self.answers.items() if part in path), MetadataResponse(404))


TOKEN = MetadataResponse(200, "token")
PREEMPT = {"EventId": "1", "EventType": "Preempt", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}
STARTED = {"EventId": "1", "EventType": "Preempt", "NotBefore": ""}
FREEZE = {"EventId": "3", "EventType": "Freeze", "NotBefore": "Mon, 19 Sep 2016 17:00:00 GMT"}
AWS_EVENTS = [
    {"NotBefore": "21 Jan 2019 09:00:43 GMT", "Code": "system-reboot", "State": "active"},
    {"NotBefore": "20 Jan 2019 09:00:43 GMT", "Code": "instance-retirement", "State": "active"},
    {"NotBefore": "19 Jan 2019 09:00:43 GMT", "Code": "system-reboot", "State": "completed"},
    {"NotBefore": "18 Jan 2019 09:00:43 GMT", "Code": "of-another-kind", "State": "active"},
]
REBOOT = {"EventId": "2", "EventType": "Reboot", "NotBefore": "Mon, 19 Sep 2016 18:00:00 GMT"}


@pytest.mark.parametrize(
    ("cloud", "answers", "notice"),
    [
        pytest.param("aws", {}, {}, id="aws: no metadata service"),
        pytest.param("aws", {"token": TOKEN}, {"retire_at": 0.0}, id="aws: nothing announced"),
        pytest.param(
            "aws",
            {
                "token": TOKEN,
                "instance-action": MetadataResponse(
                    200, '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
                ),
            },
            {"preempt_at": 1505722920.0, "retire_at": 0.0},
            id="aws: an interruption",
        ),
        pytest.param(
            "aws",
            {"token": TOKEN, "maintenance": MetadataResponse(200, json.dumps(AWS_EVENTS))},
            {"retire_at": 1547974843.0},
            id="aws: maintenance, the first that is not over",
        ),
        pytest.param(
            "aws",
            {"token": TOKEN, "maintenance": MetadataResponse(500)},
            {},
            id="aws: nothing is known of maintenance",
        ),
        pytest.param(
            "gcp", {"preempted": MetadataResponse(200, "FALSE", "e1")}, {}, id="gcp: nothing announced"
        ),
        pytest.param(
            "gcp",
            {
                "preempted": MetadataResponse(200, "FALSE", "e1"),
                "maintenance": MetadataResponse(200, "NONE\n"),
            },
            {"retire_at": 0.0},
            id="gcp: no maintenance",
        ),
        pytest.param(
            "gcp",
            {
                "preempted": MetadataResponse(200, "FALSE", "e1"),
                "maintenance": MetadataResponse(200, "TERMINATE_ON_HOST_MAINTENANCE"),
            },
            {"retire_at": 4600.0},
            id="gcp: an hour is left",
        ),
        pytest.param(
            "gcp",
            {
                "preempted": MetadataResponse(200, "FALSE", "e1"),
                "maintenance": MetadataResponse(200, "MIGRATE_ON_HOST_MAINTENANCE"),
            },
            {"retire_at": 0.0},
            id="gcp: it moves to another host",
        ),
        pytest.param(
            "gcp",
            {"preempted": MetadataResponse(200, "TRUE", "e2")},
            {"preempt_at": 1030.0},
            id="gcp: preempted",
        ),
        pytest.param(
            "azure",
            {"scheduled": MetadataResponse(200, '{"Events": []}')},
            {"retire_at": 0.0},
            id="azure: nothing announced",
        ),
        pytest.param(
            "azure",
            {"scheduled": MetadataResponse(200, json.dumps({"Events": [REBOOT, PREEMPT]}))},
            {"preempt_at": 1474309787.0, "retire_at": 1474308000.0},
            id="azure: a preemption among others",
        ),
        pytest.param(
            "azure",
            {"scheduled": MetadataResponse(200, json.dumps({"Events": [STARTED]}))},
            {"preempt_at": 1000.0, "retire_at": 0.0},
            id="azure: it has begun",
        ),
        pytest.param(
            "azure",
            {"scheduled": MetadataResponse(200, json.dumps({"Events": [FREEZE, REBOOT]}))},
            {"retire_at": 1474308000.0},
            id="azure: a reboot",
        ),
        pytest.param(
            "azure",
            {"scheduled": MetadataResponse(200, json.dumps({"Events": [FREEZE]}))},
            {"retire_at": 0.0},
            id="azure: a pause of seconds",
        ),
    ],
)
def test_what_a_metadata_service_says(
    cloud: str, answers: dict[str, MetadataResponse], notice: dict[str, float]
) -> None:
    assert notices.ADAPTERS[cloud](Service(**answers), {}, 1000.0) == notice


def test_gcp_is_asked_to_wait_once_it_has_answered_and_its_deadline_does_not_move() -> None:
    service, memory = Service(preempted=MetadataResponse(200, "FALSE", "e1")), {}  # type: ignore[var-annotated]
    notices.gcp(service, memory, 1000.0)
    service.answers["preempted"] = MetadataResponse(200, "TRUE", "e2")
    assert [notices.gcp(service, memory, now) for now in (1001.0, 1009.0)] == [{"preempt_at": 1031.0}] * 2
    asked = [path for path in service.asked if "preempted" in path]
    assert ["last_etag=e1" in path for path in asked] == [False, True, False]
    service.answers["preempted"] = MetadataResponse(0)
    assert notices.gcp(service, memory, 1010.0) == {"preempt_at": 1031.0}


def test_the_hour_of_a_maintenance_does_not_move_and_ends_with_it() -> None:
    service, memory = Service(preempted=MetadataResponse(200, "FALSE", "e1")), {}  # type: ignore[var-annotated]
    service.answers["maintenance"] = MetadataResponse(200, "TERMINATE_ON_HOST_MAINTENANCE")
    assert [notices.gcp(service, memory, now) for now in (0.0, 900.0)] == [{"retire_at": 3600.0}] * 2
    service.answers["maintenance"] = MetadataResponse(200, "NONE")
    assert notices.gcp(service, memory, 1800.0) == {"retire_at": 0.0}


def test_aws_is_asked_for_maintenance_once_a_minute() -> None:
    service, memory = Service(token=TOKEN), {}  # type: ignore[var-annotated]
    for now in range(0, 120, 2):
        assert notices.aws(service, memory, float(now)) == {"retire_at": 0.0}
    assert sum("maintenance" in path for path in service.asked) == 2


# --- claims


def request(name: str = "t", gpus: int = 1, host_gpus: int = 2, **facts: Any) -> dict[str, Any]:
    return {
        "token": name,
        "tags": {},
        "gpus": gpus,
        "host_gpus": host_gpus,
        "exclusive": False,
        "ports": [],
        **facts,
    }


def claimed(gpus: list[int], ports: list[int], exclusive: bool = False) -> dict[str, Any]:
    return {"gpus": gpus, "ports": ports, "exclusive": exclusive}


@pytest.mark.parametrize(
    ("asked", "live", "refused", "gpus"),
    [
        pytest.param(request(), [], "", [0], id="the first GPU of an idle host"),
        pytest.param(request(), [claimed([0], [1])], "", [1], id="the next one"),
        pytest.param(request(gpus=2), [claimed([0], [1])], "1 of 2 GPUs are free", [], id="too few are left"),
        pytest.param(request(gpus=0), [claimed([0, 1], [1])], "", [], id="none is needed"),
        pytest.param(request(exclusive=True), [], "", [0, 1], id="all of an exclusive host"),
        pytest.param(
            request(exclusive=True), [claimed([], [1])], "it is taken as a whole", [], id="not idle"
        ),
        pytest.param(request(), [claimed([0, 1], [1], True)], "it is taken as a whole", [], id="taken"),
        pytest.param(
            request(ports=[80]), [claimed([0], [80])], "port 80 is taken by another replica", [], id="a port"
        ),
    ],
)
def test_room_on_a_host(
    asked: dict[str, Any], live: list[dict[str, Any]], refused: str, gpus: list[int]
) -> None:
    assert claims.room_for(asked, live) == (refused, gpus)


def test_ended_claims_are_remembered_for_a_while(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims.main("claims", tmp_path, [])
    made = claims.claim(tmp_path, request("a", gpus=2), 1000.0)["claim"]
    assert claims.claim(tmp_path, request("b"), 1000.0) == {"refused": "0 of 2 GPUs are free"}
    assert claims.release(tmp_path, "a", 0.0) == claims.release(tmp_path, "a", 0.0) == {"released": True}
    ended = claims.claim(tmp_path, request("a"), 2000.0)["claim"]
    assert ended["ended_at"] is not None
    assert claims.claim(tmp_path, request("b"), ended["ended_at"] + 10)["claim"]["gpus"] == [0]
    assert {one["token"] for one in claims.known(tmp_path)} == {"a", "b"}
    claims.claim(tmp_path, request("c"), ended["ended_at"] + 4000)
    assert {one["token"] for one in claims.known(tmp_path)} == {"b", "c"}
    assert made["ports"] != []


def test_a_release_whose_folder_another_one_removes_is_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two controllers, or a retry beside a call that has timed out: at whatever instant the other one is done."""
    claims.main("claims", tmp_path, [])
    claims.claim(tmp_path, request("a"), 1000.0)
    folder = tmp_path / "machines" / "a"
    for instant in ("is_dir", "touch", "drain"):
        folder.mkdir(parents=True)
        order = {"token": "a", "image": "", "secrets_path": str(tmp_path / "none")}
        (folder / "order.json").write_text(json.dumps(order))
        with monkeypatch.context() as patched:
            if instant == "drain":
                patched.setattr(process_kill, "_signal", lambda *_: shutil.rmtree(folder, ignore_errors=True))
            else:
                real = getattr(Path, instant)

                def vanishing(path: Path, real: Any = real, before: bool = instant == "touch") -> Any:
                    response = None if before else real(path)
                    shutil.rmtree(folder, ignore_errors=True)
                    return real(path) if before else response

                patched.setattr(Path, instant, vanishing)
            assert claims.release(tmp_path, "a", 0.0) == {"released": True}
        assert not folder.exists()


def test_of_many_who_claim_at_a_time_as_many_get_one_as_there_are(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    answers: list[dict[str, Any]] = []
    workers = [
        threading.Thread(
            target=lambda n=n: answers.append(claims.claim(tmp_path, request(f"t-{n}", host_gpus=4), 0.0))
        )  # type: ignore[misc]
        for n in range(12)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    got = [answer["claim"]["gpus"][0] for answer in answers if "claim" in answer]
    assert sorted(got) == [0, 1, 2, 3]


# --- pools

HOST = {"name": "h1", "address": "10.0.0.1", "user": "u", "identity_file": "/k", "accelerators": {"L4": 4}}


def pool(*hosts: dict[str, Any], **section: Any) -> dict[str, Any]:
    return {"rack": {"hosts": [{**HOST, **host} for host in hosts], **section}}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        pytest.param({"rack": {}}, "clouds.ssh.pools.rack: must have `hosts`, a list", id="no hosts"),
        pytest.param(
            {"rack": {"hosts": [{}]}}, "clouds.ssh.pools.rack.hosts[0].address: is missing", id="nothing said"
        ),
        pytest.param(
            pool({"gpu": 1}), "clouds.ssh.pools.rack.hosts[0].gpu: unknown key", id="an unknown key"
        ),
        pytest.param(
            pool({}, colour="red"),
            "clouds.ssh.pools.rack.colour: unknown key",
            id="an unknown key of the pool",
        ),
        pytest.param(pool({}, {}), "clouds.ssh.pools: there are two hosts 'h1'", id="a name twice"),
        pytest.param(pool({"accelerators": {"L4": 0.5}}), "must count whole GPUs", id="half a GPU"),
        pytest.param(pool({"accelerators": {"L4": 1, "T4": 1}}), "must be one kind", id="two kinds"),
        pytest.param(
            pool({"port": "22"}),
            "clouds.ssh.pools.rack.hosts[0].port: must be a number",
            id="a port in words",
        ),
    ],
)
def test_a_pool_that_is_wrong(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PoolError) as caught:
        load_pools(raw)
    assert sentence in str(caught.value)


def candidate(**facts: Any) -> Candidate:
    return Candidate(accelerator="L4", **facts)


@pytest.mark.parametrize(
    ("wish", "offered"),
    [
        pytest.param(
            candidate(accelerator_count=4), [("h1", 4.0), ("h2", 10.0)], id="whole hosts, cheapest first"
        ),
        pytest.param(
            candidate(accelerator_count=1), [("h1", 1.0), ("h2", 10.0)], id="a share of a shared host"
        ),
        pytest.param(candidate(accelerator_count=8), [("h2", 10.0)], id="only the larger one"),
        pytest.param(candidate(accelerator_count=16), [], id="more than anybody has"),
        pytest.param(candidate(max_hourly_cost=5.0), [("h1", 1.0)], id="not too dear"),
        pytest.param(candidate(use_spot=True), [], id="nobody takes our hosts away: no spot"),
        pytest.param(candidate(zone="h2"), [("h2", 10.0)], id="that host"),
        pytest.param(candidate(region="else"), [], id="another pool"),
        pytest.param(Candidate(accelerator="H100"), [], id="other GPUs"),
        pytest.param(Candidate(accelerator=None), [("h1", 0.0), ("h2", 10.0)], id="without a GPU"),
    ],
)
def test_what_a_pool_offers(wish: Candidate, offered: list[tuple[str, float]]) -> None:
    pools = load_pools(
        pool(
            {"price_usd_hour": 4.0},
            {"name": "h2", "accelerators": {"l4": 8}, "exclusive": True, "price_usd_hour": 10.0},
        )
    )
    offers = offers_of(pools, Requirements((wish,)))
    assert [(offer.zone.name, offer.price_usd_hour) for offer in offers] == offered
    assert all(offer.capacity_type is CapacityType.ON_DEMAND for offer in offers)


# --- the agent


@pytest.mark.parametrize("path", sorted(AGENT.glob("*.py")), ids=lambda path: path.stem)
def test_the_agent_is_python_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    if path.stem != "bundle":
        allowed = {"provisioners", *sys.stdlib_module_names}
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module.partition(".")[0] for module in modules} <= allowed


def test_the_agent_is_one_file_and_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "agent.pyz").write_bytes(agent_bundle())
    agent_bundle.cache_clear()
    assert (tmp_path / "agent.pyz").read_bytes() == agent_bundle()
    command = [sys.executable, "-I", tmp_path / "agent.pyz", "status", tmp_path]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (said["state"], said["alive"], said["log"]) == ("pending", False, [0, 0])


def test_a_log_is_bounded_and_its_offsets_stay_true(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "output")
    threading.Thread(target=pump, args=(tmp_path, 100), daemon=True).start()
    writer = os.open(tmp_path / "output", os.O_RDWR)
    for number in range(50):
        os.write(writer, b"line %04d\n" % number)
    for _ in range(1000):
        if log_window(tmp_path)[1] == 500:
            break
        threading.Event().wait(0.01)
    first, end = log_window(tmp_path)
    assert end == 500
    assert 300 <= first <= 400
    assert read_log(tmp_path, 0, 10) == b"line %04d\n" % (first // 10)
    assert read_log(tmp_path, 490, 100) == b"line 0049\n"
    assert read_log(tmp_path, 500, 100) == b""
    os.close(writer)


def test_how_a_script_ended_is_told_with_its_last_words_although_they_come_later(tmp_path: Path) -> None:
    (tmp_path / "setup.exit").write_text("3")
    pipe = pipe_of(tmp_path)
    os.write(pipe, b"step one\nno space\n")
    threading.Timer(0.3, threading.Thread(target=pump, args=(tmp_path,), daemon=True).start).start()
    assert exit_message(tmp_path, "setup") == "`setup` failed with exit code 3: no space"
    os.close(pipe)


def test_a_container_gets_its_gpus_and_no_secret_on_its_command_line() -> None:
    task = {"token": "t", "gpus": 2, "mounts": ["/data"], "image": "vllm/vllm"}
    command = container_command(
        Path("/home/u/m"), task, {"CUDA_VISIBLE_DEVICES": "2,3", "TOKEN": "hf_secret"}
    )
    assert command[command.index("--gpus") + 1] == '"device=2,3"'
    assert command[-2:] == ["vllm/vllm", "infinity"]
    assert "/data:/data" in command
    run = exec_command("skyserve-t", "/home/u/m/work", ["TOKEN"], "serve")
    assert run[run.index("--env") + 1] == "TOKEN"


@pytest.mark.parametrize(
    ("accelerator", "seen_by", "gpus", "devices"),
    [
        pytest.param("H100", "nvidia-smi", 8, [], id="NVIDIA"),
        pytest.param("MI300X", "/sys/class/kfd", 0, ["/dev/kfd", "/dev/dri"], id="AMD"),
    ],
)
def test_gpus_are_counted_and_handed_to_a_container_as_their_maker_has_it(
    accelerator: str, seen_by: str, gpus: int, devices: list[str]
) -> None:
    wanted = order(accelerator=accelerator, count=8)
    (check, *_) = steps_for(wanted, NODE)
    assert seen_by in check.script
    assert f"8 {accelerator} were asked for" in check.script
    task = {**task_for(wanted, NODE), "image": "vllm/vllm"}
    assert (task["gpus"], task["devices"]) == (gpus, devices)
    command = container_command(Path("/home/u/m"), task, {})
    given = [command[place + 1] for place, part in enumerate(command) if part == "--device"]
    assert (given, "--gpus" in command) == (devices, gpus > 0)


@pytest.mark.parametrize(("nodes", "is_enough"), [(["0", "5", "6"], True), (["0", "5"], False), ([], False)])
def test_amds_gpus_are_the_drivers_nodes_that_are_no_processors(
    tmp_path: Path, nodes: list[str], is_enough: bool
) -> None:
    for number, gpu_id in enumerate(nodes):
        folder = tmp_path / "nodes" / str(number)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
    (check, *_) = steps_for(order(accelerator="MI300X", count=2), NODE)
    script = check.script.replace("/sys/class/kfd/kfd/topology", str(tmp_path))
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert (done.returncode == 0) is is_enough
    assert done.stderr == (
        "" if is_enough else f"2 MI300X were asked for and the driver sees {max(0, len(nodes) - 1)}\n"
    )


@pytest.mark.parametrize(
    ("instance_type", "count", "times"),
    [
        ("g6.xlarge", 1.0, 1.0),
        ("g4dn.metal", 8.0, 2.0),
        ("p5.48xlarge", 8.0, 2.0),
        ("m7i.metal-24xl", 0.0, 2.0),
    ],
)
def test_large_machines_and_metal_have_twice_the_time_to_boot(
    instance_type: str, count: float, times: float
) -> None:
    zone = Zone("aws", "us-east-1", "use1-az1")
    assert boot_timeout_factor(Offer(zone, instance_type, "T4", count, CapacityType.SPOT, 1.0)) == times


def test_a_lock_is_waited_for_as_long_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    held = files.lock(path)
    assert held is not None
    assert (files.is_locked(path), files.lock(path)) == (True, None)
    monkeypatch.setattr("time.sleep", lambda _: os.close(held))  # who has it ends
    again = files.lock(path, 60.0)
    assert again is not None
    os.close(again)
    assert not files.is_locked(path)
