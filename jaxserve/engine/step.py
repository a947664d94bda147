"""The programs of a stage: pure functions of weights, pages and one row of int32 per lane.

`layers` is the program of every stage: it brings the page table up to date, embeds (in the first
stage) or takes what the stage before sent, and runs the stage's layers over the rows of the step.
`head`, beside the last stage, turns the hidden states of chosen tokens into sampled ones. Both run
inside shard_map over the stage's lanes and ranks; pages, tables and sampling state are donated and
come back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.checkpoint.zoo import ModelConfig
from jaxserve.engine import sampling, sampling_rows
from jaxserve.engine.shapes import StepShape, layout
from jaxserve.kernels.kv_pages import KVPages
from jaxserve.models.decoder import Head, Stage, run_layers
from jaxserve.sharding.mesh import KVP
from jaxserve.sharding.rows import Groups, all_gather_rows, local_rows, spread_rows


@dataclasses.dataclass(frozen=True)
class Weights:
    """A module apart from its values: what a traced program needs to put flat arrays back in."""

    graphdef: Any
    flat: tuple[tuple[Any, nnx.Param], ...]

    @classmethod
    def of(cls, module: Stage | Head) -> Weights:
        graphdef, state = nnx.split(module)
        return cls(graphdef, tuple(nnx.to_flat_state(state)))

    def module(self, values: list[jax.Array]) -> Any:
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
    """pages: per layer, with a first axis of 1; table [1, 2, slots, W]; ints [1, size]; x: hidden
    states [1, T, D], in the first stage the tokens sampled last [1, slots]. Returns hidden states
    [1, T, D], pages, table. The last stage returns, in place of hidden states, also those of the
    tokens to sample after [1, S, D] and what says for whom [1, S, 3]."""
    stage: Stage = weights.module(values)
    size = pages[0].kv.shape[4]
    count = pages[0].kv.shape[1]
    view = layout(shape, jax.lax.axis_size(KVP), size).views(ints[0])
    table = write_table(table, view["deltas"])
    groups = _groups(view, shape, table[0], count, size)
    x = stage.embed_tokens(_tokens(view, shape, x[0])) if hasattr(stage, "embed") else x[0]
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
    values: list[jax.Array],
    x: jax.Array,
    ints: jax.Array,
    sampled: jax.Array,
    state: Any = None,
    mask: jax.Array | None = None,
) -> tuple:
    """x [1, S, D], ints [1, S, 3], sampled [1, slots], guided also mask [1, S, W] -> tokens [1, S],
    sampled, and (but for greedy) state, log-probabilities."""
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
        return token[None], sampled
    logprobs = (
        sampling.log_probabilities(logits, token, vocab) if variant in sampling_rows.SCORED else ()
    )
    return token[None], sampled, state, tuple(part[None] for part in logprobs)


def score(
    weights: Weights, vocab: int, values: list[jax.Array], x: jax.Array, target: jax.Array
) -> tuple[jax.Array, ...]:
    """Log-probabilities of target [1, S] after hidden states x [1, S, D]: chosen [1, S], the
    likeliest and their ids [1, S, k]."""
    return tuple(
        part[None]
        for part in sampling.log_probabilities(weights.module(values)(x[0]), target[0], vocab)
    )


def write_table(table: jax.Array, deltas: jax.Array) -> jax.Array:
    """table [1, 2, slots, W] with entries deltas [m, 4] (slot, index, page, block) set; a slot out
    of range is dropped."""
    slot, index, page, block = deltas.T
    return table.at[0, :, slot, index].set(jnp.stack([page, block], 1), mode="drop")


def _expand(view: dict[str, jax.Array], shape: StepShape, column: int) -> jax.Array:
    """A column of the rows, once per token [T]."""
    out = []
    row = 0
    for rows, width in shape.local + shape.spread:
        out.append(jnp.repeat(view["rows"][row : row + rows, column], width))
        row += rows
    return jnp.concatenate(out)


def _tokens(view: dict[str, jax.Array], shape: StepShape, sampled: jax.Array) -> jax.Array:
    return jnp.where(view["tokens"] < 0, sampled[_expand(view, shape, 0)], view["tokens"])


def _positions(view: dict[str, jax.Array], shape: StepShape) -> jax.Array:
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
    local = []
    spread = []
    row = 0
    for rows, width in shape.local:
        slot, start, length = view["rows"][row : row + rows].T
        local.append(local_rows(slot, start, length, width, table, pages, size))
        row += rows
    first = row
    for rows, width in shape.spread:
        mine = jnp.concatenate(
            [view["rows"][row : row + rows], view["held"][row - first : row - first + rows]], 1
        )
        mine = all_gather_rows(mine)  # every lane needs all spread rows
        settled = shape.exchange != "gather" and width > 1
        slot, start, length = mine[:, :3].T
        spread.append(
            spread_rows(
                slot,
                start,
                length,
                mine[:, 3:],
                jax.lax.axis_index(KVP),
                width,
                table,
                pages,
                size,
                settled,
            )
        )
        row += rows
    return Groups(tuple(local), tuple(spread), table, shape.exchange)
