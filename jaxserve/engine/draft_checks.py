"""Checks proposed tokens on the device: a step computes them beside the token before them, and
samples after each. What was sampled after the first is right as ever; what was sampled after a
proposed token counts if that token is what was sampled before it.

Rows of a sequence follow each other, in order of positions. `expected` [S] is the proposed token
that the next row of the same sequence computes; negative for none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def first_rows(slot: jax.Array) -> jax.Array:
    """Returns the first row [S] of each row's sequence. slot [S]."""
    number = jnp.arange(len(slot))
    return lax.cummax(jnp.where(_follows(slot), 0, number))


def counted(slot: jax.Array, token: jax.Array, expected: jax.Array) -> jax.Array:
    """Marks the rows [S] whose sampled token counts: all proposed tokens up to theirs are what was
    sampled. slot, token [S]: of each row, and sampled after it."""
    right = _follows(slot) & jnp.roll((expected >= 0) & (token == expected), 1)
    wrong = jnp.cumsum(~right)
    return wrong == wrong[first_rows(slot)]


def newest(slot: jax.Array, token: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the slots [S] of the rows with the newest token of their sequence; out of range for
    others."""
    counts = counted(slot, token, expected)
    goes_on = jnp.concatenate([(_follows(slot) & counts)[1:], jnp.zeros(1, bool)])
    return jnp.where(counts & ~goes_on, slot, 2**30)


def count_proposed(
    count: jax.Array, slot: jax.Array, expected: jax.Array, ids: jax.Array
) -> jax.Array:
    """Adds to `count` [S, V] of each row the proposed tokens of its sequence before it. ids [S]:
    index of `expected`, out of range for those of other ranks."""
    number = jnp.arange(len(slot))
    behind = (first_rows(slot)[:, None] <= number) & (number < number[:, None]) & (expected >= 0)
    return count.at[number[:, None], ids[None, :]].add(behind, mode="drop")


def _follows(slot: jax.Array) -> jax.Array:
    """Marks rows [S] of the same sequence as the row before."""
    return jnp.concatenate([jnp.zeros(1, bool), slot[1:] == slot[:-1]])
