"""Which target has which blocks of tokens in its cache, as the engines report it.

Engines cache whole blocks of tokens. Each engine names a block by a hash of its own, whose seed differs from process to process,
so names of two engines cannot be compared. Here a block has one key for all of them: a hash of its parent's key and its tokens.
Equal beginnings of prompts are thus the same chain of blocks, whichever engine reports them.

*Holders* are one integer per block, a bit per target, as in `radix_tree`. An engine evicts the end of a chain before its beginning,
so the holders of a block are nearly always among those of its parent. A look-up uses this: it goes up a chain by pointers that jump
ever further, and stops only where the holders differ. A chain of thousands of blocks takes a few dozen steps.

*Copies.* An engine that computes a block twice at the same time has it twice, reports it twice, and reports the loss of each. So
copies are counted.

*What is known.* `complete`: all that the target has is known, because its events were followed from the first one or from the moment
at which it was empty. Otherwise the absence of a first block says nothing; a block below one that is present has been reported if it
is there.

*Size.* A block that no target holds and no chain needs is dropped. A target with more than `max_blocks_per_target`, or that would
exceed `max_blocks` together with the others, is not followed any longer until it is cleared. A block takes some 400 bytes.

*Forgetting* a target clears its bit in the mask of the living, at once; its blocks are taken apart a few at a time by `tidy`, and the
bit is not used again before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_BLOCKS: Final = 2**21
MAX_BLOCKS_PER_TARGET: Final = 2**18
MAX_ADAPTERS: Final = 1024
TIDIED_AT_ONCE: Final = 4096
_MOST_NAMED: Final = 4096

EngineHash = int | bytes
"""The name that one engine has for a block."""


class Block:
    """One block at the end of its chain. `depth` counts the blocks of the chain, 0 for the root of all chains.

    `first` is the first block of the chain. `pins` count its children and whatever else needs the object to stay.
    """

    __slots__ = ("depth", "first", "holders", "jump", "key", "parent", "pins")

    def __init__(self, key: int, parent: Block | None) -> None:
        self.key = key
        self.holders = 0
        self.pins = 0
        if parent is None:
            self.parent = self.jump = self.first = self
            self.depth = 0
            self.holders = -1  # everybody has no block at all
            return
        self.parent = parent
        self.depth = parent.depth + 1
        self.first = parent.first if parent.depth else self
        further = parent.jump
        # So that each block is reached from each other one below it in a logarithmic number of steps.
        even = parent.depth - further.depth == further.depth - further.jump.depth
        self.jump = further.jump if even else parent


class CacheState:
    """One target's cache, as far as it has been reported."""

    __slots__ = ("bit", "blocks", "complete", "copies", "id", "orphans", "refused")

    def __init__(self, target_id: str, bit: int) -> None:
        self.id = target_id
        self.bit = bit
        self.blocks: dict[EngineHash, Block] = {}
        self.copies: dict[EngineHash, int] = {}  # beyond the first one
        self.complete = False
        self.refused = ""  # why its events are not followed
        self.orphans = 0  # blocks that were reported below one that is not known


