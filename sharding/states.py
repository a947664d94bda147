"""Passes what recurrent layers keep of a sequence, states and windows of inputs, between the lanes
that compute its rows.

A sequence has its state on its home lane. Consecutive rows of a spread chunk on one lane are a
*run*; any lane may have any run. What the tokens of a run make of a state is an affine map, which
all lanes compute at once, without the state. What is left to do in order is small: each run begins
with what the maps before it make of the state at home.

Runs are computed in rounds: a lane computes one run of a round at most, and sends one map or state
to all other lanes of its group. So what a step holds at once does not grow with its runs.
Everything here runs inside shard_map, on one lane and one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.kernels.delta_rule import (
    DeltaTokens,
    advance_row,
    complete,
    follow,
    no_tokens,
    of_any_state,
)
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.rows import NO_PAGE, Rows


class Link(NamedTuple):
    """One of the things that change states, in order: where a sequence begins in this step (with
    its state at home), or one of its runs. Numbers, or arrays of those of all links.

    row: of the rows of all lanes; the first one of the sequence, or the last one of the run. lane:
    home, or the lane of the run. begins: which of both it is. sends: whether other lanes need what
    it is: not the state before position 0, nor the last run of a sequence where that is at home.
    slot: of the sequence, where this is its last run and home is this lane; else out of range.
    """

    row: Any
    lane: Any
    begins: Any
    sends: Any
    slot: Any


class Round(NamedTuple):
    """The links from number `first` to before `stop`. has_run: whether one is a run of this lane;
    row: its last row, of this lane's. sends: number of the link that this lane sends, if any."""

    first: jax.Array
    stop: jax.Array
    has_run: jax.Array
    row: jax.Array
    sends: jax.Array


class Chain:
    """All links of the spread rows of a group of lanes, in the order of sequences and positions.

    rows: of all lanes of the group [lanes * R, T]. `mine`: of this lane.
    """

    def __init__(self, rows: Rows, lanes: LaneGroups):
        self.lanes = lanes
        self.lane = lanes.index()
        self.mine = rows.computed_by(self.lane)
        self._slots = rows.slot
        self._links, self._count = _links(rows, lanes.size, self.lane)
        self._stops = _stops(self._links, self._count)

    def run(self, body: Callable[[Round, Any], Any], carry: Any) -> Any:
        """Calls body(round, carry) -> carry for each round. All lanes do so equally often, those
        of other groups too, for a last time with rounds of no links."""

        def step(known: tuple) -> tuple:
            first, _, carry = known
            stop = jnp.where(first < self._count, self._stops[first], first)
            carry = body(self._round(first, stop), carry)
            return stop, self.lanes.most(jnp.int32(stop < self._count)), carry

        more = self.lanes.most(jnp.int32(self._count > 0))
        return lax.while_loop(lambda known: known[1] > 0, step, (jnp.int32(0), more, carry))[2]

    def take(self, round: Round, body: Callable[[Link, Any], Any], carry: Any) -> Any:
        """Calls body(link, carry) -> carry for the links of a round in order."""
        link = lambda number: jax.tree.map(lambda field: field[number], self._links)
        return lax.fori_loop(
            round.first, round.stop, lambda number, carry: body(link(number), carry), carry
        )

    def send(self, round: Round, stored: Callable[[Any], Any], mine: Any) -> Any:
        """Gathers what lanes send: what `stored` gives of the sequence in a slot, or `mine`, of
        this lane's run; trees. Returns what each has sent [lanes, ...], anything of those that send
        nothing."""
        row, begins = self._links.row[round.sends], self._links.begins[round.sends]
        value = jax.tree.map(lambda x, y: jnp.where(begins, x, y), stored(self._slots[row]), mine)
        return jax.tree.map(self.lanes.gather, value)

    def _round(self, first: jax.Array, stop: jax.Array) -> Round:
        links = self._links
        number = jnp.arange(len(links.row))
        mine = (links.lane == self.lane) & (first <= number) & (number < stop)
        runs = mine & ~links.begins
        rows = len(self.mine.slot)
        row = jnp.clip(links.row[runs.argmax()] - self.lane * rows, 0, rows - 1)
        return Round(first, stop, runs.any(), row, (mine & links.sends).argmax())


