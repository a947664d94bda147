"""The device programs of a step, as pure functions of weights, KV pages and one array of int32 per
lane.

`layers` is the program of every pipeline stage: it updates the page table, embeds tokens (in the
first stage) or takes hidden states from the stage before, and runs the stage's layers. `head`,
after the last stage, samples tokens from the hidden states of chosen positions, `score` gives
log-probabilities of prompt tokens, and `pool` embeddings of prompts. All run inside shard_map over
the stage's lanes and ranks; pages, tables and sampling state are donated and returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.engine import sampling, sampling_rows
from jaxserve.engine.step_shapes import StepShape, layout
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.models.decoder import Head, Stage, run_layers
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


def layers(
    weights: Weights,
    model: ModelConfig,
    shape: StepShape,
    last: bool,
    values: list[jax.Array],
    pages: list[KVPages],
    table: jax.Array,
    ints: jax.Array,
    x: jax.Array,
) -> tuple[jax.Array | tuple, list[KVPages], jax.Array]:
    """Runs a step through the layers of one stage.

    last: whether this is the last stage. values: the stage's weights. pages: KV pages per layer,
    with a leading axis of 1. table [1, 2, slots, W]: page table. ints [1, size]: the step, see
    `step_shapes.layout`. x: hidden states [1, T, D]; in the first stage the last sampled tokens [1,
    slots]. Returns hidden states [1, T, D], pages and table; the last stage returns, in place of
    the hidden states, (all of them, those to sample from [1, S, D], and for each its token, slot
    and position [1, S, 3]).
    """
    stage: Stage = weights.module(values)
    size = pages[0].kv.shape[4]
    count = pages[0].kv.shape[1]
    view = layout(shape, size).views(ints[0])
    table = write_table(table, view["deltas"])
    groups = _groups(view, shape, table[0], count, size)
    x = stage.embed_tokens(_tokens(view, shape, x[0])) if stage.is_first else x[0]
    moves = view["moves"] if shape.moves else None
    x, pages = run_layers(
        stage, model, x.astype(values[0].dtype), _positions(view, shape), groups, pages, moves
    )
    out = (x[None], x[view["samples"][:, 0]][None], view["samples"][None]) if last else x[None]
    return out, pages, table


def head(
    weights: Weights,
    vocab: int,
    variant: str,
    to_all: bool,
    values: list[jax.Array],
    x: jax.Array,
    ints: jax.Array,
    sampled: jax.Array,
    state: Any = None,
    mask: jax.Array | None = None,
) -> tuple:
    """Samples tokens from hidden states.

    x [1, S, D]: hidden states. ints [1, S, 3]: token, slot and position of each. sampled [1,
    slots]: last token of each slot. state: `SamplingState`, except for the greedy variant. mask [1,
    S, W]: allowed ids, for the guided variant. Returns tokens [1, S], sampled, and (except for
    greedy) state and log-probabilities. to_all: tokens and log-probabilities of all lanes
    [lanes, S], on every lane.
    """
    _, slot, position = ints[0].T
    logits = weights.module(values)(x[0])
    if variant == "greedy":
        token = sampling.greedy(logits, vocab)
    else:
        token, state = sampling.sample(
            logits, slot, position, state, vocab, None if mask is None else mask[0]
        )
    sampled = sampled.at[0, slot].set(token, mode="drop")
    if variant == "greedy":
        return _read_by_host(token, to_all), sampled
    logprobs = (
        sampling.log_probabilities(logits, token, vocab) if variant in sampling_rows.SCORED else ()
    )
    scored = tuple(_read_by_host(part, to_all) for part in logprobs)
    return _read_by_host(token, to_all), sampled, state, scored


def score(
    weights: Weights,
    vocab: int,
    to_all: bool,
    values: list[jax.Array],
    x: jax.Array,
    target: jax.Array,
) -> tuple[jax.Array, ...]:
    """Log-probabilities of ids target [1, S] after hidden states x [1, S, D]: of the targets [1,
    S], of the likeliest ids [1, S, k], and those ids [1, S, k]. to_all: see `head`."""
    parts = sampling.log_probabilities(weights.module(values)(x[0]), target[0], vocab)
    return tuple(_read_by_host(part, to_all) for part in parts)


def pool(weights: Weights, to_all: bool, values: list[jax.Array], x: jax.Array) -> jax.Array:
    """Embeddings: hidden states x [1, S, D] after the final norm, as f32. to_all: see `head`."""
    return _read_by_host(weights.module(values).normed(x[0]).astype(jnp.float32), to_all)


def _read_by_host(x: jax.Array, to_all: bool) -> jax.Array:
    """x [S, ...] of this lane as [1, S, ...]; or of all lanes [lanes, S, ...], on each of them."""
    return jax.lax.all_gather(x, KVP) if to_all else x[None]


def write_table(table: jax.Array, deltas: jax.Array) -> jax.Array:
    """Sets page-table entries: table [1, 2, slots, W], deltas [m, 4] of (slot, index, page, block);
    slots out of range are skipped."""
    slot, index, page, block = deltas.T
    return table.at[0, :, slot, index].set(jnp.stack([page, block], 1), mode="drop")


def _expand(view: dict[str, jax.Array], shape: StepShape, column: int) -> jax.Array:
    """A column of the step's rows (slot, start, length), repeated for each token [T]."""
    out = []
    row = 0
    for rows, width in shape.local + shape.spread:
        out.append(jnp.repeat(view["rows"][row : row + rows, column], width))
        row += rows
    return jnp.concatenate(out)


def _tokens(view: dict[str, jax.Array], shape: StepShape, sampled: jax.Array) -> jax.Array:
    """Token ids [T] of the step; a negative one stands for the last sampled token of its slot."""
    return jnp.where(view["tokens"] < 0, sampled[_expand(view, shape, 0)], view["tokens"])


def _positions(view: dict[str, jax.Array], shape: StepShape) -> jax.Array:
    """Positions [T] of the step's tokens; -1: padding."""
    within = jnp.concatenate(
        [
            jnp.tile(jnp.arange(width, dtype=jnp.int32), rows)
            for rows, width in shape.local + shape.spread
        ]
    )
    return jnp.where(within < _expand(view, shape, 2), _expand(view, shape, 1) + within, -1)


def _groups(
    view: dict[str, jax.Array], shape: StepShape, table: jax.Array, pages: int, size: int
) -> Groups:
    """The step's rows as `sharding.rows.Groups`. pages, size: number of pages and tokens per
    page."""
    local = []
    spread = []
    row = 0
    for rows, width in shape.local:
        mine = view["rows"][row : row + rows]
        local.append(local_rows(mine, width, table, pages, size))
        row += rows
    first = row
    lanes = LaneGroups(shape.group_size)
    for rows, width in shape.spread:
        held = view["held"][row - first : row - first + rows]
        mine = jnp.concatenate([view["rows"][row : row + rows], held], 1)
        mine = lanes.gather_rows(mine)  # each lane of a group needs all its spread rows
        settled = EXCHANGES[shape.exchange].settled and width > 1
        spread.append(spread_rows(mine, lanes.index(), width, table, pages, size, settled))
        row += rows
    return Groups(tuple(local), tuple(spread), table, shape.exchange, lanes)
