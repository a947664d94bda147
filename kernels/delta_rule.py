"""The gated delta rule (Yang et al., 2024), in XLA.

A head's state is a matrix [key, value]. A token multiplies it by a decay, then corrects what it
gives for the token's key k towards the token's value v: state += k (beta (v - k state))^T. Its
output is q state. Each of K key heads has G value heads with states of their own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PIECE = 32  # tokens that are computed together; a power of two
# rows of blocks on the diagonal that are inverted by powers, which in larger ones could grow beyond
# what f32 sums exactly
_BLOCK = 8


class DeltaTokens(NamedTuple):
    """Tokens, all f32: queries and keys [..., K, key], values [..., K, G, value]; beta and the
    logarithm of the decay [..., K, G]. A token with both 0 changes no state."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array


class _Pieces(NamedTuple):
    """Effect of a piece's tokens on any state. Outputs are from_state state + among new, where
    `new` = values - from_keys state are the corrections of all its tokens; the state after the
    piece is decay state + keys^T new. Arrays [K, G, PIECE, ...]; decay [K, G]."""

    values: jax.Array
    from_keys: jax.Array
    from_state: jax.Array
    among: jax.Array
    keys: jax.Array
    decay: jax.Array


_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def advance(tokens: DeltaTokens, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes one token each of R sequences, whose states are [R, K, G, key, value]: outputs [R,
    K, G, value] and states."""
    q, k, v, beta, log_decay = tokens
    decay = jnp.exp(log_decay)[..., None]
    both = _product("rknh,rkghv->nrkgv", jnp.stack([q, k], 2), states)  # reads states once
    from_state, known = both * decay
    new = beta[..., None] * (v - known)
    out = from_state + _product("rkh,rkh->rk", q, k)[..., None, None] * new
    return out, states * decay[..., None] + k[:, :, None, :, None] * new[:, :, :, None]


def advance_row(tokens: DeltaTokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes T consecutive tokens of a sequence, whose state is [K, G, key, value]: outputs [T,
    K, G, value] and the state after them.

    Tokens are taken in pieces: the corrections of a piece's tokens depend on each other by a
    triangular system, whose solution turns them into products of matrices.
    """
    T = len(tokens.q)
    size = min(PIECE, max(_BLOCK, 1 << (T - 1).bit_length()))
    cut = functools.partial(_cut, size=size)
    pieces = jax.vmap(_prepared)(DeltaTokens(*map(cut, tokens)))
    state, out = lax.scan(_run_piece, state, pieces)  # out [pieces, K, G, size, value]
    return jnp.moveaxis(out, 3, 1).reshape(-1, *tokens.v.shape[1:])[:T], state


def of_any_state(tokens: DeltaTokens) -> DeltaTokens:
    """Widens the values of tokens by `key` zeros. What such tokens make of `no_tokens` says what
    they make of every state: state = after[..., value:] before + after[..., :value], outputs alike.

    For tokens in pieces of n, a value head takes 2 key (3 key + n) FLOP more of each, and 2 key
    value where its output is completed: 139,264 in Qwen3-Next, where the pieces take 106,496 of
    one lane, and the projections of the layer 2,097,152.
    """
    zeros = jnp.zeros((*tokens.v.shape[:-1], tokens.k.shape[-1]), jnp.float32)
    return tokens._replace(v=jnp.concatenate([tokens.v, zeros], -1))


def no_tokens(shape: tuple[int, ...]) -> jax.Array:
    """Makes what no tokens make of any state of this shape [K, G, key, value]: [K, G, key, value +
    key], see `of_any_state`."""
    key, value = shape[-2:]
    return jnp.broadcast_to(jnp.eye(key, value + key, value), (*shape[:-1], value + key))


def complete(outputs: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the outputs [T, K, G, value] of tokens that began with a state [K, G, key, value].
    outputs [T, K, G, value + key]: see `of_any_state`."""
    value = before.shape[-1]
    from_state = _product("tkgh,kghv->tkgv", outputs[..., value:], before)
    return outputs[..., :value] + from_state


def follow(change: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the state [K, G, key, value] after tokens. change [K, G, key, value + key]: what they
    make of `no_tokens`; before: the state before them."""
    value = before.shape[-1]
    return _product("kghi,kgiv->kghv", change[..., value:], before) + change[..., :value]


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Cuts [T, ...] into pieces [n, size, ...]; tokens that fill up the last one change nothing."""
    padding = [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding).reshape(-1, size, *x.shape[1:])


def _prepared(tokens: DeltaTokens) -> _Pieces:
    """Solves a piece's system, for any state."""
    q, k = (jnp.moveaxis(x, 0, 1) for x in tokens[:2])  # [K, T, key]
    v = jnp.moveaxis(tokens.v, 0, 2)  # [K, G, T, value]
    beta, log_decay = (jnp.moveaxis(x, 0, 2)[..., None] for x in tokens[3:])  # [K, G, T, 1]
    total = jnp.cumsum(log_decay, 2)
    before = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    since = jnp.exp(jnp.where(before, total - total.swapaxes(2, 3), -jnp.inf))
    products = _product("nkth,kuh->nktu", jnp.stack([q, k]), k)[:, :, None] * since
    system = jnp.tril(beta * products[1], -1)
    wide_k = jnp.broadcast_to(k[:, None], (*v.shape[:3], k.shape[-1]))
    wanted = jnp.concatenate([beta * v, beta * jnp.exp(total) * wide_k], -1)
    solved = _matmul(_inverse(system), wanted)
    values, from_keys = jnp.split(solved, [v.shape[-1]], -1)
    last = total[:, :, -1:]
    return _Pieces(
        values,
        from_keys,
        jnp.exp(total) * q[:, None],
        products[0],
        jnp.exp(last - total) * wide_k,
        jnp.exp(last[..., 0, 0]),
    )


def _inverse(lower: jax.Array) -> jax.Array:
    """Inverts 1 + lower [..., n, n], strictly lower triangular, n a power of two from `_BLOCK` on:
    from the inverses of both halves on the diagonal. Products of matrices are several times as fast
    as a triangular solve, on CPUs too."""
    n = lower.shape[-1]
    if n == _BLOCK:
        power = lower
        inverse = jnp.eye(n) - lower
        for _ in range(2, n.bit_length()):
            power = _matmul(power, power)
            inverse = inverse + _matmul(inverse, power)
        return inverse
    half = n // 2
    first, last = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    below = -_matmul(last, _matmul(lower[..., half:, :half], first))
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([below, last], -1)], -2)


def _run_piece(state: jax.Array, piece: _Pieces) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a piece, and its outputs [K, G, PIECE, value]."""
    both = jnp.concatenate([piece.from_keys, piece.from_state], 2)
    known, from_state = jnp.split(_product("kgth,kghv->kgtv", both, state), 2, 2)
    new = piece.values - known
    out = from_state + _product("kgtu,kguv->kgtv", piece.among, new)
    added = _product("kgth,kgtv->kghv", piece.keys, new)
    return piece.decay[..., None, None] * state + added, out
