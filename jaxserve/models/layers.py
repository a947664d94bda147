"""Parts of a decoder block as pure functions on local arrays: the gated activation, the soft cap
and the tables of RoPE."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint.rope import Rope

CLAMP = 7.0  # bound of gate and up in `clamped`
CLAMPED_SLOPE = 1.702  # of the gate's sigmoid in `clamped`


def gated(gate_up: jax.Array, activation: str) -> jax.Array:
    """Computes activation(gate) * up, or what else `GATES` has: [T, 2, F] -> [T, F] (Shazeer,
    2020)."""
    return GATES[activation](gate_up[:, 0], gate_up[:, 1])


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gate of gpt-oss."""
    gate = jnp.minimum(gate, CLAMP)
    return gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (jnp.clip(up, -CLAMP, CLAMP) + 1)


# gates of MLPs by the names of their activations in config.json
GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu,
    "clamped": _clamped,
}


def capped(x: jax.Array, bound: float) -> jax.Array:
    """Computes bound tanh(x / bound); a bound of 0 is none."""
    if not bound:
        return x
    return bound * jnp.tanh(x / bound)


def rope_cos_sin(
    positions: jax.Array, rope: Rope, head_dim: int, max_len: int
) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of RoPE, f32 [T, 1, 1, rotated dimensions / 2], at positions [T].
    max_len: see `Rope.frequencies`.

    The product with the identity makes XLA materialise the result; otherwise it would compute the
    cosines again in every layer.
    """
    wide, factor = rope.frequencies(head_dim, max_len)
    frequencies = wide.astype(np.float32)
    angle = positions[:, None].astype(jnp.float32) * frequencies
    both = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], 1) * factor
    both = jnp.dot(both, jnp.eye(both.shape[1]), precision=jax.lax.Precision.HIGHEST)[:, None, None]
    return both[..., : len(frequencies)], both[..., len(frequencies) :]
