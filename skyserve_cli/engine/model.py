"""Continuous batching with chunked prefill, without a clock: a scheduler to which the time is an argument.

One iteration, as vLLM's and SGLang's schedulers do it:

1. Requests that have spent `base` in front of the engine join the waiting queue (FIFO).
2. Every running sequence that decodes gets one token. If the KV cache is full, the youngest sequence is
   preempted: its blocks are released, it goes back to the head of the queue, and what it had is computed again
   when there is room (often found in the prefix cache).
3. The rest of `max_batched_tokens` goes to prompts, oldest first, in chunks: decodes are never stalled by a
   long prompt (Sarathi-Serve).
4. While there is budget, a slot and room for the whole prompt plus one block, the head of the queue is
   admitted. The first one that does not fit stops the search: no request overtakes, and `waiting` is above zero,
   which is the signal that SkyWalker's selective pushing reads.

The iteration takes `Profile.iteration_s` of its batch. `begin` decides it, `finish` makes its tokens; in between
the world may submit and abort. `step` is both at once, for virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from skyserve_cli.engine.kv import BLOCK_TOKENS, BlockKey, BlockLease, PrefixCache, block_keys, blocks_for
from skyserve_cli.engine.profiles import Profile
from skyserve_cli.engine.text import EOS, Context, Language


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a client. `max_tokens` counts the end token, as engines do."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0


class TokenOutput(NamedTuple):
    """One token of one request. `cached_tokens` of its prompt were not computed but found."""

    request_id: str
    token: int
    finish: FinishReason | None
    cached_tokens: int


class Iteration(NamedTuple):
    """An iteration in virtual time: its tokens exist `duration_s` after it began."""

    duration_s: float
    outputs: tuple[TokenOutput, ...]


class RequestRefused(ValueError):
    """The engine can never serve this request: its message gives the reason."""


@dataclass(slots=True)
class Counters:
    """What has happened since the engine started. Only ever grows."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found there
    preemptions: int = 0
    iterations: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(slots=True, eq=False)
