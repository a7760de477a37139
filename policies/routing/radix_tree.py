"""An approximate radix tree over prompts: which target has probably cached how much of a prompt.

The idea is the SGLang router's: a load balancer cannot afford to poll engines for what they have cached, but it knows
what it sent them. One merged tree serves all targets. An edge is a run of bytes, a node knows who holds the
prefix that ends with its edge, and a prompt is inserted when it is sent. Nothing is tokenized.

*Blocks.* Prompts are cut into whole blocks of `block_bytes`; a child is found by the block its edge begins with,
and edges are split between blocks only. One dictionary look-up and one comparison in C pass a whole edge, the
tree stays flat (a step per block at worst, for any prompts), and the loss is less than a block
at the end of a prompt, which no engine's cache would have used either.

*Holders* are one integer per node, a bit per target. Who holds a node holds all nodes above it (SkyWalker builds
its early stop on this), so one walk down finds the match of every target.

*Forgetting* a target clears its bit in the mask of the living: it is gone at once, without a walk. The bit itself
is not used again before every node has lost it, so a target that returns begins without any node. The nodes are
reclaimed bit by bit as prompts are inserted.

*Size.* A node is charged to each of its holders with its bytes and NODE_BYTES. A target above its limit loses
its least recently used leaves, exactly and without a heap: each insert moves the nodes of its path to the young
end of the target's queue, the deepest first, so that a node is always older than the one above it and the oldest
is a leaf. The memory taken is at most the charge, and that is at most `max_bytes_per_target` for each target
and `max_bytes` for all. No insert frees more than about twice what it adds: work is never saved up for a pause.

*Many holders.* The beginning that all prompts share is held by every target. So a walk yields masks, not a row per
target: the match of one target is then a few tests of its bit, and who has the longest match are the deepest masks.

*One walk for both.* A prompt is matched to choose a target and inserted right after. The last walk is remembered until
the tree changes, so the second of the two goes on where the first ended.

Compared with the Rust tree of SGLang's gateway (smg): a dead worker leaves at once and not by ageing, all holders
of a prefix are known and not only the last one, eviction goes with the inserts and not once a minute.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from policies.routing.block_index import Link

MAX_PROMPT_BYTES: Final = (
    256 * 1024
)  # longer ones are distinguished by their first part: this much in common decides any choice
BLOCK_BYTES: Final = 16  # about 4 tokens
MAX_BYTES = 2**29

# A node with its key, its place in its parent's dictionary and its place in a queue, beside the bytes of its edge.
NODE_BYTES: Final = 400

_FEW: Final = 32  # holders: up to this number are listed by name at once


def beginning_of(prompt: bytes) -> bytes:
    """Return what is compared of a prompt. Mostly it is the prompt itself and no copy, as the tree knows it again by that."""
    return prompt if len(prompt) <= MAX_PROMPT_BYTES else prompt[:MAX_PROMPT_BYTES]


class _Node:
    """`home` is the dictionary that knows the node, under `key`: its parent's children, or the roots by scope.

    `links` tie the text that ends at them to blocks of tokens (`cached_tree`), in the order of their places; None if there are none.
    """

    __slots__ = ("children", "edge", "holders", "home", "key", "links")

    def __init__(self, edge: bytes, key: bytes | str, home: dict[bytes | str, _Node], holders: int) -> None:
        self.edge = edge
        self.key = key
        self.home = home
        self.holders = holders
        self.children = _NO_CHILDREN
        self.links: list[Link] | None = None


_NO_CHILDREN: Final[dict[bytes | str, _Node]] = {}  # of every leaf; never written to


class Match:
    """How much of one prompt each target holds, until the tree changes. `get(target_id, default)` returns it for one.

    `few` has all of them, if they are few.
    """

    __slots__ = ("_by_bit", "_levels", "few", "get")

    def __init__(
        self,
        get: Callable[[str, int], int],
        levels: Sequence[tuple[int, int]] = (),
        by_bit: Mapping[int, _Holder] = MappingProxyType({}),
        few: dict[str, int] | None = None,
    ) -> None:
        """`levels` are pairs: the mask of the holders of exactly that number of bytes, and the number, ascending."""
        self.get = get
        self.few = few
        self._levels = levels
        self._by_bit = by_bit

    def longest_first(self, drawn: int = 0) -> Iterator[str]:
        """Yield the targets that hold some of it; `drawn`, any number, decides where to begin among equals."""
        for mask, _ in reversed(self._levels):
            start = drawn % mask.bit_length()
            later = mask >> start << start
            for part in (later, mask ^ later):
                while part:
                    bit = part & -part
                    part ^= bit
                    yield self._by_bit[bit].id


class Walk:
    """Down the tree along a prompt: the nodes all of whose edges it has, how many bytes that are, and what was found.

    Of the edge of `partly`, the next node, it has `beyond` bytes.
    """

    __slots__ = ("at", "beyond", "match", "partly", "path", "prompt", "scope")

    def __init__(
        self,
        scope: str,
        prompt: bytes,
        path: list[_Node],
        at: int,
        match: Match,
        partly: _Node | None,
        beyond: int,
    ) -> None:
        self.scope = scope
        self.prompt = prompt
        self.path = path
        self.at = at
        self.match = match
        self.partly = partly
        self.beyond = beyond


def _split_links(upper: _Node, lower: _Node, length: int) -> None:
    """Give each link of a node that was split to the part that its text ends in."""
    links = lower.links or []
    upper.links = [link for link in links if link.at <= length] or None
    lower.links = [link for link in links if link.at > length] or None
    for link in lower.links or ():
        link.at -= length


class _Holder:
    """One generation of a target: its bit, and its nodes, least recently used first."""

    __slots__ = ("bit", "bytes", "id", "nodes")

    def __init__(self, target_id: str, bit: int) -> None:
        self.id = target_id
        self.bit = bit
        self.nodes: OrderedDict[_Node, None] = OrderedDict()
        self.bytes = 0


_NOTHING: Final[dict[str, int]] = {}
NO_MATCH: Final = Match(_NOTHING.get, few=_NOTHING)


class RadixTree:
    """Prompts by the targets they were sent to. Prompts of different scopes have nothing in common.

    A target may take `max_bytes_per_target`, or its equal part of `max_bytes` if that is less. Both count what a
    node costs beside its text.
    """

    def __init__(
        self, max_bytes_per_target: int, max_bytes: int = MAX_BYTES, block_bytes: int = BLOCK_BYTES
    ) -> None:
        if min(max_bytes_per_target, max_bytes, block_bytes) < 1:
            raise ValueError("a radix tree needs sizes of at least one byte")
        self.nodes = 0
        self.text_bytes = 0
        self._max_bytes_per_target = max_bytes_per_target
        self._max_bytes = max_bytes
        self._block = block_bytes
        self._roots: dict[bytes | str, _Node] = {}
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        self._alive = 0  # the bits of `_holders`
        self._dead: deque[_Holder] = deque()
        self._ids: dict[int, tuple[str, ...]] = {}  # of masks, as they are met
        self._walk: Walk | None = None  # the last one, if nothing has changed since

    @property
    def block_bytes(self) -> int:
        """What prompts are cut into."""
        return self._block

    @property
    def size_bytes(self) -> int:
        """Estimated memory, with what forgotten targets have left behind."""
        return self.text_bytes + self.nodes * NODE_BYTES

    def charged_bytes(self, target_id: str) -> int:
        """Return what counts against the target's limit; 0 if it is unknown."""
        holder = self._holders.get(target_id)
        return holder.bytes if holder is not None else 0

    def matches(self, scope: str, prompt: bytes) -> Mapping[str, int]:
        """Return how many bytes of the prompt each target holds, in whole blocks. Targets that hold none are left out."""
        match = self.match(scope, prompt)
        return {target_id: match.get(target_id, 0) for target_id in match.longest_first()}

    def match(self, scope: str, prompt: bytes) -> Match:
        """Return the same without a list of all targets."""
        walk = self._walk
        if walk is not None and walk.prompt is prompt and walk.scope == scope:
            return walk.match
        node = self._roots.get(scope)
        if node is None:
            return NO_MATCH
        block, alive = self._block, self._alive
        path = [node]
        at = beyond = 0
        held = 0  # by whom, up to `at`
        levels: list[tuple[int, int]] = []
        while True:
            node = node.children.get(prompt[at : at + block])
            if node is None:
                break
            holders = node.holders & alive
            if not holders:
                break
            if holders != held:
                if held:
                    levels.append((held & ~holders, at))
                held = holders
            edge = node.edge
            if not prompt.startswith(edge, at):
                beyond = self._common(edge, prompt, at)
                break
            at += len(edge)
            path.append(node)
        if held:
            levels.append((held, at + beyond))
        match = self._walk_match(levels)
        self._walk = Walk(scope, prompt, path, at, match, node if beyond else None, beyond)
        return match

    def walk(self, scope: str, prompt: bytes) -> Walk:
        """Return the same with the way to it."""
        match = self.match(scope, prompt)
        walk = self._walk
        if walk is None or walk.prompt is not prompt:  # nothing is known in this scope
            return Walk(scope, prompt, [], 0, match, None, 0)
        return walk

    def insert(self, scope: str, prompt: bytes, target_id: str) -> None:
        """The prompt has been sent to the target: from now on it holds all of its whole blocks."""
        block = self._block
        end = len(prompt) - len(prompt) % block
        if not end:
            return
        holder = self._holders.get(target_id) or self._join(target_id)
        bit = holder.bit
        walk, self._walk = self._walk, None
        if walk is not None and walk.prompt is prompt and walk.scope == scope:
            path, at = walk.path, walk.at
            node = path[-1]
        else:
            root = self._roots.get(scope)
            node = root if root is not None else self._add(b"", scope, self._roots)
            path, at = [node], 0
        split_for = 0
        while at < end:
            child = node.children.get(prompt[at : at + block])
            if child is None:
                break
            edge = child.edge
            if not prompt.startswith(edge, at):
                common = self._common(edge, prompt, at)
                if at + common == end and child.holders & bit:
                    end = at  # all of it is known: a split would add nothing
                else:
                    split_for |= child.holders
                    child = self._split(child, common, path)
                    at += common
            else:
                at += len(edge)
            path.append(child)
            node = child
        grown = 0
        if at < end:
            rest = prompt[at:end]
            if node.holders == bit and not node.children and at:
                node.edge += rest  # a conversation goes on, and no other target has it
                self.text_bytes += len(rest)
                grown = len(rest)
            else:
                if node.children is _NO_CHILDREN:
                    node.children = {}
                path.append(self._add(rest, rest[:block], node.children))
        self._claim(holder, path, grown)
        for other in self._bits(split_for & self._alive & ~bit):
            self._trim(other, 2 * NODE_BYTES)

    def forget(self, target_id: str) -> None:
        """The target is gone, with its cache; an unknown one is fine. Costs nothing, however much it held."""
        holder = self._holders.pop(target_id, None)
        if holder is None:
            return
        self._walk = None
        self._alive ^= holder.bit
        self._dead.append(holder)

    def _walk_match(self, levels: list[tuple[int, int]]) -> Match:
        """Return a dictionary for a few holders, as its look-ups are the fastest; else tests of bits."""
        if sum([mask.bit_count() for mask, _ in levels]) > _FEW:
            return Match(partial(self._held, levels), levels, self._by_bit)
        found: dict[str, int] = {}
        for mask, depth in levels:
            for target_id in self._names(mask):
                found[target_id] = depth
        return Match(found.get, levels, self._by_bit, found)

    def _held(self, levels: list[tuple[int, int]], target_id: str, default: int) -> int:
        holder = self._holders.get(target_id)
        if holder is not None:
            bit = holder.bit
            for mask, depth in levels:
                if mask & bit:
                    return depth
        return default

    # --- nodes

    def _common(self, edge: bytes, prompt: bytes, at: int) -> int:
        """Return how many bytes of the edge, in whole blocks, the prompt has at `at`. The first block is known to be."""
        block = self._block
        same, different = 1, min(len(edge), len(prompt) - at) // block + 1
        while different - same > 1:
            middle = (same + different) // 2
            if prompt.startswith(edge[same * block : middle * block], at + same * block):
                same = middle
            else:
                different = middle
        return same * block

    def _add(self, edge: bytes, key: bytes | str, home: dict[bytes | str, _Node]) -> _Node:
        """Return a new node without holders."""
        node = home[key] = _Node(edge, key, home, 0)
        self.nodes += 1
        self.text_bytes += len(edge)
        return node

    def _split(self, lower: _Node, length: int, path: list[_Node]) -> _Node:
        """Return a new node takes the first `length` bytes of `lower`, which is below it from now on.

        `lower` keeps its place in the queues. The new node is younger, so its ancestors must be younger still.
        """
        edge, home, holders = lower.edge, lower.home, lower.holders
        upper = home[lower.key] = _Node(edge[:length], lower.key, home, holders)
        key = edge[length : length + self._block]
        upper.children = {key: lower}
        lower.edge, lower.key, lower.home = edge[length:], key, upper.children
        if lower.links is not None:
            _split_links(upper, lower, length)
        self.nodes += 1
        for holder in self._bits(holders):
            nodes = holder.nodes
            nodes[upper] = None
            for ancestor in reversed(path):
                nodes.move_to_end(ancestor)
            holder.bytes += NODE_BYTES
        return upper

    # --- holders

    def _join(self, target_id: str) -> _Holder:
        """Return a new target, with the lowest bit that is free."""
        used = self._alive
        for dead in self._dead:
            used |= dead.bit
        holder = _Holder(target_id, ~used & (used + 1))
        self._holders[target_id] = self._by_bit[holder.bit] = holder
        self._alive |= holder.bit
        self._ids.clear()
        return holder

    def _bits(self, mask: int) -> list[_Holder]:
        by_bit = self._by_bit
        found = []
        while mask:
            bit = mask & -mask
            found.append(by_bit[bit])
            mask ^= bit
        return found

    def _names(self, mask: int) -> tuple[str, ...]:
        """Return the ids of living holders. The same few masks come again and again."""
        ids = self._ids.get(mask)
        if ids is None:
            if len(self._ids) >= 4096:
                self._ids.clear()
            ids = self._ids[mask] = tuple(holder.id for holder in self._bits(mask))
        return ids

    def _claim(self, holder: _Holder, path: list[_Node], grown: int) -> None:
        """The holder has just used all nodes of the path, the last of which has grown for it."""
        bit, nodes = holder.bit, holder.nodes
        added = grown
        for node in reversed(path):
            if node.holders & bit:
                nodes.move_to_end(node)
            else:
                node.holders |= bit
                nodes[node] = None
                added += len(node.edge) + NODE_BYTES
        holder.bytes += added
        work = 2 * added + 2 * NODE_BYTES
        self._trim(holder, work)
        if self._dead:
            self._reclaim(work)

    def _trim(self, holder: _Holder, work: int) -> None:
        """Take the oldest leaves from a holder that is above its limit, or at least `work` bytes of them."""
        limit = min(self._max_bytes_per_target, self._max_bytes // len(self._holders))
        if holder.bytes > limit:
            self._evict(holder, max(limit, holder.bytes - work))

    def _reclaim(self, work: int) -> None:
        """Take leaves from the dead, `work` bytes or a little more."""
        while work > 0 and self._dead:
            holder = self._dead[0]
            before = holder.bytes
            self._evict(holder, max(0, before - work))
            work -= before - holder.bytes
            if not holder.nodes:
                del self._by_bit[holder.bit]
                self._dead.popleft()

    def _evict(self, holder: _Holder, down_to: int) -> None:
        """Take the oldest nodes from the holder until it is charged with no more than `down_to` bytes."""
        bit, nodes, charged = holder.bit, holder.nodes, holder.bytes
        while charged > down_to:
            node, _ = nodes.popitem(last=False)
            size = len(node.edge)
            charged -= size + NODE_BYTES
            node.holders ^= bit
            if not node.holders:
                del node.home[node.key]
                self.nodes -= 1
                self.text_bytes -= size
        holder.bytes = charged