def pass_inputs(chain: Chain, tails: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Passes the last inputs of runs to the lanes that go on from there.

    tails [R, K, kept, channels]: of the run that ends with a row of this lane, the last inputs, the
    newest last; what is before the run means nothing. window [slots, K, kept, channels]: last
    inputs of sequences at home here. Returns the inputs just before the run that ends with a row
    [R, K, kept, channels], 0 before a sequence begins, and `window` after these rows. A lane sends
    kept inputs to each other lane in a round.
    """
    kept = window.shape[2]
    place = jnp.arange(kept)
    lengths = jnp.minimum(chain.mine.offset + chain.mine.lengths, kept)

    def pass_round(round: Round, carry: tuple) -> tuple:
        mine = tails[round.row], lengths[round.row]
        sent = chain.send(round, lambda slot: (window[slot], kept), mine)

        def take(link: Link, carry: tuple) -> tuple:
            last, before, window = carry
            here = ~link.begins & (link.lane == chain.lane)
            before = before.at[jnp.where(here, round.row, NO_PAGE)].set(last, mode="drop")
            tail, length = (jnp.where(here, x, y[link.lane]) for x, y in zip(mine, sent))
            length = jnp.where(link.begins, kept, length)
            tail = jnp.where(link.begins & ~link.sends, 0, tail)
            older = last[:, jnp.minimum(place + length, kept - 1)]
            last = jnp.where((place >= kept - length)[:, None], tail, older)
            return last, before, window.at[link.slot].set(last, mode="drop")

        return chain.take(round, take, carry)

    start = jnp.zeros_like(window[0]), jnp.zeros_like(tails), window
    return chain.run(pass_round, start)[1:]


def pass_states(
    chain: Chain, tokens: DeltaTokens, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the tokens of runs, and passes states from run to run.

    tokens [R, T, ...]: of this lane's rows. states [slots, K, G, key, value]: of sequences at home
    here. Returns outputs [R, T, K, G, value], and `states` after these tokens.

    In a round a lane sends a map of 4 key (value + key) bytes for each value head to each other
    lane. Chunks of which each lane computes one run, home the last one, take one round: 4 MiB a
    layer and lane in Qwen3-Next, what queries, new keys and values of 410 tokens take in a layer
    that attends. A state that goes from run to run would be half of that, in a message after the
    other; heads dealt over the lanes, whose states come back, 3 / (2 lanes) of it in two messages.
    """
    mine = chain.mine
    width = mine.shape[1]
    key, value = states.shape[-2:]
    begun = no_tokens(states.shape[1:])

    def pass_round(round: Round, carry: tuple) -> tuple:
        wide, out, state, states = carry
        first = round.row - mine.offset[round.row] // width
        stop = jnp.where(round.has_run, round.row + 1, first)

        def compute(row: jax.Array, carry: tuple) -> tuple:
            wide, change = carry
            of_row = of_any_state(jax.tree.map(lambda field: field[row], tokens))
            outputs, change = advance_row(of_row, change)
            return wide.at[row].set(outputs), change

        def complete_row(row: jax.Array, out: jax.Array) -> jax.Array:
            return out.at[row].set(complete(wide[row], before))

        def take(link: Link, carry: tuple) -> tuple:
            state, before, states = carry
            here = ~link.begins & (link.lane == chain.lane)
            before = jnp.where(here, state, before)
            of_link = jnp.where(here, change, sent[link.lane])
            stored = jnp.where(link.sends, of_link[..., :value], 0)
            state = jnp.where(link.begins, stored, follow(of_link, state))
            return state, before, states.at[link.slot].set(state, mode="drop")

        wide, change = lax.fori_loop(first, stop, compute, (wide, begun))
        fill = [(0, 0)] * 3 + [(0, key)]
        sent = chain.send(round, lambda slot: jnp.pad(states[slot], fill), change)
        state, before, states = chain.take(round, take, (state, state, states))
        return wide, lax.fori_loop(first, stop, complete_row, out), state, states

    out = jnp.zeros_like(tokens.v)
    wide = jnp.zeros((*out.shape[:-1], value + key), out.dtype)
    start = wide, out, jnp.zeros_like(states[0]), states
    _, out, _, states = chain.run(pass_round, start)
    return out, states


def _links(rows: Rows, lanes: int, lane: jax.Array) -> tuple[Link, jax.Array]:
    """Lists the links of a group's rows in order, and counts them. Everything is found by comparing
    all rows with all, which takes less than sorting them does on GPUs."""
    assert rows.home is not None
    count = len(rows.slot)
    start = rows.pos[:, 0]
    live = start >= 0
    place = rows.slot, start
    before = (place[0] < place[0][:, None]) | (
        (place[0] == place[0][:, None]) & (place[1] < place[1][:, None])
    )
    number = jnp.where(live, (before & live).sum(1), count)
    order = jnp.zeros(count, jnp.int32).at[number].set(jnp.arange(count), mode="drop")
    slot, start, home, by = (
        x[order] for x in (rows.slot, start, rows.home, jnp.arange(count) // (count // lanes))
    )
    differs = lambda x: x[1:] != x[:-1]
    end = jnp.arange(1, count + 1) == live.sum()
    last = jnp.concatenate([differs(slot), jnp.ones(1, bool)]) | end
    changes = jnp.concatenate([differs(by), jnp.ones(1, bool)])
    first = jnp.concatenate([jnp.ones(1, bool), last[:-1]])
    valid = (jnp.arange(count) < live.sum())[:, None] & jnp.stack([first, last | changes], 1)
    (links,) = jnp.nonzero(valid.reshape(-1), size=2 * count, fill_value=0)
    total = valid.sum()
    pick = lambda begin, run: jnp.stack([begin, run], 1).reshape(-1)[links]
    nowhere = jnp.full(count, NO_PAGE)
    sends = pick(start > 0, ~last | (by != home)) & (jnp.arange(2 * count) < total)
    return Link(
        pick(order, order),
        pick(home, by),
        pick(jnp.ones(count, bool), jnp.zeros(count, bool)),
        sends,
        pick(nowhere, jnp.where(last & (home == lane), slot, NO_PAGE)),
    ), total


def _stops(links: Link, count: jax.Array) -> jax.Array:
    """Returns for each link [n] where the round that begins with it stops: before the first link
    whose lane has sent, or computed, another one in it; or at `count`."""
    number = jnp.arange(len(links.row))
    both = lambda x: x[:, None] & x
    pairs = (links.lane[:, None] == links.lane) & (both(links.sends) | both(~links.begins))
    earlier = (number[:, None] < number) & pairs  # [earlier, later]
    since = jnp.where(earlier, number[:, None], -1).max(0)
    stops = (number < count) & (since >= number[:, None])
    return jnp.where(stops, number, count).min(1)
