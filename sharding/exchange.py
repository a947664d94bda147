"""Exchange strategies: how queries of spread sequences attend over KV blocks on other lanes. One
signature; a program is compiled for one of them, or for one of chunks and one of decodes.

- `gather`: all-gathers queries, keys and values, attends over the local pages, and sends partial
  results back with an all-to-all (KVP of Medha).
- `pass_q`: queries travel around a ring of lanes, so that each hop's attention hides the next hop's
  transfer (ring pass-Q of the Context Parallelism paper).
- `pass_kv`: KV blocks travel around the ring in chunks of equal size, so that the program does not
  depend on the length of contexts (ring pass-KV of the same paper).
- `visit`: queries go only to lanes that hold blocks of their sequence (`sharding.visit`).

Which is fastest depends on the number of new and of cached tokens, and on how many lanes hold a
sequence; results are equal.

A strategy first writes new keys and values to their pages, and returns what attends once those of
all strategies of a step are written: XLA would otherwise copy the pool for the readers. `visit` may
instead have some written once everything was read.

Everything here runs inside shard_map, on one lane and one rank; each rank's heads have their own
ring. Lanes meet in groups (`lane_groups`): `lanes` are those of one group, and `lane` is counted in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import merge
from jaxserve.lanes.exchange import PIECE_TOKENS
from jaxserve.sharding.attend import Attend, Attended
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.rows import Groups, split, write_kv
from jaxserve.sharding.visit import Finish, Put, visit

# q [T, K, G, H], kv [T, K, 2, H] of this lane's tokens in the spread rows of `Groups`
Exchange = Callable[[jax.Array, jax.Array, KVPages, Groups, Attend], tuple[KVPages, Finish]]


def compiler_options(exchanges: Collection[str]) -> dict[str, Any]:
    """Options for GPUs of a program with these exchanges.

    XLA's latency hiding scheduler makes transfers asynchronous, and so hides partial results of
    `visit` that go home. Before jax 0.12 it takes custom calls (attention) for short, and waits for
    a hop of a ring before the attention that should hide it; from 0.12 on, no transfer is
    asynchronous without it.
    """
    if jax.__version_info__ >= (0, 12):
        return {}
    return {"xla_gpu_enable_latency_hiding_scheduler": "visit" in exchanges}


def gather(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[KVPages, Finish]:
    """Attends by one all-gather and one all-to-all, whose bytes depend only on the new tokens."""
    lanes = groups.lanes
    G = q.shape[2]
    gathered = lanes.gather(jnp.concatenate([q, kv], 2))  # [lanes, T, K, G + vectors, H]
    for rows, x in zip(groups.spread, split(gathered[:, :, :, G:], groups.spread, lanes.size)):
        pages = write_kv(pages, x, (rows,))
    queries = split(gathered[:, :, :, :G], groups.spread, lanes.size)

    def finish(pages: KVPages) -> tuple[Attended, list[Put]]:
        partials = [
            attend(x, rows, pages.take(0), groups.table) for rows, x in zip(groups.spread, queries)
        ]
        by_lane = lambda x: x.reshape(lanes.size, -1, *x.shape[1:])  # rows are in order of lanes
        outs, lses = (jnp.concatenate([by_lane(x) for x in xs], 1) for xs in zip(*partials))
        return _merge_across(lanes, outs, lses), []

    return pages, finish


def pass_q(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[KVPages, Finish]:
    """Ring pass-Q: queries travel in lanes - 1 hops; the partial results of all hops return in one
    all-to-all (Context Parallelism paper, Alg. 3 and 4)."""
    pages = _write(kv, pages, groups)
    return pages, lambda pages: (_ring_of_queries(q, pages, groups, attend), [])


def _ring_of_queries(q: jax.Array, pages: KVPages, groups: Groups, attend: Attend) -> Attended:
    lanes = groups.lanes.size
    lane = groups.lanes.index()
    by_hop = []
    for hop in range(lanes):
        # before the attention that hides it
        arriving = q
        if hop < lanes - 1:
            arriving = groups.lanes.send_to_next(q)
        owner = (lane - hop) % lanes
        partials = [
            attend(x, rows.computed_by(owner), pages.take(0), groups.table)
            for rows, x in zip(groups.spread, split(q[None], groups.spread, lanes))
        ]
        by_hop.append([jnp.concatenate(x) for x in zip(*partials)])
        q = arriving
    hop_of_lane = (lane - jnp.arange(lanes)) % lanes  # the hop at which a lane's queries were here
    outs, lses = (jnp.stack(x)[hop_of_lane] for x in zip(*by_hop))
    return _merge_across(groups.lanes, outs, lses)


def pass_kv(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[KVPages, Finish]:
    """Ring pass-KV: blocks travel in lanes - 1 hops, chunk by chunk (Context Parallelism paper,
    Alg. 2)."""
    pages = _write(kv, pages, groups)
    return pages, lambda pages: (_ring_of_blocks(q, pages, groups, attend), [])


def _ring_of_blocks(q: jax.Array, pages: KVPages, groups: Groups, attend: Attend) -> Attended:
    lanes = groups.lanes.size
    lane = groups.lanes.index()
    own = [rows.computed_by(lane) for rows in groups.spread]
    width = max(1, PIECE_TOKENS // pages.kv.shape[4])  # pages of a chunk
    # entries of the sequences of this step on every lane
    entries = jnp.zeros((groups.table.shape[1], lanes), jnp.int32)  # [slots, lanes]
    for rows in groups.spread:
        entries = entries.at[rows.slot].max(rows.entries_per_lane)
    ends = jnp.cumsum(entries, 0)  # where each sequence's blocks end among all blocks of a lane
    queries = split(q[None], groups.spread, lanes)

    def chunk(
        index: jax.Array, before: list[tuple[jax.Array, jax.Array]]
    ) -> list[tuple[jax.Array, jax.Array]]:
        first = index * width
        here = _kv_chunk(
            pages, groups.table, entries[:, lane], ends[:, lane], first + jnp.arange(width)
        )
        for hop in range(lanes):
            # before the attention that hides it
            arriving = here
            if hop < lanes - 1:
                arriving = jax.tree.map(groups.lanes.send_to_next, here)
            owner = (lane - hop) % lanes
            chunk_pages, blocks = here
            stop = jnp.clip(ends[:, owner] - first, 0, width)
            start = jnp.clip(ends[:, owner] - entries[:, owner] - first, 0, width)
            entry = jnp.minimum(start[:, None] + jnp.arange(width), width - 1)
            table = jnp.stack([entry, blocks[entry]])
            count = stop - start
            before = [
                attend(x, rows.with_entries(count[rows.slot]), chunk_pages, table, before=last)
                for x, rows, last in zip(queries, own, before)
            ]
            here = arriving
        return before

    nothing = [
        (
            x[..., : attend.value_dim].astype(jnp.float32) * 0,
            x[..., 0].astype(jnp.float32) * 0 - jnp.inf,
        )
        for x in queries
    ]
    chunks = groups.lanes.most(-(-ends[-1].max() // width))
    outs = lax.fori_loop(0, chunks, chunk, nothing)
    out, lse = (jnp.concatenate(x) for x in zip(*outs))
    return out, lse


EXCHANGES: dict[str, Exchange] = {
    DEFAULT_EXCHANGE: gather,
    "pass_q": pass_q,
    "pass_kv": pass_kv,
    "visit": visit,
}


def _write(kv: jax.Array, pages: KVPages, groups: Groups) -> KVPages:
    """Writes new keys and values [T, K, 2, H] to their pages: settled ones here, others on
    whichever lane of the group these are, for which all lanes get them in an all-gather."""
    lanes = groups.lanes
    for rows, x in zip(groups.spread, split(kv[None], groups.spread, lanes.size)):
        if rows.settled:
            pages = write_kv(pages, x, (rows.computed_by(lanes.index()),))
        else:
            pages = write_kv(pages, lanes.gather_rows(x), (rows,))
    return pages


def _kv_chunk(
    pages: KVPages, table: jax.Array, entries: jax.Array, ends: jax.Array, at: jax.Array
) -> tuple[KVPages, jax.Array]:
    """Pages, and their blocks, number `at` [n] among all blocks of this lane, counted sequence by
    sequence; numbers past the last give any."""
    slot = jnp.minimum(
        jnp.searchsorted(ends, at, side="right", method="compare_all"), len(ends) - 1
    )
    entry = jnp.clip(at - ends[slot] + entries[slot], 0, table.shape[2] - 1)
    return pages.take((0, table[0, slot, entry])), table[1, slot, entry]


def _merge_across(lanes: LaneGroups, out: jax.Array, lse: jax.Array) -> Attended:
    """Sends partial results (out [lanes, T, K, G, H], lse [lanes, T, K, G]: all tokens of the group
    over this lane's blocks) back to the tokens' lanes, and merges those of this lane's tokens."""
    partials = lanes.all_to_all(jnp.concatenate([out, lse[..., None]], -1))
    return merge(partials[..., :-1], partials[..., -1])
