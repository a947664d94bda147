"""vLLM's KV events as types, written from its schema (vllm/distributed/kv_events.py): unknown
fields, missing fields and wrong types are errors."""

from __future__ import annotations

from typing import Any

import msgspec


class Event(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """An event is a map whose `type` is the class's name."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  # Dynamo's, not vLLM's, whose own types pass over it


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Index:
    """The blocks that a router believes to be there, by what it was told."""

    def __init__(self) -> None:
        self.on: dict[str, dict[int, BlockStored]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}  # of each block and all before it

    def apply(self, event: Any) -> None:
        match type(event).__name__:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                for number in event.block_hashes:
                    self.on.setdefault(event.medium, {}).pop(number, None)
            case "AllBlocksCleared":
                self.on.clear()

    def _store(self, event: Any) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert len(event.extra_keys) == len(event.block_hashes)
        before: tuple[int, ...] = ()
        if event.parent_block_hash is not None:
            before = self.tokens[event.parent_block_hash]  # a parent is told of first
        for number, block in enumerate(event.block_hashes):
            before += tuple(event.token_ids[number * event.block_size :][: event.block_size])
            self.tokens[block] = before
            self.on.setdefault(event.medium, {})[block] = event

    def blocks(self, medium: str = "GPU") -> set[int]:
        return set(self.on.get(medium, ()))
