"""Estimates the device memory of a replica from its plan, without allocating anything or asking a
device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
import numpy as np

from jaxserve.checkpoint.zoo import layers_of
from jaxserve.engine import sampling
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.stages import POOL_AXES
from jaxserve.models.decoder import declare, padded_vocab
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rules import RULES

F32 = 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes on the device that needs most. weights, kv (pages): exact. tables: page tables and
    sampling state. work: estimate of the activations of the largest step."""

    weights: int
    kv: int
    tables: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.tables + self.work


def sizes(plan: StagePlan) -> Sizes:
    """Bytes per device of a replica with this plan."""
    stages = layers_of(plan.model, plan.mesh.spp)
    weights = [
        sum(_part(d.shape, d.axes, plan) for d in declare(plan.model, part, plan.mesh.tp).values())
        for part in stages
    ]
    layer = sum(
        _part(x.shape, POOL_AXES, plan) * x.dtype.itemsize for x in jax.tree.leaves(plan.pool())
    )
    return Sizes(
        max(weights) * np.dtype(plan.dtype).itemsize,
        max(map(len, stages)) * layer,
        _tables(plan),
        _work(plan),
    )


def _part(shape: tuple[int, ...], axes: Iterable[str | None], plan: StagePlan) -> int:
    """Elements of an array with these logical axes that one device holds."""
    degrees = {TP: plan.mesh.tp, KVP: plan.mesh.kvp}
    return math.prod(shape) // math.prod(
        degrees.get(RULES[axis] or "", 1) for axis in axes if axis is not None
    )


def _tables(plan: StagePlan) -> int:
    """Bytes of page table and sampling state on a device of the last stage, where tokens are
    sampled."""
    vocab = padded_vocab(plan.model, plan.mesh.tp) // plan.mesh.tp
    state = sum(
        math.prod(shape) * dtype.itemsize
        for shape, dtype in sampling.empty_state(1, plan.slots, vocab).values()
    )
    return state + 2 * plan.slots * plan.width * F32


def _work(plan: StagePlan) -> int:
    """Bytes of the largest step: four copies of its hidden states, three of the widest product of a
    layer, and three of the logits in f32."""
    model = plan.model
    tp = plan.mesh.tp
    item = np.dtype(plan.dtype).itemsize
    tokens = max(shape.tokens for shape in plan.shapes)
    widest = max(
        3 * model.d_ff // tp, 3 * (model.heads + 2 * model.kv_heads) * model.head_dim // tp
    )
    logits = max(plan.samples) * padded_vocab(model, tp) // tp
    return tokens * (4 * model.d_model + widest) * item + 3 * logits * F32
