"""Copies of recurrent states on KV pages give back every bit, whatever the types of both are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.state_copies import restore_states, save_states
from jaxserve.kernels.kv_pages import FP8, KVPages, pool_shapes
from jaxserve.models.deltanet import States

PAGES, HEADS, SIZE, NUMBERS = 12, 2, 4, 8
SLOTS = 3
BEYOND = 2**30


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> jax.Array:
    """Numbers of any bits, with infinities and every kind of NaN among them."""
    item = np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (*shape, item), np.uint8)
    return jnp.asarray(raw.view(dtype)[..., 0])


def raw(x: jax.Array) -> bytes:
    return np.asarray(x).tobytes()


def finite(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("kv", [jnp.float32, jnp.bfloat16, jnp.float16, FP8])
@pytest.mark.parametrize("hidden", [jnp.float32, jnp.bfloat16])
def test_a_slot_gets_back_what_another_had(kv, hidden):
    rng = np.random.default_rng(0)
    shape = (1, PAGES, HEADS, 2, SIZE, NUMBERS)
    like = pool_shapes(shape, kv)
    pools = [
        KVPages(
            bits(rng, shape, np.dtype(kv)),
            None if like.scales is None else finite(rng, shape[:-1], like.scales.dtype),
        )
        for _ in range(2)
    ]
    states = [
        States(
            bits(rng, (1, SLOTS, 2, 2, 4, 3), np.dtype(np.float32)),
            # the last inputs may be widened: no NaN, which has many forms
            finite(rng, (1, SLOTS, 2, 3, 5), hidden),
        )
        for _ in range(3)
    ]
    parts = 4
    ids = np.array([7, 2, 11, 5], np.int32)
    before = jax.tree.map(np.asarray, pools)
    save = jax.jit(save_states, donate_argnums=0)  # as stages do: a copy would change some NaNs
    saved = save(pools, states, jnp.array([[1, *ids]]))
    others = np.setdiff1d(np.arange(PAGES), ids)
    for old, new in zip(before, saved):
        assert raw(np.asarray(new.kv)[0, others]) == raw(old.kv[0, others])
        if old.scales is not None:
            assert raw(new.scales) == raw(old.scales)
    nothing = jnp.array([[0, *(BEYOND + np.arange(parts))]])
    before = [raw(pool.kv) for pool in saved]
    saved = save(saved, states, nothing)
    assert [raw(pool.kv) for pool in saved] == before
    blank = jax.tree.map(jnp.zeros_like, states)
    got = jax.jit(restore_states)(blank, saved, jnp.array([[2, *ids]]))
    for old, new in zip(states, got):
        for source, target in zip(old, new):
            assert raw(np.asarray(target)[0, 2]) == raw(np.asarray(source)[0, 1])
            assert not np.asarray(target[0, :2]).any()
    unchanged = jax.jit(restore_states)(blank, saved, jnp.array([[BEYOND, *ids]]))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(unchanged))
