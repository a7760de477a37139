"""Reads batches of cache events as engines publish them: msgpack, in the two forms that are in use.

A batch is an array: its time, its events, and the rank of the engine among those of one data parallel group. An event is a map
with its kind under `type` (vLLM since 0.11), or an array that begins with its kind (older ones, and SGLang).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

MAX_BATCH_BYTES: Final = 2 * 2**20
"""Of one message. A batch has what one step of an engine stores, which is some thousands of tokens."""

Hash = int | bytes


class BatchError(ValueError):
    """A message is no batch of events that can be followed."""


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks are in the cache now, each below the one before it and the first below the parent."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """A copy of each of these blocks is not in the cache any longer."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """Nothing is in the cache."""


class _StoredRow(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedRow(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedRow(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


Event = Stored | Removed | Cleared | _StoredRow | _RemovedRow | _ClearedRow
STORED: Final = (Stored, _StoredRow)
REMOVED: Final = (Removed, _RemovedRow)


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class _BatchOfRows(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    data_parallel_rank: int | None = None


_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_of_maps = msgspec.msgpack.Decoder(_Batch)
_of_rows = msgspec.msgpack.Decoder(_BatchOfRows)


def read_batch(payload: bytes) -> tuple[list[Any], int]:
    """Return the events of a message, and the rank of its engine. Raises BatchError."""
    if len(payload) > MAX_BATCH_BYTES:
        raise BatchError(f"a batch of {len(payload)} bytes: at most {MAX_BATCH_BYTES} are read")
    try:
        batch: _Batch | _BatchOfRows = _of_maps.decode(payload)
    except _ERRORS as first:
        try:
            batch = _of_rows.decode(payload)
        except _ERRORS:
            raise BatchError(f"no batch of cache events: {first}") from None
    return batch.events, batch.data_parallel_rank or 0
