"""Gated DeltaNet: a state of fixed size for each sequence, in place of keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.kernels.delta_rule import DeltaTokens, advance, advance_row
from jaxserve.kernels.qkv import rms_norm
from jaxserve.models.parameters import create, matmul
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.rows import NO_PAGE, Groups, Rows
from jaxserve.sharding.states import Chain, pass_inputs, pass_states

EPS = 1e-6  # of the norms of queries and keys, whatever that of the layers is


class States(NamedTuple):
    """States of the sequences in all slots, in one layer: states f32 [lanes, slots, K, G, key,
    value], and the last inputs of the convolution [lanes, slots, K, taps - 1, channels]. A sequence
    has them on its home lane. Fields are arrays, or their shapes."""

    state: Any
    window: Any


def state_shapes(spec: DeltaNetSpec, lanes: int, slots: int, dtype: Any) -> States:
    """Shapes of the states of a layer. dtype: of hidden states."""
    return States(
        jax.ShapeDtypeStruct((lanes, slots, *spec.state), jnp.float32),
        jax.ShapeDtypeStruct((lanes, slots, *spec.window), dtype),
    )


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet over the states of a layer; parameters: see `DeltaNetSpec`."""

    qkvz: nnx.Param
    ba: nnx.Param
    conv: nnx.Param
    a_log: nnx.Param
    dt_bias: nnx.Param
    out_norm: nnx.Param
    out_proj: nnx.Param

    def __init__(self, model: ModelConfig, layer: int):
        spec = model.mixer(layer)
        assert isinstance(spec, DeltaNetSpec)
        self.spec = spec
        self.eps = model.norms.eps
        create(self, spec.declare(model))

    def __call__(
        self,
        x: jax.Array,
        tokens: Tokens,
        cos_sin: tuple[jax.Array, jax.Array] | None,
        groups: Groups,
        states: States,
    ) -> tuple[jax.Array, States]:
        """Hidden states [T, D] of tokens and this layer's states (leading axis of 1) -> this rank's
        part of the output, and the states after these tokens. A sequence begins at position 0 with
        an empty state; padding changes nothing."""
        qkvz = matmul(x, self.qkvz, 1, tokens)  # [T, K, channels + G * value]
        live = (tokens.positions >= 0)[:, None, None]
        inputs = jnp.where(live, qkvz[..., : self.spec.channels], 0)
        beta, log_decay = self._gates(x, tokens)
        outs = []
        first = 0
        for rows in (*groups.local, *groups.spread):
            mine = groups.of_this_lane(rows)
            shared = mine is not rows and not rows.apart  # sequences, with other lanes
            chain = Chain(rows, groups.lanes) if shared else None
            some = slice(first, first + mine.pos.size)
            first = some.stop
            entering = inputs[some].reshape(*mine.shape, *inputs.shape[1:])
            mixed, states = self._convolve(entering, mine, states, chain)
            computed = self._tokens(mixed, beta[some], log_decay[some])
            out, states = _run(computed, mine, states, chain)
            outs.append(out.reshape(mine.pos.size, *out.shape[2:]))
        out = jnp.concatenate(outs)  # [T, K, G, value]
        gate = jax.nn.silu(qkvz[..., self.spec.channels :].reshape(out.shape).astype(jnp.float32))
        out = (rms_norm(out, self.out_norm[...], self.eps) * gate).astype(x.dtype)
        return matmul(out.reshape(len(x), -1), self.out_proj, 3, tokens), states

    def _gates(self, x: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """Beta and the logarithm of the decay of each value head, f32 [T, K, G]; 0 for padding."""
        ba = matmul(x, self.ba, 1, tokens).astype(jnp.float32)  # [T, K, 2, G]
        step = jax.nn.softplus(ba[:, :, 1] + self.dt_bias[...])
        live = (tokens.positions >= 0)[:, None, None]
        beta = jnp.where(live, jax.nn.sigmoid(ba[:, :, 0]), 0)
        return beta, jnp.where(live, -jnp.exp(self.a_log[...]) * step, 0)

    def _convolve(
        self, x: jax.Array, rows: Rows, states: States, chain: Chain | None
    ) -> tuple[jax.Array, States]:
        """Convolves inputs x [R, T, K, channels] with those before them, f32; a sequence's last
        inputs are kept. chain: where other lanes compute rows of the same sequences."""
        if chain is None:
            before = _inputs_before(x, rows, states.window[0, rows.slot])
            last = _last_inputs(before, x, rows.lengths)
            where = jnp.where(rows.ends, rows.slot, NO_PAGE)
            window = states.window.at[0, where].set(last, mode="drop")
        else:
            unknown = jnp.zeros((len(x), *states.window.shape[2:]), x.dtype)
            tails = _last_inputs(_inputs_before(x, rows, unknown), x, rows.lengths)
            passed, window = pass_inputs(chain, tails, states.window[0])
            before = _inputs_before(x, rows, passed[rows.run_ends])
            window = window[None]
        T = rows.shape[1]
        wide = jnp.concatenate([before, x], 1)  # [R, kept + T, K, channels]
        taps = jnp.moveaxis(self.conv[...], 2, 0)  # [taps, K, channels]
        mixed = sum(wide[:, i : i + T].astype(jnp.float32) * taps[i] for i in range(len(taps)))
        return jax.nn.silu(mixed), states._replace(window=window)

    def _tokens(self, mixed: jax.Array, beta: jax.Array, log_decay: jax.Array) -> DeltaTokens:
        """Splits convolved inputs [R, T, K, channels] into queries and keys of length 1 (queries
        over the root of their size), and values."""
        key = self.spec.key
        q, k, v = jnp.split(mixed, (key, 2 * key), -1)
        values = v.reshape(*v.shape[:-1], self.spec.group, self.spec.value)
        by_row = lambda gate: gate.reshape(*mixed.shape[:3], -1)
        return DeltaTokens(_unit(q) * key**-0.5, _unit(k), values, by_row(beta), by_row(log_decay))


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS)


