"""Real sshd, real processes: machines are brought up over SSH and run what they are ordered, whatever fails meanwhile."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from provisioners.clock import unix_now
from provisioners.port.base import InstanceState
from provisioners.port.commands import (
    CommandError,
    CommandTimeoutError,
    DiskFullError,
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
)
from provisioners.port.host_port import HostReport
from provisioners.remote.async_ssh import AsyncConnection, connect_async
from provisioners.remote.bootstrap_runner import BootstrapError, Progress
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_hosts import SshHosts
from provisioners.remote.ssh_keys import Keys
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import (
    KEYS,
    boot,
    bring_up,
    launch_order,
    login,
    machine_of,
    node_of,
    until,
    whole_log,
)
from tests.clouds.vms.vm_world import Vm, VmWorld

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world() -> Iterator[VmWorld]:
    with VmWorld() as one:
        yield one


@pytest.fixture(scope="module")
def shared(world: VmWorld) -> Vm:
    """One machine for those who leave no trace on it."""
    vm = boot(world, "shared")
    until(lambda: _lets_in(vm), "the login")
    return vm


def _lets_in(vm: Vm) -> bool:
    try:
        connect(login(vm)).close()
    except ShellError:
        return False
    return True


# --- the shell


def test_a_machine_that_ran_our_user_data_shows_the_host_key_that_we_expected(shared: Vm) -> None:
    with connect(login(shared)) as shell:
        assert shell.run("id -un; hostname").out.decode().split() == ["skyserve", "shared"]


def test_a_changed_host_key_is_refused_and_nothing_is_sent(shared: Vm) -> None:
    expected = KEYS.host("another")
    before = shared.console().count("Accepted")
    with pytest.raises(HostKeyError) as caught:
        connect(replace(login(shared), host_keys=(expected.public,)))
    assert f"{KEYS.host('shared').fingerprint} instead of {expected.fingerprint}" in caught.value.message
    assert shared.console().count("Accepted") == before


def test_a_host_whose_key_nobody_knows_is_refused(shared: Vm) -> None:
    with pytest.raises(HostKeyError, match="no host key is known"):
        connect(replace(login(shared), host_keys=()))


def test_another_owners_key_is_refused(shared: Vm) -> None:
    stranger = Keys(KEYS.secret, "owner-2").login("chat").private
    with pytest.raises(LoginRefusedError, match="refuses the login of 'skyserve'"):
        connect(replace(login(shared), private_key=stranger))


def test_a_port_where_nobody_listens_is_unreachable(shared: Vm) -> None:
    with pytest.raises(UnreachableError, match="cannot be reached"):
        connect(replace(login(shared), port=2222))


def test_a_command_says_how_it_failed(shared: Vm) -> None:
    with connect(login(shared)) as shell, pytest.raises(CommandError) as caught:
        shell.run("echo some; echo 'no such model' >&2; exit 7")
    assert (caught.value.output.code, caught.value.output.out) == (7, b"some\n")
    assert caught.value.message.endswith("exit code 7: no such model")


def test_a_command_that_does_not_end_is_left(shared: Vm) -> None:
    with connect(login(shared)) as shell:
        with pytest.raises(CommandTimeoutError):
            shell.run("sleep 1000", timeout_s=0.2)
        assert shell.run("echo on").out == b"on\n"


def test_much_output_on_both_channels_does_not_block(shared: Vm) -> None:
    with connect(login(shared)) as shell:
        output = shell.run("head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2", timeout_s=60)
    assert (len(output.out), len(output.err)) == (3000000, 3000000)


def test_a_program_that_leaves_something_running_has_ended(shared: Vm) -> None:
    with connect(login(shared)) as shell:
        assert shell.run("sleep 1000 & echo $!").out.strip().isdigit()


def test_a_file_is_written_whole_and_read_in_parts(shared: Vm) -> None:
    data = os.urandom(200_000)
    with connect(login(shared)) as shell:
        shell.put("some/folder/file", data, mode=0o640)
        assert shell.read("some/folder/file", 100_000, 1000) == data[100_000:101_000]
        assert shell.read("some/folder/file", len(data)) == b""
        assert shell.read("nothing") == b""
        assert shell.run("stat -c %a some/folder/file; ls some/folder").out == b"640\nfile\n"


def test_many_may_write_a_file_at_once(shared: Vm) -> None:
    data = os.urandom(50_000)
    with connect(login(shared)) as shell:

        def put(_: int) -> None:
            shell.put("together/file", data)

        with ThreadPoolExecutor(
            4
        ) as pool:  # an sshd opens ten sessions of a connection, and is slow to close
            list(pool.map(put, range(4)))
        assert shell.read("together/file") == data
        assert shell.run("ls together").out == b"file\n"


def test_a_full_disk_has_its_own_error(world: VmWorld) -> None:
    vm = boot(world, "tiny", disk_mb=8)
    until(lambda: _lets_in(vm), "the login")
    with connect(login(vm)) as shell:
        shell.put("kept", b"old")
        with pytest.raises(DiskFullError, match="tiny: the disk is full"):
            shell.put("kept", bytes(20_000_000))
        assert shell.read("kept") == b"old"


def test_a_machine_that_falls_silent_is_noticed_by_the_time_out(world: VmWorld) -> None:
    vm = boot(world, "silent")
    until(lambda: _lets_in(vm), "the login")
    with connect(login(vm)) as shell:
        vm.freeze()
        with pytest.raises((CommandTimeoutError, UnreachableError)):
            shell.run("echo", timeout_s=1.0)
        with pytest.raises(UnreachableError):
            connect(login(vm), timeout_s=0.5)


# --- bringing up


def test_a_machine_that_boots_late_is_waited_for(world: VmWorld) -> None:
    vm = boot(world, "late", boot_s=1.0)
    seen: list[Progress] = []
    order = launch_order("late", run="echo it runs; exec sleep 1000")
    host = bring_up(vm, order, on_progress=seen.append)
    until(lambda: host.read_log(0, 1000) == b"it runs\n", "the log")
    assert [str(one) for one in seen] == [
        "waiting for ssh (1/3)",
        "handing over the order (2/3)",
        "starting the agent (3/3)",
    ]
    assert host.status().state is InstanceState.RUNNING


def test_a_machine_that_never_lets_us_in_is_given_up_with_the_reason(world: VmWorld) -> None:
    vm = world.boot("deaf", boot_s=1000)
    with pytest.raises(BootstrapError, match=r"no login in time: deaf .* cannot be reached: .*refused"):
        bring_up(vm, launch_order("deaf"), boot_timeout_s=1.0)


def test_scripts_see_their_files_variables_and_secrets_and_nobody_else_the_secrets(
    world: VmWorld, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    (work / "sub" / "main.py").write_text("print('from the workdir')\n")
    (work / "weights.bin").write_text("large")
    (work / ".skyignore").write_text("*.bin\n")
    (tmp_path / "config.json").write_text('{"a": 1}')
    script = """
        python3 sub/main.py; ls; cat /data/config.json conf/c.json ~/home.json; echo
        echo $KIND $HF_TOKEN $SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES $SKYPILOT_NUM_GPUS_PER_NODE $SKYSERVE_REPLICA_PORT
        exec sleep 1000
    """
    order = launch_order(
        "files",
        setup="touch made-by-setup",
        run=script,
        accelerator="L4",
        count=2,
        env={"KIND": "test"},
        secrets={"HF_TOKEN": "hf_secret"},
        workdir=str(work),
        file_mounts={
            f"{place}": str(tmp_path / "config.json")
            for place in ("conf/c.json", "~/home.json", "/data/config.json")
        },
    )
    vm = boot(world, "files", gpus=2)
    vm.run("mkdir /data; chmod 777 /data")
    host = bring_up(vm, order)
    log = until(lambda: (text := whole_log(host)).count("\n") >= 6 and text, "the log")
    a = '{"a": 1}'
    assert log.splitlines() == [
        "from the workdir",
        "conf",
        "made-by-setup",
        "sub",
        f"{a}{a}{a}",
        "test hf_secret 0/1 2 8000",
    ]
    # Not on the disk, nor in memory any more, nor on a command line.
    assert (
        vm.run("grep -rl hf_secret /home/skyserve /dev/shm 2>/dev/null || true")
        == f"/home/skyserve/{host.folder}/log.000000000000000\n"
    )
    assert "hf_secret" not in vm.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


DOCKER = """#!/bin/sh
echo "$*" >>/home/skyserve/docker-calls
case "$1" in
image) exit 1 ;;
inspect) [ -e /home/skyserve/no-container ] && echo true || exit 1 ;;
run) ;;
exec)
  [ "$2" = --workdir ] || exit 9
  cd "$3" && shift 3
  while [ "$1" = --env ]; do shift 2; done
  shift && exec "$@" ;;
