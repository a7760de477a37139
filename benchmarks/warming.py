"""What filling the cache of a new replica is worth: the first minute after it joins, with and without.

    python -m benchmarks.warming                        3 engines, a fourth joins after 200 s; chats of 12 tenants
    python -m benchmarks.warming --load 0.6,0.9 --policies gorgo,cache_aware,least_load --system-tokens 400

Chats have a system prompt for each tenant. The balancer is the production code (`lb.core.warming` over `lb.core.targets` and
`lb.core.scheduler`), the engines are the model of `skyserve_cli.engine`: figures compare, they do not predict a GPU. Columns are of the
requests that arrived in the first minute after the join, means over the seeds with half of a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from benchmarks.traffic.chat import Chat, Habits
from benchmarks.traffic.driver import Flight, ServingEngine, Setting, World
from benchmarks.traffic.measure import Served
from benchmarks.traffic.tables import print_table, shown
from benchmarks.traffic.workloads import Call, Passage, Spread
from lb.core.residency import ANYWHERE
from lb.core.warming import PromptSample, PromptSamples, Surroundings, WarmingEnd, WarmingStep, WarmUp
from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.engine.text import EOS, token_bytes
from skyserve_cli.sim.summary import estimate

JOINS_AT_S = 200.0
COUNTED_S = 60.0
TICK_S = 0.1
SESSIONS_PER_ENGINE_S = 0.66  # where three engines serve all they can


class _Prefill(Flight):
    """A request that fills the cache."""

    def __init__(self, call: Call, step: WarmingStep, now: float) -> None:
        super().__init__(call, step.view(), now, 0.0, 1.0)
        self.step = step


class JoiningWorld(World):
    """A world whose last engine joins later. Its cache is filled for `warming_s`."""

    def __init__(self, chat: Chat, setting: Setting, warming_s: float) -> None:
        super().__init__(chat, setting)
        self.warming_s = warming_s
        self.warmed_s = self.prefilled_bytes = 0.0
        self._all = self._table.table
        self._table.apply(replace(self._all, targets=self._all.targets[:-1]), 0.0)
        self._samples = PromptSamples(self._all)
        self._prompts: dict[bytes, Passage] = {}
        self.events.at(JOINS_AT_S, self._joins, self._engines[-1])

    def _joins(self, engine: ServingEngine, now: float) -> None:
        self._table.apply(self._all, now)
        key = self._table.key(engine.key.id)
        assert key is not None
        engine.key = key
        self._table.loaded(key, engine.load(), now, now)
        steps = self._samples.steps((), (), now) if self.warming_s else []
        if steps:
            self._table.warm(key, True)
            self._warm((engine, WarmUp(steps, now, self.warming_s)), now)
        self._let_in(now)

    def _warm(self, about: tuple[ServingEngine, WarmUp], now: float) -> None:
        engine, up = about
        around = Surroundings(pressed=bool(len(self._queue)) or self._table.waiting(engine.key) > 0)
        step = up.next(around, now)
        if isinstance(step, WarmingEnd):
            self.warmed_s = now - up.since
            self._table.warm(engine.key, False)
            self._let_in(now)
        elif step is None:
            self.events.at(now + TICK_S, self._warm, about)
        else:
            self._up = up
            call = Call(f"prefill-{up.done}", _cut(self._prompts[step.sample.body], step.length), (EOS,))
            engine.submit(call.id, call, _Prefill(call, step, now), now + self._way_s)

    def _arrives(self, call: Call, now: float) -> None:
        if now >= self._samples.due_at:
            name = call.id.encode()
            self._prompts[name] = call.prompt
            self._samples.add(PromptSample(now, call.scope, ANYWHERE, "", b"/", name, call.prompt.text))
        super()._arrives(call, now)

    def first_token(self, flight: Flight, cached_tokens: int, now: float) -> None:
        if not isinstance(flight, _Prefill):
            super().first_token(flight, cached_tokens, now)

    def last_token(self, engine: ServingEngine, flight: Flight, now: float) -> None:
        if not isinstance(flight, _Prefill):
            super().last_token(engine, flight, now)
            return
        self.prefilled_bytes += flight.step.added
        self._table.cached(engine.key, flight.view, now)
        self._up.ended(True)
        self._warm((engine, self._up), now)


def _cut(prompt: Passage, length: int) -> Passage:
    """The whole tokens of the first `length` bytes."""
    ends = list(accumulate(len(token_bytes(token)) for token in prompt.tokens))
    count = sum(end <= length for end in ends)
    return Passage(prompt.text[: ends[count - 1] if count else 0], prompt.tokens[:count])


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    policy: str
    load: float
    warming_s: float
    system_tokens: int
    tenants: int
    engines: int
    seed: int


class FirstMinute(NamedTuple):
    """What the requests of the first minute got: seconds to the first token, and of the newcomer its share and its hits."""

    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    new_share: float
    new_hit_rate: float
    new_ttft_p90_s: float
    warmed_s: float


def run_cell(cell: Cell) -> FirstMinute:
    habits = Habits(
        tenants=cell.tenants, system_tokens=cell.system_tokens, think_s=Spread(14, 71, 1, 300), popularity=0.7
    )
    chat = Chat(cell.load * SESSIONS_PER_ENGINE_S * (cell.engines - 1), JOINS_AT_S + 120.0, cell.seed, habits)
    world = JoiningWorld(chat, Setting(policy=cell.policy, profiles=(L4_8B,) * cell.engines), cell.warming_s)
    served = [one for one in world.play().served if JOINS_AT_S <= one.arrived_at < JOINS_AT_S + COUNTED_S]
    new = [one for one in served if one.engine == cell.engines - 1]
    ttft = sorted(map(_ttft_s, served))
    return FirstMinute(
        _quantile(ttft, 0.5),
        _quantile(ttft, 0.9),
        _quantile(ttft, 0.99),
        len(new) / len(served),
        sum(one.cached_tokens for one in new) / max(1, sum(one.prompt_tokens for one in new)),
        _quantile(sorted(map(_ttft_s, new)), 0.9),
        world.warmed_s,
    )


def _ttft_s(one: Served) -> float:
    return one.first_at - one.arrived_at


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


COLUMNS: tuple[tuple[str, Callable[[FirstMinute], float], str], ...] = (
    ("TTFT p50 s", lambda one: one.ttft_p50_s, ".2f"),
    ("p90", lambda one: one.ttft_p90_s, ".2f"),
    ("p99", lambda one: one.ttft_p99_s, ".2f"),
    ("newcomer's share", lambda one: one.new_share, ".2f"),
    ("its hit rate", lambda one: one.new_hit_rate, ".2f"),
    ("its TTFT p90 s", lambda one: one.new_ttft_p90_s, ".2f"),
    ("warmed s", lambda one: one.warmed_s, ".1f"),
)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["gorgo", "cache_aware"])
    parser.add_argument(
        "--load", type=lambda text: [float(one) for one in text.split(",")], default=[0.6, 0.9, 1.1]
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of warming at most (default: 15)")
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--tenants", type=int, default=12)
    parser.add_argument("--engines", type=int, default=4, help="with the one that joins (default: 4)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    args: Any = arguments().parse_args(words)
    rows = [
        (policy, load, warming_s)
        for policy in args.policies
        for load in args.load
        for warming_s in (0.0, args.seconds)
    ]
    cells = [
        Cell(*row, args.system_tokens, args.tenants, args.engines, seed)
        for row in rows
        for seed in range(1, args.seeds + 1)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = dict(zip(cells, pool.map(run_cell, cells), strict=True))
    table = []
    for row in rows:
        values = [one for cell, one in found.items() if (cell.policy, cell.load, cell.warming_s) == row]
        policy, load, warming_s = row
        figures = [shown(estimate([column(one) for one in values]), form) for _, column, form in COLUMNS]
        table.append([policy, f"{load:g}", "yes" if warming_s else "no", *figures])
    title = (
        f"the first {COUNTED_S:g} s after 1 of {args.engines} x l4-8b joined, {args.tenants} system prompts of"
        f" {args.system_tokens} tokens, {args.seeds} seeds"
    )
    print_table(title, ["policy", "load", "warming", *(head for head, _, _ in COLUMNS)], table, args.markdown)


if __name__ == "__main__":
    main()
