"""What commands cost: CPU time (user and system) and wall-clock time of each, the medians of 7 runs.

    python -m benchmarks.face_cpu [-o json] [--before PYTHON]

Each run is a process of its own, with a running controller and the service of examples/01-hello-engine. `--before` is the
interpreter of an environment with another version of the product (its own checkout, its own `.venv/bin/python`): its
runs alternate with those of this one, so that other load on the host meets both, and read the same controller.

The home is temporary, and no cloud is called but the local one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RUNS = 7

CONFIG = "clouds: {local: {}}\n"
HELLO = ROOT / "examples/01-hello-engine/service.yaml"
SERVICE = "hello"
NOTHING = "(python -c pass)"
COMMANDS: Mapping[str, Sequence[str]] = {
    "--help": ["--help"],
    "validate FILE": ["validate", str(HELLO)],
    "plan FILE": ["plan", str(HELLO)],
    "status": ["status"],
    "status NAME --endpoint": ["status", SERVICE, "--endpoint"],
    "logs NAME": ["logs", SERVICE, "--no-follow"],
    "events": ["events"],
    "report NAME": ["report", SERVICE],
    "check": ["check"],
}


class Cost(NamedTuple):
    cpu_s: float
    wall_s: float


def cost(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Cost:
    """Of a process and all that it waited for. Raises CalledProcessError if it fails."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    return Cost(used.ru_utime + used.ru_stime, wall_s)


def medians(runs: Sequence[Cost]) -> Cost:
    return Cost(statistics.median(r.cpu_s for r in runs), statistics.median(r.wall_s for r in runs))


def measured(
    pythons: Mapping[str, str], environment: Mapping[str, str], folder: Path
) -> dict[str, dict[str, Cost]]:
    """The medians by command and by the name of the interpreter. The interpreters take turns within each round."""
    found: dict[str, dict[str, Cost]] = {}
    for title, words in {NOTHING: (), **COMMANDS}.items():
        runs: dict[str, list[Cost]] = {name: [] for name in pythons}
        for _ in range(RUNS):
            for name, python in pythons.items():
                command = [python, "-m", "skyserve_cli", *words] if words else [python, "-c", "pass"]
                runs[name].append(cost(command, environment, folder))
        found[title] = {name: medians(each) for name, each in runs.items()}
    return found


@contextmanager
def a_home() -> Iterator[tuple[dict[str, str], Path]]:
    """The environment of a home with a controller and one service up, and a folder to run in: not a checkout, whose code
    `python -m` would prefer to that of its environment."""
    with tempfile.TemporaryDirectory(prefix="face-") as temporary:
        folder = Path(temporary)
        home = folder / "home"
        home.mkdir()
        (home / "config.yaml").write_text(CONFIG)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"SKYSERVE_HOME": str(home)}
        serve = [sys.executable, "-m", "skyserve_cli"]
        try:
            subprocess.run(
                [*serve, "up", str(HELLO), "-y"], env=environment, cwd=folder, check=True, capture_output=True
            )
            yield environment, folder
        finally:
            for words in (["down", "--all", "--purge", "-y"], ["controller", "stop"]):
                subprocess.run(
                    [*serve, *words], env=environment, cwd=folder, check=False, capture_output=True
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--before", metavar="PYTHON", help="the interpreter of an earlier version")
    arguments = parser.parse_args()
    pythons = ({"before": arguments.before} if arguments.before else {}) | {"now": sys.executable}
    with a_home() as (environment, folder):
        found = measured(pythons, environment, folder)
    if arguments.output == "json":
        shown = {
            title: {name: each._asdict() for name, each in costs.items()} for title, costs in found.items()
        }
        print(json.dumps(shown, indent=2))
        return
    heads = [f"{what} {name}" for what in ("CPU s", "wall s") for name in pythons]
    print(f"{'command':24}" + "".join(f"{head:>15}" for head in heads))
    for title, costs in found.items():
        figures = [each[index] for index in (0, 1) for each in costs.values()]
        print(f"{title:24}" + "".join(f"{figure:15.2f}" for figure in figures))


if __name__ == "__main__":
    main()
