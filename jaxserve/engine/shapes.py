"""The shapes that steps are compiled for, and where the fields of a step lie in a lane's row.

A lane's tokens are rows of equal length in up to four groups: single tokens and prefill rows of
local sequences, then of spread ones. A `StepShape` is how many rows of how many tokens each group
has; the short list that `shapes` gives is all that is ever compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxserve.costs.exchange_choice import moves_per_pair
from jaxserve.lanes.groups import group_sizes
from jaxserve.settings.schema import SchedulerConfig

NOWHERE = np.int32(2**30)  # a slot that no table has: writes to it are dropped
FEW_DECODES = 4  # spread sequences that decode on a lane, in most steps
FEW_ROWS = 4  # a part of the rows of a step, for spread chunks that do not fill it
FEED = -1  # in place of a token id: the one sampled last for the row's slot


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Everything static about a step, per lane: (rows, tokens per row) of each group; (0, 0) is an
    empty group."""

    decode: tuple[int, int] = (0, 0)
    prefill: tuple[int, int] = (0, 0)
    spread_decode: tuple[int, int] = (0, 0)
    spread_prefill: tuple[int, int] = (0, 0)
    samples: int = 1  # tokens it may sample per lane
    group_size: int = 1  # lanes that meet for spread rows: see `lanes.groups`
    # how spread rows, of prompts where there are any, and blocks on other lanes meet: see
    # sharding.exchange
    exchange: str = "gather"
    moves: int = 0  # pages that it may move from each lane of a group to each, beside its layers

    @property
    def local(self) -> tuple[tuple[int, int], ...]:
        return tuple(group for group in (self.decode, self.prefill) if group[0])

    @property
    def spread(self) -> tuple[tuple[int, int], ...]:
        return tuple(group for group in (self.spread_decode, self.spread_prefill) if group[0])

    @property
    def decode_ring(self) -> bool:
        """Whether queries of decodes go round a ring: they do only where no other row is spread."""
        return self.exchange != "gather" and not self.spread_prefill[0]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.local + self.spread)

    @property
    def tokens(self) -> int:
        return sum(rows * width for rows, width in self.local + self.spread)

    def __str__(self) -> str:
        return self._name

    @functools.cached_property
    def _name(self) -> str:
        name = lambda groups: "+".join(f"{rows}x{width}" for rows, width in groups)
        if not self.spread:
            return name(self.local)
        exchange = "" if self.exchange == "gather" else f"_{self.exchange}"
        moves = "_moves" if self.moves else ""
        spread = f"{name(self.spread)}_on_{self.group_size}{exchange}{moves}"
        return f"{name(self.local)}_spread_{spread}"


