"""Copies the recurrent states of a slot to KV pages of its lane and back: checkpoints that later
sequences go on from (`cache.state_checkpoints`).

The bytes of the states of a stage's layers, one after the other, fill parts of pages: pool by pool,
in each as many pages as a checkpoint has. Nothing is rounded: numbers wider than those of pages are
cut into several, narrower ones are widened to f32 first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.page_copy import bits, read_pages, write_pages
from jaxserve.models.deltanet import States


def save_states(
    pools: Sequence[KVPages], states: Sequence[States], ints: jax.Array
) -> list[KVPages]:
    """Inside shard_map: writes the states of a slot to pages. ints [1, 1 + pages]: the slot, and
    pages, which differ and are out of range where this lane has nothing to save. Returns the
    pools."""
    slot, ids = ints[0, 0], ints[0, 1:]
    kv = pools[0].kv
    leaves = [leaf[0, slot] for leaf in jax.tree.leaves(list(states))]
    words = jnp.concatenate([_to_words(leaf, kv.dtype) for leaf in leaves])
    part = (len(ids), *kv.shape[2:])
    room = len(pools) * math.prod(part)
    parts = jnp.pad(words, (0, room - len(words))).reshape(len(pools), *part)
    return [
        pool._replace(kv=write_pages(KVPages(pool.kv), ids, KVPages(values)).kv)
        for pool, values in zip(pools, parts)
    ]


def restore_states(
    states: Sequence[States], pools: Sequence[KVPages], ints: jax.Array
) -> list[States]:
    """Inside shard_map: reads the states of a slot from pages. ints [1, 1 + pages]: the slot, out
    of range where this lane has nothing to restore, and pages, which are in range. Returns the
    states."""
    slot, ids = ints[0, 0], ints[0, 1:]
    word = pools[0].kv.dtype
    read = [bits(read_pages(KVPages(pool.kv), ids).kv).reshape(-1) for pool in pools]
    words = jnp.concatenate(read)
    leaves, tree = jax.tree.flatten(list(states))
    out = []
    at = 0
    for leaf in leaves:
        shape = leaf.shape[2:]
        kept = _kept(leaf.dtype, word)
        count = math.prod(shape) * kept.itemsize // word.itemsize
        value = words[at : at + count].view(kept).reshape(shape).astype(leaf.dtype)
        out.append(leaf.at[0, slot].set(value, mode="drop"))
        at += count
    return jax.tree.unflatten(tree, out)


def _kept(dtype: Any, word: Any) -> Any:
    """Returns the type that numbers are kept in: their own, or f32 where those of pages are
    wider."""
    narrow = jnp.dtype(dtype).itemsize < jnp.dtype(word).itemsize
    return jnp.dtype(jnp.float32 if narrow else dtype)


def _to_words(x: jax.Array, word: Any) -> jax.Array:
    """Returns the bits of numbers, one after the other, in words of the size of those of pages."""
    return x.astype(_kept(x.dtype, word)).reshape(-1).view(f"uint{8 * word.itemsize}")
