"""Products of groups of rows with a matrix each, by the kernel for Hopper that comes with jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

from jaxserve.kernels.kv_pages import COMPUTE_DTYPES

# tile of a thread block: of these sizes the first that divides a matrix; and how many of its steps
# along K are loaded at once
BLOCK_M = 64
BLOCKS_N = (128, 192, 64)
BLOCKS_K = (64, 32)
STEPS = 4


def check(x: Any, w: Any) -> None:
    """Checks that the kernel multiplies x [T, K] by w [E, K, N]: arrays, or anything with shape and
    dtype. Errors: NotImplementedError, with the reason."""
    if x.dtype != w.dtype or x.dtype not in COMPUTE_DTYPES:
        raise NotImplementedError(f"products of {x.dtype} and {w.dtype}")
    for name, size, blocks in (("inputs", w.shape[1], BLOCKS_K), ("outputs", w.shape[2], BLOCKS_N)):
        if not _block(size, blocks):
            raise NotImplementedError(f"{size} {name}, which are no multiple of {min(blocks)}")


def _block(size: int, blocks: Sequence[int]) -> int:
    """Returns the first of these sizes of a tile that divides a matrix's; 0 where none does."""
    return next((block for block in blocks if size % block == 0), 0)


def grouped(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    """Multiplies groups of rows, as `ops.grouped`. Errors: NotImplementedError, with the reason."""
    check(x, w)
    y = ragged_dot(
        x,
        w,
        group_sizes=counts,
        block_m=BLOCK_M,
        block_n=_block(w.shape[2], BLOCKS_N),
        block_k=_block(w.shape[1], BLOCKS_K),
        max_concurrent_steps=STEPS,
        grid_block_n=1,
    )
    used = jnp.arange(len(x)) < counts.sum()  # the kernel does not write the others
    return jnp.where(used[:, None], y, 0)
