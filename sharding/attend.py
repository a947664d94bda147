"""Attention of a layer's tokens over pages of this lane, as the exchanges call it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.rows import Rows

Attended = tuple[jax.Array, jax.Array]  # out [T, K, G, H] f32, lse [T, K, G] f32


@dataclasses.dataclass(frozen=True)
class Attend:
    """Attends over pages in one layer. Tokens are flat: q [R * T, K, G, H] -> out [R * T, K, G, H],
    lse [R * T, K, G] f32. scale: factor on q k. window: sliding window in tokens, or None. softcap:
    bound of the logits, 0: none; value_dim: numbers of a key that are its value, None: pages have
    values besides; see `kernels.reference`. implementation: see `ops.attend`."""

    scale: float
    window: int | None = None
    softcap: float = 0
    value_dim: int | None = None
    implementation: str | None = None

    def __call__(
        self,
        q: jax.Array,
        rows: Rows,
        pages: KVPages,
        table: jax.Array,
        before: tuple[jax.Array, jax.Array] | None = None,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, jax.Array]:
        """Calls `ops.attend`. before: (out, lse) to merge with, if any; dtype: of `out`."""
        shaped = lambda x: x.reshape(*rows.shape, *x.shape[1:])
        out, lse = ops.attend(
            shaped(q),
            rows.pos,
            pages,
            table,
            rows.slot,
            rows.entries,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            value_dim=self.value_dim,
            dtype=dtype,
            before=jax.tree.map(shaped, before),
            implementation=self.implementation,
        )
        return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])

    def to_earlier(
        self, q: jax.Array, rows: Rows, pages: KVPages, table: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to the tokens before a query's own, which need not be on a page yet."""
        window = None if self.window is None else self.window - 1
        before = dataclasses.replace(rows, pos=jnp.maximum(rows.pos - 1, -1))
        return dataclasses.replace(self, window=window)(q, before, pages, table)

    def to_itself(self, q: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attends of each token q [T, K, G, H] to its own key and value kv [T, K, 2, H] alone."""
        lse = jnp.einsum("tkgh,tkh->tkg", q, kv[:, :, 0], preferred_element_type=jnp.float32)
        lse = lse * self.scale
        if self.softcap:
            lse = self.softcap * jnp.tanh(lse / self.softcap)
        value = kv[:, :, None, -1, : self.value_dim].astype(jnp.float32)
        return jnp.broadcast_to(value, (*q.shape[:-1], value.shape[-1])), lse