class _Sequence:
    request: Request
    ready_at: float
    tokens: list[int]  # prompt and generated
    context: Context
    keys: list[BlockKey]  # of the full blocks of `tokens`
    computed: int = 0  # tokens whose keys and values are in the cache
    lease: BlockLease | None = None
    decoding: bool = False  # has produced a token since it was admitted
    cached_tokens: int | None = None  # set by the first admission
    gone: bool = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class EngineModel:
    """One replica. Synchronous and deterministic: the same calls give the same results."""

    def __init__(self, profile: Profile, language: Language) -> None:
        self.profile = profile
        self.counters = Counters()
        self.max_model_len = int(profile.max_model_len.value)
        self._language = language
        self._max_seqs = int(profile.max_num_seqs.value)
        self._max_batched = int(profile.max_batched_tokens.value)
        self._cache = PrefixCache(int(profile.kv_capacity.value) // BLOCK_TOKENS)
        # A lone request must fit with its spare block, or it would wait for ever.
        if blocks_for(self.max_model_len) + 1 > self._cache.capacity:
            raise ValueError(
                f"{profile.name}: a request of max_model_len tokens does not fit in the KV cache"
            )
        # Every decoding sequence gets its token in every iteration, and a prompt at least one.
        if self._max_batched <= self._max_seqs:
            raise ValueError(f"{profile.name}: max_batched_tokens must be above max_num_seqs")
        self._live: dict[str, _Sequence] = {}
        self._arriving: deque[_Sequence] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # oldest first
        self._batch: list[tuple[_Sequence, int]] | None = None  # of the iteration under way

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that cannot be admitted yet: pending, in SkyWalker's word."""
        return len(self._waiting)

    @property
    def cache(self) -> PrefixCache:
        """The KV cache, to be read."""
        return self._cache

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache held by running sequences, 0 to 1; blocks that are only cached do not count."""
        return self._cache.in_use / self._cache.capacity

    def submit(self, request: Request, now: float) -> None:
        """Accept a request at `now` (seconds). Raises RequestRefused if it can never be served."""
        if request.id in self._live:
            raise RequestRefused(f"request {request.id!r} is already being served")
        if not request.prompt:
            raise RequestRefused("the prompt is empty")
        if request.max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1 (got {request.max_tokens})")
        if len(request.prompt) + request.max_tokens > self.max_model_len:
            raise RequestRefused(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} are more than "
                f"the context of {self.max_model_len} tokens"
            )
        sequence = _Sequence(
            request=request,
            ready_at=now + self.profile.base_s,
            tokens=list(request.prompt),
            context=self._language.read(request.prompt, request.seed),
            keys=block_keys(request.prompt),
        )
        self._live[request.id] = sequence
        self._arriving.append(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Forget a request wherever it is and free its blocks at once. False if it is not here (any more).

        `reason` is STOP when the caller found a stop string in the text.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        if sequence.lease is not None:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._arriving.remove(sequence)
        self._end(sequence, reason)
        return True

    def wakes_at(self, now: float) -> float | None:
        """Return when the next iteration can begin: `now` if there is work, None if there is none at all."""
        if self._running or self._waiting:
            return now
        if self._arriving:
            return max(now, self._arriving[0].ready_at)
        return None

    def step(self, now: float) -> Iteration:
        """Return one whole iteration that begins at `now`; without work it takes no time and makes nothing."""
        duration_s = self.begin(now)
        return Iteration(duration_s, self.finish())

    def begin(self, now: float) -> float:
        """Choose the batch of the iteration that begins at `now`; returns its duration in seconds."""
        if self._batch is not None:
            raise RuntimeError("the iteration under way must be finished first")
        while self._arriving and self._arriving[0].ready_at <= now:
            self._waiting.append(self._arriving.popleft())
        self._make_room_for_decodes()
        decodes = sum(1 for sequence in self._running if sequence.decoding)
        budget = self._max_batched - decodes
        batch: list[tuple[_Sequence, int]] = []
        for sequence in self._running:
            if sequence.decoding:
                batch.append((sequence, 1))
            elif budget > 0:
                chunk = min(budget, len(sequence.tokens) - sequence.computed)
                budget -= chunk
                batch.append((sequence, chunk))
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            chunk = min(budget, len(sequence.tokens) - sequence.computed)
            budget -= chunk
            batch.append((sequence, chunk))
        self._batch = batch
        if not batch:
            return 0.0
        self.counters.iterations += 1
        return self.profile.iteration_s(
            prefill_tokens=self._max_batched - decodes - budget,
            sequences=len(batch),
            context_tokens=sum(sequence.computed + chunk for sequence, chunk in batch),
        )

    def finish(self) -> tuple[TokenOutput, ...]:
        """End the iteration under way: its tokens, in the order in which their sequences were admitted."""
        if self._batch is None:
            raise RuntimeError("no iteration is under way")
        outputs = []
        for sequence, chunk in self._batch:
            if sequence.gone:  # aborted meanwhile
                continue
            self._compute(sequence, chunk)
            if sequence.computed == len(sequence.tokens):
                outputs.append(self._sample(sequence))
        self._batch = None
        self._running = [sequence for sequence in self._running if not sequence.gone]
        return tuple(outputs)

    def live(self) -> Iterable[str]:
        """Ids of all requests that are not over."""
        return self._live.keys()

    def _make_room_for_decodes(self) -> None:
        """A block for every decode that starts a new one, at the cost of the youngest."""
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            lease = _held(sequence)
            if sequence.computed < lease.blocks * BLOCK_TOKENS or self._cache.grow(lease):
                position += 1
            else:
                self._preempt(self._running.pop())

    def _preempt(self, sequence: _Sequence) -> None:
        self._cache.release(_held(sequence))
        sequence.lease = None
        sequence.computed = 0
        sequence.decoding = False
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _admit(self, sequence: _Sequence) -> bool:
        """Give the sequence its blocks, if there is a slot and room."""
        if len(self._running) >= self._max_seqs:
            return False
        # The spare block also keeps a sequence that was preempted in this very iteration from coming straight
        # back: the room it left is never more than it had. The last token is always computed: the model needs its output to choose the next one.
        reusable = sequence.keys[: (len(sequence.tokens) - 1) // BLOCK_TOKENS]
        lease = self._cache.admit(reusable, blocks_for(len(sequence.tokens)), spare=1)
        if lease is None:
            return False
        sequence.lease = lease
        sequence.computed = len(lease.path) * BLOCK_TOKENS
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.counters.prefix_queries += len(sequence.tokens)
            self.counters.prefix_hits += sequence.computed
        return True

    def _compute(self, sequence: _Sequence, chunk: int) -> None:
        sequence.computed += chunk
        lease = _held(sequence)
        while (len(lease.path) + 1) * BLOCK_TOKENS <= sequence.computed:
            self._cache.commit(lease, sequence.keys[len(lease.path)])

    def _sample(self, sequence: _Sequence) -> TokenOutput:
        request = sequence.request
        if sequence.generated == 0:
            self.counters.prompt_tokens += len(request.prompt)
            self.counters.cached_prompt_tokens += sequence.cached_tokens or 0
        self.counters.generated_tokens += 1
        sequence.decoding = True
        may_end = not request.ignore_eos and sequence.generated >= request.min_tokens
        token = self._language.next(sequence.context, may_end=may_end)
        sequence.tokens.append(token)
        sequence.context.extend((token,))
        if len(sequence.tokens) % BLOCK_TOKENS == 0:
            sequence.keys.append(tuple(sequence.tokens[-BLOCK_TOKENS:]))
        reason = None
        if token == EOS:
            reason = FinishReason.STOP
        elif sequence.generated >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason)
        return TokenOutput(request.id, token, reason, sequence.cached_tokens or 0)

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease)
            sequence.lease = None
        sequence.gone = True
        del self._live[sequence.request.id]
        self.counters.finished[reason] += 1


def _held(sequence: _Sequence) -> BlockLease:
    if sequence.lease is None:
        raise AssertionError(f"request {sequence.request.id!r} runs without blocks")
    return sequence.lease
