"""Which load balancer each way to install or to deploy runs, and its cost, from real starts of each.

    python -m benchmarks.installs                     all ways: about half an hour, as root (machines are network namespaces)
    python -m benchmarks.installs --only wheel,region --rounds 3

A way is followed as its page says: a copy of this checkout is installed, a service with one replica (the mock engine of
`benchmarks.router`) comes up, and what its load balancer reports of itself is shown beside the CPU time of a request of 1 KB (32 connections,
saturated) and of a chunk (100 streams of 50 chunks/s): medians over the rounds, with the range. Services on other hosts have TLS to their replicas. No
API keys. Images need a container runtime and are not started: they are the wheel, with the distribution's Python (packaging/Containerfile).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.installs.ways import Started, alone, deployed, installed, local, quickstart, region
from benchmarks.router.cells import BY_NAME
from benchmarks.router.machine import allow_many_files, compiled, pinned
from tests.clouds.vms import vm_world
from tests.e2e.test_cli_controller_install import SYSTEMCTL

_LOAD_CORE, _AGENT_CORE = 0, 1
_WARM_S, _WINDOW_S = 0.5, 3.0

Start = Callable[[Path, Path], AbstractContextManager[Started]]


@dataclass(frozen=True)
class Way:
    name: str
    title: str
    install: str  # one of INSTALLS
    start: Start


INSTALLS: dict[str, Callable[[Path], Path]] = {
    "wheel": lambda folder: installed(folder, "."),
    "quickstart": quickstart,
    "editable": lambda folder: installed(folder, "--editable", "."),
}
WAYS = (
    Way("wheel", "`pip install .` or `uv pip install .` (README), `serve up`", "wheel", local),
    Way("quickstart", "`quickstart.sh`", "quickstart", local),
    Way("editable", "`pip install -e .` (development), `serve up`", "editable", local),
    Way("alone", "`python -m lb` of a wheel", "wheel", alone),
    Way("region", "region on a machine, controller of a wheel", "wheel", region),
    Way("region-editable", "region on a machine, controller of `-e`", "editable", region),
    Way(
        "deployed", "`serve controller deploy` from a wheel", "wheel", partial(deployed, systemctl=SYSTEMCTL)
    ),
    Way(
        "deployed-editable",
        "`serve controller deploy` from `-e`",
        "editable",
        partial(deployed, systemctl=SYSTEMCTL),
    ),
)


def measure(started: Started, cell_name: str, folder: Path) -> float:
    """Return the CPU time of the load balancer per request or chunk, in microseconds. Raises RuntimeError."""
    cell = BY_NAME[cell_name]
    command = [str(compiled("load")), cell.mode, "-A", started.address, "-P", str(started.port)]
    command += cell.load_arguments(folder, _WARM_S, _WINDOW_S)
    command += ["-p", ",".join(map(str, started.agents)), "-b", ",".join(map(str, started.engines))]
    with pinned(_LOAD_CORE):
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise RuntimeError(f"{cell_name}: {done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout)
    if said["answered"] != said["sent"] or said["wrong"]:
        raise RuntimeError(f"{cell_name}: {said}")
    return float(said["proxy_cpu_s"] * 1e6 / (said["requests"] if cell.mode == "unary" else said["events"]))


def row(way: Way, program: Path, folder: Path, rounds: int) -> str:
    """Return the line of a way in the table."""
    found: dict[str, list[float]] = {"unary": [], "streams100": []}
    with way.start(program, folder / way.name) as started:
        for pid in started.agents:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {_AGENT_CORE})
        for _ in range(rounds):
            for cell, values in found.items():
                values.append(measure(started, cell, folder))
        build, has_tls = started.build, started.has_tls
    kind = str(build["kind"]) + (f" ({build['not_compiled']})" if build.get("not_compiled") else "")
    helper = "no" if not build["fast_path"] else "not for TLS" if build.get("slow_tls") else "yes"
    costs = " | ".join(f"{median(one):.0f} [{min(one):.0f}, {max(one):.0f}]" for one in found.values())
    return f"| {way.title} | {kind} | {helper} | {'yes' if has_tls else 'no'} | {costs} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of ways, with commas: " + ", ".join(way.name for way in WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [way.name for way in WAYS]
    if unknown := set(names) - {way.name for way in WAYS}:
        parser.error(f"--only: there is no way {', '.join(sorted(unknown))}")
    if why := vm_world.why_not() or vm_world.why_no_venv():
        print(why, file=sys.stderr)
        return 1
    allow_many_files()
    failed = 0
    print(
        "| way | modules | helper in C | TLS to replicas | µs a request | µs a chunk |\n|---|---|---|---|---|---|"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="installs-")))
        programs: dict[str, Path] = {}
        for way in (way for way in WAYS if way.name in names):
            try:
                if way.install not in programs:
                    (folder / way.install).mkdir()
                    programs[way.install] = INSTALLS[way.install](folder / way.install)
                print(row(way, programs[way.install], folder, given.rounds), flush=True)
            except (RuntimeError, TimeoutError, OSError, subprocess.SubprocessError) as error:
                failed += 1
                print(f"{way.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
