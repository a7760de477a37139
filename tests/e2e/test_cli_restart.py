"""What a controller must know again after kill -9, and what must not end with an update: each was seen to go wrong elsewhere.

SkyPilot 0.14.1 numbers replicas from 1 again and so writes over a living one, forgets the version (its issue 8562), starts at the
smallest size, forgets where spot instances were lost, may end again and again at a replica that is going (8563), does not apply
`num_overprovision` in an update, cuts streams of replicas that drain, and sends 100 requests to a replica at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.test_cli_life import ask

pytestmark = pytest.mark.long
STREAMS = 200
HOLD = """
import asyncio, os, sys
from aiohttp import web

async def main(port, crowd, go):
    here = 0

    async def chat(request):
        nonlocal here
        here += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with asyncio.timeout(60):
            while here < crowd and not os.path.exists(go):
                await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\\n\\n")
        return response

    async def health(request):
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""

ENGINE = "serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT"


def write(folder: Path, policy: str, *, run: str = ENGINE) -> Path:
    file = folder / "service.yaml"
    file.write_text(
        "name: small\nservice:\n  readiness_probe: {path: /health, endpoint_probe_interval_seconds: 1}\n"
        f"  replica_policy: {{{policy}}}\n"
        "resources: {infra: local, use_spot: true}\n"
        f"run: {run}\n"
    )
    return file


def holding(folder: Path, crowd: int) -> str:
    """Engines that end no stream until one of them has `crowd` requests, or until the file `go` is there."""
    (folder / "hold.py").write_text(HOLD)
    return f"{sys.executable} {folder}/hold.py $SKYSERVE_REPLICA_PORT {crowd} {folder}/go"


def kill_controller(serve: Any) -> None:
    os.kill(json.loads(serve.ok("controller", "status", "-o", "json").out)["pid"], signal.SIGKILL)


def ready(serve: Any) -> dict[int, dict[str, Any]]:
    return {each["id"]: each for each in serve.view("small")["replicas"] if each["state"] == "READY"}


def kinds(serve: Any) -> list[str]:
    return [json.loads(line)["kind"] for line in serve.ok("events", "small", "-o", "json").out.splitlines()]


def test_ids_versions_sizes_and_lost_zones_are_known_again(serve: Any, tmp_path: Path) -> None:
    policy = "min_replicas: 2, max_replicas: {}, target_qps_per_replica: 0.2, upscale_delay_seconds: 0, spot_placer: dynamic_fallback"
    file = write(tmp_path, policy.format(4))
    url = serve.ok("up", file, "-y").out.strip()
    serve.ok("update", "small", file, "--env", "A=1", "-y")
    for _ in range(60):
        ask(url)
    serve.eventually(lambda: len(ready(serve)) == 4)
    cheapest = min(ready(serve).values(), key=lambda each: each["price_usd_hour"])
    serve.ok("local", "preempt", f"small/{cheapest['id']}")
    serve.eventually(lambda: len(ready(serve)) == 4 and cheapest["id"] not in ready(serve))
    before, highest = ready(serve), max(each["id"] for each in serve.view("small", "--all")["replicas"])
    assert {each["version"] for each in before.values()} == {2}
    serve.ok("down", "small", "--replica-id", str(highest), "-y")

    kill_controller(serve)
    serve.ok("update", "small", write(tmp_path, policy.format(5)), "--env", "A=1", "-y")
    for _ in range(60):
        ask(url)
    serve.eventually(lambda: len(ready(serve)) == 5)

    after = ready(serve)
    kept = before.keys() - {highest}
    assert after.keys() >= kept, "replicas that lived before are those that live now"
    for each in kept:
        same = ("instance_id", "endpoint", "created_at", "ready_at")
        assert [before[each][key] for key in same] == [after[each][key] for key in same]
    new = after.keys() - kept
    assert len(new) == 2
    assert min(new) > highest, "no id is used twice"
    assert {each["version"] for each in after.values()} == {2, 3}, (
        "no version is launched that is not wanted any more"
    )
    assert cheapest["zone"] not in {after[each]["zone"] for each in new}, (
        "where an instance was lost is known"
    )
    ended = [
        each["id"]
        for each in serve.view("small", "--all")["replicas"]
        if each["state"] == "GONE" and each["version"] > 1
    ]
    assert sorted(ended) == [cheapest["id"], highest]


def test_a_replica_that_is_going_when_the_controller_dies_goes(serve: Any, tmp_path: Path) -> None:
    run = holding(tmp_path, STREAMS)
    serve.ok("up", write(tmp_path, "min_replicas: 2", run=run), "-y")
    url = serve.ok("status", "--endpoint", "small").out.strip()
    texts: list[bytes] = []
    callers = [threading.Thread(target=lambda: texts.append(ask(url, stream=True))) for _ in range(4)]
    for caller in callers:
        caller.start()
    serve.eventually(lambda: serve.view("small")["load"]["in_flight"] == 4)
    serve.ok("update", "small", write(tmp_path, "min_replicas: 1", run=run), "-y", "--no-wait")
    serve.eventually(
        lambda: any(each["state"] not in ("READY", "GONE") for each in serve.view("small")["replicas"])
    )
    kill_controller(serve)
    assert len(serve.view("small")["replicas"]) == 2, "a replica with streams is waited for"
    (tmp_path / "go").touch()
    serve.eventually(lambda: len(serve.view("small")["replicas"]) == 1)
    for caller in callers:
        caller.join()
    assert texts == [b"data: [DONE]\n\n"] * 4, "streams of a replica that drains end whole"
    assert serve.view("small")["status"] == "READY"
    assert "ControllerFailed" not in kinds(serve)


def test_an_update_applies_the_number_of_spares(serve: Any, tmp_path: Path) -> None:
    policy = "min_replicas: 1, max_replicas: 1, target_qps_per_replica: 100, spot_placer: dynamic_fallback, num_overprovision: {}"
    serve.ok("up", write(tmp_path, policy.format(1)), "-y")
    serve.eventually(lambda: len(ready(serve)) == 2)
    serve.ok("update", "small", write(tmp_path, policy.format(3)), "-y")
    serve.eventually(lambda: len(ready(serve)) == 4)
    assert set(ready(serve)) >= {1, 2}


def test_one_replica_has_more_than_a_hundred_streams_at_once(serve: Any, tmp_path: Path) -> None:
    file = write(tmp_path, "min_replicas: 1", run=holding(tmp_path, STREAMS))
    url = serve.ok("up", file, "-y").out.strip()

    async def stream(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.post(
            f"{url}/v1/chat/completions", json={"model": "m", "stream": True, "messages": []}
        ) as response:
            return response.status, await response.text()

    async def all_of_them() -> list[tuple[int, str]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(stream(session) for _ in range(STREAMS)))

    assert asyncio.run(all_of_them()) == [(200, "data: [DONE]\n\n")] * STREAMS
