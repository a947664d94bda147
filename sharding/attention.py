"""Attention of one layer over the KV pages of all lanes: writes the step's keys and values to their
pages, then attends.

Rows of local sequences attend over the pages of their lane alone. Settled rows of spread sequences
reach KV on other lanes of their group by the exchange strategy that the program was compiled for
(`exchange`). The keys and values of other spread rows, decodes among them, may belong on any lane:
beside settled rows these go by `gather`; alone by the program's strategy, and where that is a ring,
their keys and values are gathered first, which are few. The bytes that cross lanes depend only on
the number of tokens in the step, except with `pass_kv`, which moves KV (Medha, section 3.4).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.lanes import exchange as strategies
from jaxserve.sharding.attend import Attend
from jaxserve.sharding.exchange import EXCHANGES, write_gathered
from jaxserve.sharding.rows import Groups, split, write_kv
from jaxserve.sharding.visit import Put, put


def attention(
    q: jax.Array,
    kv: jax.Array,
    pages: KVPages,
    groups: Groups,
    attend: Attend,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KVPages]:
    """Attention of one layer on one lane and rank; runs inside shard_map.

    q [T, K, G, H], kv [T, K, 2, H]: of this lane's tokens, local rows first, then spread ones.
    pages: the layer's KV pages, with a leading axis of 1. sinks f32 [K, G]: logit of a key without
    a value that every query of a head sees; None: there is no such key. Returns out,
    shaped like q but with the dimensions of values, and the pages with the new keys and values.
    """
    attend = dataclasses.replace(attend, implementation=groups.attention)
    parts = _spread_parts(groups)
    spread_outs = []
    puts: list[Put] = []
    tokens = groups.local_tokens()
    pages = write_kv(pages, kv[:tokens], groups.local)
    # Everything is written before anything is read, or after everything was: XLA would otherwise
    # copy the pool for the readers. Exchanges without settled rows write themselves what others
    # send, or return it.
    for exchange, part, mine in parts:
        if not strategies.EXCHANGES[exchange].settled:
            continue
        if part.settled:
            own = tuple(rows.computed_by(groups.lanes.index()) for rows in part.spread)
            pages = write_kv(pages, kv[mine], own)
        else:
            pages = write_gathered(kv[mine], pages, part)
    for exchange, part, mine in parts:
        attended, pages, late = EXCHANGES[exchange](q[mine], kv[mine], pages, part, attend)
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
    """Spread rows by exchange strategy, rows that are not settled first: the strategy, its rows,
    and which of the lane's tokens they are."""
    out = []
    at = groups.local_tokens()
    for settled in (False, True):
        spread = tuple(rows for rows in groups.spread if rows.settled == settled)
        if spread:
            stop = at + sum(rows.pos.size for rows in spread) // groups.lanes.size
            exchange = groups.exchange
            if groups.settled and not settled:
                exchange = DEFAULT_EXCHANGE
            out.append((exchange, dataclasses.replace(groups, spread=spread), slice(at, stop)))
            at = stop
    return out
