"""Costs of steps on A100, H100 and H200: coefficients fitted from public measurements
(`experiments.profiles.fit` writes profiles.json).

`costs(device, shape, tp)` gives the row of a measured model, or computes one from what was fitted
for the device: how fast it multiplies, reads weights and KV, attends and sends.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

from jaxserve.costs.predictor import Costs
from jaxserve.settings.schema import ConfigError

FILE = Path(__file__).with_name("profiles.json")
ITEM = 2  # bytes of a bf16 weight, activation or KV element
PARTIAL = 4  # bytes of an element of a lane's part of attention, and of its log-sum-exp


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder that decide its costs. Where there are fewer kv heads than ranks,
    each rank holds one."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Query and kv heads of one rank."""
        return -(-self.heads // tp), -(-self.kv_heads // tp)

    def layer_weights(self, tp: int = 1) -> float:
        """Elements of the products of one layer on one rank."""
        heads, kv_heads = self.rank_heads(tp)
        return self.d_model * ((2 * heads + 2 * kv_heads) * self.head_dim + 3 * self.d_ff / tp)

    def head_weights(self, tp: int = 1) -> float:
        """Elements of the product with the vocabulary on one rank."""
        return self.d_model * self.vocab / tp

    def elementwise_bytes(self, tp: int = 1) -> float:
        """Bytes that norms, rotation, activation and residual of one layer read and write per token
        on one rank, if none is fused."""
        heads, kv_heads = self.rank_heads(tp)
        return ITEM * (
            7 * self.d_model + 2 * (heads + kv_heads) * self.head_dim + 3 * self.d_ff / tp
        )

    def weight_bytes(self) -> int:
        """Of the products of all layers, the embedding and the head, in bf16."""
        return round(ITEM * (self.layers * self.layer_weights() + 2 * self.head_weights()))

    def kv_bytes_per_token(self) -> int:
        """Of all layers, in bf16."""
        return ITEM * 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, tokens: float, cached: float = 0) -> float:
        """Of all layers for new tokens after cached ones, attention counted as causal."""
        pairs = (cached + tokens / 2) * tokens
        return self.layers * (
            2 * self.layer_weights() * tokens + 4 * self.heads * self.head_dim * pairs
        )


