"""How well a load balancer predicts what real engines have cached, with their events and without: vLLM with a small cache that evicts.

    python -m benchmarks.cache_prediction [--requests 2000] [--engines 4] [--blocks 128] [--parallel 4] [--disturbed 500]

Each request is a turn of one of many conversations, or a question about one of many documents; most streams, some do not. The engine
reports how much of each prompt was cached, and the load balancer has predicted that, both by events and by what it had sent. Errors are
shares of prompts. With `--disturbed N` another N requests follow while a tenth of the events are lost on their way, and N more after an
engine was killed and started again.

Needs `scripts/real_engines.sh`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import zmq

from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import Command, Fleet
from benchmarks.chaos.real_engines import vllm_command

MODEL = "tiny"
START_TIMEOUT_S = 900.0
BLOCK_TOKENS = 32  # vLLM on CPUs takes multiples of it only
RELAYED = 3000  # above an engine's port: its events, where a relay loses some of them
LOST_SHARE = 0.1
_TEXT = (
    "the river keeper wrote down how high water stood at each gate and who had come by with which load that week "
    "since boats were many but clerks few a ledger was kept in two copies one for harbour one for town"
)
WORDS = tuple(_TEXT.split())


def engine_command(blocks: int, *, relayed: bool = False) -> Command:
    """Return the command of a vLLM with a cache of so many blocks of 32 tokens, which publishes its events."""

    def command(port: int) -> Sequence[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port + (RELAYED if relayed else 1000)}",
            "replay_endpoint": f"tcp://*:{port + 2000}",
        }
        own = (
            "--block-size",
            str(BLOCK_TOKENS),
            "--num-gpu-blocks-override",
            str(blocks),
            "--enable-prompt-tokens-details",
        )
        return (*vllm_command(str(port)), *own, "--kv-events-config", json.dumps(events))

    return command


class LossyRelay:
    """Passes the events of engines on, and loses some. A thread of its own, which ends with the process or by `close`."""

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        self.lost = 0
        self.loses = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._closing = False
        self._thread = threading.Thread(
            target=self._run, args=(tuple(ports), random.Random(seed)), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self, ports: Sequence[int], rng: random.Random) -> None:
        poller, outs = zmq.Poller(), dict[Any, Any]()
        for port in ports:
            inlet, outlet = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
            inlet.setsockopt(zmq.SUBSCRIBE, b"")
            inlet.connect(f"tcp://127.0.0.1:{port + RELAYED}")
            outlet.bind(f"tcp://127.0.0.1:{port + 1000}")
            outs[inlet] = outlet
            poller.register(inlet, zmq.POLLIN)
        while not self._closing:
            for inlet, _ in poller.poll(100):
                parts = inlet.recv_multipart()
                if self.loses and rng.random() < LOST_SHARE:
                    self.lost += 1
                else:
                    outs[inlet].send_multipart(parts)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


@dataclass
class Talk:
    """A conversation, or a document about which different questions are sent."""

    messages: list[dict[str, str]]
    is_document: bool
    busy: bool = False


@dataclass
class Workload:
    """Sends turns to an endpoint, some at a time. Every conversation starts again when it has become long."""

    url: str
    http: aiohttp.ClientSession
    seed: int = 1
    talks: int = 48
    turns: int = 8
    words: int = 150  # of a document, or of the system prompt of a conversation
    model: str = MODEL
    statuses: dict[int, int] = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._all = [self._new(number % 2 == 0) for number in range(self.talks)]

    def _new(self, is_document: bool) -> Talk:
        return Talk([{"role": "system", "content": words(self._rng, self.words)}], is_document)

    async def run(self, requests: int, parallel: int) -> None:
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                await self._turn()

        await asyncio.gather(*(worker() for _ in range(parallel)))

    async def _turn(self) -> None:
        free = [number for number, talk in enumerate(self._all) if not talk.busy]
        number = free[int(len(free) * self._rng.random() ** 1.5)]
        talk = self._all[number]
        if len(talk.messages) > 2 * self.turns:
            talk = self._all[number] = self._new(talk.is_document)
        talk.busy = True
        question = {"role": "user", "content": words(self._rng, self._rng.randrange(8, 30))}
        stream, length = self._rng.random() < 0.7, self._rng.randrange(4, 40)
        reply = await self._send([*talk.messages, question], stream, length)
        if not talk.is_document and reply is not None:
            talk.messages += [question, {"role": "assistant", "content": reply}]
        talk.busy = False
        self.done += 1

    async def _send(self, messages: list[dict[str, str]], stream: bool, length: int) -> str | None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": length,
            "temperature": 0,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
        if response.status != 200:
            return None
        if not stream:
            return str(json.loads(text)["choices"][0]["message"]["content"])
        lines = [
            line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"
        ]
        choices = [json.loads(line)["choices"] for line in lines]
        return "".join(one[0]["delta"].get("content") or "" for one in choices if one)


@dataclass(frozen=True)
class Prediction:
    """Mean errors, as shares of prompts, of the requests that were measured, and the share that was cached."""

    requests: int
    by_events: float
    by_forwards: float
    cached: float

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.cached:.1%} of their tokens cached: mean error "
            f"{self.by_events:.2%} by events, {self.by_forwards:.2%} by what was sent"
        )


def prediction(after: Mapping[str, float], before: Mapping[str, float] | None = None) -> Prediction:
    """Return what the counters of a load balancer say of the requests between two looks at them."""

    def grown(name: str) -> float:
        name = f"cache_{name}_total"
        return after.get(name, 0.0) - (0.0 if before is None else before.get(name, 0.0))

    requests = grown("measured_requests")
    return Prediction(
        int(requests),
        grown("error_by_events") / max(requests, 1),
        grown("error_by_forwards") / max(requests, 1),
        grown("hit_tokens") / max(grown("measured_prompt_tokens"), 1),
    )


async def settled(balancer: Balancer, targets: int) -> None:
    """Wait until the caches of so many targets are known."""

    async def are_known() -> bool:
        return (await balancer.counters()).get("cache_complete_targets", 0.0) >= targets

    await until(are_known, "the caches are not known")


async def measure(options: argparse.Namespace) -> int:
    disturbed = options.disturbed > 0
    command = engine_command(options.blocks, relayed=disturbed)
    async with Fleet(command, options.engines, START_TIMEOUT_S) as fleet, Balancer() as balancer:
        relay = LossyRelay([one.port for one in fleet.engines], 1) if disturbed else None
        await balancer.push(
            [one.json for one in fleet.engines],
            policy=options.policy,
            cache_events={"enabled": True, "tokenize_per_s": 1000.0},
        )
        await settled(balancer, options.engines)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
            load = Workload(f"http://127.0.0.1:{balancer.port}", http, talks=options.talks)
            found = [await phase("undisturbed", balancer, load, options.requests, options.parallel)]
            if relay is not None:
                relay.loses = True
                found.append(await phase("a tenth lost", balancer, load, options.disturbed, options.parallel))
                await restart(fleet, balancer)
                found.append(
                    await phase("after a restart", balancer, load, options.disturbed, options.parallel)
                )
        counters = await balancer.counters()
        print("statuses:", load.statuses, "lost batches:", relay.lost if relay is not None else 0)
        print({name: int(value) for name, value in sorted(counters.items()) if name.startswith("cache_")})
        if relay is not None:
            relay.close()
    return 0 if all(one.by_events <= 0.02 for one in found) and set(load.statuses) == {200} else 1


async def phase(name: str, balancer: Balancer, load: Workload, requests: int, parallel: int) -> Prediction:
    """Send requests, and print what was predicted of them."""
    before = await balancer.counters()
    await load.run(requests, parallel)
    found = prediction(await balancer.counters(), before)
    print(f"{name}: {found}", flush=True)
    return found


async def restart(fleet: Fleet, balancer: Balancer) -> None:
    """Kill an engine and start it again; print how long its new cache was not known after it was up."""
    engine, loop = fleet.engines[0], asyncio.get_running_loop()
    before = (await balancer.counters())["cache_engine_restarts_total"]
    await engine.kill()
    await engine.start()
    await fleet.up(engine)
    began = loop.time()

    async def is_noticed() -> bool:
        return (await balancer.counters())["cache_engine_restarts_total"] > before

    await until(is_noticed, "the new process was not noticed")
    await settled(balancer, len(fleet.engines))
    print(f"an engine restarted: its cache was known {loop.time() - began:.1f} s after it was up", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=128, help="of 32 tokens, in the cache of an engine")
    parser.add_argument("--talks", type=int, default=48)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--policy", default="gorgo")
    parser.add_argument("--disturbed", type=int, default=0, help="requests with losses, and after a restart")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
