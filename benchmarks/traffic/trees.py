"""Tree of thoughts over grade-school mathematics: the workload on which SkyWalker measured its ideas (§5).

A problem is solved in steps. The root is asked for the first step and proposes one thought per branch; each child
takes up one of them and is asked for the next (the "propose" form of Yao et al., 2023). With 2 branches and a depth
of 4 a tree has 1 + 2 + 4 + 8 = 15 requests, with 4 branches 85. A client works on one tree at a time: a child starts
when its parent has responded, the next tree when the last request of this one has. All prompts begin with the same
instructions; at 300 tokens of them a cache that never forgets finds 0.893 of all prompt tokens (SkyWalker measured
0.896 to 0.900).

The thoughts are the steps of the data set's own solutions. Before it proposes them a model may muse for
`musing_tokens`, which no child takes up: it is the spread of response lengths that makes load hard to predict (SkyWalker
§2.3), and the data set alone has little of it.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.traffic.workloads import (
    ANSWER_BEGIN,
    MESSAGE_END,
    Arrival,
    Call,
    Passage,
    Prose,
    Spread,
    join,
    message,
    passage,
    shuffled,
    spoken,
)

DEPTH = 4
SHARED_TOKENS = 300
_ASK = join((passage("\nNext step:"), MESSAGE_END, ANSWER_BEGIN))
_QUESTION = passage("<|im_start|>user\n")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the steps of its solution, `DEPTH` of them."""

    question: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Clients:
    """A number of clients, each of which works on `trees` trees, one after the other."""

    number: int
    branches: int = 2
    trees: int = 4


@dataclass(slots=True, eq=False)
class _Client:
    """`first_problem` is the place of its first problem in the shuffled order."""

    number: int
    branches: int
    trees_left: int
    first_problem: int
    trees_begun: int = 0


@dataclass(slots=True, eq=False)
class _Tree:
    name: str
    client: _Client
    head: Passage  # instructions and question
    problem: Problem
    open: int = 0  # calls that have not ended


@dataclass(frozen=True, slots=True)
class _Node:
    tree: _Tree
    depth: int
    path: Passage  # the thoughts taken up so far
    thoughts: tuple[Passage, ...]  # what its response proposes, one per branch


class TreesOfThought:
    """`ramp_s` spreads the first trees, so that clients do not move in step. What a call says depends on the seed,
    its client and its place in the tree, not on who came first. Raises ValueError without problems."""

    def __init__(
        self,
        problems: Sequence[Problem],
        clients: Iterable[Clients],
        seed: int,
        *,
        shared_tokens: int = SHARED_TOKENS,
        musing_tokens: Spread | None = None,
        ramp_s: float = 5.0,
        name: str = "trees",
    ) -> None:
        if not problems:
            raise ValueError("trees of thought need problems")
        self.name = name
        self._problems = problems
        self._seed = seed
        self._musing_tokens = musing_tokens
        rng = random.Random(seed)
        self._order = shuffled(rng, len(problems))
        self._shared = message("system", Prose(rng).passage(shared_tokens))
        self._starts: list[tuple[float, _Client]] = []
        planned = 0
        for group in clients:
            for _ in range(group.number if group.trees > 0 else 0):
                client = _Client(len(self._starts), group.branches, group.trees, planned)
                self._starts.append((rng.random() * ramp_s, client))
                planned += group.trees
        self._nodes: dict[str, _Node] = {}

    def opening(self) -> Iterator[Arrival]:
        for at_s, client in sorted(self._starts, key=lambda start: start[0]):
            yield Arrival(at_s, self._plant(client))

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        node = self._nodes.pop(call.id)
        tree = node.tree
        set_off = []
        if node.depth + 1 < DEPTH:
            for branch, thought in enumerate(node.thoughts):
                child = self._call(
                    f"{call.id}{_label(branch)}", tree, node.depth + 1, join((node.path, thought))
                )
                set_off.append(Arrival(now, child))
        tree.open -= 1
        if not tree.open and tree.client.trees_left:
            set_off.append(Arrival(now, self._plant(tree.client)))
        return set_off

    def _plant(self, client: _Client) -> Call:
        place = client.first_problem + client.trees_begun
        problem = self._problems[self._order[place % len(self._order)]]
        name = f"{client.number}-{client.trees_begun}"
        client.trees_begun += 1
        client.trees_left -= 1
        head = join((self._shared, _QUESTION, passage(problem.question)))
        return self._call(f"{name}.", _Tree(name, client, head, problem), 0, passage(""))

    def _call(self, call_id: str, tree: _Tree, depth: int, path: Passage) -> Call:
        step = tree.problem.steps[depth]
        thoughts = tuple(passage(f"\n{_label(branch)} {step}") for branch in range(tree.client.branches))
        self._nodes[call_id] = _Node(tree, depth, path, thoughts)
        tree.open += 1
        return Call(
            id=call_id,
            prompt=join((tree.head, path, _ASK)),
            answer=spoken(join((self._muse(call_id), *thoughts))),
            scope="trees",
            session=tree.name,
        )

    def _muse(self, call_id: str) -> Passage:
        if self._musing_tokens is None:
            return passage("")
        rng = random.Random(f"{self._seed}/{call_id}")
        return Prose(rng).passage(round(self._musing_tokens.draw(rng)))


def _label(branch: int) -> str:
    return chr(ord("A") + branch)


def load_gsm8k(path: Path, limit: int | None = None) -> list[Problem]:
    """Problems of GSM8K (Cobbe et al., 2021) as published: JSON lines with `question` and `answer`, packed by gzip.

    A solution of fewer than `DEPTH` lines repeats its last. Raises OSError, ValueError or KeyError for other files.
    """
    problems: list[Problem] = []
    with gzip.open(path, "rb") as lines:
        for line in lines:
            if limit is not None and len(problems) >= limit:
                break
            entry = orjson.loads(line)
            steps = entry["answer"].split("\n")[:DEPTH]
            steps += steps[-1:] * (DEPTH - len(steps))
            problems.append(Problem(entry["question"], tuple(steps)))
    return problems


def made_up(seed: int, count: int) -> list[Problem]:
    """Problems without sense that are as long as GSM8K's: questions of 66 tokens, steps of 30, at the median."""
    rng = random.Random(seed)
    prose = Prose(rng)
    question, step = Spread(66, 108, 10, 300), Spread(30, 45, 4, 120)

    def text(length: Spread) -> str:
        return prose.passage(round(length.draw(rng))).text.decode()

    return [Problem(text(question), tuple(text(step) for _ in range(DEPTH))) for _ in range(count)]
