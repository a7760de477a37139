"""The KV cache of the engine: ref-counted 16-token blocks in a prefix tree, least recently used leaf evicted.

A block is either *private* to one sequence (not yet full) or a *node* of the tree: a full block, reached by
the tokens of all blocks before it, so two sequences share a node exactly when their whole prefix is equal.
A node is referenced by every running sequence whose path holds it; hence a parent has at least as many
references as its children together, and a node without references has only descendants without. These are
what may be evicted, leaves first, the one that was released longest ago first.

The idea is SGLang's radix cache at vLLM's granularity (automatic prefix caching by blocks of 16 tokens).
Unlike vLLM, equal blocks computed at the same time by two sequences are merged when the second one fills.

    capacity = free + private + referenced nodes + unreferenced (evictable) nodes
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16

BlockKey = tuple[int, ...]  # the 16 tokens of a full block


def block_keys(tokens: Sequence[int]) -> list[BlockKey]:
    """Return the keys of all full blocks of `tokens`; a rest of fewer than 16 tokens has none."""
    whole = len(tokens) - len(tokens) % BLOCK_TOKENS
    return [tuple(tokens[start : start + BLOCK_TOKENS]) for start in range(0, whole, BLOCK_TOKENS)]


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class BlockNode:
    """A full block in the tree."""

    key: BlockKey
    parent: BlockNode | None
    children: dict[BlockKey, BlockNode] = field(default_factory=dict)
    references: int = 0
    released_at: int = 0  # tick of the last release: the order of eviction
    name: int = 0  # for those who follow the changes
    parent_name: int = 0  # 0: it is the first block


@dataclass(slots=True, eq=False)
class BlockLease:
    """What one sequence holds: its path of nodes from the root, then its private blocks."""

    path: list[BlockNode]
    private: int

    @property
    def blocks(self) -> int:
        return len(self.path) + self.private


class PrefixCache:
    """All blocks of one engine. Pure bookkeeping: no tokens are computed here."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a cache needs at least one block (got {capacity_blocks})")
        self.capacity = capacity_blocks
        self._root = BlockNode(key=(), parent=None, references=1)
        self._nodes = 0
        self._unreferenced = 0
        self._private = 0
        self._tick = 0
        self._leaves: list[
            tuple[int, int, BlockNode]
        ] = []  # heap with stale entries; `_is_current` finds them
        self._serial = 0
        self._named = 0
        self._changes: list[tuple[bool, BlockNode]] | None = (
            None  # that were not taken yet; None: they are not followed
        )

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.capacity - self._nodes - self._private

    @property
    def available(self) -> int:
        """Blocks a sequence could get: free ones and those that may be evicted."""
        return self.free + self._unreferenced

    @property
    def in_use(self) -> int:
        """Blocks held by running sequences."""
        return self.capacity - self.available

    @property
    def cached(self) -> int:
        """Blocks kept only because a later prompt may start with them."""
        return self._unreferenced

    def follow(self, first_name: int = 0) -> None:
        """From now on changes are kept until they are taken, and new blocks have names after `first_name`."""
        self._changes = []
        self._named = first_name

    def take_changes(self) -> list[tuple[bool, BlockNode]]:
        """Return the blocks that were stored (True) and evicted since the last call, in order."""
        changes = self._changes or []
        if changes:
            self._changes = []
        return changes

    def admit(self, keys: Sequence[BlockKey], blocks: int, spare: int) -> BlockLease | None:
        """Return a lease of `zone_backoff` blocks whose first ones are found in the tree along `keys`.

        None, and nothing changed, unless `spare` more blocks would be left: a sequence that was let in
        must be able to decode a little before it is preempted.
        """
        path = self._match(keys[:blocks])
        fresh = blocks - len(path)
        revived = sum(1 for node in path if node.references == 0)
        if self.available - revived < fresh + spare:
            return None
        for node in path:
            node.references += 1
        self._unreferenced -= revived
        self._make_room(fresh)
        self._private += fresh
        return BlockLease(path, fresh)

    def grow(self, lease: BlockLease) -> bool:
        """Return one more private block; False if every block is held by a running sequence."""
        if self.available < 1:
            return False
        self._make_room(1)
        self._private += 1
        lease.private += 1
        return True

    def commit(self, lease: BlockLease, key: BlockKey) -> None:
        """The lease's first private block is full and holds `key`: from now on others can share it."""
        if lease.private < 1:
            raise ValueError("a lease without private blocks has nothing to commit")
        parent = lease.path[-1] if lease.path else self._root
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = BlockNode(key, parent)
            self._nodes += 1
            if self._changes is not None:
                self._named += 1
                node.name, node.parent_name = self._named, parent.name
                self._changes.append((True, node))
        elif node.references == 0:
            self._unreferenced -= 1
        node.references += 1
        lease.path.append(node)
        lease.private -= 1
        self._private -= 1

    def release(self, lease: BlockLease) -> None:
        """The sequence is done with its blocks: private ones are free, shared ones stay while there is room."""
        self._tick += 1
        self._private -= lease.private
        for node in lease.path:
            node.references -= 1
            if node.references == 0:
                self._unreferenced += 1
                node.released_at = self._tick
                if not node.children:
                    self._push_leaf(node)
        lease.path = []
        lease.private = 0

    def cached_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first blocks along `keys` are here, in use or not."""
        return len(self._match(keys))

    def nodes(self) -> Iterator[BlockNode]:
        """Yield every node of the tree, parents first: for audits."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _match(self, keys: Sequence[BlockKey]) -> list[BlockNode]:
        path: list[BlockNode] = []
        children = self._root.children
        for key in keys:
            node = children.get(key)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _make_room(self, blocks: int) -> None:
        """Evict until `zone_backoff` are free. The caller has checked that they are available."""
        while self.free < blocks:
            released_at, _, leaf = heapq.heappop(self._leaves)
            if not self._is_current(leaf, released_at):
                continue
            parent = leaf.parent
            if parent is None:
                raise AssertionError("the root is referenced for ever")
            del parent.children[leaf.key]
            leaf.parent = None
            if self._changes is not None:
                self._changes.append((False, leaf))
            self._nodes -= 1
            self._unreferenced -= 1
            if parent.references == 0 and not parent.children:
                self._push_leaf(parent)

    def _push_leaf(self, leaf: BlockNode) -> None:
        # A hot leaf is released often and leaves a stale entry each time: rebuild before they outnumber
        # the tree, so that memory stays proportional to the capacity.
        if len(self._leaves) > 2 * self.capacity + 64:
            self._leaves = [entry for entry in self._leaves if self._is_current(entry[2], entry[0])]
            heapq.heapify(self._leaves)
        self._serial += 1
        heapq.heappush(self._leaves, (leaf.released_at, self._serial, leaf))

    def _is_current(self, node: BlockNode, released_at: int) -> bool:
        """Return whether a heap entry still speaks of an evictable leaf of the tree."""
        return (
            node.references == 0
            and not node.children
            and node.parent is not None
            and node.released_at == released_at
        )