@dataclasses.dataclass(frozen=True)
class Link:
    """A message of n bytes takes `seconds + n / bytes_per_s`."""

    seconds: float
    bytes_per_s: float

    def __call__(self, size: float) -> float:
        return self.seconds + size / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device: its data sheet, and what was fitted over all its profiled models. Seconds
    are per layer unless said otherwise.

    A product reads weights in `floor_seconds + weights / weight_bytes_per_s`, uses them in
    `base_seconds + weights / base_bytes_per_s` and 2 FLOP per weight and token. `attention_tile`: a
    chunk attends to so many more tokens than it must, for kernels work in tiles.
    """

    device: str
    memory_bytes: int
    memory_bytes_per_s: float  # peak
    flops_per_s: float  # peak, dense bf16
    launch: float  # a step in one stage
    sample: float  # a step's sampling
    floor_seconds: float
    weight_bytes_per_s: float
    base_seconds: float
    base_bytes_per_s: float
    product_flops_per_s: float
    elementwise_bytes_per_s: float
    chunk_seconds: float
    attention_flops_per_s: float
    attention_tile: float
    read_bytes_per_s: float  # KV by a chunk
    decode_seconds: float
    decode_kv_head_seconds: float  # per sequence and kv head
    decode_bytes_per_s: float  # KV by decodes
    mixed: float
    ranks: dict[int, Link]  # sum over so many ranks
    node: Link  # to a device of another node, over its own adapter
    source: tuple[str, ...]
    error: dict[str, float]

    def costs(self, shape: ModelShape, tp: int) -> Costs:
        """Computed from the shape. Errors: ConfigError for a degree above those that were
        measured."""
        heads, kv_heads = shape.rank_heads(tp)
        weights = ITEM * shape.layer_weights(tp)
        pair = 4 * heads * shape.head_dim / self.attention_flops_per_s
        kv = 2 * ITEM * kv_heads * shape.head_dim
        head = shape.head_weights(tp)
        return dataclasses.replace(
            self.messages(shape, tp),
            launch=self.launch,
            mixed=self.mixed,
            linear_floor=self.floor_seconds + weights / self.weight_bytes_per_s,
            linear_base=self.base_seconds + weights / self.base_bytes_per_s,
            linear_token=weights / self.product_flops_per_s
            + shape.elementwise_bytes(tp) / self.elementwise_bytes_per_s,
            chunk=self.chunk_seconds,
            chunk_token=pair * self.attention_tile,
            pair=pair,
            read=kv / self.read_bytes_per_s,
            decode=self.decode_seconds,
            decode_seq=kv_heads * self.decode_kv_head_seconds,
            decode_kv=kv / self.decode_bytes_per_s,
            head=self.sample + ITEM * head / self.weight_bytes_per_s,
            head_token=2 * head / self.product_flops_per_s,
        )

    def messages(self, shape: ModelShape, tp: int) -> Costs:
        """Costs of communication alone, between ranks, lanes and stages; lanes and stages are in
        different nodes.

        Ranks: two sums of an activation per layer. Lanes: queries, keys and values go out, partial
        results come back. Stages: every rank sends the activation to its peer.
        """
        heads, kv_heads = shape.rank_heads(tp)
        activation = ITEM * shape.d_model
        exchanged = ITEM * (heads + 2 * kv_heads) * shape.head_dim + PARTIAL * heads * (
            shape.head_dim + 1
        )
        link = self._ranks(tp)
        return Costs(
            layers=shape.layers,
            tp=2 * link.seconds,
            tp_token=2 * activation / link.bytes_per_s,
            kvp=2 * self.node.seconds,
            kvp_token=exchanged / self.node.bytes_per_s,
            hop=self.node.seconds,
            hop_token=activation / self.node.bytes_per_s,
        )

    def _ranks(self, tp: int) -> Link:
        """The link of this degree, or of the next greater one. Errors: ConfigError."""
        if tp == 1:
            return Link(0.0, math.inf)
        if tp > max(self.ranks):
            raise ConfigError(
                "mesh",
                f"tp={tp}: sums over more than {max(self.ranks)} ranks were not measured on "
                f"{self.device}",
            )
        return self.ranks[min(degree for degree in self.ranks if degree >= tp)]


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """The costs of a measured model. error: mean relative errors by part, of fitted points and
    ('held out') of points left out."""

    device: str
    model: str
    dtype: str
    tp: int
    source: tuple[str, ...]
    error: dict[str, float]
    costs: Costs


@functools.cache
def _table() -> dict:
    return json.loads(FILE.read_text())


@functools.cache
def profiles() -> list[DeviceProfile]:
    """All rows of measured models."""
    return [
        DeviceProfile(**row | {"source": tuple(row["source"]), "costs": Costs(**row["costs"])})
        for row in _table()["profiles"]
    ]


@functools.cache
def devices() -> dict[str, Device]:
    """All kinds of devices, by name."""
    found = {}
    for row in _table()["devices"]:
        links = {
            "ranks": {int(degree): Link(**link) for degree, link in row["ranks"].items()},
            "node": Link(**row["node"]),
        }
        found[row["device"]] = Device(**row | links | {"source": tuple(row["source"])})
    return found


@functools.cache
def shapes() -> dict[str, ModelShape]:
    """The shapes of the measured models, by name."""
    return {name: ModelShape(**shape) for name, shape in _table()["models"].items()}


def costs(device: str, shape: ModelShape, tp: int = 1) -> Costs:
    """The row of this shape if it was measured, else computed from the device's. Errors:
    ConfigError."""
    if device not in devices():
        raise ConfigError("device", f"{device!r} is not one of {', '.join(devices())}")
    if not 1 <= tp <= shape.heads:
        raise ConfigError("mesh", f"tp={tp} cannot split {shape.heads} heads")
    for row in profiles():
        if (row.device, row.tp) == (device, tp) and shapes()[row.model] == shape:
            return row.costs
    return devices()[device].costs(shape, tp)
