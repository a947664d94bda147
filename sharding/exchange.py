"""How the queries of spread sequences and the blocks of KV on other lanes meet: strategies behind
one signature, chosen per program.

`gather`: queries go to all lanes, partials come home (Medha's KVP). `pass_q`: the same, in hops
around a ring of lanes, so that each hop's attention hides the next hop's transfer (ring pass-Q).
`pass_kv`: queries stay, blocks go round (ring pass-KV), in pieces of equal size, so that how long
contexts are is no shape of the program. What is cheapest depends on how many tokens are new and how
many are cached; the answer is the same. `gather` writes the keys and values that it gathers; around
a ring they are on their pages already.

Everything here runs inside shard_map, on one lane and one rank: each rank's heads have a ring of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import merge
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rows import Groups, Rows, write

PIECE = 2048  # tokens of KV that a lane sends on at once
# For GPUs: XLA's scheduler takes custom calls, attention among them, for short, and would end a hop
# before the attention that hides it.
# From jax 0.12 on nothing is asynchronous without it.
COMPILER_OPTIONS: dict[str, Any] = (
    {"xla_gpu_enable_latency_hiding_scheduler": False} if jax.__version_info__ < (0, 12) else {}
)
# q [R * T, K, G, H], rows, pages, table, before -> out, lse
Attend = Callable[..., tuple[jax.Array, jax.Array]]


def gather(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[jax.Array, KVPages]:
    """One all-gather, one all-to-all; their bytes depend on the new tokens only."""
    lanes = lax.axis_size(KVP)
    far = lax.all_gather(jnp.concatenate([q, kv], 2), KVP)  # [lanes, T, K, G + 2, H]
    parts = split(far, groups.spread, lanes)
    for rows, x in zip(groups.spread, parts):
        pages = write(pages, x[:, :, -2:], (rows,))
    partials = [
        attend(x[:, :, :-2], rows, pages.take(0), groups.table)
        for rows, x in zip(groups.spread, parts)
    ]
    home = lambda x: x.reshape(lanes, -1, *x.shape[1:])  # the lanes' rows follow each other
    return _come_home(
        *(jnp.concatenate([home(x) for x in some], 1) for some in zip(*partials))
    ), pages


def pass_q(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[jax.Array, KVPages]:
    """Queries go round in lanes - 1 hops; the partials of all hops come home in one all-to-all
    (context parallel paper, Alg. 3 and 4)."""
    lanes = lax.axis_size(KVP)
    lane = lax.axis_index(KVP)
    found = []
    for hop in range(lanes):
        later = _onward(q) if hop < lanes - 1 else q  # issued before what hides it
        whose = (lane - hop) % lanes
        partials = [
            attend(x, rows.of(whose), pages.take(0), groups.table)
            for rows, x in zip(groups.spread, split(q[None], groups.spread, lanes))
        ]
        found.append([jnp.concatenate(x) for x in zip(*partials)])
        q = later
    by_lane = (lane - jnp.arange(lanes)) % lanes  # the hop at which a lane's queries were here
    return _come_home(*(jnp.stack(x)[by_lane] for x in zip(*found))), pages


def pass_kv(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[jax.Array, KVPages]:
    """Blocks go round in lanes - 1 hops, piece by piece (context parallel paper, Alg. 2)."""
    lanes = lax.axis_size(KVP)
    lane = lax.axis_index(KVP)
    own = [rows.of(lane) for rows in groups.spread]
    width = max(1, PIECE // pages.kv.shape[4])  # pages of a piece
    held = jnp.zeros((groups.table.shape[1], lanes), jnp.int32)
    for rows in groups.spread:
        # [slots, lanes], of the sequences of this step
        held = held.at[rows.slot].max(rows.everywhere)
    ends = jnp.cumsum(held, 0)  # all their blocks on a lane stand in one line
    queries = split(q[None], groups.spread, lanes)

    def piece(
        index: jax.Array, before: list[tuple[jax.Array, jax.Array]]
    ) -> list[tuple[jax.Array, jax.Array]]:
        first = index * width
        here = _piece(pages, groups.table, held[:, lane], ends[:, lane], first + jnp.arange(width))
        for hop in range(lanes):
            # issued before what hides it
            later = jax.tree.map(_onward, here) if hop < lanes - 1 else here
            whose, (some, blocks) = (lane - hop) % lanes, here
            stop = jnp.clip(ends[:, whose] - first, 0, width)
            start = jnp.clip(ends[:, whose] - held[:, whose] - first, 0, width)
            entry = jnp.minimum(start[:, None] + jnp.arange(width), width - 1)
            table = jnp.stack([entry, blocks[entry]])
            count = stop - start
            before = [
                attend(x, rows.holding(count[rows.slot]), some, table, before=last)
                for x, rows, last in zip(queries, own, before)
            ]
            here = later
        return before

    nothing = [
        (x.astype(jnp.float32) * 0, x[..., 0].astype(jnp.float32) * 0 - jnp.inf) for x in queries
    ]
    outs = lax.fori_loop(0, -(-ends[-1].max() // width), piece, nothing)
    return jnp.concatenate([out for out, _ in outs]), pages


EXCHANGES: dict[str, Callable[..., tuple[jax.Array, KVPages]]] = {
    "gather": gather,
    "pass_q": pass_q,
    "pass_kv": pass_kv,
}


def split(x: jax.Array, groups: tuple[Rows, ...], lanes: int) -> list[jax.Array]:
    """x [n, T, ...] of n lanes -> per group [n * R * T, ...]; a group has the rows of `lanes`
    lanes."""
    out = []
    at = 0
    for rows in groups:
        count = rows.pos.size // lanes
        out.append(x[:, at : at + count].reshape(len(x) * count, *x.shape[2:]))
        at += count
    return out


def _piece(
    pages: KVPages, table: jax.Array, held: jax.Array, ends: jax.Array, place: jax.Array
) -> tuple[KVPages, jax.Array]:
    """The pages at these places [n] of this lane's line, and their blocks; what is beyond the
    line's end does not matter."""
    slot = jnp.minimum(
        jnp.searchsorted(ends, place, side="right", method="compare_all"), len(ends) - 1
    )
    entry = jnp.clip(place - ends[slot] + held[slot], 0, table.shape[2] - 1)
    return pages.take((0, table[0, slot, entry])), table[1, slot, entry]


def _onward(x: jax.Array) -> jax.Array:
    lanes = lax.axis_size(KVP)
    return lax.ppermute(x, KVP, [(lane, (lane + 1) % lanes) for lane in range(lanes)])


def _come_home(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Partials [lanes, T, K, G, H], [lanes, T, K, G] of all lanes' tokens over this lane's blocks
    -> merged out of this lane's tokens."""
    pieces: Any = lax.all_to_all(jnp.concatenate([out, lse[..., None]], -1), KVP, 0, 0)
    return merge(pieces[..., :-1], pieces[..., -1])[0]
