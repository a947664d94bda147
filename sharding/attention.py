"""Attention of one layer over the KV pages of all lanes: writes the step's keys and values to their
pages, then attends.

Rows of local sequences attend over the pages of their lane alone. Those of spread sequences reach
KV on other lanes of their group by an exchange strategy (`exchange`), decodes perhaps by another
one than chunks; what goes by the same one shares its messages. The bytes that cross lanes depend
only on the number of tokens in the step, except with `pass_kv`, which moves KV (Medha, section
3.4).
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.exchange import EXCHANGES
from jaxserve.sharding.rows import Groups, split, write_kv
from jaxserve.sharding.visit import Put, put


def attention(
    q: jax.Array,
    kv: jax.Array | None,
    pages: KVPages,
    groups: Groups,
    attend: Attend,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """Attention of one layer on one lane and rank; runs inside shard_map.

    q [T, K, G, H], kv [T, K, 2, H]: of this lane's tokens, local rows first, then spread ones. kv
    None: there are only local rows, and theirs are on their pages.
    pages: the layer's KV pages, with a leading axis of 1. sinks f32 [K, G]: logit of a key without
    a value that every query of a head sees; None: there is no such key. Returns out,
    shaped like q but with the dimensions of values, and the pages with the new keys and values.
    """
    attend = dataclasses.replace(attend, implementation=groups.attention)
    spread_outs = []
    puts: list[Put] = []
    tokens = groups.local_tokens()
    if kv is not None:
        pages = write_kv(pages, kv[:tokens], groups.local)
    written = []
    for exchange, part, mine in _spread_parts(groups):
        assert kv is not None
        pages, finish = EXCHANGES[exchange](q[mine], kv[mine], pages, part, attend)
        written.append(finish)
    for finish in written:
        attended, late = finish(pages)
        puts += late
        spread_outs.append(with_sinks(*attended, sinks).astype(q.dtype))
    local = zip(groups.local, split(q[None, :tokens], groups.local, 1))
    outs = [
        with_sinks(*attend(x, rows, pages.take(0), groups.table, dtype=q.dtype), sinks)
        for rows, x in local
    ] + spread_outs
    out = jnp.concatenate(outs) if len(outs) > 1 else outs[0]
    if puts:
        pages = put(puts, pages, after=out)
    return out, pages


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Adds sinks [K, G] to the keys of attention that gave out [T, K, G, H] and lse [T, K, G]."""
    if sinks is None:
        return out
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype)


def _spread_parts(groups: Groups) -> list[tuple[str, Groups, slice]]:
    """Spread rows by exchange strategy: the strategy, its rows, and which of the lane's tokens they
    are."""
    out = []
    at = groups.local_tokens()
    for exchange, rows in itertools.groupby(groups.spread, lambda rows: rows.exchange):
        spread = tuple(rows)
        stop = at + sum(each.pos.size for each in spread) // groups.lanes.size
        out.append((exchange, dataclasses.replace(groups, spread=spread), slice(at, stop)))
        at = stop
    return out
