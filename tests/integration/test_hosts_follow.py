"""Machines are followed over one connection each, with real sshd: lines, heartbeats, lost connections, silent machines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from time import sleep
from typing import Any

import pytest

from provisioners.clock import unix_now
from provisioners.port.base import InstanceState, LaunchOrder
from provisioners.port.commands import (
    CommandError,
    CommandTimeoutError,
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
)
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machine
from provisioners.remote import async_ssh, supervise
from provisioners.remote.async_ssh import AsyncConnection, Report, connect_async
from provisioners.remote.host import Host, agent_command
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
)
from tests.clouds.vms.vm_world import Vm, VmWorld

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]
BEAT_S = 2.0  # short, and yet a busy machine is not silent for two and a half of them


@pytest.fixture(scope="module")
def world() -> Iterator[VmWorld]:
    with VmWorld() as one:
        yield one


@dataclass
class Followed:
    """A machine that runs and is followed. `dialled` counts the connections that were tried for that."""

    vm: Vm
    order: LaunchOrder
    hosts: SshHosts
    machine: Machine
    dialled: list[str] = field(default_factory=list)

    def report(self) -> HostReport:
        report = self.hosts.report(self.machine)
        assert report is not None
        return report

    def announce(self) -> float:
        """A preemption notice, once it is on the machine's disk."""
        at = int(unix_now()) + 120.0
        self.vm.metadata.announce(at)
        path = f"/home/skyserve/{node_of(self.order).folder}/notice.json"
        until(lambda: str(at) in self.vm.run(f"cat {path}", check=False), "the notice on the machine")
        return at


Follow = Callable[..., Followed]


@pytest.fixture
def follow(world: VmWorld) -> Iterator[Follow]:
    made: list[Followed] = []

    def start(name: str, lease_s: int = 1800, **how: Any) -> Followed:
        vm = boot(world, name, lease_s=lease_s)
        dialled: list[str] = []

        async def dial_line(to: Login) -> AsyncConnection:
            dialled.append(to.name)
            return await connect_async(to, timeout_s=1.0)

        hosts = SshHosts(lambda _: login(vm), poll_s=0.1, heartbeat_s=BEAT_S, dial_line=dial_line, **how)
        order = launch_order(name)
        one = Followed(vm, order, hosts, machine_of(vm, order), dialled)
        made.append(one)
        hosts.supervise(one.machine, order, [vm.address])
        until(lambda: one.report().state is InstanceState.RUNNING, "the run")
        return one

    yield start
    for one in made:
        one.hosts.release(one.machine.token)


