"""The device programs of a step, as pure functions of weights, KV pages and one array of int32 per
lane.

`LayersProgram` is the program of every pipeline stage: it updates the page table, embeds tokens (in
the first stage) or takes hidden states from the stage before, and runs the stage's layers.
`HeadProgram`, after the last stage, samples tokens from the hidden states of chosen positions, and
gives log-probabilities of prompt tokens and embeddings of prompts. All run inside shard_map over
the stage's lanes and ranks; pages, tables and sampling state are donated and returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.page_groups import PagePlace
from jaxserve.engine import draft_checks, sampling, sampling_rows
from jaxserve.engine.step_shapes import ADAPTER, LENGTH, SLOT, START, StepShape, layout
from jaxserve.models.decoder import Head, LayerCache, Stage, run_layers
from jaxserve.models.tokens import Tokens
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rows import Groups, local_rows, spread_rows


@dataclasses.dataclass(frozen=True)
class Weights:
    """A module without its values; rebuilds the module from a flat list of arrays inside a traced
    program."""

    graphdef: Any
    flat: tuple[tuple[Any, nnx.Param], ...]

    @classmethod
    def of(cls, module: Stage | Head) -> Weights:
        graphdef, state = nnx.split(module)
        return cls(graphdef, tuple(nnx.to_flat_state(state)))

    def module(self, values: list[jax.Array]) -> Any:
        """The module with these values, in the order of `flat`."""
        state = nnx.from_flat_state(
            [(keys, param.replace(value)) for (keys, param), value in zip(self.flat, values)]
        )
        return nnx.merge(self.graphdef, state)


@dataclasses.dataclass(frozen=True)
class LayersProgram:
    """The layers of one stage, in steps of a shape. last: whether this is the last stage. dtype: of
    hidden states. pages, block_size: of a pool, and tokens of a page. attention: see `Groups`.
    places: of each layer, see `StagePlan.places`; None: each has a cache of its own. adapters:
    whether weights have them, see `models.adapters`."""

    weights: Weights
    shape: StepShape
    last: bool
    dtype: Any
    pages: int
    block_size: int
    attention: str | None = None
    places: tuple[PagePlace, ...] | None = None
    adapters: bool = False

    def run(
        self,
        values: list[jax.Array],
        caches: list[LayerCache],
        tables: list[jax.Array],
        ints: jax.Array,
        x: jax.Array,
    ) -> tuple[jax.Array | tuple, list[LayerCache], list[jax.Array], list[jax.Array]]:
        """Runs a step.

        values: the stage's weights. caches: pools of KV pages, and states, with a leading axis of
        1. tables [1, 2, slots, W] each: page tables by page group. ints [1, size]: the step, see
        `step_shapes.layout`. x: hidden states [1, T, D]; in the first stage the last sampled tokens
        [1, slots]. Returns hidden states [1, T, D], caches, table and captured hidden states
        [1, T, D]; the last stage returns, in place of the first, (hidden states of all tokens,
        those to sample from [1, S, D], and for each its token, slot, position and proposed token
        [1, S, 4]).
        """
        shape = self.shape
        stage: Stage = self.weights.module(values)
        view = layout(shape, self.block_size, len(tables)).views(ints[0])
        tables = write_table(tables, view["deltas"])
        groups = [
            dataclasses.replace(
                _groups(view, shape, table[0], self.pages, self.block_size),
                attention=self.attention,
            )
            for table in tables
        ]
        places = self.places or [PagePlace(0, number) for number in range(len(caches))]
        x = x[0]
        inputs = None
        if stage.is_first:
            ids = _token_ids(view, shape, x)
            x = stage.embed_tokens(ids)
            if stage.inputs is not None:
                inputs = stage.inputs(ids, x)
        moves = view["moves"] if shape.moves else None
        x = x.astype(self.dtype)
        tokens = Tokens(_positions(view, shape))
        if self.adapters:
            tokens = tokens._replace(adapters=_expand(view, shape, ADAPTER) - 1)
        x, caches, captured = run_layers(stage, x, tokens, groups, caches, places, moves, inputs)
        captured = [each[None] for each in captured]
        if not self.last:
            return x[None], caches, tables, captured
        samples = view["samples"]
        return (x[None], x[samples[:, 0]][None], samples[None]), caches, tables, captured


@dataclasses.dataclass(frozen=True)
class HeadProgram:
    """Programs that run on hidden states after the last stage. to_all: what the host reads is of
    all lanes [lanes, ...], on every lane. drafts: whether steps may check proposed tokens."""

    weights: Weights
    vocab: int
    to_all: bool
    drafts: bool = False

    def sample(
        self,
        variant: str,
        values: list[jax.Array],
        x: jax.Array,
        ints: jax.Array,
        sampled: jax.Array,
        state: Any = None,
        mask: jax.Array | None = None,
    ) -> tuple:
        """Samples tokens from hidden states x [1, S, D].

        ints [1, S, 4]: see `step_shapes.layout`. sampled [1, slots]: last token of each slot.
        state: `SamplingState`, except for the greedy variant. mask [1, S, W]: allowed ids, for the
        guided variant. Returns tokens [1, S], sampled, and (where the state changes: not for greedy
        and drawn) state and log-probabilities.
        """
        _, slot, position, expected = ints[0].T
        proposed = expected if self.drafts else None
        logits = self.weights.module(values)(x[0])
        if variant == "greedy":
            token = sampling.greedy(logits, self.vocab)
            return self._read(token), _noted(sampled, slot, token, proposed)
        if variant == "drawn":
            token = sampling.draw(logits, slot, position, state, self.vocab)
            return self._read(token), _noted(sampled, slot, token, proposed)
        allowed = None if mask is None else mask[0]
        token, state = sampling.sample(logits, slot, position, state, self.vocab, allowed, proposed)
        sampled = _noted(sampled, slot, token, proposed)
        logprobs: tuple[jax.Array, ...] = ()
        if variant in sampling_rows.SCORED:
            logprobs = sampling.log_probabilities(logits, token, self.vocab)
        return self._read(token), sampled, state, tuple(map(self._read, logprobs))

    def score(
        self, values: list[jax.Array], x: jax.Array, target: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Log-probabilities of ids target [1, S] after hidden states x [1, S, D]: of the targets
        [1, S], of the likeliest ids [1, S, k], and those ids [1, S, k]."""
        logits = self.weights.module(values)(x[0])
        parts = sampling.log_probabilities(logits, target[0], self.vocab)
        return tuple(map(self._read, parts))

    def pool(self, values: list[jax.Array], x: jax.Array) -> jax.Array:
        """Embeddings: hidden states x [1, S, D] after the final norm, as f32."""
        return self._read(self.weights.module(values).normed(x[0]).astype(jnp.float32))

    def _read(self, x: jax.Array) -> jax.Array:
        """x [S, ...] of this lane as the host reads it: [1, S, ...], or of all lanes."""
        return jax.lax.all_gather(x, KVP) if self.to_all else x[None]


