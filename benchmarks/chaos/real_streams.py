"""Streams of a real engine that are cut at random places, against undisturbed ones: the same to the last character, or an error.

Two vLLM on the CPU (`benchmarks.chaos.real_engines`), or two of llama.cpp's servers, stand behind relays and behind one
agent; a third one is asked directly and is what the others are compared with. Every request is greedy, so an undisturbed stream has one text.
For each cell (an API and what is asked of it) `--samples` streams are cut once and as many twice: behind a random number
of events, and within the next one, the relay ends the connection by RST or FIN. `--how replicas` cuts a
whole replica every second instead, with every stream on it. A stream ends in one of five ways:

    exact     text, finish reason, stop reason and counts of the undisturbed stream
    error     a prefix of its text, then the API's own error event; the reason is in the table
    inexact   other text, and the agent says so: the request's explanation has a step with `inexact`
    OTHER     other text, finish reason or counts, as if nothing had happened
    BROKEN    no end, or an HTTP error before the first byte

Exits with 1 if there is a stream of the last two.

    python -m benchmarks.chaos.real_streams [--engine vllm|llamacpp] [--cells chat:stop,messages] [--samples 50] [--seed 1] [--json FILE]
        [--parallel 8] [--how streams|replicas] [--hogs 2] [--lb-python PYTHON] [--engines URL,URL]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop

from benchmarks.chaos.balancer import Balancer, until
from benchmarks.chaos.fleet import NO_LLAMA_SERVER, Command, Fleet, llama_engine, llama_server
from benchmarks.chaos.real_engines import has_vllm, vllm_engine
from benchmarks.chaos.relay import Cut, Cuts, Relay
from benchmarks.chaos.stream_apis import TOOLS, Api, Received, Turn, common_length, request, with_image

_STREAM_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 300.0
_NEVER_SAID = ["zqzq", "\n\n###"]
PROMPTS: Sequence[str] = (
    "What is a spot instance?",
    "Write a function that sorts a list.",
    "Numbers from one to a hundred, please.",
    "héllo ✓ 日本語",
)


class Kind(str, Enum):
    """What is asked of a stream beside its text."""

    PLAIN = "plain"
    CHARACTER = "character"  # as plain, cut where the bytes of a character are not complete
    STOP = "stop"  # strings that do not occur
    STOP_LATER = "stop_later"  # a string that occurs at three quarters of the text
    PENALTIES = "penalties"
    REPETITION = "repetition"
    TOOLS = "tools"  # on offer, and not called
    TRIMS = "trims"  # a chat template that trims, and tools
    MIN_TOKENS = "min_tokens"  # a stop token that would end the response early, if it were allowed to
    MULTI_TURN = "multi_turn"
    SEEDED = "seeded"
    IMAGES = "images"  # refused by a model of text


_APIS: dict[Kind, tuple[Api, ...]] = {
    Kind.PLAIN: tuple(Api),
    Kind.CHARACTER: (Api.CHAT, Api.COMPLETIONS),
    Kind.STOP: (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES),
    Kind.STOP_LATER: (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES),
    Kind.PENALTIES: (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES),
    Kind.REPETITION: (Api.CHAT, Api.COMPLETIONS),
    Kind.TOOLS: (Api.CHAT, Api.RESPONSES, Api.MESSAGES),
    Kind.TRIMS: (Api.CHAT, Api.RESPONSES, Api.MESSAGES),
    Kind.MIN_TOKENS: (Api.CHAT, Api.COMPLETIONS),
    Kind.MULTI_TURN: (Api.CHAT, Api.RESPONSES, Api.MESSAGES),
    Kind.SEEDED: (Api.CHAT, Api.COMPLETIONS),
    Kind.IMAGES: (Api.CHAT, Api.RESPONSES, Api.MESSAGES),
}


@dataclass(frozen=True, slots=True)
class Cell:
    api: Api
    kind: Kind

    def __str__(self) -> str:
        return f"{self.api.value}:{self.kind.value}"


CELLS = tuple(Cell(api, kind) for api in Api for kind, apis in _APIS.items() if api in apis)
_NOT_OF_LLAMA = {Kind.CHARACTER, Kind.MIN_TOKENS}  # its tiny model says ASCII, and it reports no token ids


class RealEngine(str, Enum):
    """Named as the agent names its kind."""

    VLLM = "vllm"
    LLAMACPP = "llamacpp"

    @property
    def cells(self) -> tuple[Cell, ...]:
        return CELLS if self is self.VLLM else tuple(cell for cell in CELLS if cell.kind not in _NOT_OF_LLAMA)

    @property
    def is_here(self) -> bool:
        return has_vllm() if self is self.VLLM else bool(llama_server())

    def command(self, folder: Path) -> Command:
        """Return what starts it; `folder` is for the model of llama.cpp."""
        return vllm_engine() if self is self.VLLM else llama_engine(folder, slots=16)


class Ending(str, Enum):
    EXACT = "exact"
    ERROR = "error"
    INEXACT = "inexact"
    OTHER = "OTHER"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Plan:
    engine: RealEngine = RealEngine.VLLM
    cells: tuple[Cell, ...] = CELLS
    samples: int = 50
    cuts: tuple[int, ...] = (1, 2)
    tokens: int = 160
    seed: int = 1
    parallel: int = 8
    whole_replicas: bool = False
    hogs: int = 0
    lb_python: str = sys.executable
    engines: tuple[str, ...] = ()  # URLs of engines that run already; the last is the undisturbed one


@dataclass(slots=True)
class Sample:
    """One stream of a cell, and how it ended."""

    id: str
    cell: Cell
    prompt: int
    cuts: tuple[Cut, ...]  # of its legs
    ending: Ending = Ending.BROKEN
    why: str = ""
    legs: int = 0
    received: Received | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


Row = tuple[Cell, int]
"""A cell and the number of cuts of each of its streams."""


class Bench:
    """The agent, its relays, and the undisturbed engine."""

    def __init__(
        self, plan: Plan, http: aiohttp.ClientSession, balancer: Balancer, relays: Sequence[Relay], cuts: Cuts, undisturbed: str
    ) -> None:  # fmt: skip
        self._plan = plan
        self._http = http
        self._balancer = balancer
        self._relays = relays
        self._cuts = cuts
        self._undisturbed = undisturbed
        self._rng = random.Random(plan.seed)
        self._numbers = 0

    async def run(self, tell: Callable[[Row, Sequence[Sample]], None]) -> list[Sample]:
        """Run all cells; `tell` is called with each row as it is complete."""
        samples: list[Sample] = []
        for cell in self._plan.cells:
            bodies = [await self._body(cell, prompt) for prompt in range(len(PROMPTS))]
            expected = [
                await self.read(self._undisturbed, cell.api, body, f"undisturbed-{cell}-{number}")
                for number, body in enumerate(bodies)
            ]
            for number, one in enumerate(expected):
                assert one.ended or one.status != 200, f"{cell} {PROMPTS[number]!r}: {one.fault}"
            rows: list[tuple[int, int]] = [(0, len(PROMPTS))]
            if expected[0].status == 200:  # else this is refused
                rows += [(cuts, self._plan.samples) for cuts in self._plan.cuts]
            for cuts, count in rows:
                drawn = [self._draw(cell, cuts, number, expected) for number in range(count)]
                await self._all(drawn, bodies, expected)
                tell((cell, cuts), drawn)
                samples += drawn
        return samples

    def _draw(self, cell: Cell, cuts: int, number: int, expected: Sequence[Received]) -> Sample:
        self._numbers += 1
        prompt = number % len(PROMPTS)
        events: Sequence[int] = range(max(1, len(expected[prompt].raw)))
        if cell.kind is Kind.CHARACTER:
            events = expected[prompt].within_character or events
        at = sorted(self._rng.choice(events) for _ in range(cuts))

        def share() -> float:
            return 0.0 if cell.kind is Kind.CHARACTER else self._rng.random()

        planned = tuple(
            Cut(here - before, share(), self._rng.random() < 0.5)
            for before, here in zip((0, *at), at, strict=False)
        )
        return Sample(f"s{self._numbers}", cell, prompt, planned)

    async def _all(
        self, samples: Sequence[Sample], bodies: Sequence[dict[str, Any]], expected: Sequence[Received]
    ) -> None:
        turn = asyncio.Semaphore(self._plan.parallel)

        async def one(sample: Sample) -> None:
            async with turn:
                await self._one(sample, bodies[sample.prompt], expected[sample.prompt])

        await asyncio.gather(*(one(sample) for sample in samples))

    async def _one(self, sample: Sample, body: dict[str, Any], expected: Received) -> None:
        api = sample.cell.api
        if not self._plan.whole_replicas:
            self._cuts.plan(sample.id, sample.cuts)
        url = f"http://127.0.0.1:{self._balancer.port}"
        got = sample.received = await self.read(url, api, body, sample.id)
        legs = self._cuts.take(sample.id)
        sample.legs = len(legs)
        steps: list[dict[str, Any]] = []
        with suppress(AssertionError):  # the agent remembers the last thousand requests
            steps = (await self._balancer.ask(f"/-/explain/{sample.id}"))["steps"]
        sample.ending, sample.why = judge(got, expected, steps)
        if sample.ending is not Ending.EXACT:
            sample.evidence = {
                "request": body,
                "steps": steps,
                "events": got.raw,
                "undisturbed": expected.text,
                "legs": [
                    {
                        "relay": leg.relay,
                        "cut": leg.cut,
                        "request": leg.request.decode("utf-8", "replace"),
                        "response": leg.response.decode("utf-8", "replace"),
                    }
                    for leg in legs
                ],
            }

    async def read(self, url: str, api: Api, body: dict[str, Any], request_id: str) -> Received:
        """Read one stream to its end, or to what ends it."""
        got = Received(api)
        headers = {"X-Request-Id": request_id}
        try:
            async with (
                asyncio.timeout(_STREAM_TIMEOUT_S),
                self._http.post(url + api.path, json=body, headers=headers) as response,
            ):
                got.status = response.status
                if response.status != 200:
                    got.error = f"HTTP {response.status} {(await response.text())[:300]}"
                    return got
                async for line in response.content:
                    if line.startswith(b"data:"):
                        got.event(line[5:].decode().strip())
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            got.fault = f"{type(error).__name__}: {error}"
        return got

    async def _body(self, cell: Cell, prompt: int) -> dict[str, Any]:
        """Return the request of a cell; what depends on the text is taken from the plain stream of the undisturbed engine."""
        turns: list[Turn] = [("user", PROMPTS[prompt])]
        if cell.kind is Kind.TRIMS:
            turns.insert(0, ("system", "[trim] Be brief."))
        if cell.kind is Kind.MULTI_TURN:
            turns = [
                ("system", "Be brief."), ("user", "héllo ✓ 日本語"), ("assistant", "  ok\n"), *turns,
            ]  # fmt: skip
        body = request(cell.api, turns, self._plan.tokens, usage=prompt % 2 == 0)
        if cell.kind in (Kind.TOOLS, Kind.TRIMS):
            body["tools"] = TOOLS[cell.api]
        if cell.kind is Kind.PENALTIES:
            body |= {"frequency_penalty": 1.5, "presence_penalty": 1.0}
        if cell.kind is Kind.REPETITION:
            body["repetition_penalty"] = 1.1
        if cell.kind is Kind.SEEDED:
            body |= {"temperature": 0.8, "seed": 11}
        if cell.kind is Kind.IMAGES:
            return with_image(cell.api, body)
        stop = "stop_sequences" if cell.api is Api.MESSAGES else "stop"
        if cell.kind is Kind.STOP:
            body[stop] = _NEVER_SAID
        if cell.kind is Kind.STOP_LATER:
            text = (await self.read(self._undisturbed, cell.api, body, "plain")).text
            at = len(text) * 3 // 4
            body[stop] = ["zqzq", text[at : at + 12]]
        if cell.kind is Kind.MIN_TOKENS:
            asked = body | {"return_token_ids": True}
            ids = (await self.read(self._undisturbed, cell.api, asked, "plain")).token_ids
            body |= {"stop_token_ids": [ids[len(ids) // 4]], "min_tokens": self._plan.tokens * 3 // 4}
        return body

    async def cut_replicas(self) -> None:
        """Cut one replica after the other, about a second apart, for ever."""
        while True:
            for relay in self._relays:
                await asyncio.sleep(self._rng.uniform(0.6, 1.4))
                relay.cut(reset=self._rng.random() < 0.5)
                await asyncio.sleep(0.05)
                relay.heal()


def judge(got: Received, expected: Received, steps: Sequence[dict[str, Any]]) -> tuple[Ending, str]:
    """Return how a stream ended, and in what it differs from the undisturbed one or what its error says."""
    if expected.status != 200:  # what the engine refuses
        same = got.status == expected.status
        return (
            (Ending.EXACT, "refused alike") if same else (Ending.OTHER, f"{got.error}, not {expected.error}")
        )
    inexact = next((f"({step['why']})" for step in steps if "inexact" in json.dumps(step)), None)
    prefix = common_length(got.text, expected.text) == len(got.text)
    if got.status != 200 or got.fault or not got.ended:
        return Ending.BROKEN, got.error or got.fault or "the stream ends without an event of its API"
    if got.error:
        if prefix or inexact:
            return Ending.ERROR, got.error
        return Ending.OTHER, f"other text before the error: {got.error}"
    differences = got.differences(expected)
    if not differences:
        return Ending.EXACT, ""
    return (Ending.INEXACT, inexact) if inexact else (Ending.OTHER, "; ".join(differences))


@asynccontextmanager
async def _bench(plan: Plan) -> AsyncIterator[Bench]:
    cuts = Cuts()
    async with AsyncExitStack() as stack:
        urls = plan.engines
        if not urls:
            folder = stack.enter_context(TemporaryDirectory())
            command = plan.engine.command(Path(folder))
            fleet = await stack.enter_async_context(Fleet(command, 3, _START_TIMEOUT_S))
            urls = tuple(engine.url for engine in fleet.engines)
        relays = [
            await stack.enter_async_context(Relay(f"replica-{number}", urlsplit(url).port or 80, cuts))
            for number, url in enumerate(urls[:2], 1)
        ]
        balancer = await stack.enter_async_context(Balancer(python=plan.lb_python))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout()
            )
        )
        for _ in range(plan.hogs):
            hog = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
            stack.callback(hog.kill)
        # Connections end here and replicas do not: one that lost a connection is to be tried again.
        await balancer.push(
            [
                {"id": relay.name, "url": f"http://127.0.0.1:{relay.port}", "health_path": "/health"}
                for relay in relays
            ],
            pushing={"mode": "blind"},
            breaker={"failures": 1 if plan.whole_replicas else 1000},
            continuation={"max_breaks": 100 if plan.whole_replicas else 3},
        )

        async def recognised() -> bool:
            return list((await balancer.kinds()).values()).count(plan.engine.value) == len(relays)

        await until(recognised, f"the engines are not recognised as {plan.engine.value}")
        bench = Bench(plan, http, balancer, relays, cuts, urls[-1])
        if plan.whole_replicas:
            cutter = asyncio.ensure_future(bench.cut_replicas())
            stack.callback(cutter.cancel)
        yield bench
        complaints = balancer.complaints()
        assert not complaints, complaints


async def run(
    plan: Plan, tell: Callable[[Row, Sequence[Sample]], None] = lambda row, samples: None
) -> list[Sample]:
    """Run all cells of a plan."""
    async with _bench(plan) as bench:
        return await bench.run(tell)


_REASON = re.compile(r"\(([^()]+)\)")


def print_row(row: Row, samples: Sequence[Sample]) -> None:
    cell, cuts = row
    counts = Counter(sample.ending for sample in samples)
    shares = "".join(f"{counts[ending]:8}" for ending in Ending)
    reasons = Counter(
        found.group(1) if (found := _REASON.search(sample.why)) else sample.why[:60]
        for sample in samples
        if sample.ending in (Ending.ERROR, Ending.INEXACT)
    )
    why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(3))
    legs = sum(sample.legs for sample in samples) - len(samples)
    print(f"{cell!s:26}{cuts:5}{len(samples):9}{legs:7}{shares}  {why}", flush=True)
    bad = Counter(sample.why for sample in samples if sample.ending in (Ending.OTHER, Ending.BROKEN))
    for text, count in bad.most_common(2):
        print(f"    {count} x {text[:160]}", flush=True)


def write_json(path: Path, plan: Plan, samples: Sequence[Sample]) -> None:
    """Write all endings, with the evidence of those that are not exact."""
    found = [
        {
            "id": sample.id, "cell": str(sample.cell), "prompt": PROMPTS[sample.prompt], "cuts": [(cut.events, round(cut.share, 3), cut.reset) for cut in sample.cuts],
            "seams": sample.legs - 1, "ending": sample.ending.value, "why": sample.why, **sample.evidence,
        }
        for sample in samples
    ]  # fmt: skip
    path.write_text(json.dumps({"seed": plan.seed, "tokens": plan.tokens, "samples": found}, indent=1))


def _cells(text: str) -> tuple[Cell, ...]:
    """Return the cells that a list of APIs, kinds and `api:kind` names."""
    names = text.split(",")
    found = tuple(cell for cell in CELLS if {str(cell), cell.api.value, cell.kind.value}.intersection(names))
    if not found:
        raise argparse.ArgumentTypeError(f"none of {', '.join(map(str, CELLS))}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Streams of a real engine, cut and compared with undisturbed ones."
    )
    parser.add_argument("--engine", type=RealEngine, choices=tuple(RealEngine), default=RealEngine.VLLM)
    parser.add_argument("--cells", type=_cells, help="APIs, kinds or API:KIND, with commas; default: all")
    parser.add_argument("--samples", type=int, default=50, help="streams per cell and number of cuts")
    parser.add_argument("--cuts", default="1,2", help="numbers of cuts per stream")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=8, help="streams at a time")
    parser.add_argument("--how", choices=("streams", "replicas"), default="streams")
    parser.add_argument("--hogs", type=int, default=0, help="processes that take CPU meanwhile")
    parser.add_argument(
        "--lb-python", default=sys.executable, help="interpreter whose load balancer is tested"
    )
    parser.add_argument(
        "--engines", default="", help="URLs of running engines, with commas; the last is undisturbed"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    engines = tuple(given.engines.split(",")) if given.engines else ()
    engine: RealEngine = given.engine
    if not engines and not engine.is_here:
        missing = "no vLLM: run scripts/real_engines.sh" if engine is RealEngine.VLLM else NO_LLAMA_SERVER
        print(missing, file=sys.stderr)
        return 2
    plan = Plan(
        engine, given.cells or engine.cells, given.samples, tuple(map(int, given.cuts.split(","))), given.tokens, given.seed, given.parallel,
        given.how == "replicas", given.hogs, given.lb_python, engines,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines end with us, however we are ended
    print(f"{'cell':26}{'cuts':>5}{'streams':>9}{'seams':>7}" + "".join(f"{one.value:>8}" for one in Ending))
    try:
        samples = uvloop.run(run(plan, print_row))
    except KeyboardInterrupt:
        return 130
    if given.json:
        write_json(given.json, plan, samples)
    bad = sum(sample.ending in (Ending.OTHER, Ending.BROKEN) for sample in samples)
    print(f"{len(samples)} streams, {bad} silently other or broken")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