esac
"""


def test_scripts_run_in_a_container_where_an_image_is_asked_for(world: VmWorld) -> None:
    """What stands in for docker checks how it is called, and runs scripts without a container."""
    vm = boot(world, "docked")
    vm.run(f"cat >/usr/local/bin/docker <<'E'\n{DOCKER}E\nchmod 755 /usr/local/bin/docker")
    order = launch_order(
        "docked", setup="touch made", run="ls; echo $TOKEN; exec sleep 1000", secrets={"TOKEN": "hf_secret"}
    )
    host = bring_up(vm, order, replace(node_of(order), image="vllm/vllm-openai"))
    until(lambda: whole_log(host).endswith("made\nhf_secret\n"), "the log")
    calls = host.shell.read("docker-calls").decode()
    assert [line.split()[0] for line in calls.splitlines()] == [
        "image",
        "pull",
        *["inspect", "rm", "run", "exec"] * 2,
    ]
    assert "--env TOKEN" in calls
    assert "hf_secret" not in calls
    host.stop(grace_s=1.0)
    assert host.shell.read("docker-calls").decode().splitlines()[-1] == "rm --force skyserve-docked"


def test_fewer_gpus_than_asked_for_is_a_sentence(world: VmWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioners.remote.bootstrap_steps._DRIVER_S", 5.0)
    vm = boot(world, "fewer", gpus=1)
    with pytest.raises(BootstrapError) as caught:
        bring_up(vm, launch_order("fewer", accelerator="L4", count=4))
    assert (caught.value.step, caught.value.message) == (
        "gpus",
        "step 'gpus' failed: 4 L4 were asked for and nvidia-smi sees 1",
    )
    assert "nvidia-smi sees 1" in vm.run("cat /home/skyserve/.skyserve/machines/fewer/log.*")


def test_a_work_directory_that_is_not_there_is_a_sentence(world: VmWorld) -> None:
    vm = boot(world, "nowhere")
    with pytest.raises(BootstrapError, match="step 'workdir' failed: there is no /nowhere on this machine"):
        bring_up(vm, launch_order("nowhere", workdir="/nowhere"))


def test_a_disk_that_fills_up_while_files_come_is_a_sentence(world: VmWorld, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(os.urandom(30_000_000))
    vm = boot(world, "full", disk_mb=12)
    with pytest.raises(BootstrapError, match="step 'workdir' failed: full: the disk is full"):
        bring_up(vm, launch_order("full", workdir=str(tmp_path)))


def test_a_setup_that_fails_shows_its_last_line_and_its_log(world: VmWorld) -> None:
    vm = boot(world, "broken")
    host = bring_up(vm, launch_order("broken", setup="echo step one; echo no space for wheels >&2; exit 3"))
    status = until(lambda: (one := host.status()).state is InstanceState.SETUP_FAILED and one, "the failure")
    assert (status.exit_code, status.message) == (3, "`setup` failed with exit code 3: no space for wheels")
    assert host.read_log(0, 1000) == b"step one\nno space for wheels\n"
    assert not status.prepared


def test_run_survives_the_end_of_the_connection(world: VmWorld) -> None:
    vm = boot(world, "survivor")
    host = bring_up(vm, launch_order("survivor", run="echo $$ >pid; while :; do echo tick; sleep 0.05; done"))
    pid = until(lambda: host.shell.read(f"{host.folder}/work/pid"), "the process")
    host.shell.close()
    vm.run("pkill -x sshd -f 'sshd: skyserve' || true")
    again = bring_up(vm, launch_order("survivor", run="echo never; exit 1"))
    before = again.status().log[1]
    until(lambda: again.status().log[1] > before, "more output")
    assert again.status().state is InstanceState.RUNNING
    assert again.shell.read(f"{again.folder}/work/pid") == pid


@pytest.mark.parametrize("victim", ["daemon", "pump", "script setup", "script run"])
def test_whatever_of_the_agent_is_killed_it_goes_on_or_says_so(world: VmWorld, victim: str) -> None:
    name = "victim-" + victim.replace(" ", "-")
    vm = boot(world, name)
    setup = "sleep 1000" if victim == "script setup" else None
    host = bring_up(vm, launch_order(name, setup=setup, run="while :; do echo tick; sleep 0.05; done"))
    wanted = InstanceState.SETUP if setup else InstanceState.RUNNING
    verb, _, script = victim.partition(" ")
    begun = f"{host.folder}/{script or 'run'}.pid"
    until(lambda: host.shell.read(begun), "the script")
    vm.run(f"pkill -KILL -f '[a]gent-.*.pyz {verb} .*{script}'")
    if verb == "script":
        status = until(lambda: (one := host.status()).state not in (wanted,) and one, "the loss")
        assert status.state is (InstanceState.SETUP_FAILED if setup else InstanceState.RUN_EXITED)
        assert f"`{script}` was killed together with the program that watched it" in status.message
        return
    until(lambda: (host.start(), host.status().alive)[1], "another daemon")
    before = host.status().log[1]
    until(lambda: host.status().log[1] > before + 50, "more output")
    assert host.status().state is InstanceState.RUNNING


def test_stop_ends_everything_with_grace(world: VmWorld) -> None:
    vm = boot(world, "stopped")
    run = """
        trap 'echo finishing; exit 0' TERM
        setsid env -i sleep 7777 & (exec -a orphan sleep 8888 &)
        echo up; while :; do sleep 0.05; done
    """
    host = bring_up(vm, launch_order("stopped", run=run))
    until(lambda: b"up" in host.read_log(0, 100), "the start")
    host.stop(grace_s=5.0)
    assert vm.run("pgrep -f '[s]leep [78]{4}|[a]gent-' || true").split() == []
    assert b"finishing" in host.read_log(0, 1000)
    host.start()
    assert not host.status().alive


STEPS = ["ssh", "gpus", "workdir", "mount-0", "secrets", "order", "start", "after"]


def test_killed_at_one_step_after_the_other_and_begun_again_it_comes_to_the_same(
    world: VmWorld, tmp_path: Path
) -> None:
    """The process that brings the machine up is killed with SIGKILL just as a step is on its way, and the next one at the next step."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data").write_bytes(os.urandom(2_000_000))
    (tmp_path / "mounted").write_text("mounted")
    vm = boot(world, "killed", gpus=1)
    facts = {
        "token": vm.name,
        "workdir": str(tmp_path / "work"),
        "file_mounts": {"m/file": str(tmp_path / "mounted")},
        "setup": "echo setup >>../ran",
        "run": "echo run $TOKEN >>../ran; wc -c <data; cat m/file; exec sleep 1000",
        "accelerator": "L4",
        "count": 1,
        "secrets": {"TOKEN": "t"},
    }
    for step in STEPS:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(facts), vm.name, vm.address, step],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"now\n", step
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
    host = bring_up(vm, launch_order(**facts))  # type: ignore[arg-type]
    until(lambda: whole_log(host).endswith("2000000\nmounted"), "the log")
    assert host.shell.read(f"{host.folder}/ran") == b"setup\nrun t\n"


