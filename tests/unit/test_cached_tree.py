"""What targets have cached, by events and by what was sent to them: who decides when, and how well it predicts engines that evict."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from policies.routing.base import RequestView, TargetView
from policies.routing.cache_aware import CacheAware
from policies.routing.cached_tree import MAX_LINKS, SETTLE_S, CachedTree, EngineCaches
from policies.routing.gorgo import Gorgo
from policies.routing.radix_tree import RadixTree
from tests.unit.test_radix_tree import audit

SIZE = 4  # tokens of a block
BYTES = 4  # of a token of the engine below


def tokens_of(text: bytes) -> list[int]:
    return [int.from_bytes(text[at : at + BYTES], "big") for at in range(0, len(text), BYTES)]


class Engine:
    """Caches whole blocks by the tokens before them; evicts those used least recently, the end of a chain first."""

    def __init__(self, caches: EngineCaches, target: str, blocks: int) -> None:
        self.caches = caches
        self.target = target
        self.most = blocks
        self.blocks: OrderedDict[int, None] = OrderedDict()
        caches.index.clear(target, complete=True)

    def serve(self, text: bytes) -> int:
        """Compute a prompt; return how many of its tokens were cached."""
        tokens = tokens_of(text)
        index, names, parent = self.caches.index, list[int](), 0
        for at in range(0, len(tokens) - SIZE + 1, SIZE):
            parent = hash((self.target, parent, *tokens[at : at + SIZE]))
            names.append(parent)
        hits = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        for name in reversed(names):
            self.blocks[name] = None
            self.blocks.move_to_end(name)
        cache = index.cache(self.target)
        assert cache is not None
        if hits < len(names):
            above = names[hits - 1] if hits else None
            index.stored(cache, above, names[hits:], tokens[hits * SIZE : len(names) * SIZE], SIZE)
        while len(self.blocks) > self.most:
            index.removed(cache, [self.blocks.popitem(last=False)[0]])
        return hits * SIZE


class World:
    def __init__(self, blocks: int = 1000, targets: str = "ab") -> None:
        self.caches = EngineCaches()
        self.text = RadixTree(2**24)
        self.tree = CachedTree(self.text, self.caches)
        self.engines = {target: Engine(self.caches, target, blocks) for target in targets}

    def send(self, target: str, text: bytes, link: bool = True) -> int:
        self.text.insert("m", text, target)
        hits = self.engines[target].serve(text)
        if link:
            self.link(text)
        return hits

    def link(self, text: bytes) -> None:
        self.caches.link("m", text, tokens_of(text))

    def matches(self, text: bytes) -> dict[str, int]:
        match = self.tree.match("m", text)
        return {target: match.get(target, 0) for target in self.engines}


def words(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


def test_without_links_what_was_sent_decides() -> None:
    world = World()
    text = words(1, 160)
    world.send("a", text, link=False)
    assert world.matches(text) == {"a": 160, "b": 0}


def test_an_evicted_prompt_is_not_expected_any_longer() -> None:
    world = World(blocks=12)
    one, other = words(1, 160), words(2, 160)
    world.send("a", one)
    assert world.matches(one)["a"] == 160
    world.send("a", other)
    assert world.matches(one)["a"] == 32, "two of its ten blocks are left"
    assert world.matches(other)["a"] == 160


def test_a_cache_that_another_load_balancer_has_filled_is_seen() -> None:
    world = World()
    text = words(1, 160)
    world.send("a", text)
    world.engines["b"].serve(text)
    assert world.matches(text) == {"a": 160, "b": 160}
    assert sorted(world.tree.match("m", text).longest_first()) == ["a", "b"]


def test_a_longer_prompt_has_what_is_linked_and_what_was_sent_beyond() -> None:
    world = World()
    text = words(1, 160)
    world.send("a", text)
    world.send("a", text + words(2, 160), link=False)
    assert world.matches(text + words(2, 160))["a"] == 320
    assert world.matches(text + words(3, 160))["a"] == 160


def test_a_prompt_that_parts_from_a_linked_one_is_cached_by_its_share_and_then_exactly() -> None:
    world = World()
    document = words(1, 320)
    world.send("a", document + words(2, 160))
    asked = document + words(3, 160)
    assert world.matches(asked)["a"] == 320
    world.send("a", asked)
    assert len(world.tree) == 3, "where the two part is a link, too"
    world.engines["a"] = Engine(world.caches, "a", 1000)
    assert world.matches(document + words(4, 160)) == {"a": 0, "b": 0}
    world.engines["b"].serve(document)
    assert world.matches(document + words(4, 160)) == {"a": 0, "b": 320}
    audit(world.text)


def test_where_texts_part_is_exact_though_their_tokens_are_uneven() -> None:
    """The beginning takes a token for each byte, the rest one for sixteen: a share of bytes would be far off."""
    caches, text = EngineCaches(), RadixTree(2**24)
    tree = CachedTree(text, caches)
    cache = caches.index.clear("a", complete=True)
    dense, rest = words(1, 64), 640
    for seed in (2, 3):
        prompt = dense + words(seed, rest)
        tokens = [*dense, *range(seed * 1000, seed * 1000 + rest // 16)]
        text.insert("m", prompt, "b")
        caches.index.stored(cache, None, list(range(seed * 100, seed * 100 + 26)), tokens, SIZE)
        caches.link("m", prompt, tokens)
    expected = tree.expected("m", dense + words(4, rest), "a")
    assert (expected.bytes, expected.tokens, expected.by_forwards) == (64, 64, 0)


def test_what_is_on_its_way_counts_as_cached() -> None:
    world = World()
    text = words(1, 160)
    world.send("a", text)
    world.engines["a"] = Engine(world.caches, "a", 1000)  # restarted
    assert world.matches(text)["a"] == 0
    request = RequestView("r", "POST", "/", prompt=text, scope="m")
    world.caches.record(request, "a", 1.0)
    assert world.matches(text)["a"] == 160
    world.caches.responded(request, "a", 2.0)
    assert world.matches(text)["a"] == 160
    other = RequestView("o", "POST", "/", prompt=words(5, 16), scope="m")
    world.caches.record(other, "b", 2.0 + SETTLE_S)
    assert world.matches(text)["a"] == 0
    world.caches.ended(request, "a", 3.0, 5)
    world.caches.ended(other, "b", 3.0, 5)
    assert not world.caches._sent
    assert not world.caches._by_target


def test_of_a_cache_that_is_known_in_part_only_what_is_known_decides() -> None:
    world = World()
    text = words(1, 160)
    world.send("a", text)
    tokens = tokens_of(text)
    cache = world.caches.index.clear("a", complete=False)
    assert world.matches(text)["a"] == 160, "its first block may be there from before"
    world.caches.index.stored(cache, None, [1, 2], tokens[:8], SIZE)
    assert world.matches(text)["a"] == 32
    world.caches.index.refuse(cache, "why")
    assert world.matches(text)["a"] == 160


def test_links_are_kept_up_to_a_number_and_blocks_up_to_the_index_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(blocks=8)
    world.caches.index.max_blocks = 100
    for seed in range(200):
        world.send("ab"[seed % 2], words(seed, 160))
    assert len(world.caches.index) <= 110
    assert 5 < len(world.tree) < 15
    assert MAX_LINKS > 1000
    world.tree.close()
    assert len(world.tree) == 0
    assert len(world.caches.index) == 16, "what the two engines have"


def test_links_survive_splits_and_growth() -> None:
    world = World()
    rng, texts = random.Random(5), [words(0, 64)]
    for _ in range(300):
        text = rng.choice(texts)[: rng.randrange(16, 400)] + rng.choice(
            [b"", rng.randbytes(rng.randrange(60))]
        )
        texts.append(text)
        world.send(rng.choice("ab"), text)
    audit(world.text)
    off = 0
    for text in texts:
        whole = len(text) - len(text) % 16
        for target, engine in world.engines.items():
            cached = len(text) // 16 * 16 if not whole else engine_cached(engine, text)
            off += abs(min(world.matches(text)[target], whole) - cached) > 16
    assert off == 0


def engine_cached(engine: Engine, text: bytes) -> int:
    parent, held = 0, 0
    tokens = tokens_of(text)
    for at in range(0, len(tokens) - SIZE + 1, SIZE):
        parent = hash((engine.target, parent, *tokens[at : at + SIZE]))
        if parent not in engine.blocks:
            break
        held += SIZE * BYTES
    return held


@pytest.mark.parametrize("kind", ["chats", "documents"])
def test_events_predict_an_engine_that_evicts_and_forwards_do_not(kind: str) -> None:
    """The cache has a tenth of the working set; prompts are measured as the load balancer measures them."""
    rng = random.Random(9)
    world = World(blocks=150)
    texts = [rng.randbytes(rng.randrange(400, 1200)) for _ in range(40)]
    for number in range(400):
        at = int(rng.random() ** 2 * len(texts))
        if kind == "chats":
            texts[at] = text = (texts[at] if len(texts[at]) < 2400 else rng.randbytes(400)) + rng.randbytes(
                64
            )
        else:
            text = texts[at] + rng.randbytes(96)
        view, target = RequestView(str(number), "POST", "/", prompt=text, scope="m"), rng.choice("ab")
        world.caches.record(view, target, float(number))
        cached = world.send(target, text)
        world.caches.measured(str(number), len(tokens_of(text)), cached)
        world.caches.ended(view, target, float(number), 1)
    by_events, by_forwards = world.caches.by_events, world.caches.by_forwards
    assert by_events.requests == by_forwards.requests == 400
    assert by_events.errors / 400 <= 0.005
    assert by_forwards.errors / 400 > 0.2
    assert abs(by_events.predicted - by_events.cached) / by_events.prompt < 0.005


@pytest.mark.parametrize("make", [CacheAware, Gorgo])
def test_policies_follow_events_and_cease_to(make: type[CacheAware] | type[Gorgo]) -> None:
    policy, caches = make(), EngineCaches()
    policy.follow(caches)
    text = words(1, 1600)
    request = RequestView("1", "POST", "/", prompt=text, scope="m")
    targets = [TargetView("a"), TargetView("b")]
    policy.record(request, "a", 0.0)
    policy.ended(request, "a", 1.0, 1)
    engines = {target: Engine(caches, target, 1000) for target in "ab"}
    engines["b"].serve(text)
    caches.link("m", text, tokens_of(text))
    choice = policy.choose(request, targets, 2.0)
    assert choice is not None
    assert (choice.target_id, choice.matched_bytes) == ("b", 1600)
    policy.follow(None)
    assert not caches.trees
    choice = policy.choose(request, targets, 2.0)
    assert choice is not None
    assert (choice.target_id, choice.matched_bytes) == ("a", 1600)
