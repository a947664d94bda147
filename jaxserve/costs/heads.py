"""The attention heads of a model's ranks, for the costs of lanes."""

from __future__ import annotations

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.lanes.work import ITEM, Heads, stored_bytes


def heads_of(model: ModelConfig, tp: int, item: int = ITEM, fp8: bool = False) -> Heads:
    """Returns the heads of one of `tp` ranks. item: bytes of an element of queries and of what they
    attend to; fp8: pages hold the latter in FP8."""
    heads, kv_heads = model.rank_heads(tp)
    vectors, numbers = model.page
    query, result = model.paged_mixer.attended_dims(model)
    return Heads(
        heads,
        kv_heads,
        query,
        item,
        stored=stored_bytes(numbers, item, fp8),
        vectors=vectors,
        value_dim=result,
        attending=model.paged_layers() / model.layers,
    )