DRIVER = """
import json, sys, threading, time
from types import SimpleNamespace
from tests.clouds.vms import vm_bench as bench
from provisioners.remote.host import Host

facts, name, address, doomed = json.loads(sys.argv[1]), *sys.argv[2:]
real = Host.do

def say():
    print("now", flush=True)

def do(self, step, timeout_s):
    if step.name == doomed:
        threading.Timer(0.05, say).start()
    return real(self, step, timeout_s)

Host.do = do
if doomed == "ssh":
    say()
bench.bring_up(SimpleNamespace(name=name, address=address), bench.launch_order(**facts))
say()
time.sleep(1000)
"""


def test_a_step_left_behind_by_a_dead_controller_is_ended_by_the_next(world: VmWorld) -> None:
    vm = boot(world, "takeover")
    host = bring_up(vm, launch_order("takeover"))
    agent = f"python3 {vm.run('ls -d /home/skyserve/.skyserve/agent-*.pyz').strip()} step {host.folder}"
    host.shell.run(
        f"setsid {agent} slow sh -c 'touch began; sleep 1000; touch never' >/dev/null 2>&1 </dev/null &"
    )
    until(lambda: host.shell.run(f"ls {host.folder}/began", check=False).code == 0, "the first")
    host.shell.run(f"{agent} slow sh -c 'touch taken-over'")
    listed = (
        host.shell.run(f"ls {host.folder}; pgrep -f 'sleep 1000; touch neve[r]' || echo none")
        .out.decode()
        .split()
    )
    assert {"taken-over", "done.slow", "none"} <= set(listed)
    assert "never" not in listed


