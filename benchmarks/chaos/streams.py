"""Streams whose target is killed: 200 at once, SIGKILL in mid-stream, ten times. Or it vanishes (`--vanish`): it is stopped,
so that no connection is closed and no byte comes, as when a machine is taken away.

Engine processes that say the same (`--kinds`: ours, the shapes of vLLM, SGLang, llama.cpp and TGI over sockets, and
llama.cpp's own server with a tiny random model, where there is one) stand
behind one agent. `--streams` streams run all the while, chats and completions in turn; the engine that has
most of them is killed at a random moment and started again on its port. Claims:

* every stream is complete: one id, one role, one finish reason, one end mark, no error, and its usage is right
* its text is that of an undisturbed run, byte by byte
* nothing is in flight at the end, and nothing is wrong in the agent's log

Reported: how much longer than usual the client waited for the next token where its engine was killed (the seam: from the
last event before it to the next one, less the stream's median gap).

    python -m benchmarks.chaos.streams [--streams 200] [--kills 10] [--kinds skyserve,vllm] [--modes auto] [--vanish]

`--modes exact` is for our engine: the streams have a seed, with which no other one goes on exactly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import (
    NO_LLAMA_SERVER,
    Command,
    Engine,
    Fleet,
    llama_engine,
    llama_server,
    our_engine,
    shaped_engine,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHAPES = ("vllm", "sglang", "llamacpp", "tgi")
LLAMA = "llama-server"
KINDS = ("skyserve", *SHAPES, LLAMA)
ENGINES = 3
PROMPTS = 20
# What an agent must have recognised; TGI does not take a chat's text back, so its chats cannot go on.
_RECOGNISED = {LLAMA: "llamacpp"}
_NO_CHATS = ("tgi",)
_COUNT_LAST = (LLAMA, "llamacpp", "tgi")


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens` of each stream; `pace_s` between two of them where the engine is ours to slow down."""

    kind: str = "skyserve"
    mode: str = "auto"
    streams: int = 200
    kills: int = 10
    tokens: int = 60
    pace_s: float = 0.1
    seed: int = 1
    vanish: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (COMPLETIONS,) if self.kind in _NO_CHATS else (CHAT, COMPLETIONS)

    def command(self, folder: Path) -> Command:
        if self.kind == "skyserve":
            return our_engine(0.015 / self.pace_s)  # an iteration of its profile takes some 15 ms
        if self.kind == LLAMA:
            return llama_engine(folder, slots=self.streams)
        return shaped_engine(self.kind, self.pace_s)

    def body(self, path: str, number: int) -> dict[str, Any]:
        prompt = f"Tell me of the sea, part {number}."
        asked: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": self.tokens, "seed": 7}
        if self.kind == LLAMA:
            asked |= {"temperature": 0, "cache_prompt": True}
        else:
            asked["ignore_eos"] = True
        asked |= {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
        return asked | {"stream_options": {"include_usage": True}}


@dataclass(slots=True)
class StreamRecord:
    """What a client received on one stream, and when."""

    id: str
    path: str
    number: int
    asked_at: float
    text: str = ""
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    done: int = 0
    errors: list[str] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # of each event that says something
    seams: list[float] = field(default_factory=list)  # extra seconds

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(str(chunk["error"].get("message")))
            return
        self.ids.add(chunk["id"])
        self.created.add(chunk["created"])
        if chunk.get("usage"):
            self.completion_tokens.append(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            said = delta.get("content") or choice.get("text") or ""
            self.roles += bool(delta.get("role")) and not said
            self.text += said
            if said:
                self.at.append(now)
            if choice.get("finish_reason"):
                self.finishes.append(choice["finish_reason"])

    def problems(self, undisturbed: StreamRecord, *, one_creation: bool, usage_is_last: bool) -> list[str]:
        """In what it differs from the undisturbed one.

        `one_creation`: the engine sends one time of creation for all chunks of a stream; llama.cpp sends the time of
        each. `usage_is_last`: tokens are counted in its last words only; if it is killed between the end of the text
        and these, those of the prompt are unknown.
        """
        found = list(self.errors)
        if self.text != undisturbed.text:
            same = next(
                (at for at, (a, b) in enumerate(zip(self.text, undisturbed.text, strict=False)) if a != b),
                None,
            )
            found.append(
                f"its text of {len(self.text)} characters differs from character {same} on "
                f"({len(undisturbed.text)} undisturbed)"
            )
        for what in ("roles", "finishes", "done"):
            mine, its = getattr(self, what), getattr(undisturbed, what)
            if mine != its:
                found.append(f"{what} {mine}, undisturbed {its}")
        expected = undisturbed.completion_tokens
        if self.completion_tokens != expected and (self.completion_tokens or not usage_is_last):
            found.append(f"{self.completion_tokens} tokens counted, undisturbed {expected}")
        if len(self.ids) != 1 or (len(self.created) != 1 and one_creation):
            found.append(f"{len(self.ids)} ids, {len(self.created)} instants of creation")
        return found


@dataclass(slots=True)
class Report:
    streams: list[StreamRecord] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)  # streams in flight on the target, each time
    continued: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def seams_ms(self) -> list[float]:
        return sorted(1000 * seam for record in self.streams for seam in record.seams)


async def read_stream(
    http: aiohttp.ClientSession, url: str, record: StreamRecord, body: dict[str, Any]
) -> None:
    """One stream, to its end or to whatever ends it."""
    loop = asyncio.get_running_loop()
    try:
        async with http.post(url + record.path, json=body, headers={"X-Request-Id": record.id}) as response:
            if response.status != 200:
                record.errors.append(f"{response.status}: {(await response.text())[:200]}")
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    record.event(line[6:].strip(), loop.time())
    except aiohttp.ClientError as error:
        record.errors.append(f"{type(error).__name__}: {error}")


async def run(plan: Plan) -> Report:
    """Run one kind of engine in one mode."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="skyserve-chaos-") as folder:
        async with (
            Fleet(plan.command(Path(folder)), ENGINES) as fleet,
            Balancer("--continue", plan.mode) as balancer,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            undisturbed = await _undisturbed(plan, fleet.engines[0], http)
            await _push(plan, fleet, balancer)
            rng = random.Random(plan.seed)
            stop = asyncio.Event()
            clients = [
                asyncio.ensure_future(_client(plan, number, http, balancer, rng, report, stop))
                for number in range(plan.streams)
            ]
            try:
                await _kills(plan, fleet, balancer, rng, report)
            finally:
                stop.set()
            await asyncio.gather(*clients)
            await until(balancer.at_rest, "something is still in flight or held")
            report.continued = int((await balancer.counters())["continuations_total"])
            report.broken += balancer.complaints()
    for record in report.streams:
        problems = record.problems(
            undisturbed[record.path, record.number],
            one_creation=plan.kind != LLAMA,
            usage_is_last=plan.kind in _COUNT_LAST,
        )
        report.broken += [f"{record.id} {record.path}: {why}" for why in problems]
    if not report.continued:
        report.broken.append("no stream was hit")
    return report


async def _undisturbed(
    plan: Plan, engine: Engine, http: aiohttp.ClientSession
) -> dict[tuple[str, int], StreamRecord]:
    """Return the streams of all prompts, by path and number, read from an engine that nothing happens to."""
    now = asyncio.get_running_loop().time()
    found = {
        (path, number): StreamRecord("", path, number, now)
        for path in plan.paths
        for number in range(PROMPTS)
    }
    await asyncio.gather(
        *(read_stream(http, engine.url, record, plan.body(*key)) for key, record in found.items())
    )
    for record in found.values():
        assert record.done == 1, record
        assert not record.errors, record
    return found


async def _push(plan: Plan, fleet: Fleet, balancer: Balancer) -> None:
    """Push the table, and wait until the kind of every engine is recognised."""
    await balancer.push(
        [engine.json for engine in fleet.engines],
        pushing={"mode": "blind"},
        continuation={"mode": plan.mode, "max_breaks": 100},
    )
    kind = _RECOGNISED.get(plan.kind, plan.kind)

    async def recognised() -> bool:
        return list((await balancer.kinds()).values()).count(kind) == ENGINES

    await until(recognised, f"the engines are not recognised as {kind}: {await balancer.kinds()}")


async def _client(
    plan: Plan,
    number: int,
    http: aiohttp.ClientSession,
    balancer: Balancer,
    rng: random.Random,
    report: Report,
    stop: asyncio.Event,
) -> None:
    """Read one stream after the other, until `stop`."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(rng.random() * plan.tokens * plan.pace_s / 2)
    turn = number
    while not stop.is_set():
        path = plan.paths[turn % len(plan.paths)]
        record = StreamRecord(f"s{number}-{turn}", path, turn // 2 % PROMPTS, loop.time())
        await read_stream(http, f"http://127.0.0.1:{balancer.port}", record, plan.body(path, record.number))
        await _find_seams(balancer, record)
        report.streams.append(record)
        turn += plan.streams


async def _kills(plan: Plan, fleet: Fleet, balancer: Balancer, rng: random.Random, report: Report) -> None:
    """Ten times the busiest engine, each time when all of them are well."""

    async def busiest() -> Engine | None:
        """Once all streams are there and all engines are well."""
        if set((await balancer.standings()).values()) != {"good"}:
            return None
        in_flight = {one["id"]: one["in_flight"] for one in (await balancer.stats())["targets"]}
        if sum(in_flight.values()) < plan.streams / 2:
            return None
        name = max(in_flight, key=lambda one: in_flight[one])
        return next(engine for engine in fleet.engines if engine.name == name)

    async def left(name: str) -> bool:
        """Nothing waits for it."""
        return not any(one["in_flight"] for one in (await balancer.stats())["targets"] if one["id"] == name)

    for _ in range(plan.kills):
        await until(busiest, "the engines do not get well again")
        await asyncio.sleep(rng.uniform(0.2, 2.0))
        engine = await until(busiest, "the engines do not get well again")
        assert engine is not None
        in_flight = {one["id"]: one["in_flight"] for one in (await balancer.stats())["targets"]}
        report.killed.append(in_flight[engine.name])
        if plan.vanish:
            engine.stop()
            await until(partial(left, engine.name), "streams wait for an engine that has vanished")
        await engine.kill()
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        await engine.start()
        await fleet.up(engine)


async def _find_seams(balancer: Balancer, record: StreamRecord) -> None:
    """When the agent lost this stream's target, and how long the client waited then."""
    with suppress(AssertionError):  # the agent remembers the last thousand requests
        steps = (await balancer.ask(f"/-/explain/{record.id}"))["steps"]
        gaps = [later - earlier for earlier, later in zip(record.at, record.at[1:], strict=False)]
        for step in steps:
            cut_at = record.asked_at + step["after_s"]
            after = next((at for at, instant in enumerate(record.at) if instant >= cut_at), 0)
            if step["event"] == "broke" and after:
                record.seams.append(record.at[after] - record.at[after - 1] - statistics.median(gaps))


def tell(plan: Plan, report: Report) -> None:
    for path in plan.paths:
        mine = [record for record in report.streams if record.path == path]
        seams = sorted(1000 * seam for record in mine for seam in record.seams)
        whole = sum(record.done == 1 and not record.errors for record in mine)
        hit = sum(bool(record.seams) for record in mine)
        p50, p99 = (seams[len(seams) // 2], seams[int(len(seams) * 0.99)]) if seams else (0.0, 0.0)
        print(
            f"{plan.kind:13}{plan.mode:6}{path.removeprefix('/v1/'):18}{len(mine):8}{whole:8}{hit:8}{len(seams):8}"
            f"{p50:10.0f}{p99:10.0f}",
            flush=True,
        )
    for why, count in Counter(report.broken).most_common(8):
        print(f"BROKEN: {why}" + (f" ({count} times)" if count > 1 else ""), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Streams whose target is killed.")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--modes", default="auto")
    parser.add_argument("--tokens", type=int, default=60, help=f"of a stream ({LLAMA}: 10 times as many)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vanish", action="store_true", help="no connection is closed when a target dies")
    given = parser.parse_args(arguments)
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    if LLAMA in kinds and not llama_server():
        print(NO_LLAMA_SERVER, file=sys.stderr)
        kinds.remove(LLAMA)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines end with us, however we are ended
    print(f"{'engines':13}{'mode':6}{'endpoint':18}{'streams':>8}{'whole':>8}{'hit':>8}{'seams':>8}"
          f"{'p50 ms':>10}{'p99 ms':>10}")  # fmt: skip
    broken = False
    for kind in kinds:
        for mode in given.modes.split(","):
            tokens = given.tokens * (10 if kind == LLAMA else 1)
            plan = Plan(kind, mode, given.streams, given.kills, tokens, given.pace, given.seed, given.vanish)
            try:
                report = uvloop.run(run(plan))
            except KeyboardInterrupt:
                return 130
            tell(plan, report)
            broken = broken or bool(report.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