def shapes(config: SchedulerConfig, lanes: int, block: int) -> list[StepShape]:
    """All shapes of an engine with pages of `block` tokens, cheapest first. Every batch that the
    scheduler may start fits the last of them."""
    most = (config.max_seqs, 1)
    tile = config.tile
    tiles = config.tiles
    wide = [(1, width) for width in _powers(tile, tile * tiles, 2) if width > 1]
    many = [(tiles, tile)] if tiles > 1 else []
    out = [StepShape((rows, 1)) for rows in _powers(1, config.max_seqs, 2)]
    out += [StepShape(decode, group) for group in wide + many for decode in ((0, 0), most)]
    out += [StepShape(most, (rows, tile)) for rows in _powers(2, tiles, 2) if rows < tiles]
    few = -(-tiles // FEW_ROWS)
    moves: tuple[int, ...] = (0,)
    if config.planner != "none":
        moves = (0, moves_per_pair(config.chunk_tokens, block, lanes))
    for size in group_sizes(lanes)[1:]:
        decodes = (min(FEW_DECODES, config.max_seqs), 1)
        out += _spread_shapes(config, size, decodes, (few, tiles), ((0, 0), (tiles, tile)), moves)
    if lanes > 1:
        out += _spread_shapes(config, lanes, most, (tiles,), ((tiles, tile),), moves)
    sizes = sample_sizes(config)
    fit = lambda shape: next((size for size in sizes if size >= shape.rows), sizes[-1])
    out = [dataclasses.replace(shape, samples=fit(shape)) for shape in dict.fromkeys(out)]
    return sorted(
        out, key=lambda shape: (bool(shape.spread), shape.tokens, shape.rows, shape.group_size)
    )


def _spread_shapes(
    config: SchedulerConfig,
    group_size: int,
    decodes: tuple[int, int],
    chunk_rows: tuple[int, ...],
    local_rows: tuple[tuple[int, int], ...],
    moves: tuple[int, ...],
) -> Iterator[StepShape]:
    """The shapes with spread rows on groups of this size. decodes: rows of spread sequences that
    decode; chunk_rows: numbers of rows of spread chunks; local_rows: rows of local chunks; moves:
    pages from each lane to each."""
    most = (config.max_seqs, 1)
    tile = config.tile
    for exchange in decode_exchanges(config):
        yield StepShape(most, spread_decode=decodes, group_size=group_size, exchange=exchange)
    for exchange in ("gather", *(rings(config) if tile > 1 else ())):
        cut = exchange != "gather"  # where lanes change: some rows are short
        for rows, local, moved in itertools.product(chunk_rows, local_rows, moves):
            yield StepShape(
                most,
                local,
                decodes,
                (rows + cut, tile),
                exchange=exchange,
                moves=moved,
                group_size=group_size,
            )


def first_shapes(shapes: list[StepShape]) -> list[StepShape]:
    """Picks the few shapes that together hold every batch, to be compiled before the others: the
    largest of each exchange, the largest with decodes alone, also spread ones by each exchange, and
    the smallest and the largest with decodes and one row of a prompt."""
    largest = {(bool(shape.spread), shape.exchange, shape.moves): shape for shape in shapes}
    local = [shape for shape in shapes if not shape.spread]
    decodes = [shape for shape in local if not shape.prefill[0]]
    spread = {
        shape.exchange: shape for shape in shapes if shape.spread and not shape.spread_prefill[0]
    }
    mixed = [shape for shape in local if shape.decode[0] and shape.prefill[0] == 1]
    chosen = {*largest.values(), *decodes[-1:], *spread.values(), *mixed[:1], *mixed[-1:]}
    return [shape for shape in shapes if shape in chosen]


def rings(config: SchedulerConfig) -> tuple[str, ...]:
    """The exchanges around a ring that steps may choose."""
    both = "pass_q", "pass_kv"
    return (
        ()
        if config.exchange == "gather"
        else (config.exchange,)
        if config.exchange in both
        else both
    )


def decode_exchanges(config: SchedulerConfig) -> tuple[str, ...]:
    """The exchanges that steps may choose whose spread rows are decodes alone."""
    return ("gather",) if config.decode_exchange == "gather" else ("gather", "pass_q")


def sample_sizes(config: SchedulerConfig) -> list[int]:
    """How many tokens a head program may sample per lane: its compiled sizes. A sequence samples
    one token of a step at most."""
    return list(_powers(1, config.max_seqs, 2))


def _powers(low: int, high: int, factor: int) -> Iterator[int]:
    while low < high:
        yield low
        low *= factor
    yield high


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each field of a step lies in a lane's row of int32. Field -> (offset, shape)."""

    fields: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def views(self, ints):
        """Per field, its part of `ints` [..., size], numpy or jax."""
        return {
            name: ints[..., at : at + math.prod(shape)].reshape(*ints.shape[:-1], *shape)
            for name, (at, shape) in self.fields.items()
        }


@functools.cache
def layout(shape: StepShape, block: int) -> Layout:
    """deltas: slot, index, page, block; with room for what the step's tokens and moves change.
    tokens: ids or FEED. rows: slot, start, length. held: of spread rows, entries per lane of the
    group. samples: token (of the lane's tokens) to sample after, slot, position of the sampled
    token. moves: see `page_moves.move_pages`."""
    spread = sum(rows for rows, _ in shape.spread)
    new = lambda groups: sum(
        rows * (1 if width == 1 else -(-width // block) + 1) for rows, width in groups
    )
    sizes: dict[str, tuple[int, ...]] = {
        "deltas": (
            new(shape.local) + shape.group_size * (new(shape.spread) + shape.moves),
            4,
        ),
        "tokens": (shape.tokens,),
        "rows": (shape.rows, 3),
        "held": (spread, shape.group_size),
        "samples": (shape.samples, 3),
        "moves": (2, shape.group_size, shape.moves),
    }
    ends = list(itertools.accumulate(math.prod(size) for size in sizes.values()))
    return Layout(
        {name: (end - math.prod(size), size) for (name, size), end in zip(sizes.items(), ends)},
        ends[-1],
    )