# --- notices, the dead-man switch, gangs


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_maintenance_of_the_host_and_a_preemption_notice_of_the_cloud_are_heard(
    world: VmWorld, cloud: str
) -> None:
    name = f"noticed-{cloud}"
    vm = boot(world, name, cloud=cloud)
    at = int(unix_now()) + 7200.0
    vm.metadata.maintain(at)
    host = bring_up(vm, launch_order(name, cloud=cloud))
    heard = until(lambda: host.status().retire_at, "the maintenance")
    # Google's metadata has only: within an hour.
    assert heard == at if cloud != "gcp" else at - 7200.0 < heard < at
    assert host.status().preempt_at is None
    at = int(unix_now()) + 120.0
    vm.metadata.announce(at)
    heard = until(lambda: host.status().preempt_at, "the notice")
    if cloud == "gcp":  # which does not say when: thirty seconds from when it is heard
        assert at - 120.0 < heard < at
    else:
        assert heard == at
    assert not [path for path in vm.metadata.asked if path.startswith("!")]


def test_a_notice_calls_back_at_once_and_progress_does_not(world: VmWorld) -> None:
    vm = boot(world, "called", cloud="aws")
    order = launch_order("called", cloud="aws", setup="for i in 1 2 3; do echo $i; sleep 0.1; done")
    machine = machine_of(vm, order)
    hosts = SshHosts(lambda machine: login(vm), poll_s=0.1)
    reports: queue.SimpleQueue[HostReport | None] = queue.SimpleQueue()
    hosts.on_report(lambda: reports.put(hosts.report(machine)))
    hosts.supervise(machine, order, [vm.address])
    running = reports.get(timeout=60.0)
    assert running is not None
    assert (running.state, running.preempt_at) == (InstanceState.RUNNING, None)
    at = int(unix_now()) + 120.0
    vm.metadata.announce(at)
    noticed = reports.get(timeout=60.0)
    assert noticed is not None
    assert (noticed.state, noticed.preempt_at) == (InstanceState.RUNNING, at)
    hosts.release(machine.token)
    assert reports.empty()