def in_line(vm: Vm, use: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    async def run() -> None:
        line = await connect_async(login(vm))
        try:
            await use(line)
        finally:
            line.close()

    asyncio.run(run())


async def read(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await asyncio.wait_for(report.next(), 60))
    return found


# --- the agent's lines


def test_an_agent_writes_a_line_at_once_at_each_heartbeat_and_when_something_changes(world: VmWorld) -> None:
    vm = boot(world, "lines")
    host = bring_up(vm, launch_order("lines"))
    until(lambda: host.status().state is InstanceState.RUNNING)
    at = int(unix_now()) + 120.0

    async def use(line: AsyncConnection) -> None:
        beating = await line.open(agent_command("follow", host.folder, "0.2"))
        lines = []
        for _ in range(4):
            lines.append(await read(beating))
            beating.respond()
        assert [(one["state"], one["preempt_at"]) for one in lines] == [("running", None)] * 4
        silent = await line.open(agent_command("follow", host.folder, "1000"))
        assert (await read(silent))["preempt_at"] is None
        vm.metadata.announce(at)
        assert (await read(silent))["preempt_at"] == at

    in_line(vm, use)


def test_an_agent_without_responses_ends_and_so_does_one_whose_connection_is_closed(world: VmWorld) -> None:
    vm = boot(world, "deserted")
    host = bring_up(vm, launch_order("deserted"))

    async def use(line: AsyncConnection) -> None:
        deserted = await line.open(agent_command("follow", host.folder, "0.1"))
        with suppress(EOFError):
            while True:
                await read(deserted)
        assert deserted.exit_code == 0
        await read(await line.open(agent_command("follow", host.folder, "1000")))
        assert vm.run("pgrep -fc 'agent.* follo[w]'").strip() != "0"

    in_line(vm, use)
    until(lambda: vm.run("pgrep -fc 'agent.* follo[w]' || true").strip() == "0", "the end of the command")


def test_a_connection_is_a_visit_only_while_the_controller_responds(world: VmWorld) -> None:
    vm = boot(world, "visited", lease_s=4)
    host = bring_up(vm, launch_order("visited"))
    host.shell.close()

    async def use(line: AsyncConnection) -> None:
        report = await line.open(agent_command("follow", host.folder, "1"))
        visited_until = time.monotonic() + 7.0
        while time.monotonic() < visited_until:  # longer than it would live without
            await read(report)
            report.respond()
        assert vm.is_running
        # The connection stays, and nothing responds any more.
        await asyncio.to_thread(vm.await_end)

    in_line(vm, use)


# --- the line keeps the rules of the shell


def test_a_line_refuses_strangers_with_the_sentences_of_the_shell(world: VmWorld) -> None:
    vm = boot(world, "strange")
    bring_up(vm, launch_order("strange")).shell.close()
    before = vm.console().count("Accepted")
    right = login(vm)
    cases: list[tuple[Login, type[Exception]]] = [
        (replace(right, host_keys=(KEYS.host("another").public,)), HostKeyError),
        (replace(right, host_keys=()), HostKeyError),
        (replace(right, private_key=Keys(KEYS.secret, "owner-2").login("chat").private), LoginRefusedError),
        (replace(right, private_key="none"), LoginRefusedError),
    ]
    for wrong, kind in cases:
        with pytest.raises(kind) as by_shell:
            connect(wrong)
        with pytest.raises(kind) as by_line:
            asyncio.run(connect_async(wrong))
        assert str(by_line.value) == str(by_shell.value)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        asyncio.run(connect_async(replace(right, port=2222)))
    assert vm.console().count("Accepted") == before


def test_commands_of_a_line_take_input_and_fail_as_those_of_the_shell(world: VmWorld) -> None:
    vm = boot(world, "commanded")
    bring_up(vm, launch_order("commanded")).shell.close()

    async def use(line: AsyncConnection) -> None:
        assert (await line.run("cat; echo $LC_ALL", stdin=b"secret ")).out == b"secret C\n"
        with pytest.raises(CommandError, match=r"`echo no >&2; exit 7` failed with exit code 7: no$"):
            await line.run("echo no >&2; exit 7")
        with pytest.raises(CommandTimeoutError):
            await line.run("sleep 1000", timeout_s=0.2)
        done = await asyncio.gather(*(line.run(["echo", f"{number}"]) for number in range(20)))
        assert [one.out for one in done] == [b"%d\n" % number for number in range(20)]

    in_line(vm, use)


# --- machines that are followed


def test_a_machine_that_runs_has_no_thread_and_its_log_needs_no_new_connection(follow: Follow) -> None:
    one = follow("threadless")
    until(lambda: not [t for t in threading.enumerate() if "threadless" in t.name], "the thread's end")
    before = one.vm.console().count("Accepted")
    assert one.hosts.log_window(one.machine) == (0, 0)
    assert one.hosts.read_log(one.machine, 0, 100) == b""
    assert one.vm.console().count("Accepted") == before
    at = one.announce()
    until(lambda: one.report().preempt_at == at, "the notice")
    assert one.dialled == ["threadless"]


def test_what_happened_while_the_connection_was_lost_is_reported_after(follow: Follow) -> None:
    one = follow("lost")
    one.vm.run("touch /run/no-sshd; pkill -x sshd")  # all of them: nothing is let in
    until(lambda: len(one.dialled) > 1, "an attempt to connect")
    at = one.announce()
    assert (one.report().state, one.report().preempt_at) == (InstanceState.RUNNING, None)
    one.vm.run("/usr/sbin/sshd")
    until(lambda: one.report().preempt_at == at, "the notice")


def test_a_machine_that_falls_silent_is_connected_to_again(follow: Follow) -> None:
    one = follow("frozen")
    one.vm.freeze()
    until(lambda: len(one.dialled) > 2, "attempts to connect")
    at = one.announce()
    assert (one.report().state, one.report().preempt_at) == (InstanceState.RUNNING, None)
    one.vm.thaw()
    until(lambda: one.report().preempt_at == at, "the notice")


def test_a_machine_that_cannot_be_visited_says_since_when_and_why(follow: Follow) -> None:
    """Its state stays what it was, and no one would know that its lease runs out."""
    one = follow("leased", lease_s=60)
    lease = until(lambda: one.report().lease, "the lease")
    assert (lease.lease_s, lease.visited_at, lease.why) == (60.0, None, "")
    begun = unix_now()
    one.vm.freeze()
    lease = until(lambda: (found := one.report().lease) and found.visited_at and found, "the silence")
    one.vm.thaw()
    assert one.report().state is InstanceState.RUNNING
    assert begun - 2 * BEAT_S <= lease.visited_at <= unix_now()
    assert lease.why.startswith("ssh: leased: ")
    assert 0.0 < lease.left_s(unix_now()) < 60.0
    until(lambda: (found := one.report().lease) and found.visited_at is None, "the next visit")


def test_an_agent_that_stands_still_is_noticed_though_its_machine_is_well(follow: Follow) -> None:
    one = follow("stopped")
    one.vm.run("pkill -STOP -f 'agent.* follo[w]'")
    until(lambda: len(one.dialled) > 1, "another connection")
    at = one.announce()
    until(lambda: one.report().preempt_at == at, "the notice")


def test_a_command_that_was_killed_is_started_again_on_the_same_connection(follow: Follow) -> None:
    one = follow("killed")
    killed = one.vm.run("pgrep -f 'agent.* follo[w]'").split()
    one.vm.run("pkill -KILL -f 'agent.* follo[w]'")
    at = one.announce()
    until(lambda: one.report().preempt_at == at, "the notice")
    assert one.dialled == ["killed"]
    assert not set(killed) & set(one.vm.run("pgrep -f 'agent.* follo[w]'").split())


def test_a_machine_whose_daemon_died_with_its_connection_is_brought_up_again(follow: Follow) -> None:
    one = follow("rebooted")
    one.vm.run("pkill -KILL -f 'agent.* daemo[n]'; pkill -x sshd")

    def is_alive() -> bool:
        with suppress(ShellError), connect(login(one.vm)) as shell:
            return Host(shell, node_of(one.order).folder).status(renew=False).alive
        return False

    until(lambda: len(one.dialled) > 1, "another connection")
    until(is_alive, "the daemon")
    until(lambda: one.report().state is InstanceState.RUNNING)


def test_a_machine_whose_agent_does_not_follow_is_polled(
    follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(verb: str, folder: str, *words: str) -> list[str]:
        return agent_command("unknown" if verb == "follow" else verb, folder, *words)

    monkeypatch.setattr(supervise, "agent_command", older)
    one = follow("older")
    at = one.announce()
    until(lambda: one.report().preempt_at == at, "the notice")
    assert one.vm.run("pgrep -fc 'agent.* follo[w]' || true").strip() == "0"


def test_threads_that_come_at_once_share_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def slowly() -> object:
        sleep(0.05)  # long enough for every thread to be in here, were they let in
        made.append(object())
        return made[-1]

    monkeypatch.setattr(async_ssh, "_ssh_loop", cache(slowly))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: async_ssh.ssh_loop(), range(8)))
    assert len(made) == 1
    assert set(map(id, found)) == {id(made[0])}
