"""Instances of the local cloud as the processes they are: how they start, what they see, how they die."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from policies.model import CapacityType
from provisioners.clock import unix_now
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.host import HostOrder
from provisioners.local.store import InstanceFolder, LocalStore
from provisioners.port.base import Cache, Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import InvalidRequestError
from tests.kit.eventually import eventually

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local cloud needs Linux")

OWNER = "owner-1"
SERVE = 'exec python3 -u -m http.server "$SKYSERVE_REPLICA_PORT"'


class Lab:
    """A local cloud of its own, and short words for what tests do with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cloud = LocalProvisioner(home)
        self.cloud.offers(Requirements((Candidate(),)))  # writes cloud.yaml
        config = LocalStore(home).config_path
        text = config.read_text().replace("cold_start_s: 0.5 ", "cold_start_s: 0.05")
        config.write_text(text.replace("stop_grace_s: 3 ", "stop_grace_s: 0.5"))

    def order(
        self,
        run: str = "exec sleep 1000",
        setup: str | None = None,
        replica_id: int = 1,
        use_spot: bool = True,
        workdir: Path | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        file_mounts: Mapping[str, str] | None = None,
    ) -> LaunchOrder:
        return LaunchOrder(
            token=f"{OWNER}-chat-{replica_id}",
            owner=OWNER,
            service="chat",
            replica_id=replica_id,
            version=1,
            offer=self.cloud.offers(Requirements((Candidate(use_spot=use_spot, accelerator="L4"),)))[0],
            setup=setup,
            run=run,
            env=env or {},
            secrets=secrets or {},
            workdir=None if workdir is None else str(workdir),
            file_mounts=file_mounts or {},
        )

    def now(self, instance: Instance) -> Instance:
        return {known.token: known for known in self.cloud.instances(OWNER)}[instance.token]

    def until(self, instance: Instance, state: InstanceState) -> Instance:
        eventually(lambda: self.now(instance).state is state, f"{instance.token} is {state.value}")
        return self.now(instance)

    def log(self, instance: Instance) -> str:
        return self.cloud.read_log(instance, 0, 1 << 20).decode()

    def until_logged(self, instance: Instance, text: str) -> str:
        eventually(lambda: text in self.log(instance), f"{text!r} is in the log")
        return self.log(instance)

    def folder(self, instance: Instance) -> InstanceFolder:
        return LocalStore(self.home).folder(instance.token)

    def host(self, instance: Instance) -> psutil.Process:
        pid = self.folder(instance).host_pid()
        assert pid is not None
        return psutil.Process(pid)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path / "home")
    yield made
    for instance in made.cloud.instances(OWNER):
        made.cloud.terminate(instance)
        assert made.now(instance).state.is_gone
        assert not local_process.marked(instance.id)
        assert not made.folder(instance).work_path.exists()


# --- What they leave for others -------------------------------------------------------------------------------

KEPT = 'echo "found: $(cat "$HF_HOME/weights" 2>/dev/null)"; echo "of $SKYSERVE_REPLICA_ID" >"$HF_HOME/weights"; exec sleep 1000'


def test_a_successor_finds_what_a_replica_that_was_killed_has_written(lab: Lab) -> None:
    cache = Cache("owner-1/-/chat", ("HF_HOME",))

    def start(replica_id: int, cache: Cache | None = cache) -> Instance:
        order = replace(lab.order(run=KEPT, replica_id=replica_id), cache=cache)
        return lab.until(lab.cloud.launch(order), InstanceState.RUNNING)

    first = start(1)
    lab.until_logged(first, "found: \n")
    kept = lab.home / "local" / "cache" / "owner-1" / "-" / "chat"
    eventually((kept / "hf_home" / "weights").exists, "the weights are written")
    lab.host(first).kill()
    lab.until(first, InstanceState.TERMINATED)
    second = start(2)
    assert "of earlier replicas" in lab.until_logged(second, "found: of 1\n")
    third = start(3)  # beside the second
    lab.until_logged(third, "found: of 2\n")
    lab.until_logged(start(4, Cache("owner-1/-/other", ("HF_HOME",))), "found: \n")
    lab.until_logged(start(5, Cache("owner-1/ml/chat", ("HF_HOME",))), "found: \n")

    assert lab.cloud.remove_cache(cache) == ([str(kept)], [])
    assert not kept.exists()
    assert lab.cloud.remove_cache(cache) == ([], [])