class BlockIndex:
    """The caches of all targets whose engines report them. All of them have the same block size, that of the first one."""

    def __init__(
        self, max_blocks: int = MAX_BLOCKS, max_blocks_per_target: int = MAX_BLOCKS_PER_TARGET
    ) -> None:
        self.block_size = 0  # tokens; 0: not known yet
        self.followed = 0  # targets
        self.held = 0  # blocks of all targets, copies left out
        self.max_blocks = max_blocks
        self._max_per_target = max_blocks_per_target
        self._blocks: dict[int, Block] = {}
        self._roots: dict[str, Block] = {}
        self._caches: dict[str, CacheState] = {}
        self._by_bit: dict[int, CacheState] = {}
        self._names: dict[int, tuple[str, ...]] = {}  # of masks, as they are met
        self._alive = 0
        self._dead: deque[CacheState] = deque()

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return len(self._blocks)

    @property
    def tidy_is_due(self) -> bool:
        """Whether blocks of forgotten targets are left."""
        return bool(self._dead)

    # --- what engines report

    def cache(self, target_id: str) -> CacheState | None:
        """Return what is known of a target that is followed."""
        return self._caches.get(target_id)

    def clear(self, target_id: str, *, complete: bool) -> CacheState:
        """The target is followed from now on, with nothing known of it; `complete` if that is because it has nothing."""
        self.forget(target_id)
        used = self._alive
        for dead in self._dead:
            used |= dead.bit
        cache = CacheState(target_id, ~used & (used + 1))
        cache.complete = complete
        self._caches[target_id] = self._by_bit[cache.bit] = cache
        self.followed = len(self._caches)
        self._alive |= cache.bit
        self._names.clear()
        return cache

    def forget(self, target_id: str) -> None:
        """The target is not followed any longer; an unknown one is fine."""
        cache = self._caches.pop(target_id, None)
        if cache is not None:
            self._alive ^= cache.bit
            self._dead.append(cache)
            self.followed = len(self._caches)
        if not self._caches:
            self.block_size = 0

    def stored(
        self,
        cache: CacheState,
        parent: EngineHash | None,
        hashes: Sequence[EngineHash],
        tokens: Sequence[int],
        block_size: int,
        lora: str = "",
        extra: Sequence[object] | None = None,
    ) -> None:
        """The engine has stored blocks, each below the one before it; `extra` is what distinguishes each beside its tokens."""
        if cache.refused:
            return
        blocks, known = self._blocks, cache.blocks
        if not tokens:  # of a second medium, without what is in them
            for name in hashes:
                if name in known:
                    cache.copies[name] = cache.copies.get(name, 0) + 1
            return
        whole = block_size > 0 and len(tokens) == block_size * len(hashes)
        if whole and not self.block_size:
            self.block_size = block_size
        if not whole or block_size != self.block_size:
            self.refuse(cache, "block_size")
            return
        if parent is not None:
            above = known.get(parent)
        elif lora in self._roots or len(self._roots) < MAX_ADAPTERS:
            above = self.root(lora)
        else:
            self.refuse(cache, "too_many_adapters")
            return
        if above is None:
            cache.orphans += len(hashes)
            return
        bit, at = cache.bit, 0
        for index, name in enumerate(hashes):
            end = at + block_size
            block = known.get(name)
            if block is not None:
                cache.copies[name] = cache.copies.get(name, 0) + 1
            else:
                key = hash((above.key, *tokens[at:end]))
                if extra is not None and extra[index] is not None:
                    key = hash((key, repr(extra[index])))
                block = blocks.get(key)
                if block is None:
                    block = blocks[key] = Block(key, above)
                    above.pins += 1
                block.holders |= bit
                known[name] = block
                self.held += 1
            above = block
            at = end
        if len(known) > self._max_per_target or self.held > self.max_blocks:
            self.refuse(cache, "too_many_blocks")

    def removed(self, cache: CacheState, hashes: Sequence[EngineHash]) -> None:
        """The engine has lost a copy of each of these."""
        copies = cache.copies
        for name in hashes:
            if copies and name in copies:
                left = copies[name] - 1
                if left:
                    copies[name] = left
                else:
                    del copies[name]
                continue
            block = cache.blocks.pop(name, None)
            if block is not None:
                self._lost(block, cache.bit)

    def refuse(self, cache: CacheState, why: str) -> None:
        """Follow the target no longer, until it is cleared."""
        self.clear(cache.id, complete=False).refused = why

    def tidy(self, most: int = TIDIED_AT_ONCE) -> None:
        """Take apart at most so many blocks of forgotten targets."""
        while self._dead and most > 0:
            cache = self._dead[0]
            while cache.blocks and most > 0:
                self._lost(cache.blocks.popitem()[1], cache.bit)
                most -= 1
            if not cache.blocks:
                del self._by_bit[cache.bit]
                self._dead.popleft()

    # --- chains

    def root(self, lora: str) -> Block:
        """Return where the chains of an adapter begin; the model's own have the empty name."""
        root = self._roots.get(lora)
        if root is None:
            root = self._roots[lora] = Block(hash(lora), None)
        return root

    def knows_adapter(self, name: str) -> bool:
        """Return whether an engine has reported blocks of an adapter of this name."""
        return name in self._roots

    def pinned_chain(self, tokens: Sequence[int], lora: str = "") -> Block:
        """Return the last whole block of these tokens. It stays, even if no target holds it, until it is `unpinned`."""
        size, blocks = self.block_size, self._blocks
        block = self.root(lora)
        if size:
            for at in range(0, len(tokens) - size + 1, size):
                key = hash((block.key, *tokens[at : at + size]))
                below = blocks.get(key)
                if below is None:
                    below = blocks[key] = Block(key, block)
                    block.pins += 1
                block = below
        block.pins += 1
        return block

    def unpin(self, block: Block) -> None:
        """A chain that was returned by `pinned_chain`, or pinned otherwise, is not needed any longer."""
        block.pins -= 1
        self._drop(block)

    def levels(self, block: Block) -> list[tuple[int, int]]:
        """Return who holds how many blocks of the chain, deepest first: pairs of a mask and a number. Holders of none are left out."""
        left = self._alive & block.first.holders
        found: list[tuple[int, int]] = []
        while left:
            new = block.holders & left
            if new:
                found.append((new, block.depth))
                left ^= new
                if not left:
                    break
            further = block.jump
            block = block.parent if further.holders & left else further
        return found

    def id_of(self, bit: int) -> str:
        """Return the target of a bit."""
        return self._by_bit[bit].id

    def names(self, mask: int) -> tuple[str, ...]:
        """Return the targets of a mask. The same few come again and again."""
        names = self._names.get(mask)
        if names is None:
            if len(self._names) >= _MOST_NAMED:
                self._names.clear()
            left, found = mask, list[str]()
            while left:
                bit = left & -left
                left ^= bit
                found.append(self._by_bit[bit].id)
            names = self._names[mask] = tuple(found)
        return names

    def depth(self, block: Block, cache: CacheState) -> int:
        """Return how many blocks of the chain the target holds."""
        bit = cache.bit
        while block.depth and not block.holders & bit:
            further = block.jump
            block = block.parent if further.holders & bit else further
        return block.depth

    # --- inside

    def _lost(self, block: Block, bit: int) -> None:
        block.holders &= ~bit
        self.held -= 1
        self._drop(block)

    def _drop(self, block: Block) -> None:
        """Remove the block if nothing needs it, and then those above it."""
        while block.depth and not block.holders and not block.pins:
            if self._blocks.pop(block.key, None) is None:
                return
            block = block.parent
            block.pins -= 1


class Link:
    """A text of `depth` bytes is `tokens` tokens, the whole blocks of which, of `size` tokens, end with `block`.

    It ends `at` bytes after the beginning of its node in a radix tree.
    """

    __slots__ = ("at", "block", "depth", "size", "tokens")

    def __init__(self, depth: int, tokens: int, block: Block, size: int) -> None:
        self.at = 0
        self.depth = depth
        self.tokens = tokens
        self.block = block
        self.size = size


def ancestor(block: Block, depth: int) -> Block:
    """Return the block of the chain at that depth, at most its own."""
    while block.depth > depth:
        block = block.jump if block.jump.depth >= depth else block.parent
    return block


def common_block(one: Block, other: Block) -> Block:
    """Return the last block that two chains share."""
    depth = min(one.depth, other.depth)
    one, other = ancestor(one, depth), ancestor(other, depth)
    while one is not other and one.depth:
        if one.jump is not other.jump:
            one, other = one.jump, other.jump
        else:
            one, other = one.parent, other.parent
    return one
