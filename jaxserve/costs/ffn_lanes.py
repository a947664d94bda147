"""Messages of lanes that share out experts or MLPs: see `sharding.mesh.over_lanes`."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import ExpertsSpec, MlpSpec
from jaxserve.lanes.rates import Link
from jaxserve.lanes.work import ITEM

# of a layer: tokens, weights and numbers of their experts are gathered, sums come back; of one
# without experts, tokens are gathered, and their positions once for all layers
EXPERT_MESSAGES = 4
MLP_MESSAGES = 2
ROUTED = 4 + 4  # bytes of the weight and of the number of a token's expert


class FfnTraffic(NamedTuple):
    """Messages of a layer whose feed-forward part lanes share out; bytes that a lane receives in it
    per token of its own, padding included, and that it sends to have its sums."""

    messages: int
    gathered: int
    scattered: int


def ffn_traffic(d_model: int, spec: MlpSpec | ExpertsSpec, item: int = ITEM) -> FfnTraffic:
    """Returns what the lanes of a spec send. item: bytes of an element of hidden states. Every lane
    gets all tokens, and adds what all made of its own."""
    others = spec.lanes - 1
    if not others:
        return FfnTraffic(0, 0, 0)
    token = d_model * item
    if isinstance(spec, MlpSpec):
        return FfnTraffic(MLP_MESSAGES, others * token, others * token)
    gathered = others * (token + spec.active * ROUTED)
    return FfnTraffic(EXPERT_MESSAGES, gathered, others * token)


def weights_for_others(model: ModelConfig, tp: int) -> float:
    """Counts the elements of MLPs of one layer by which one of `tp` ranks multiplies tokens of
    other lanes, times these lanes, averaged over the layers; experts do not count."""
    share = model.share(tp)
    specs = [share.mlp(layer) for layer in range(model.layers)]
    return sum(spec.weights_for_others(share) for spec in specs) / model.layers


def ffn_seconds(model: ModelConfig, link: Link) -> tuple[float, float]:
    """Returns the seconds per layer, averaged over the layers, that lanes take to send tokens to
    feed-forward parts on other lanes and back: once, and per token of a lane. link: between
    lanes."""
    once = token = 0.0
    for spec, count in Counter(map(model.mlp, range(model.layers))).items():
        messages, gathered, scattered = ffn_traffic(model.d_model, spec)
        if messages:
            average = link.in_layers(count / model.layers)
            once += messages * average.seconds
            token += (gathered + scattered) / average.bytes_per_s
    return once, token
