"""What the face costs: CPU seconds (user and system, the median of 5 runs, each a process of its own) of

    import skyserve_cli      beyond an interpreter that imports nothing
    serve status             the whole process, with a running controller and a service
    serve plan               after import: A100, L4 and H100 over the three clouds of the catalog

    python benchmarks/face_cpu.py [-o json]

A home of its own is made and taken away. Nothing is asked of a cloud.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 5

CLOUDS = "clouds: {local: {}, aws: {}, gcp: {}, azure: {subscription_id: x}}\n"
SLEEPER = "service: {}\nresources: {infra: local}\nrun: exec python3 -m http.server $SKYSERVE_REPLICA_PORT\n"
WISH = """
service: {replica_policy: {min_replicas: 3, spot_placer: dynamic_fallback}}
resources: {accelerators: {A100: 1, A100-80GB: 1, L4: 1, H100: 8}}
run: serve
"""
PLAN_AFTER_IMPORT = """
import sys, time
from skyserve_cli import app
from skyserve_cli.commands import plan
began = time.process_time()
code = app.run(["plan", sys.argv[1]])
print(time.process_time() - began, file=sys.stderr)
sys.exit(code)
"""


def cpu_s(command: list[str], environment: Mapping[str, str]) -> float:
    """CPU seconds of a process and all that it waited for. Raises CalledProcessError if it fails."""
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command)
    return used.ru_utime + used.ru_stime


def said_s(command: list[str], environment: Mapping[str, str]) -> float:
    """The last line that it says, a number."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stderr.splitlines()[-1])


def median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(RUNS))


@contextmanager
def a_home() -> Iterator[tuple[dict[str, str], Path]]:
    """The environment of a home with a controller and one service up, and a file to plan with."""
    with tempfile.TemporaryDirectory(prefix="face-") as folder:
        home, wish, sleeper = Path(folder, "home"), Path(folder, "chat.yaml"), Path(folder, "web.yaml")
        home.mkdir()
        (home / "config.yaml").write_text("clouds: {local: {poll_seconds: 0.5}}\n")
        wish.write_text(WISH)
        sleeper.write_text(SLEEPER)
        environment = {**os.environ, "SKYSERVE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        serve = [sys.executable, "-m", "skyserve_cli"]
        try:
            subprocess.run(
                [*serve, "up", str(sleeper), "-y"], env=environment, check=True, capture_output=True
            )
            (home / "config.yaml").write_text(CLOUDS)
            yield environment, wish
        finally:
            for words in (["down", "--all", "--purge", "-y"], ["controller", "stop"]):
                subprocess.run([*serve, *words], env=environment, check=False, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    output = parser.parse_args().output
    python = sys.executable
    with a_home() as (environment, wish):
        nothing = median(lambda: cpu_s([python, "-c", "pass"], environment))
        found = {
            "import skyserve_cli": median(lambda: cpu_s([python, "-c", "import skyserve_cli"], environment))
            - nothing,
            "serve status": median(lambda: cpu_s([python, "-m", "skyserve_cli", "status"], environment)),
            "serve plan, after import": median(
                lambda: said_s([python, "-c", PLAN_AFTER_IMPORT, str(wish)], environment)
            ),
        }
    if output == "json":
        print(json.dumps({what: round(used_s, 4) for what, used_s in found.items()}, indent=2))
        return
    for what, used_s in found.items():
        print(f"{what:26} {used_s:6.3f} s of CPU")


if __name__ == "__main__":
    main()