def test_a_cache_is_no_link(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    owner = lab.home / "local" / "cache" / "owner-1"
    owner.mkdir(parents=True)
    (owner / "-").symlink_to(tmp_path / "elsewhere")
    cache = Cache("owner-1/-/chat", ("HF_HOME",))
    with pytest.raises(InvalidRequestError, match="is a link"):
        lab.cloud.launch(replace(lab.order(), cache=cache))
    assert not lab.cloud.instances(OWNER)
    with pytest.raises(InvalidRequestError, match="is a link"):
        lab.cloud.remove_cache(cache)


# --- How they start -----------------------------------------------------------------------------------------


def test_setup_then_run_then_it_answers_on_its_endpoint(lab: Lab) -> None:
    instance = lab.cloud.launch(lab.order(setup="echo prepared > index.html", run=SERVE))
    assert instance.state is InstanceState.PENDING
    running = lab.until(instance, InstanceState.RUNNING)
    lab.until_logged(instance, "Serving HTTP")
    with urlopen(running.endpoint or "") as response:
        assert response.read() == b"prepared\n"


@pytest.mark.parametrize(
    ("setup", "run", "state", "message"),
    [
        pytest.param(
            "echo trying; echo no such wheel >&2; exit 3",
            "true",
            InstanceState.SETUP_FAILED,
            "`setup` failed with exit code 3: no such wheel",
            id="setup that fails",
        ),
        pytest.param(
            "true",
            "echo bye; echo; exit 7",
            InstanceState.RUN_EXITED,
            "`run` ended with exit code 7: bye",
            id="run that exits",
        ),
        pytest.param(
            None,
            "nohup sleep 600 & echo started",
            InstanceState.RUN_EXITED,
            "`run` ended with exit code 0: `sleep` runs on in the background, but `run` must stay in the foreground: "
            "start the server with `exec`, or end `run` with `wait`; it printed last: started",
            id="run that starts a server",
        ),
        pytest.param(
            None,
            "echo done",
            InstanceState.RUN_EXITED,
            "`run` ended with exit code 0: it must run for as long as the replica is to serve; it printed last: done",
            id="run that is done",
        ),
        pytest.param(
            None,
            "kill -SEGV $$",
            InstanceState.RUN_EXITED,
            "`run` ended by signal SIGSEGV",
            id="run that crashes",
        ),
    ],
)
def test_a_script_that_ends_leaves_the_machine_standing_with_a_message(
    lab: Lab, setup: str | None, run: str, state: InstanceState, message: str
) -> None:
    instance = lab.until(lab.cloud.launch(lab.order(setup=setup, run=run)), state)
    assert instance.message == message
    assert lab.folder(instance).is_live()  # it is there, and paid for, until someone ends it
    lab.cloud.terminate(instance)
    assert lab.now(instance).state is InstanceState.TERMINATED


def test_scripts_are_for_bash(lab: Lab) -> None:
    instance = lab.cloud.launch(
        lab.order(run='words=(one two); [[ ${words[1]} == two ]] && echo "is ${BASH##*/}"')
    )
    lab.until_logged(instance, "is bash\n")


def test_what_a_replica_sees(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYSERVE_DB", "postgresql://user:password@db")
    monkeypatch.setenv("FROM_THE_USER", "yes")
    order = lab.order(
        run="env; echo END", replica_id=12, env={"MODEL": "tiny"}, secrets={"HF_TOKEN": "hf_123"}
    )
    instance = lab.cloud.launch(order)
    seen = dict(line.split("=", 1) for line in lab.until_logged(instance, "END").splitlines() if "=" in line)
    expected = {
        "SKYSERVE_SERVICE": "chat",
        "SKYSERVE_REPLICA_ID": "12",
        "SKYSERVE_REPLICA_PORT": (instance.endpoint or "").rpartition(":")[2],
        "SKYSERVE_INSTANCE_ID": instance.id,
        "SKYSERVE_REGION": order.offer.zone.region,
        "SKYSERVE_ZONE": order.offer.zone.name,
        "SKYPILOT_SERVE_REPLICA_ID": "12",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "MODEL": "tiny",
        "HF_TOKEN": "hf_123",
        "FROM_THE_USER": "yes",
        "PWD": str(lab.folder(instance).work_path),
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert "SKYSERVE_DB" not in seen


def test_secrets_are_on_no_command_line_and_on_no_disk(lab: Lab) -> None:
    secret = "s3cr3t-" + os.urandom(8).hex()
    instance = lab.cloud.launch(
        lab.order(run='echo "${#TOKEN} letters"; sleep 1000', secrets={"TOKEN": secret})
    )
    lab.until_logged(instance, f"{len(secret)} letters")
    command_lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in command_lines if secret in line]
    files = [path for path in lab.home.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_each_replica_works_in_its_own_copy(lab: Lab, tmp_path: Path) -> None:
    workdir, model = tmp_path / "project", tmp_path / "weights.bin"
    (workdir / "src").mkdir(parents=True)
    (workdir / "src" / "app.txt").write_text("original")
    (workdir / ".git").mkdir()
    os.mkfifo(workdir / "pipe")
    model.write_text("weights")
    order = lab.order(
        run='cat src/app.txt models/w.bin; ls -A; echo changed > src/app.txt; echo "END"',
        workdir=workdir,
        file_mounts={"models/w.bin": str(model)},
    )
    instance = lab.cloud.launch(order)
    assert lab.until_logged(instance, "END").split() == ["originalweightsmodels", "src", "END"]
    assert (workdir / "src" / "app.txt").read_text() == "original"


def test_a_work_directory_may_contain_our_home(tmp_path: Path) -> None:
    (tmp_path / "app.txt").write_text("app")
    lab = Lab(tmp_path / ".home")
    instance = lab.cloud.launch(lab.order(run="find . -type f; echo END", workdir=tmp_path))
    assert lab.until_logged(instance, "END").split() == ["./app.txt", "END"]
    lab.cloud.terminate(instance)


@pytest.mark.parametrize(
    ("file_mounts", "says"),
    [
        pytest.param(
            {"data": "s3://bucket/data"}, "needs the program aws", id="a bucket without its program"
        ),
        pytest.param({"data": "ftp://host/data"}, "is no bucket", id="a URL of something else"),
        pytest.param({"/data": "/etc/hostname"}, "use a relative path", id="an absolute path"),
        pytest.param({"~/data": "/etc/hostname"}, "use a relative path", id="a path in the home"),
        pytest.param({"../data": "/etc/hostname"}, "use a relative path", id="a path that climbs out"),
    ],
)
def test_file_mounts_that_cannot_be(
    lab: Lab, file_mounts: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(InvalidRequestError, match=says):
        lab.cloud.launch(lab.order(file_mounts=file_mounts))


@pytest.mark.parametrize("fails", [False, True], ids=["fetched", "refused"])
def test_a_bucket_is_fetched_by_its_vendors_program(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What stands in for `aws` copies a folder as `sync` does, or refuses."""
    program = tmp_path / "bin" / "aws"
    program.parent.mkdir()
    body = (
        'echo "An error occurred (AccessDenied)" >&2; exit 1'
        if fails
        else 'mkdir -p "$5"; echo "$3 $4 by $KEY" >"$5/w.bin"'
    )
    program.write_text(f'#!/bin/sh\n[ "$2" = sync ] || exit 1\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("KEY", "me")
    order = lab.order(run="cat models/w.bin; echo END; sleep 60", file_mounts={"models": "s3://bucket/llama"})
    instance = lab.cloud.launch(order)
    if fails:
        ended = lab.until(instance, InstanceState.SETUP_FAILED)
        assert "s3://bucket/llama` could not be fetched with exit code 1: An error occurred" in ended.message
    else:
        assert "--only-show-errors s3://bucket/llama by me" in lab.until_logged(instance, "END")
    lab.cloud.terminate(instance)


def test_what_was_accepted_can_be_asked_for_and_ended_whatever_becomes_of_its_order(
    lab: Lab, tmp_path: Path
) -> None:
    workdir = tmp_path / "project"
    workdir.mkdir()
    order = lab.order(workdir=workdir)
    instance = lab.until(lab.cloud.launch(order), InstanceState.RUNNING)
    workdir.rmdir()
    LocalStore(lab.home).config_path.write_text("regions: broken")
    assert lab.cloud.launch(order).id == instance.id
    lab.cloud.terminate(instance)
    assert lab.now(instance).state is InstanceState.TERMINATED


# --- How they die -------------------------------------------------------------------------------------------

# A child, one in a session of its own, and one forked twice; all deaf to SIGTERM.
FAMILY = """
trap '' TERM
sleep 1001 & setsid sleep 1002 & (setsid bash -c 'sleep 1003 & exit' &)
echo ready; wait
"""


def family(instance: Instance) -> list[str]:
    lines = []
    for pid in local_process.marked(instance.id):
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(psutil.Process(pid).cmdline()))
    return sorted(line for line in lines if line.startswith("sleep"))


@pytest.fixture
def household(lab: Lab) -> Instance:
    instance = lab.cloud.launch(lab.order(run=FAMILY))
    lab.until_logged(instance, "ready")
    eventually(lambda: family(instance) == ["sleep 1001", "sleep 1002", "sleep 1003"], "all are born")
    return instance


def test_terminate_ends_every_descendant_and_the_host(lab: Lab, household: Instance) -> None:
    host = lab.host(household)
    lab.cloud.terminate(household)
    assert not local_process.marked(household.id)
    assert not host.is_running()
    assert lab.now(household).state is InstanceState.TERMINATED
    assert "ready" in lab.log(household)  # the log outlives the instance


def test_terminate_lets_a_server_finish_within_the_grace(lab: Lab) -> None:
    instance = lab.cloud.launch(
        lab.order(run="trap 'echo said goodbye; exit' TERM; echo up; while :; do sleep 0.05; done")
    )
    lab.until_logged(instance, "up")
    lab.cloud.terminate(instance)
    assert "said goodbye" in lab.log(instance)


def test_a_host_killed_hard_takes_its_instance_along(lab: Lab, household: Instance) -> None:
    lab.host(household).kill()
    dead = lab.until(household, InstanceState.TERMINATED)
    assert dead.message.startswith("the host process died")
    assert not local_process.marked(household.id)


def test_a_host_that_breaks_says_why(lab: Lab) -> None:
    """An unreadable status file stands for any bug: the replica exits with its host, the story is kept."""
    instance = lab.until(lab.cloud.launch(lab.order(run="sleep 1000")), InstanceState.RUNNING)
    folder = lab.folder(instance)
    (folder.path / "preempt.json").write_text("{broken")
    dead = lab.until(instance, InstanceState.TERMINATED)
    assert "the host process failed" in dead.message
    assert not local_process.marked(instance.id)


def test_an_instance_outlives_its_launcher(lab: Lab) -> None:
    code = (
        "import sys, pickle; from pathlib import Path; from provisioners.local.cloud import LocalProvisioner;"
        "LocalProvisioner(Path(sys.argv[1])).launch(pickle.load(sys.stdin.buffer))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(lab.home)], input=pickle.dumps(lab.order()), check=True, timeout=60
    )
    (instance,) = lab.cloud.instances(OWNER)
    lab.until(instance, InstanceState.RUNNING)


# --- Launchers that die half-way ----------------------------------------------------------------------------


def die_here(_folder: InstanceFolder, _order: HostOrder) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_the_lock(folder: InstanceFolder, _order: HostOrder) -> None:
    """As a host does that has not read its order yet."""
    fcntl.flock(os.open(folder.alive_path, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)


def launch_and_die(lab: Lab, order: LaunchOrder) -> int:
    """The exit code of a launcher that is killed when it is about to start the host."""
    launcher = os.fork()
    if launcher == 0:
        try:
            LocalProvisioner(lab.home, spawn=die_here).launch(order)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])


def test_a_launcher_killed_before_the_host_started_is_made_good_by_the_same_token(lab: Lab) -> None:
    order = lab.order()
    assert launch_and_die(lab, order) == -signal.SIGKILL
    assert LocalStore(lab.home).folder(order.token).record() is not None  # it had got that far
    assert not lab.cloud.instances(OWNER)
    lab.until(lab.cloud.launch(order), InstanceState.RUNNING)
    assert len(lab.cloud.instances(OWNER)) == 1


def test_what_a_killed_launcher_left_is_gone_after_the_next_launch(lab: Lab) -> None:
    assert launch_and_die(lab, lab.order(replica_id=1)) == -signal.SIGKILL
    kept = lab.cloud.launch(lab.order(replica_id=2))
    assert [folder.token for folder in LocalStore(lab.home).folders()] == [kept.token]


def test_an_instance_that_is_ended_before_its_host_spoke_is_remembered(lab: Lab) -> None:
    """Else the next launch takes it for one that was cut short, and removes it."""
    kept = lab.order(replica_id=1)
    mute = LocalProvisioner(lab.home, spawn=hold_the_lock)
    mute.launch(kept)
    folder = LocalStore(lab.home).folder(kept.token)
    folder.request_stop()
    folder.alive_path.unlink()  # what was held is another file now: no one is alive
    lab.cloud.launch(lab.order(replica_id=2))
    assert folder.record() is not None
    (ended,) = (one for one in lab.cloud.instances(OWNER) if one.token == kept.token)
    assert ended.state is InstanceState.TERMINATED
    assert lab.cloud.launch(kept).state is InstanceState.TERMINATED


def test_a_host_that_gets_half_an_order_leaves_without_a_trace(lab: Lab) -> None:
    instance = lab.cloud.launch(lab.order())
    lab.cloud.terminate(instance)
    status_path = lab.folder(instance).path / "status.json"
    status_path.unlink()
    host = [sys.executable, "-m", "provisioners.local.host", str(lab.folder(instance).path)]
    ended = subprocess.run(host, input='{"home": "/', text=True, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert not status_path.exists()


def test_the_dead_are_forgotten_in_time(lab: Lab) -> None:
    old = lab.cloud.launch(lab.order(replica_id=1))
    lab.cloud.terminate(old)
    later = LocalProvisioner(lab.home, now=lambda: unix_now() + 3700)
    new = later.launch(lab.order(replica_id=2))
    assert [instance.token for instance in lab.cloud.instances(OWNER)] == [new.token]


def test_on_demand_instances_are_recorded_as_such(lab: Lab) -> None:
    assert lab.cloud.launch(lab.order(use_spot=False)).capacity_type is CapacityType.ON_DEMAND
