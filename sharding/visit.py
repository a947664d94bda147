"""Exchange `visit`: queries go only to the lanes that hold blocks of their sequence (TokenLake,
section 3.4). Its four functions have the names of the paper's data plane (Fig. 5); each is a named
scope of the traced program, by which profiles show it.

A lane sends as many rows to each other lane of its group as the program has room for: one
all-to-all of queries, one of partial results, which go home beside the lane's own attention, and
one of new keys and values. Where all rows are decodes, a token attends to itself at home, pages are
read for earlier tokens alone, and keys and values are put once everything was read: no attention
waits for their transfer. Tokens of prompts attend to each other across lanes, so theirs are put
first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.kv_pages import KVPages
from jaxserve.kernels.merge import merge
from jaxserve.lanes.exchange import rows_with_room
from jaxserve.sharding.attend import Attend, Attended
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.rows import Groups, Rows, split, write_kv


@dataclasses.dataclass(frozen=True)
class Visits:
    """Rows of one length on their way. own [R, T]: those that this lane computes. to [lanes,
    room]: numbers of own rows that visit each lane; R: none. visitors [lanes * room, T]: rows of
    other lanes that visit this one, in order of lanes."""

    own: Rows
    to: jax.Array
    visitors: Rows

    def send(self, x: jax.Array) -> jax.Array:
        """Returns tokens x [R * T, ...] of own rows as they are sent: [lanes, room * T, ...]."""
        rows = x.reshape(*self.own.shape, *x.shape[1:])
        sent = rows[jnp.minimum(self.to, len(rows) - 1)]
        return sent.reshape(len(self.to), -1, *x.shape[1:])

    def take_home(self, x: jax.Array, nothing: float) -> jax.Array:
        """Places what came back for own rows, x [lanes * room * T, ...], by lane: [lanes, R * T,
        ...], `nothing` for rows that did not visit a lane."""
        count, width = self.own.shape
        lanes, room = self.to.shape
        out = jnp.full((lanes, count, width, *x.shape[1:]), nothing, x.dtype)
        rows = x.reshape(lanes, room, width, *x.shape[1:])
        out = out.at[jnp.arange(lanes)[:, None], self.to].set(rows, mode="drop")
        return out.reshape(lanes, count * width, *x.shape[1:])


Put = tuple[jax.Array, Rows]  # keys and values [R * T, K, 2, H] to write, and their rows
# attends over pages; returns keys and values too that are to be written when all was read
Finish = Callable[[KVPages], tuple[Attended, list[Put]]]


def visit(
    q: jax.Array, kv: jax.Array, pages: KVPages, groups: Groups, attend: Attend
) -> tuple[KVPages, Finish]:
    """Attends by all-to-alls of `groups.room` of each lane's rows per pair of lanes."""
    lanes = groups.lanes
    visits = [init_query(rows, lanes, groups.room) for rows in groups.spread]
    puts = init_transfer(kv, visits, lanes)
    if all(each.own.shape[1] == 1 for each in visits):
        return pages, lambda pages: (query(q, kv, pages, groups, visits, attend), puts)
    pages = put(puts, pages)
    return pages, lambda pages: (query(q, None, pages, groups, visits, attend), [])


@jax.named_scope("init_query")
def init_query(rows: Rows, lanes: LaneGroups, room: float) -> Visits:
    """Plans which rows visit which lanes of the group: those with tokens visit each other lane that
    holds blocks of their sequence. room: share of a lane's rows that may visit another one."""
    assert rows.entries_per_lane is not None
    me = lanes.index()
    own = rows.computed_by(me)
    count = len(own.slot)
    lane = jnp.arange(lanes.size)
    holds = (rows.entries_per_lane > 0) & (rows.pos[:, :1] >= 0)
    visits = holds.reshape(-1, count, lanes.size) & (lane[:, None, None] != lane)
    # numbers of the rows of each home lane [home, room, lane], those that visit first
    number = jnp.argsort(~visits, 1)[:, : rows_with_room(room, count)]
    number = jnp.where(jnp.take_along_axis(visits, number, 1), number, count)
    here = number[:, :, me]
    among_all = jnp.where(here < count, lane[:, None] * count + here, len(rows.slot))
    return Visits(own, number[me].T, rows.pick(among_all.reshape(-1)))


