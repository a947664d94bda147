"""Seconds of prefill that Tetris' figures are simulated with: Table 1 for Llama-3 8B, composed from
costs for 70B.

The paper prints no latencies of 70B. They are composed, layer by layer, of what our profiles say of
A100s at tp=4 (linear parts and attention, split over the group), of the hops of KV in a ring, which
attention hides as far as it lasts, and of what a hop costs whatever it carries, which is read off
Table 1: the constant parts of its rows grow with the number of hops. What balancing of KV exposes
as a group grows is composed alike, for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxserve.costs.coefficients import Costs
from jaxserve.costs.profiles import costs, devices
from jaxserve.lab.simulate.run import shape_of
from jaxserve.lanes.cdsp import Instances, Latency, LatencyPoint, fit

K = 1024
NODE = 8  # GPUs
LENGTHS = tuple(K * thousands for thousands in (4, 8, 16, 32, 64, 128, 256))
# Table 1: seconds by SP size; 256k tokens do not fit on one GPU
TABLE: dict[int, tuple[float, ...]] = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
TP = {"llama3-8b": 1, "llama3-70b": 4}  # of prefill instances (7.1)
BLOCK = 256  # tokens; chunks end on whole blocks


def table_points() -> Iterator[LatencyPoint]:
    """Table 1, as `fit` takes it."""
    yield from (
        (size, 0, length, seconds)
        for size, row in TABLE.items()
        for length, seconds in zip(LENGTHS, row)
    )


def hop(size: int) -> float:
    """Seconds that a hop in a ring of `size` costs whatever it carries: Table 1's constant parts,
    by hop and layer."""
    fitted = fit(table_points())
    return (
        max(fitted[size].base - fitted[1].base, 0.0) / shape_of("llama3-8b").layers / (size - 1)
        if size > 1
        else 0.0
    )


@functools.cache
def costs_of(model: str) -> Costs:
    """Returns the costs of one instance."""
    return costs("a100", shape_of(model), TP[model])


@functools.cache
def kv_bytes(model: str) -> int:
    """Returns the bytes of a token's KV in a layer, on one rank of an instance."""
    shape = shape_of(model)
    return 2 * 2 * shape.rank_heads(TP[model])[1] * shape.head_dim


def composed(model: str, size: int, history: int, tokens: int) -> float:
    """Seconds of a chunk on `size` instances, from the costs of one."""
    device = devices()["a100"]
    one = costs_of(model)
    kv = kv_bytes(model) * (history + tokens) / size
    attention = max(
        one.attend_chunk(history, tokens) / size, (size - 1) * kv / device.node.bytes_per_s
    )
    layer = one.linear(-(-tokens // size)) + attention + (size - 1) * hop(size)
    return one.launch + one.layers * layer + one.head + one.head_token


def composed_points(model: str) -> Iterator[LatencyPoint]:
    for size in TABLE:
        for history in (0, 16 * K, 64 * K, 128 * K):
            yield from (
                (size, history, tokens, composed(model, size, history, tokens))
                for tokens in LENGTHS[:6]
            )


@functools.cache
def latencies(model: str) -> dict[int, Latency]:
    """Eq. 1 for each group size."""
    return fit(table_points() if model == "llama3-8b" else composed_points(model))


class Balancing(NamedTuple):
    """Balancing of KV over a group that has grown (4.1). Seconds per layer: send, of what each
    instance that was there sends to those that join; linear, of the linear parts of the layer
    before, beside which it does."""

    send: float
    linear: float
    layers: int

    @property
    def exposed(self) -> float:
        """Seconds, of all layers, in which nothing else runs: nothing hides the first layer's."""
        return self.send + (self.layers - 1) * max(self.send - self.linear, 0.0)


def balancing(model: str, before: int, after: int, history: float, tokens: float) -> Balancing:
    """Returns what balancing a history takes beside a chunk of `tokens` tokens, where `before`
    instances have become `after`: in a node, if one has as many, else between nodes."""
    device = devices()["a100"]
    link = device.ranks[2] if after <= NODE // TP[model] else device.node
    one = costs_of(model)
    send = link(kv_bytes(model) * history * (1 / before - 1 / after))
    return Balancing(send, one.linear(math.ceil(tokens / after)), one.layers)


def growth(model: str, before: int, after: int, history: float, tokens: float) -> float:
    """Returns the seconds that balancing exposes: `cdsp.Growth` of a model."""
    return balancing(model, before, after, history, tokens).exposed


@functools.cache
def instances(model: str) -> Instances:
    moves = functools.partial(growth, model)
    return Instances(latencies(model), NODE // TP[model], BLOCK, growth=moves)
