"""What an upgrade of the controller costs the services that it runs: requests that fail, and replicas that are launched.

    python scripts/upgrade_under_load.py [--from COMMIT] [--rate 20] [--seconds 20]

Installs an earlier commit (by default that of release 0.2.0) in an environment of its own, brings three services of its examples
up with it on the local cloud, and sends them requests, half of them streams. Under that load this checkout is installed over it, its
controller stops, and the present one starts. The replicas must be the same afterwards. Then `serve update` replaces those of one
service and `serve down` ends all: the present release manages what the earlier one began. Prints a row per step; exit code 1 if a
request failed, a replica was launched by the upgrade, or a process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
RELEASE_0_2_0 = "34848bac"
EXAMPLES = {"hello": "01-hello-engine", "evolving": "03-update", "elastic": "04-autoscaling"}
UPDATED = "evolving"
MOST_LOOKS = 20
LOOK_S = 15.0  # longer than the autoscaler of the examples takes to act on the load

Replicas = set[tuple[str, int, str]]  # service, id and instance


class Load:
    """Requests at a constant rate to each service in turn, whatever becomes of those before."""

    def __init__(self, urls: list[str], rate: float) -> None:
        self._urls, self._rate = urls, rate
        self.sent = 0
        self.failed: list[str] = []

    async def run(self, ended: asyncio.Event) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as client, asyncio.TaskGroup() as group:
            while not ended.is_set():
                group.create_task(self._request(client, self.sent))
                self.sent += 1
                await asyncio.sleep(1 / self._rate)

    async def _request(self, client: aiohttp.ClientSession, number: int) -> None:
        # The model's name is another one after the update; without one any replica answers.
        stream = number % 2 == 1
        body = {"stream": stream, "max_tokens": 200, "messages": [{"role": "user", "content": f"{number}"}]}
        url = self._urls[number % len(self._urls)]
        try:
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(f"request {number} to {url}: {error!r}")
            return
        if response.status != 200 or ("[DONE]" if stream else '"choices"') not in text:
            self.failed.append(f"request {number} to {url}: {response.status} {text[-200:]}")


class Installation:
    """`serve` in an environment and a home of its own."""

    def __init__(self, folder: Path) -> None:
        self._programs = folder / "environment/bin"
        self.home = folder / "home"
        subprocess.run([sys.executable, "-m", "venv", self._programs.parent], check=True)

    def install(self, checkout: Path) -> str:
        command: list[str | Path] = [self._programs / "pip", "install", "--quiet", "--upgrade", checkout]
        subprocess.run(command, env={**os.environ, "SKYSERVE_NATIVE": "0"}, check=True)
        return ""

    def serve(self, *arguments: str) -> str:
        environment = {**os.environ, "SKYSERVE_HOME": str(self.home)}
        command = [str(self._programs / "serve"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def replicas(self) -> Replicas:
        services: list[dict[str, Any]] = json.loads(self.serve("status", "-o", "json"))
        return {
            (service["name"], replica["id"], replica["instance_id"])
            for service in services
            for replica in service["replicas"]
        }


@contextmanager
def checkout_of(commit: str, folder: Path) -> Iterator[Path]:
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)


def started_by(home: Path) -> list[str]:
    """Return the command lines of the processes that work in a home."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(home) in line]


async def settled(installation: Installation) -> Replicas:
    """Return the replicas once the load has not changed their number any more for a while."""
    found = await asyncio.to_thread(installation.replicas)
    for _ in range(MOST_LOOKS):
        await asyncio.sleep(LOOK_S)
        before, found = found, await asyncio.to_thread(installation.replicas)
        if found == before:
            break
    return found


async def upgraded(installation: Installation, urls: list[str], rate: float, seconds: float) -> bool:
    """Change the release under load, and print what each step cost."""
    load, ended = Load(urls, rate), asyncio.Event()
    sent = failed = launched = 0

    async def step(name: str, act: Callable[..., str], *arguments: Any) -> None:
        nonlocal sent, failed
        await asyncio.to_thread(act, *arguments)
        await asyncio.sleep(seconds)
        print(f"{name:<40}{load.sent - sent:5} requests  {len(load.failed) - failed} failed", flush=True)
        sent, failed = load.sent, len(load.failed)

    serve, file = installation.serve, str(ROOT / "examples" / EXAMPLES[UPDATED] / "service.yaml")
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(ended))
        running = await settled(installation)
        await step("the earlier release runs", serve, "status")
        await step("the present one is installed over it", installation.install, ROOT)
        await step("the earlier controller has stopped", serve, "controller", "stop")
        await step("the present controller has started", serve, "controller", "start")
        launched = len(await asyncio.to_thread(installation.replicas) - running)
        await step(
            "it has replaced a service's replicas",
            serve,
            "update",
            UPDATED,
            file,
            "--env",
            "MODEL=another",
            "-y",
        )
        ended.set()
    print(
        f"{load.sent} requests, {len(load.failed)} failed; {len(running)} replicas, {launched} launched by the upgrade"
    )
    print(*load.failed[:10], sep="\n", end="\n" if load.failed else "")
    return not launched and not load.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from", dest="commit", default=RELEASE_0_2_0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each step is watched")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        checkout_of(given.commit, Path(scratch) / "checkout") as checkout,
    ):
        installation = Installation(Path(scratch))
        installation.install(checkout)
        files = [str(checkout / "examples" / name / "service.yaml") for name in EXAMPLES.values()]
        try:
            urls = [installation.serve("up", file, "-y").split()[-1] for file in files]
            is_good = asyncio.run(upgraded(installation, urls, given.rate, given.seconds))
        finally:
            installation.serve("controller", "start")
            installation.serve("down", "--all", "-y")
            installation.serve("controller", "stop")
        left = started_by(installation.home)
        print(f"{len(left)} processes left after serve down", *left, sep="\n")
    return 0 if is_good and not left else 1


if __name__ == "__main__":
    sys.exit(main())