def test_a_machine_that_nobody_cares_for_shuts_itself_down(world: VmWorld) -> None:
    vm = boot(world, "forgotten", lease_s=4)
    host = bring_up(vm, launch_order("forgotten"))
    cared_until = time.monotonic() + 6.0
    while time.monotonic() < cared_until:  # longer than it would live without
        host.status()
        time.sleep(0.2)
    assert vm.is_running
    vm.await_end()


def test_two_nodes_run_when_both_are_set_up_and_know_each_other(world: VmWorld) -> None:
    logins: dict[str, Login] = {}
    hosts = SshHosts(lambda machine: logins[machine.id], poll_s=0.1)
    setup = "[ $SKYPILOT_NODE_RANK = 0 ] || while [ ! -e ~/go-on ]; do sleep 0.05; done; echo set up"
    run = "echo $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES: $(echo $SKYPILOT_NODE_IPS); exec sleep 1000"
    order = launch_order("gang", num_nodes=2, setup=setup, run=run)
    vms = [boot(world, node_of(order, rank=rank).token) for rank in range(2)]
    machines = [machine_of(vm, order, rank) for rank, vm in enumerate(vms)]
    logins.update({vm.name: login(vm) for vm in vms})
    ips = [vm.address for vm in vms]
    for machine in machines:
        hosts.supervise(machine, order, ips)
    until(lambda: hosts.read_log(machines[0], 0, 100) == b"set up\n", "the head's setup")
    assert hosts.log_window(machines[0]) == (0, 7)
    states = [one.state for one in map(hosts.report, machines) if one is not None]
    assert states == [InstanceState.SETUP, InstanceState.SETUP]
    vms[1].run("touch /home/skyserve/go-on")
    for rank, machine in enumerate(machines):
        log = until(lambda m=machine: hosts.read_log(m, 7, 1000), "the run").decode()  # type: ignore[misc]
        assert log == f"{rank} of 2: {' '.join(ips)}\n"
        until(lambda m=machine: (r := hosts.report(m)) and r.state is InstanceState.RUNNING)  # type: ignore[misc]
    for machine in machines:
        hosts.release(machine.token)
    assert [hosts.report(machine) for machine in machines] == [None, None]