def _noted(
    sampled: jax.Array, slot: jax.Array, token: jax.Array, expected: jax.Array | None
) -> jax.Array:
    """Returns sampled [1, slots] with the newest token of each slot [S]. expected: see
    `draft_checks`; None where none is proposed."""
    if expected is not None:
        slot = draft_checks.newest(slot, token, expected)
    return sampled.at[0, slot].set(token, mode="drop")


def write_table(tables: list[jax.Array], deltas: jax.Array) -> list[jax.Array]:
    """Sets page-table entries: tables [1, 2, slots, W] by page group, deltas [m, columns] of slot,
    index, page, block and the pages of further groups; slots out of range are skipped."""
    slot, index, page, block, *further = deltas.T
    return [
        table.at[0, :, slot, index].set(jnp.stack([each, block], 1), mode="drop")
        for table, each in zip(tables, [page, *further])
    ]


def _expand(view: dict[str, jax.Array], shape: StepShape, column: int) -> jax.Array:
    """A column of the step's rows, repeated for each token [T]."""
    out = []
    row = 0
    for rows, width in shape.local + shape.spread:
        out.append(jnp.repeat(view["rows"][row : row + rows, column], width))
        row += rows
    return jnp.concatenate(out)


def _token_ids(view: dict[str, jax.Array], shape: StepShape, sampled: jax.Array) -> jax.Array:
    """Token ids [T] of the step; a negative one stands for the last sampled token of its slot."""
    return jnp.where(view["tokens"] < 0, sampled[_expand(view, shape, SLOT)], view["tokens"])


def _positions(view: dict[str, jax.Array], shape: StepShape) -> jax.Array:
    """Positions [T] of the step's tokens; -1: padding."""
    offset = jnp.concatenate(
        [
            jnp.tile(jnp.arange(width, dtype=jnp.int32), rows)
            for rows, width in shape.local + shape.spread
        ]
    )
    used = offset < _expand(view, shape, LENGTH)
    return jnp.where(used, _expand(view, shape, START) + offset, -1)


def _groups(
    view: dict[str, jax.Array], shape: StepShape, table: jax.Array, pages: int, size: int
) -> Groups:
    """The step's rows as `sharding.rows.Groups`. pages, size: number of pages and tokens per
    page."""
    of_rows = view["rows"][:, :ADAPTER]
    local = []
    spread = []
    row = 0
    for group, apart in ((shape.decode, True), (shape.prefill, False)):
        rows, width = group
        if rows:
            mine = of_rows[row : row + rows]
            local.append(local_rows(mine, width, table, pages, size, apart))
            row += rows
    first = row
    lanes = LaneGroups(shape.group_size)
    for exchange, group in shape.by_exchange:
        rows, width = group
        these = slice(row - first, row - first + rows)
        home = view["homes"][these, None]
        mine = jnp.concatenate([of_rows[row : row + rows], view["held"][these], home], 1)
        mine = lanes.gather_rows(mine)  # each lane of a group needs all its spread rows
        lane = lanes.index()
        apart = group is shape.spread_decode
        pool = table, pages, size
        each = spread_rows(mine[:, :-1], lane, width, *pool, exchange, apart)
        spread.append(dataclasses.replace(each, home=mine[:, -1]))
        row += rows
    return Groups(tuple(local), tuple(spread), table, lanes, shape.room)
