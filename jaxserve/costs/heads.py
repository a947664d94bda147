"""The attention heads of a model's ranks, for the costs of lanes."""

from __future__ import annotations

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.lanes.work import ITEM, Heads, stored_bytes


def heads_of(model: ModelConfig, tp: int, item: int = ITEM, fp8: bool = False) -> Heads:
    """Returns the heads of one of `tp` ranks. Where layers differ, they are those of one that sees
    all tokens: they cost most at long contexts. item: bytes of an element of queries and of what
    they attend to; fp8: pages hold the latter in FP8."""
    paged = [layer for layer in range(model.layers) if model.mixer(layer).has_pages]
    sizes = model.at(next((layer for layer in paged if model.window(layer) is None), paged[0]))
    heads, kv_heads = sizes.rank_heads(tp)
    vectors, numbers = sizes.page
    query, result = sizes.paged_mixer.attended_dims(sizes)
    deltas = [spec for spec in model.mixers if isinstance(spec, DeltaNetSpec)]
    return Heads(
        heads,
        kv_heads,
        query,
        item,
        stored=stored_bytes(numbers, item, fp8),
        vectors=vectors,
        value_dim=result,
        passed=max((spec.share(tp).passed_bytes for spec in deltas), default=0),
        attending=len(paged) / model.layers,
    )