def test_another_controller_goes_on_where_the_first_one_died(world: VmWorld) -> None:
    order = launch_order("adopted", run="echo once >>../count; exec sleep 1000")
    vm = boot(world, "adopted")
    machine = machine_of(vm, order)
    for _ in range(2):
        hosts = SshHosts(lambda machine: login(vm), poll_s=0.1)
        hosts.supervise(machine, order, [vm.address])
        until(lambda h=hosts: (r := h.report(machine)) and r.state is InstanceState.RUNNING)  # type: ignore[misc]
        hosts.release(machine.token)
    assert vm.run("cat /home/skyserve/.skyserve/machines/adopted/count") == "once\n"


def test_a_machine_that_is_silent_keeps_its_last_report(world: VmWorld) -> None:
    order = launch_order("mute")
    vm = boot(world, "mute")
    machine = machine_of(vm, order)
    dialled: list[str] = []

    async def dial_line(to: Login) -> AsyncConnection:
        dialled.append(to.name)
        return await connect_async(to, timeout_s=0.5)

    hosts = SshHosts(lambda machine: login(vm), poll_s=0.1, dial_line=dial_line)
    until(lambda: _lets_in(vm), "the login")
    hosts.supervise(machine, order, [vm.address])
    until(lambda: (r := hosts.report(machine)) and r.state is InstanceState.RUNNING)
    vm.run("touch /run/no-sshd; pkill -x sshd")  # all of them, for good: no one is let in any more
    until(lambda: len(dialled) > 6, "to be given up more than once")
    report = hosts.report(machine)
    assert report is not None
    assert report.state is InstanceState.RUNNING
    hosts.release(machine.token)


# --- the world itself


def test_what_a_killed_test_leaves_is_swept_by_the_next(tmp_path: Path) -> None:
    code = "import time; from tests.clouds.vms.vm_world import VmWorld; w = VmWorld('10.214.7.0/24'); v = w.boot('x'); v.run('true'); print(v.namespace, flush=True); time.sleep(1000)"
    doomed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert doomed.stdout is not None
    namespace = doomed.stdout.readline().strip()
    doomed.kill()
    doomed.wait()
    doomed.stdout.close()
    assert Path(f"/run/netns/{namespace}").exists()
    until(lambda: not vm_world._pids(namespace), "the end of its processes")
    with VmWorld("10.214.7.0/24"):
        assert not Path(f"/run/netns/{namespace}").exists()
        assert not Path(f"/sys/class/net/{namespace}").exists()
