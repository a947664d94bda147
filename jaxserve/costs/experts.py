"""Messages of lanes that share experts out: see `models.experts`."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import ExpertsSpec
from jaxserve.lanes.rates import Link
from jaxserve.lanes.work import ITEM

MESSAGES = (
    4  # of a layer: tokens, weights and numbers of their experts are gathered, sums come back
)
ROUTED = 4 + 4  # bytes of the weight and of the number of a token's expert


class ExpertTraffic(NamedTuple):
    """Bytes that a lane receives per token of its own, padding included, in a layer with experts,
    and that it sends to have its sums."""

    gathered: int
    scattered: int


def expert_traffic(d_model: int, spec: ExpertsSpec, item: int = ITEM) -> ExpertTraffic:
    """Returns what the lanes of a spec send. item: bytes of an element of hidden states. Every lane
    gets all tokens, and adds what all made of its own."""
    others = spec.lanes - 1
    token = d_model * item
    return ExpertTraffic(others * (token + spec.active * ROUTED), others * token)


def expert_seconds(model: ModelConfig, link: Link) -> tuple[float, float]:
    """Returns the seconds per layer, averaged over the layers, that lanes take to send tokens to
    experts and back: once, and per token of a lane. link: between lanes."""
    specs = [model.mlp(layer) for layer in range(model.layers)]
    shared = [spec for spec in specs if isinstance(spec, ExpertsSpec) and spec.lanes > 1]
    if not shared:
        return 0.0, 0.0
    link = link.in_layers(len(shared) / model.layers)
    size = sum(expert_traffic(model.d_model, shared[0]))
    return MESSAGES * link.seconds, size / link.bytes_per_s
