"""One of five targets is down and still listed: how many requests fail?

Five real server processes, the load balancer as a real process, 20 requests a second for 20 seconds. In one
variant a target is killed (it refuses connections), in the other it is stopped with SIGSTOP (it accepts and never
responds). The load balancer gets no message. A request fails if it gets no 200 within the time limit.

The figures to compare with were measured on SkyPilot 0.14.1 with its own SkyServeLoadBalancer, the same load
and the same faults (four runs of the first case, one of the others, on a busy 2-core machine): the dead target
always has the fewest requests in flight, its failures are retried on any target including itself, and nothing
takes it out of the list before the controller does. Related upstream: skypilot-org/skypilot #3916
(do not retry on the replica that failed) and #10444 (load counts that leak).

    python benchmarks/lb_blackhole.py [--seconds 20] [--rate 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
TARGETS = 5
SERVICE_S = 0.1
TIME_LIMIT_S = 40.0
SKYSERVE = {
    ("least_load", "refuses"): "169-182 of 400 (42-45 %)",
    ("round_robin", "refuses"): "3-5 of 400 (1 %)",
    ("least_load", "frozen"): "4 of 400 hang for more than 40 s (1 %)",
    ("round_robin", "frozen"): "80 of 400 hang for more than 40 s (20 %)",
}


async def serve_target() -> None:
    """The child: responds to everything after SERVICE_S; prints its port."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if request.path != "/health":
            await asyncio.sleep(SERVICE_S)
        return web.json_response({"pid": os.getpid()})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


async def start(stack: AsyncExitStack, *command: str) -> tuple[asyncio.subprocess.Process, int]:
    """A child that prints one line of JSON with its port; ended with the stack."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, env=environment
    )

    async def end() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    return process, int(json.loads(await process.stdout.readline())["port"])


async def measure(policy: str, fault: str, seconds: float, rate: float) -> tuple[int, int, float]:
    """Requests, failures, and the longest response in seconds."""
    async with AsyncExitStack() as stack:
        targets = [await start(stack, __file__, "--serve-target") for _ in range(TARGETS)]
        flags = [flag for _, port in targets for flag in ("--target", f"http://127.0.0.1:{port}")]
        _, port = await start(
            stack, "-m", "lb", "--port", "0", "--policy", policy, "--health-path", "/health",
            "--log-level", "error", *flags,
        )  # fmt: skip
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIME_LIMIT_S), connector=aiohttp.TCPConnector(limit=0)
            )
        )
        victim, _ = targets[0]
        victim.send_signal(signal.SIGKILL if fault == "refuses" else signal.SIGSTOP)

        async def one(after_s: float) -> tuple[bool, float]:
            await asyncio.sleep(after_s)
            began_at = time.monotonic()
            try:
                async with http.post(f"http://127.0.0.1:{port}/v1/completions", data=b"{}") as response:
                    await response.read()
                    good = response.status == 200
            except (TimeoutError, aiohttp.ClientError):
                good = False
            return good, time.monotonic() - began_at

        answers = await asyncio.gather(*(one(number / rate) for number in range(int(seconds * rate))))
        failures = sum(1 for good, _ in answers if not good)
        return len(answers), failures, max(took_s for _, took_s in answers)


async def compare(seconds: float, rate: float) -> None:
    print(f"{'policy':<12} {'fault':<8} {'failed here':<18} {'slowest':<9} SkyServe (SkyPilot 0.14.1)")
    for (policy, fault), theirs in SKYSERVE.items():
        count, failures, slowest_s = await measure(policy, fault, seconds, rate)
        ours = f"{failures} of {count} ({100 * failures / count:.0f} %)"
        print(f"{policy:<12} {fault:<8} {ours:<18} {slowest_s:<7.2f} s {theirs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Failures while one of five targets is down and still listed."
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--serve-target", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(serve_target() if given.serve_target else compare(given.seconds, given.rate))


if __name__ == "__main__":
    main()
