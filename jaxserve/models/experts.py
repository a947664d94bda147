"""Mixture of experts. Ranks share the experts out, and each has all tokens of its lane: the sum
over ranks that any MLP needs is the only collective. Where lanes share them out too, a lane gets
the tokens of all, and sends back what its experts made of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import ExpertsBesideMlpSpec, ExpertsSpec, RouterSpec
from jaxserve.kernels.qkv import rms_norm
from jaxserve.models.layers import gated
from jaxserve.models.mlp import gated_mlp
from jaxserve.models.parameters import create, grouped
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.mesh import KVP, TP, axis_sum, over_lanes

SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}  # by `RouterSpec.scores`
_LEAST = 1e-20  # beside sums of sigmoids, which may all be zero


class Experts(nnx.Module):
    """Experts of a layer; parameters: see `ExpertsSpec`."""

    router: nnx.Param
    router_bias: nnx.Param
    correction: nnx.Param
    expert_gate_up: nnx.Param
    expert_gate_up_bias: nnx.Param
    expert_down: nnx.Param
    expert_down_bias: nnx.Param
    shared_gate_up: nnx.Param
    shared_down: nnx.Param
    shared_gate: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        spec = model.mlp(layer)
        assert isinstance(spec, ExpertsSpec)
        self.spec = spec
        create(self, spec.declare(model.at(layer)))

    def __call__(self, x: jax.Array, tokens: Tokens) -> jax.Array:
        """Hidden states [T, D] of tokens -> this rank's part of the output."""
        spec = self.spec
        weights, chosen = self._route(x)
        chosen = jnp.where((tokens.positions >= 0)[:, None], chosen, -1)
        if spec.shared and spec.shared_lanes == spec.lanes:
            return over_lanes(self._all, spec.lanes, x, tokens, weights, chosen)
        out = over_lanes(self._compute, spec.lanes, x, weights, chosen)
        if spec.shared:
            out = out + self._shared(x, tokens)
        return out

    def _all(
        self, x: jax.Array, tokens: Tokens, weights: jax.Array, chosen: jax.Array
    ) -> jax.Array:
        """Sums what this device's experts, and its part of what is shared, make of tokens."""
        return self._compute(x, weights, chosen) + self._shared(x, tokens)

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights f32 and numbers of the experts of each token, [T, active]; all in f32."""
        logits = jnp.dot(
            x.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        if self.spec.router.bias:
            logits = logits + self.router_bias[...]
        correction: jax.Array | float = 0.0
        if self.spec.router.correction:
            correction = self.correction[...]
        return route(logits, self.spec.router, self.spec.active, correction)

    def _compute(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Sums what this device's experts make of tokens x [T, D], in the order of their ranking.
        weights, chosen [T, active]; -1: none."""
        share = jax.lax.axis_index(TP)  # of the experts
        if self.spec.lanes > 1:
            share = share + jax.lax.axis_index(KVP) * jax.lax.axis_size(TP)
        E = len(jax.tree.leaves(self.expert_down.get_value())[0])
        mine = chosen - share * E
        mine = jnp.where((chosen >= 0) & (mine >= 0) & (mine < E), mine, E)  # E: of others
        order = jnp.argsort(mine.ravel(), stable=True)
        counts = jnp.bincount(mine.ravel(), length=E + 1)[:E].astype(jnp.int32)
        expert = jnp.minimum(mine.ravel()[order], E - 1)
        rows = x[order // self.spec.active]
        hidden = grouped(rows, self.expert_gate_up, counts)
        if self.spec.biases:
            hidden = hidden + self.expert_gate_up_bias[...][expert]
        out = grouped(gated(hidden, self.spec.activation), self.expert_down, counts)
        if self.spec.biases:
            out = out + self.expert_down_bias[...][expert]
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
        by_token = out[place].reshape(*mine.shape, -1)
        weights = jnp.where(mine < E, weights, 0)[..., None]
        return (by_token * weights).sum(1).astype(x.dtype)

    def _shared(self, x: jax.Array, tokens: Tokens) -> jax.Array:
        """The MLP that computes every token."""
        weights = self.shared_gate_up, self.shared_down
        out = gated_mlp(x, tokens, *weights, self.spec.activation)
        if self.spec.shared_gate:
            gate = jax.nn.sigmoid(x.astype(jnp.float32) @ self.shared_gate[...])
            out = (out * gate).astype(x.dtype)
        return out


class ExpertsBesideMlp(Experts):
    """Experts and an MLP side by side; parameters: see `ExpertsBesideMlpSpec`."""

    gate_up: nnx.Param
    down: nnx.Param
    router_scale: nnx.Param
    expert_scale: nnx.Param
    mlp_out_norm: nnx.Param
    experts_norm: nnx.Param
    experts_out_norm: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__(model, layer)
        self.eps = model.norms.eps

    def joined(self, x: jax.Array, normed: jax.Array, tokens: Tokens) -> jax.Array:
        """Computes the experts of hidden states x [T, D] and the MLP of `normed`, what the block's
        norm made of them; returns the sum of both under their norms, of all ranks."""
        assert isinstance(self.spec, ExpertsBesideMlpSpec)
        mlp = self.spec.mlp
        dense = functools.partial(
            gated_mlp, gate_up=self.gate_up, down=self.down, activation=mlp.activation
        )
        weights, chosen = self._route(x)
        chosen = jnp.where((tokens.positions >= 0)[:, None], chosen, -1)
        inputs = rms_norm(x, self.experts_norm[...], self.eps)
        parts = [
            over_lanes(dense, mlp.lanes, normed, tokens),
            over_lanes(self._compute, self.spec.lanes, inputs, weights, chosen),
        ]
        norms = self.mlp_out_norm, self.experts_out_norm
        both = zip(axis_sum(jnp.stack(parts), TP), norms)
        first, second = (rms_norm(part, norm[...], self.eps) for part, norm in both)
        return first + second

    def _route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = self.router_scale[...] * x.shape[1] ** -0.5
        weights, chosen = super()._route(rms_norm(x.astype(jnp.float32), scale, self.eps))
        return weights * self.expert_scale[...][chosen], chosen


def route(
    logits: jax.Array, router: RouterSpec, active: int, correction: jax.Array | float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Chooses the `active` experts of each token by logits [T, E]: weights and numbers [T, active],
    best first. correction [E]: see `RouterSpec`."""
    if router.scores == "chosen":
        best, chosen = jax.lax.top_k(logits, active)
        return jax.nn.softmax(best) * router.scale, chosen
    scores = SCORES[router.scores](logits)
    ranking = scores + correction
    if router.groups > 1:
        ranking = _of_best_groups(ranking, router)
    chosen = jax.lax.top_k(ranking, active)[1]
    weights = jnp.take_along_axis(scores, chosen, 1)
    if router.normalised:
        weights = weights / (weights.sum(1, keepdims=True) + _LEAST)
    return weights * router.scale, chosen


def _of_best_groups(ranking: jax.Array, router: RouterSpec) -> jax.Array:
    """Returns ranking [T, E] with -inf outside the best groups."""
    by_group = ranking.reshape(len(ranking), router.groups, -1)
    value = jax.lax.top_k(by_group, router.group_scores)[0].sum(-1)
    best = jax.lax.top_k(value, router.best_groups)[1]
    kept = jax.nn.one_hot(best, router.groups, dtype=bool).any(1)
    return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(ranking.shape)
