"""Which targets have a prompt in their caches: as their engines report it where that is known, else by what was sent to them.

A radix tree has the text of prompts, the index of blocks has what engines report, in tokens. A *link* ties the two: "the text that
ends here is the chain that ends with this block". Links come from prompts that have passed and were read by an engine's tokenizer
afterwards; no tokenizer is needed to choose a target.

*A look-up* follows a prompt down the tree and takes the last link on its way. If a link further down belongs to a text that begins as
the prompt does, the chain of that one is taken as far as the common part reaches, by the share of its bytes. Where two linked texts part
their chains do too, and that block is remembered as a link of its own: from then on the place is exact.

*Who decides.* A target whose engine reports its cache is believed as far as the link reaches. Where all of that is cached, or
nothing reliable is known, what has been sent decides, as without events. What was sent and has no first byte yet is not in the events:
it counts as cached, as it will be by the time that another request has its turn.

*Size.* At most MAX_LINKS links are kept, and as many as leave the index within its limit; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from policies.routing.base import RequestView
from policies.routing.block_index import Block, BlockIndex, Link, ancestor, common_block
from policies.routing.radix_tree import Match, RadixTree, Walk, _Node, beginning_of
from policies.routing.sampling import ALL

MAX_LINKS: Final = 2**16
SETTLE_S: Final = 0.5  # after a first byte, until the events of its prompt have come
_FURTHER: Final = 16  # nodes below the end of a prompt that are searched for a link


Linked = tuple[int, Block]
"""The part of a prompt that is known in tokens: its length in bytes, and the last block of its chain of whole blocks."""


class Expected(NamedTuple):
    """How much of a prompt of `prompt_bytes` a target is expected to have: by what was sent to it, and by events.

    `tokens` is -1 where events do not decide.
    """

    prompt_bytes: int
    by_forwards: int
    bytes: int
    tokens: int


class _Sent(NamedTuple):
    """A prompt on its way to a target. It is out of date at `until`."""

    target_id: str
    prompt: bytes
    until: float


_FOREVER: Final = float("inf")


class EngineCaches:
    """What engines report of their caches, for all routing policies in use, and how well that predicts.

    Its hooks are called with those of the policies.
    """

    def __init__(self, index: BlockIndex | None = None) -> None:
        self.index = index if index is not None else BlockIndex()
        self.trees: list[CachedTree] = []
        self.now = 0.0
        self.by_events = Accuracy()
        self.by_forwards = Accuracy()  # of the same requests, by what was sent alone
        self._sent: dict[str, _Sent] = {}
        self._by_target: dict[str, dict[str, _Sent]] = {}
        self._expected: dict[str, Expected] = {}

    # --- hooks

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        """Note that the request is on its way. Called before the same hook of the policies."""
        self.now = now
        prompt = request.prompt
        if not prompt:
            return
        prompt = beginning_of(prompt)
        if self.trees:
            self._expected[request.id] = self.trees[0].expected(request.scope, prompt, target_id)
        self._forget_sent(request.id)
        self._put(request.id, _Sent(target_id, prompt, _FOREVER))

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        """Note that the first byte of its response has come, so its prompt has been computed."""
        self.now = now
        sent = self._sent.get(request.id)
        if sent is not None and sent.until == _FOREVER:
            self._put(request.id, sent._replace(until=now + SETTLE_S))

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        """Forget the request, which is over."""
        self._expected.pop(request.id, None)
        self._forget_sent(request.id)

    def measured(self, request_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has reported how much of a prompt was cached. Called before `ended`."""
        expected = self._expected.pop(request_id, None)
        if expected is None or prompt_tokens <= 0:
            return
        share = prompt_tokens / expected.prompt_bytes
        by_forwards = expected.by_forwards * share
        by_events = expected.tokens if expected.tokens >= 0 else expected.bytes * share
        self.by_forwards.add(by_forwards, cached_tokens, prompt_tokens)
        self.by_events.add(by_events, cached_tokens, prompt_tokens)

    # --- for its trees

    def is_on_its_way(self, target_id: str, beginning: bytes) -> bool:
        """Return whether a prompt that begins so is on its way to the target, and not in its events yet."""
        now = self.now
        return any(
            sent.until > now and sent.prompt.startswith(beginning)
            for sent in self._by_target.get(target_id, _NONE_SENT).values()
        )

    def decided(self, target_id: str, prompt: bytes, sent: int, held: int, covered: int) -> int:
        """Return how many bytes of a prompt a target has, where `sent` bytes were sent to it and its events show `held`.

        Events say nothing beyond `covered` bytes.
        """
        if held == covered:
            return sent
        cache = self.index.cache(target_id)
        if cache is None or cache.refused or not (held or cache.complete):
            return sent
        return sent if self.is_on_its_way(target_id, prompt[:sent]) else held

    def link(self, scope: str, text: bytes, tokens: list[int], lora: str = "") -> None:
        """Add a link: a text that has passed is these tokens."""
        for tree in self.trees:
            tree.link(scope, beginning_of(text), tokens, lora)

    def served(self, scope: str, text: bytes, target_id: str) -> None:
        """Note that the target has computed the text, which is a prompt and the response to it."""
        for tree in self.trees:
            tree.insert(scope, beginning_of(text), target_id)

    def is_linked(self, scope: str, prompt: bytes) -> bool:
        """Return whether all of the prompt is known in tokens."""
        return bool(self.trees) and self.trees[0].is_linked(scope, beginning_of(prompt))

    def _put(self, request_id: str, sent: _Sent) -> None:
        self._sent[request_id] = sent
        self._by_target.setdefault(sent.target_id, {})[request_id] = sent

    def _forget_sent(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            of_target = self._by_target[sent.target_id]
            del of_target[request_id]
            if not of_target:
                del self._by_target[sent.target_id]


_NONE_SENT: Final[dict[str, _Sent]] = {}


class Accuracy:
    """Sums over the requests whose engine reported how much of the prompt was cached. Errors are shares of prompts."""

    __slots__ = ("cached", "errors", "predicted", "prompt", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt = 0
        self.predicted = 0.0
        self.cached = 0
        self.errors = 0.0

    def add(self, predicted: float, cached: int, prompt: int) -> None:
        """Count a request: what was predicted, what was cached, and its whole prompt, in tokens."""
        predicted = min(predicted, prompt)
        self.requests += 1
        self.prompt += prompt
        self.predicted += predicted
        self.cached += cached
        self.errors += abs(predicted - cached) / prompt


class CachedTree:
    """A policy's radix tree, whose matches take in what engines report."""

    def __init__(self, tree: RadixTree, caches: EngineCaches) -> None:
        self.caches = caches
        self._tree = tree
        self._index = caches.index
        self._links: OrderedDict[Link, _Node] = OrderedDict()
        caches.trees.append(self)

    def __len__(self) -> int:
        """Return the number of links."""
        return len(self._links)

    def close(self) -> None:
        """Forget all links: nothing is looked up here any longer."""
        while self._links:
            self._detach(next(iter(self._links)))
        self.caches.trees.remove(self)

    def match(self, scope: str, prompt: bytes) -> Match:
        """Return how many bytes of the prompt each target has."""
        if not self._links:
            return self._tree.match(scope, prompt)
        walk = self._tree.walk(scope, prompt)
        linked = self._linked(walk)
        if linked is None:
            return walk.match
        covered, block = linked
        few, index = walk.match.few, self._index
        rows = index.levels(block)
        if few is None or index.followed > ALL:
            return _LazyMatch(self.caches, prompt, walk.match, covered, block.depth, rows)
        known: dict[str, int] = {}
        names, whole = index.names, block.depth
        for mask, depth in rows:
            held = covered if depth == whole else covered * depth // whole
            for name in names(mask):
                known[name] = held
        for name, sent in few.items():
            if sent > known.get(name, 0):
                known[name] = self.caches.decided(name, prompt, sent, known.get(name, 0), covered)
        return _FewMatch(known.get, few=known)

    def expected(self, scope: str, prompt: bytes, target_id: str) -> Expected:
        """Return how much of the prompt a target is expected to have, both ways."""
        held = self.match(scope, prompt).get(target_id, 0)
        walk = self._tree.walk(scope, prompt)
        by_forwards, tokens = walk.match.get(target_id, 0), -1
        linked, cache = self._linked(walk), self._index.cache(target_id)
        if linked is not None and cache is not None and not cache.refused:
            covered, block = linked
            depth = self._index.depth(block, cache)
            alone = covered * depth // block.depth
            if (depth or cache.complete) and held == alone:
                tokens = depth * self._index.block_size
        return Expected(len(prompt), by_forwards, held, tokens)

    def insert(self, scope: str, text: bytes, target_id: str) -> None:
        """Note that the target has computed the text."""
        self._tree.insert(scope, text, target_id)

    def is_linked(self, scope: str, prompt: bytes) -> bool:
        """Return whether all of the prompt is known in tokens."""
        walk = self._tree.walk(scope, prompt)
        link = self._last_link(walk)
        return link is not None and link.depth == len(prompt) - len(prompt) % self._tree.block_bytes

    def link(self, scope: str, text: bytes, tokens: list[int], lora: str) -> None:
        """Add a link: the text is these tokens."""
        index, walk = self._index, self._tree.walk(scope, text)
        size = index.block_size
        if not size or len(tokens) < size or not walk.path:
            return
        ends_in = walk.partly if walk.partly is not None else walk.path[-1]
        at = walk.beyond if walk.partly is not None else len(ends_in.edge)
        depth = walk.at + walk.beyond
        if depth < len(text) - len(text) % self._tree.block_bytes or not ends_in.edge:
            return  # it has been forgotten in the meantime
        block = index.pinned_chain(tokens, lora)
        link = Link(depth, len(tokens), block, size)
        link.at = at
        self._attach(ends_in, link)
        self._part(walk, ends_in, link)
        while self._links and (len(self._links) > MAX_LINKS or len(index) > index.max_blocks):
            self._detach(next(iter(self._links)))

    # --- inside

    def _linked(self, walk: Walk) -> Linked | None:
        """Return what is known of a prompt in tokens."""
        depth = walk.at + walk.beyond
        above = self._last_link(walk)
        if above is not None and above.depth == depth:
            return (depth, above.block) if above.block.depth else None
        below = self._next_link(walk)
        if below is None:
            return (above.depth, above.block) if above is not None and above.block.depth else None
        block = ancestor(below.block, _blocks_at(depth, above, below))
        return (depth, block) if block.depth else None

    def _last_link(self, walk: Walk) -> Link | None:
        """Return the last link on the way of the prompt."""
        size = self._index.block_size
        if walk.partly is not None and walk.partly.links is not None:
            for link in reversed(walk.partly.links):
                if link.at <= walk.beyond and link.size == size:
                    return link
        for node in reversed(walk.path):
            if node.links is not None:
                for link in reversed(node.links):
                    if link.size == size:
                        return link
        return None

    def _next_link(self, walk: Walk) -> Link | None:
        """Return a link further down, of a text that goes on after what it shares with the prompt."""
        size, node, beyond = self._index.block_size, walk.partly, walk.beyond
        if node is None:
            node = next(iter(walk.path[-1].children.values()), None) if walk.path else None
            beyond = 0
        for _ in range(_FURTHER):
            if node is None:
                return None
            for link in node.links or ():
                if link.at > beyond and link.size == size:
                    return link
            beyond = 0
            node = next(iter(node.children.values()), None)
        return None

    def _attach(self, node: _Node, link: Link) -> None:
        """Add a link to a node, in place of one at the same place."""
        links = [one for one in node.links or () if one.at != link.at]
        for old in node.links or ():
            if old.at == link.at and self._links.pop(old, None) is not None:
                self._index.unpin(old.block)
        links.append(link)
        links.sort(key=_place)
        node.links = links
        self._links[link] = node

    def _detach(self, link: Link) -> None:
        """Forget a link. The node that it was added to may have been split since: then the link stays there, marked by size 0."""
        node = self._links.pop(link)
        self._index.unpin(link.block)
        link.size = 0
        if node.links is not None:
            node.links = [one for one in node.links if one is not link] or None

    def _part(self, walk: Walk, ends_in: _Node, link: Link) -> None:
        """Where the text has parted from another one that is linked, remember the block that both have in common."""
        depth, size = walk.at, self._index.block_size
        path = walk.path if walk.partly is not None else walk.path[:-1]
        if walk.partly is None:
            depth -= len(ends_in.edge)
        if not path or not path[-1].edge:
            return
        node = path[-1]
        if node.links is not None and node.links[-1].at == len(node.edge):
            return
        other = self._other_below(node, ends_in)
        if other is None:
            return
        block = common_block(link.block, other.block)
        if not block.depth:
            return
        block.pins += 1
        parting = Link(depth, block.depth * size, block, size)
        parting.at = len(node.edge)
        self._attach(node, parting)

    def _other_below(self, node: _Node, but: _Node) -> Link | None:
        """Return a link below a node, not below one of its children."""
        size = self._index.block_size
        for looked_at, child in enumerate(node.children.values()):
            if child is not but and child.links is not None:
                for link in child.links:
                    if link.size == size:
                        return link
            if looked_at >= _FURTHER:
                break
        return None


class _FewMatch(Match):
    """The match of few targets: all are computed at once, by events where they decide."""

    __slots__ = ()

    def longest_first(self, drawn: int = 0) -> Iterator[str]:
        """Yield the targets that hold some of it; `drawn`, any number, decides where to begin among equals."""
        held = self.few or {}
        names = [name for name, each in held.items() if each]
        if names:
            start = drawn % len(names)
            names = [*names[start:], *names[:start]]
            names.sort(key=held.__getitem__, reverse=True)
        yield from names


class _LazyMatch(Match):
    """The match of many targets: each is computed when it is needed.

    A row of `rows` is the mask, in the index, of the targets that have exactly so many blocks, and that number; the most come
    first. The `covered` bytes are `whole` blocks.
    """

    __slots__ = ("_caches", "_covered", "_known", "_prompt", "_rows", "_sent", "_whole")

    def __init__(
        self,
        caches: EngineCaches,
        prompt: bytes,
        sent: Match,
        covered: int,
        whole: int,
        rows: list[tuple[int, int]],
    ) -> None:
        super().__init__(self._of)
        self._caches = caches
        self._prompt = prompt
        self._sent = sent
        self._covered = covered
        self._whole = whole
        self._rows = rows
        self._known: dict[str, int] = {}

    def longest_first(self, drawn: int = 0) -> Iterator[str]:
        """Yield the targets that hold some of it; `drawn`, any number, decides where to begin among equals."""
        index, reported = self._caches.index, 0
        for mask, _ in self._rows:
            reported |= mask
            start = drawn % mask.bit_length()
            later = mask >> start << start
            for part in (later, mask ^ later):
                while part:
                    bit = part & -part
                    part ^= bit
                    yield index.id_of(bit)
        for target_id in self._sent.longest_first(drawn):
            cache = index.cache(target_id)
            if cache is None or (not cache.bit & reported and self._of(target_id, 0)):
                yield target_id

    def _of(self, target_id: str, default: int) -> int:
        known = self._known.get(target_id)
        if known is not None:
            return known
        held, cache = 0, self._caches.index.cache(target_id)
        if cache is not None:
            bit = cache.bit
            for mask, row in self._rows:
                if mask & bit:
                    held = self._covered * row // self._whole
                    break
        sent = self._sent.get(target_id, 0)
        if sent > held:
            held = self._caches.decided(target_id, self._prompt, sent, held, self._covered)
        self._known[target_id] = held
        return held or default


def _place(link: Link) -> int:
    return link.at


def _blocks_at(depth: int, above: Link | None, below: Link) -> int:
    """Return about how many whole blocks the first `depth` bytes are of a text with the link `below` them, and perhaps one `above`."""
    from_bytes, from_tokens = (0, 0) if above is None else (above.depth, above.tokens)
    span = below.depth - from_bytes
    if span <= 0:
        return below.block.depth
    tokens = from_tokens + (below.tokens - from_tokens) * (depth - from_bytes) // span
    return tokens // below.size


__all__ = ["Accuracy", "CachedTree", "EngineCaches", "Expected", "Link"]
