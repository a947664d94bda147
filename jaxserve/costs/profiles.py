"""Costs of steps on A100, H100 and H200: coefficients fitted from public measurements
(`experiments.profiles.fit` writes profiles.json).

`costs(device, model, tp)` gives the row of a measured model, or computes one from what was fitted
for the device: how fast it multiplies, reads weights and KV, attends and sends.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

from jaxserve.checkpoint.model import ModelConfig, declare
from jaxserve.checkpoint.specs import ExpertsSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.ffn_lanes import ffn_seconds, weights_for_others
from jaxserve.costs.heads import heads_of
from jaxserve.lanes.rates import Link
from jaxserve.lanes.work import ITEM
from jaxserve.settings.schema import ConfigError

FILE = Path(__file__).with_name("profiles.json")
# of a token, per byte of an f32 state: it gives what is known of a key, takes the correction, and
# gives the output
STATE_FLOPS = 3 * 2 / 4


def elementwise_bytes(model: ModelConfig, tp: int = 1) -> float:
    """Bytes that norms, rotation, activation and residual of one layer read and write per token on
    one of `tp` ranks, if none is fused."""
    rank = model.share(tp)
    rotated = rank.heads + rank.kv_heads
    return ITEM * (7 * model.d_model + 2 * rotated * rank.head_dim + model.inner(tp))


def windows_of(model: ModelConfig) -> tuple[int, float]:
    """Returns the largest sliding window (0: there is none), and the share of the layers with pages
    that have one."""
    paged = [layer for layer in range(model.layers) if model.mixer(layer).has_pages]
    windows = [window for window in map(model.window, paged) if window is not None]
    return max(windows, default=0), len(windows) / len(paged)


def expert_lanes(model: ModelConfig) -> int:
    """Returns over how many lanes a model's experts are split."""
    return next((spec.lanes for spec in model.mlps if isinstance(spec, ExpertsSpec)), 1)


@functools.cache
def _matrices(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's matrices by path: models with equal ones have equal costs."""
    declared = declare(model, range(model.layers))
    return {path: parameter.shape for path, parameter in declared.items() if parameter.inputs}


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device: its data sheet, and what was fitted over all its profiled models. Seconds
    are per layer unless said otherwise.

    A product reads weights in `floor_seconds + weights / weight_bytes_per_s`, uses them in
    `base_seconds + weights / base_bytes_per_s` and 2 FLOP per weight and token. `attention_tile`: a
    chunk attends to that many more tokens than it must, for kernels work in tiles.
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
    ranks: dict[int, Link]  # sum over ranks, by their number
    node: Link  # to a device of another node, over its own adapter
    source: tuple[str, ...]
    error: dict[str, float]

    def costs(self, model: ModelConfig, tp: int) -> Costs:
        """Computed from the model, averaged over its layers: only some may attend, and others have
        states, which decodes read and write. Errors: ConfigError for a degree above those that were
        measured."""
        heads = heads_of(model, tp)
        attending = heads.attending
        state = model.share(tp).state_bytes() / model.layers  # of a sequence
        weights = ITEM * model.dense_weights(tp)
        experts = ITEM * model.expert_weights(tp)
        lanes = expert_lanes(model)
        active = weights + experts * lanes * model.active_experts
        active += ITEM * weights_for_others(model, tp)
        pair = attending * heads.pair_flops / self.attention_flops_per_s
        kv = attending * heads.kv_bytes
        head = model.head_weights(tp)
        window, windowed = windows_of(model)
        return dataclasses.replace(
            self.messages(model, tp),
            launch=self.launch,
            mixed=self.mixed,
            linear_floor=self.floor_seconds + weights / self.weight_bytes_per_s,
            linear_base=self.base_seconds + weights / self.base_bytes_per_s,
            expert_floor=experts / self.weight_bytes_per_s,
            expert_base=experts / self.base_bytes_per_s,
            active_experts=model.active_experts,
            expert_lanes=lanes,
            linear_token=(active + STATE_FLOPS * state) / self.product_flops_per_s
            + elementwise_bytes(model, tp) / self.elementwise_bytes_per_s,
            chunk=self.chunk_seconds,
            chunk_token=pair * self.attention_tile,
            pair=pair,
            read=kv / self.read_bytes_per_s,
            decode=self.decode_seconds,
            decode_seq=attending * heads.kv_heads * self.decode_kv_head_seconds
            + 2 * state / self.decode_bytes_per_s,
            decode_kv=max(kv / self.decode_bytes_per_s, pair),  # latents are used by many heads
            window=window,
            windowed=windowed,
            head=self.sample + ITEM * head / self.weight_bytes_per_s,
            head_token=2 * head / self.product_flops_per_s,
        )

    def messages(self, model: ModelConfig, tp: int) -> Costs:
        """Costs of communication alone, between ranks, lanes and stages; lanes and stages are in
        different nodes.

        Ranks: two sums of an activation per layer. Lanes: queries, keys and values go out, partial
        results come back; so do tokens where lanes share experts out. Stages: every rank sends the
        activation to its peer.
        """
        heads = heads_of(model, tp)
        activation = ITEM * model.d_model
        exchanged = heads.query_bytes + heads.new_kv_bytes + heads.partial_bytes
        node = self.node.in_layers(heads.attending)
        link = self._ranks(tp)
        once, token = ffn_seconds(model, self.node)
        return Costs(
            layers=model.layers,
            tp=2 * link.seconds,
            tp_token=2 * activation / link.bytes_per_s,
            experts_sent=once,
            experts_sent_token=token,
            kvp=2 * node.seconds,
            kvp_token=exchanged / node.bytes_per_s,
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


# what lanes that share out MLPs and experts change
SHARED_OUT = ("linear_floor", "linear_base", "linear_token", "expert_floor", "expert_base")


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


def costs(device: str, model: ModelConfig, tp: int = 1) -> Costs:
    """Returns the row of a measured model with these matrices, or else computes costs from the
    device's. What lanes share out was not measured: its parts of a row change by the factor that is
    computed. Errors: ConfigError."""
    if device not in devices():
        raise ConfigError("device", f"{device!r} is not one of {', '.join(devices())}")
    if not 1 <= tp <= model.heads:
        raise ConfigError("mesh", f"tp={tp} cannot split {model.heads} heads")
    for row in profiles():
        measured = (row.device, row.tp) == (device, tp) and not model.has_windows
        if measured and _matrices(MODELS[row.model]) == _matrices(model):
            return _shared_out(row.costs, devices()[device], model, tp)
    return devices()[device].costs(model, tp)


def _shared_out(measured: Costs, device: Device, model: ModelConfig, tp: int) -> Costs:
    """Returns costs measured of a model whose lanes have all of it, for one that they share."""
    alone = model.over()
    if model == alone:
        return measured
    before = device.costs(alone, tp)
    after = device.costs(model, tp)
    changed = {
        name: getattr(measured, name) * getattr(after, name) / (getattr(before, name) or 1.0)
        for name in SHARED_OUT
    }
    return dataclasses.replace(measured, expert_lanes=after.expert_lanes, **changed)