@jax.named_scope("init_transfer")
def init_transfer(kv: jax.Array, visits: Sequence[Visits], lanes: LaneGroups) -> list[Put]:
    """Sends new keys and values [T, K, 2, H] to the lanes that their rows visit; a token's page is
    on one of these, or here."""
    mine = split(kv[None], [each.own for each in visits], 1)
    came = _exchange(mine, visits, lanes)
    own = [(x, each.own) for x, each in zip(mine, visits)]
    return own + [(x, each.visitors) for x, each in zip(came, visits)]


@jax.named_scope("put")
def put(puts: Sequence[Put], pages: KVPages, after: jax.Array | None = None) -> KVPages:
    """Writes keys and values to their pages. after: a result of all that reads the pages before;
    without this order XLA may write first, to a copy of the pool for the readers."""
    kv = jnp.concatenate([x for x, _ in puts])
    if after is not None:
        kv = lax.platform_dependent(kv, after, cpu=_sum_first, default=_barrier)
    return write_kv(pages, kv, tuple(rows for _, rows in puts))


def _barrier(x: jax.Array, after: jax.Array) -> jax.Array:
    """Returns x, not before `after` is computed."""
    return lax.optimization_barrier((x, after))[0]


def _sum_first(x: jax.Array, after: jax.Array) -> jax.Array:
    """Returns x, not before `after` is computed. XLA's CPU compiler drops barriers before it looks
    where it must copy: here x depends on a number, which is 0."""
    zero = jnp.minimum(jnp.abs(jnp.nan_to_num(after.astype(jnp.float32).sum())), 0)
    return x + zero.astype(x.dtype)


@jax.named_scope("query")
def query(
    q: jax.Array,
    kv: jax.Array | None,
    pages: KVPages,
    groups: Groups,
    visits: Sequence[Visits],
    attend: Attend,
) -> Attended:
    """Attention of tokens q [T, K, G, H] over the pages of all lanes. kv [T, K, 2, H]: keys and
    values of these tokens that are not on pages yet; None: they are."""
    over_pages = attend if kv is None else attend.to_earlier
    lanes = groups.lanes
    mine = split(q[None], [each.own for each in visits], 1)
    came = _exchange(mine, visits, lanes)
    partials = [
        over_pages(x, each.visitors, pages.take(0), groups.table) for x, each in zip(came, visits)
    ]
    packed = [jnp.concatenate([out, lse[..., None]], -1) for out, lse in partials]
    by_lane = lambda x: x.reshape(lanes.size, -1, *x.shape[1:])
    home = lanes.all_to_all(jnp.concatenate([by_lane(x) for x in packed], 1))
    arrived = split(home, [each.visitors for each in visits], lanes.size)
    own = [[over_pages(x, each.own, pages.take(0), groups.table)] for x, each in zip(mine, visits)]
    if kv is not None:
        new = split(kv[None], [each.own for each in visits], 1)
        for parts, *tokens in zip(own, mine, new):
            parts.append(attend.to_itself(*tokens))
    merged = []
    for each, parts, x in zip(visits, own, arrived):
        out, lse = (jnp.stack(y) for y in zip(*parts))
        out = jnp.concatenate([each.take_home(x[..., :-1], 0), out])
        lse = jnp.concatenate([each.take_home(x[..., -1], -jnp.inf), lse])
        merged.append(merge(out, lse))
    out, lse = (jnp.concatenate(x) for x in zip(*merged))
    return out, lse


def _exchange(
    mine: Sequence[jax.Array], visits: Sequence[Visits], lanes: LaneGroups
) -> list[jax.Array]:
    """Sends tokens of own rows, by group of rows, to the lanes that they visit -> those of the rows
    that visit this lane."""
    sent = jnp.concatenate([each.send(x) for x, each in zip(mine, visits)], 1)
    return split(lanes.all_to_all(sent), [each.visitors for each in visits], lanes.size)
