"""What following machines costs the controller: CPU and threads in steady state, over real sshd.

    python benchmarks/follow_cpu.py [-n 50] [--seconds 120] [-o json]

Boots machines as the tests do (namespaces of this machine, each with its own sshd and agent; needs root), brings them up
and follows them in a process of its own. That process prints what it used between two instants when nothing happens on
the machines but heartbeats, and how long a notice takes. The figures for 1,000 machines are scaled from these, not
measured: CPU is proportional to the number of machines, and threads do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from provisioners.port.base import InstanceState  # noqa: E402
from provisioners.remote.ssh_hosts import SshHosts  # noqa: E402
from provisioners.remote.supervise import HEARTBEAT_S  # noqa: E402
from tests.clouds.vms.vm_bench import boot, launch_order, login, machine_of, node_of  # noqa: E402
from tests.clouds.vms.vm_world import VmWorld  # noqa: E402

PATIENCE_S = 600.0
SCALE = 1000
AT_ONCE = 10  # machines that boot at a time, on this machine's few cores


def follow(addresses: dict[str, str], seconds: float) -> None:
    """The controller's side: prints READY, then the figures, then how long a notice took."""
    hosts = SshHosts(lambda machine: login(_vm(machine.id, addresses)))
    machines = {name: machine_of(_vm(name, addresses), _order(name)) for name in addresses}
    changed: queue.SimpleQueue[float] = queue.SimpleQueue()
    names = list(machines)
    began = time.process_time()
    for at in range(0, len(names), AT_ONCE):
        part = names[at : at + AT_ONCE]
        for name in part:
            hosts.supervise(machines[name], _order(name), [addresses[name]])
        until = time.monotonic() + PATIENCE_S
        while not all((r := hosts.report(machines[n])) and r.state is InstanceState.RUNNING for n in part):
            assert time.monotonic() < until, [hosts.report(machines[n]) for n in part]
            time.sleep(0.2)
    bring_up_s = time.process_time() - began
    print("READY", flush=True)
    sys.stdin.readline()
    began, began_wall = time.process_time(), time.monotonic()
    time.sleep(seconds)
    used, wall = time.process_time() - began, time.monotonic() - began_wall
    facts = {
        "cpu_s": used,
        "wall_s": wall,
        "bring_up_cpu_s": bring_up_s,
        "python_threads": threading.active_count(),
        "threads": _status("Threads"),
        "rss_mib": _status("VmRSS") / 1024,
    }
    hosts.on_report(lambda: changed.put(time.time()))
    print(json.dumps(facts), flush=True)
    print(json.dumps(changed.get(timeout=60.0) - float(sys.stdin.readline())), flush=True)


def _vm(name: str, addresses: dict[str, str]) -> Any:
    return SimpleNamespace(name=name, address=addresses[name])


def _order(name: str) -> Any:
    return launch_order(name, cloud="none")  # without a metadata service that is polled


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def measure(count: int, seconds: float) -> dict[str, Any]:
    names = [f"m{number}" for number in range(count)]
    with VmWorld() as world:
        vms = []
        for name in names:
            vms.append(boot(world, name, disk_mb=32))
            time.sleep(0.2)
        facts = json.dumps({vm.name: vm.address for vm in vms})
        command = [sys.executable, __file__, "--follow", facts, "--seconds", str(seconds)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "READY"
        child.stdin.write("go\n")
        child.stdin.flush()
        result: dict[str, Any] = json.loads(child.stdout.readline())
        path = f"/home/skyserve/{node_of(_order(names[0])).folder}/notice.json"
        wrote_at = time.time()  # so that the time to get into the machine counts too
        vms[0].run(f"echo '{{\"preempt_at\": 2000000000}}' >{path}.new && mv {path}.new {path}")
        child.stdin.write(f"{wrote_at}\n")
        child.stdin.flush()
        result["notice_s"] = json.loads(child.stdout.readline())
        child.wait(60)
    return {"machines": count, **result}


def table(result: dict[str, Any]) -> str:
    per_machine = result["cpu_s"] / result["wall_s"] / result["machines"]
    beats = result["wall_s"] / HEARTBEAT_S
    return (
        f"{result['machines']} machines for {result['wall_s']:.0f} s ({beats:.1f} heartbeats of {HEARTBEAT_S:g} s): "
        f"{result['cpu_s'] * 1e3:.0f} ms of CPU, {per_machine * 1e3:.4f} ms per machine and second, "
        f"{result['threads']} threads ({result['python_threads']} of Python), {result['rss_mib']:.0f} MiB\n"
        f"a notice on a machine's disk was reported {result['notice_s']:.2f} s later\n"
        f"bringing up cost {result['bring_up_cpu_s'] / result['machines'] * 1e3:.0f} ms of CPU per machine\n"
        f"scaled to {SCALE:,} machines, not measured: {per_machine * SCALE * 100:.2f} % of a core, "
        f"{result['threads']} threads (they do not depend on the number of machines)"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU and threads of following machines over real sshd")
    parser.add_argument("-n", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("-o", choices=["text", "json"], default="text")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.follow:
        follow(json.loads(asked.follow), asked.seconds)
        return
    result = measure(asked.n, asked.seconds)
    print(json.dumps(result) if asked.o == "json" else table(result))


if __name__ == "__main__":
    main()
