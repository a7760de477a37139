"""Conversations whose state is on one replica: each follow-up must reach the replica that stored the response before it.

Two replicas behind one agent; `--conversations` at a time, with every routing policy, whole and streamed in turn. Claims:

* every follow-up is served, also of responses that the agent has not seen (it is started again in between)
* so they are while one of the two drains
* when that one is killed, each follow-up for it gets the API's error, 404, within a second, and those of the other are served

The replicas store responses in memory, as vLLM does. With `--vllm VENV MODEL` they are vLLM itself, on the processor.

    python -m benchmarks.chaos.conversations [--conversations 200] [--policies gorgo,round_robin] [--vllm VENV MODEL]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import Command, Engine, Fleet
from policies.routing.registry import POLICIES

RESPONSES = "/v1/responses"
AT_ONCE = 16
LONGEST_S = 1.0  # until the API's error, once the replica is gone
_DRAINING = {"state": "draining"}


class StoringEngine:
    """Stores each response under its id, and knows no other's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._stored: dict[str, dict[str, Any]] = {}

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post(RESPONSES, self._create),
                web.get(RESPONSES + "/{id}", self._get),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _create(self, request: web.Request) -> web.StreamResponse:
        json_body = await request.json()
        previous = json_body.get("previous_response_id")
        if previous is not None and previous not in self._stored:
            return self._unknown(previous)
        name = f"resp_{self._name}_{next(self._numbers)}"
        made = self._stored[name] = {"id": name, "object": "response", "output": []}
        if not json_body.get("stream"):
            return web.json_response(made)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for kind in ("response.created", "response.completed"):
            data = json.dumps({"response": made, "type": kind})
            await response.write(f"event: {kind}\ndata: {data}\n\n".encode())
        await response.write_eof()
        return response

    async def _get(self, request: web.Request) -> web.Response:
        stored = self._stored.get(request.match_info["id"])
        return self._unknown(request.match_info["id"]) if stored is None else web.json_response(stored)

    def _unknown(self, response_id: str) -> web.Response:
        error = {"message": f"Response with id '{response_id}' not found.", "type": "invalid_request_error"}
        return web.json_response({"error": error | {"param": "response_id", "code": 404}}, status=404)


@dataclass
class Turn:
    status: int
    seconds: float
    response_id: str
    error: str = ""


class Users:
    """Clients of one endpoint."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._free = asyncio.Semaphore(AT_ONCE)

    async def ask(self, number: int, previous: str | None = None) -> Turn:
        """One turn; every other conversation is streamed."""
        body = {
            "model": "tiny",
            "input": f"question {number}",
            "max_output_tokens": 4,
            "stream": number % 2 == 1,
        }
        if previous is not None:
            body["previous_response_id"] = previous
        async with self._free:
            start = time.perf_counter()
            async with self._http.post(self._url + RESPONSES, json=body) as response:
                text = await response.text()
                seconds = time.perf_counter() - start
        found = (
            text.partition('"id":"')[2].partition('"')[0] or text.partition('"id": "')[2].partition('"')[0]
        )
        return Turn(response.status, seconds, found, "" if response.status == 200 else text)

    async def follow(self, last: list[Turn]) -> list[Turn]:
        return await asyncio.gather(*(self.ask(number, turn.response_id) for number, turn in enumerate(last)))


def served(turns: list[Turn]) -> str:
    return f"{sum(turn.status == 200 for turn in turns)} of {len(turns)}"


async def stored_by(http: aiohttp.ClientSession, engine: Engine, turns: list[Turn]) -> list[bool]:
    """Which of the responses this engine has, by a look at the engine itself."""

    async def has(turn: Turn) -> bool:
        async with http.get(f"{engine.url}{RESPONSES}/{turn.response_id}") as response:
            return response.status == 200

    return [await has(turn) for turn in turns]


async def one_policy(policy: str, engines: list[Engine], count: int) -> bool:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with Balancer() as balancer:
            await balancer.push([one.json for one in engines], policy=policy)
            users = Users(http, f"http://127.0.0.1:{balancer.port}")
            first = list(await asyncio.gather(*(users.ask(number) for number in range(count))))
            second = await users.follow(first)
            log = balancer.complaints()
        async with Balancer() as balancer:
            await balancer.push([one.json for one in engines], policy=policy)
            users = Users(http, f"http://127.0.0.1:{balancer.port}")
            third = await users.follow(second)
            lost, kept = engines
            await balancer.push([lost.json | _DRAINING, kept.json], policy=policy)
            fourth = await users.follow(third)
            on_lost = await stored_by(http, lost, fourth)
            await lost.kill()
            fifth = await users.follow(fourth)
            at_rest = await until(balancer.at_rest, "requests are left")
            log += balancer.complaints()
    gone = [turn for turn, was in zip(fifth, on_lost, strict=True) if was]
    others = [turn for turn, was in zip(fifth, on_lost, strict=True) if not was]
    errors = Counter(turn.status for turn in gone)
    slowest = max((turn.seconds for turn in gone), default=0.0)
    print(
        f"{policy:26} follow-ups {served(second)}, after a restart {served(third)}, in a drain {served(fourth)}; "
        f"killed: {len(gone)} of its own {dict(errors)} in {slowest:.2f} s at most, others {served(others)}",
        flush=True,
    )
    right = all(turn.status == 200 for turns in (second, third, fourth, others) for turn in turns)
    api_errors = all(turn.status == 404 and "not found" in turn.error for turn in gone)
    for line in log[:5]:
        print("   ", line)
    return right and api_errors and slowest < LONGEST_S and at_rest and not log and 0 < len(gone) < count


def storing_engine(port: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.chaos.conversations", "--serve", str(port)]


def vllm(venv: str, model: str) -> Command:
    return lambda port: [
        f"{venv}/bin/vllm", "serve", model, "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1",
        "--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16",
    ]  # fmt: skip


async def main_async(arguments: argparse.Namespace) -> int:
    command: Command = vllm(*arguments.vllm) if arguments.vllm else storing_engine
    failed = []
    for policy in arguments.policies:
        async with Fleet(command, 2) as fleet:
            if not await one_policy(policy, fleet.engines, arguments.conversations):
                failed.append(policy)
    print("failed:", ", ".join(failed)) if failed else print("all claims hold")
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--policies", type=lambda text: text.split(","), default=sorted(POLICIES))
    parser.add_argument("--vllm", nargs=2, metavar=("VENV", "MODEL"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        web.run_app(
            StoringEngine(str(arguments.serve)).application(),
            host="127.0.0.1",
            port=arguments.serve,
            print=None,
        )
        return
    sys.exit(asyncio.run(main_async(arguments)))


if __name__ == "__main__":
    main()