def _inputs_before(x: jax.Array, rows: Rows, window: jax.Array) -> jax.Array:
    """The inputs just before each row, [R, kept, K, channels]: of rows before it in x [R, T, K,
    channels], beyond these of its window [R, K, kept, channels], 0 before a sequence begins."""
    R, T = rows.shape
    kept = window.shape[2]
    place = jnp.arange(kept) - kept  # against the row's first token
    row = jnp.arange(R)[:, None]
    in_step = rows.offset[:, None] + place  # token of the sequence's tokens in the step, or below 0
    flat = x.reshape(R * T, *x.shape[2:])
    earlier = flat[jnp.maximum(row * T + place, 0)]
    kept_inputs = window[row, :, jnp.clip(in_step + kept, 0, kept - 1)]
    wide = (..., None, None)
    begins = (rows.pos[:, :1] - rows.offset[:, None] <= 0)[wide]
    kept_inputs = jnp.where(begins, 0, kept_inputs)
    return jnp.where((in_step >= 0)[wide], earlier, kept_inputs)


def _last_inputs(before: jax.Array, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """The last inputs of rows of `lengths` [R] tokens, [R, K, kept, channels]: of x [R, T, K,
    channels], and of what is before them [R, kept, K, channels]."""
    R, kept = before.shape[:2]
    row = jnp.arange(R)[:, None]
    place = lengths[:, None] + jnp.arange(kept) - kept
    inside = x[row, jnp.maximum(place, 0)]
    outside = before[row, jnp.minimum(place + kept, kept - 1)]
    return jnp.moveaxis(jnp.where((place >= 0)[..., None, None], inside, outside), 1, 2)


def _run(
    tokens: DeltaTokens, rows: Rows, states: States, chain: Chain | None
) -> tuple[jax.Array, States]:
    """Computes rows [R, T]: outputs [R, T, K, G, value], and the states after them. chain: see
    `GatedDeltaNet._convolve`."""
    if chain is not None:
        out, state = pass_states(chain, tokens, states.state[0])
        state = state[None]
    elif rows.apart:
        out, state = _run_singles(tokens, rows, states.state)
    else:
        out, state = _run_rows(tokens, rows, states.state)
    return out, states._replace(state=state)


def _run_singles(tokens: DeltaTokens, rows: Rows, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes rows [R, 1] of different sequences at once: outputs [R, 1, K, G, value], states [1,
    slots, ...]."""
    fresh = (rows.pos[:, 0] == 0)[:, None, None, None, None]
    before = jnp.where(fresh, 0, states[0, rows.slot])
    out, after = advance(DeltaTokens(*(field[:, 0] for field in tokens)), before)
    where = jnp.where(rows.ends, rows.slot, NO_PAGE)
    return out[:, None], states.at[0, where].set(after, mode="drop")


def _run_rows(tokens: DeltaTokens, rows: Rows, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes rows [R, T] one after the other, as rows of one sequence depend on each other:
    outputs [R, T, K, G, value], states [1, slots, ...]. Rows of padding, which come last, are left
    out."""

    def run(row: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outs, states = carry
        slot = rows.slot[row]
        before = jnp.where(rows.pos[row, 0] == 0, 0, states[0, slot])
        out, after = advance_row(jax.tree.map(lambda field: field[row], tokens), before)
        return outs.at[row].set(out), states.at[0, slot].set(after)

    outs = jnp.zeros_like(tokens.v)
    return lax.fori_loop(0, (rows.lengths > 0).sum(), run, (outs, states))
