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
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE
from jaxserve.lanes.cdsp import PLANNERS
from jaxserve.lanes.choice import decode_choices
from jaxserve.lanes.cost import moves_per_pair
from jaxserve.lanes.exchange import EXCHANGES, rows_with_room
from jaxserve.lanes.groups import group_sizes
from jaxserve.settings.schema import SchedulerConfig

NOWHERE = np.int32(2**30)  # a slot that no table has: writes to it are dropped
FEW_DECODES = 4  # spread sequences that decode on a lane, in most steps
# decodes beside chunks: a part of those that there may be, where that is worth its programs
FEW_OF_MANY = 8
LEAST_FEW = 8
FEW_ROWS = 4  # a part of the rows of a step, for spread chunks that do not fill it
FEED = -1  # in place of a token id: the one sampled last for the row's slot


class RowGroup(NamedTuple):
    """Rows of `width` tokens each, on a lane; an empty group has none."""

    rows: int = 0
    width: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.width


EMPTY = RowGroup()


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Everything static about a step, per lane."""

    decode: RowGroup = EMPTY
    prefill: RowGroup = EMPTY
    spread_decode: RowGroup = EMPTY
    spread_prefill: RowGroup = EMPTY
    samples: int = 1  # tokens it may sample per lane
    group_size: int = 1  # lanes that meet for spread rows: see `lanes.groups`
    # how spread prefill rows and spread decodes meet blocks on other lanes: see sharding.exchange;
    # the default where there are none
    exchange: str = DEFAULT_EXCHANGE
    decode_exchange: str = DEFAULT_EXCHANGE
    room: float = 1.0  # share of a lane's spread rows that may reach one other lane
    moves: int = 0  # pages that it may move from each lane of a group to each, beside its layers

    @property
    def local(self) -> tuple[RowGroup, ...]:
        return tuple(group for group in (self.decode, self.prefill) if group.rows)

    @property
    def spread(self) -> tuple[RowGroup, ...]:
        return tuple(group for group in (self.spread_decode, self.spread_prefill) if group.rows)

    @property
    def by_exchange(self) -> tuple[tuple[str, RowGroup], ...]:
        """The groups of spread rows, each with the exchange that it has."""
        pairs = (
            (self.decode_exchange, self.spread_decode),
            (self.exchange, self.spread_prefill),
        )
        return tuple(pair for pair in pairs if pair[1].rows)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The exchanges of its spread rows, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.by_exchange))

    @property
    def decode_ring(self) -> bool:
        """True if queries of decodes go round a ring."""
        return EXCHANGES[self.decode_exchange].ring and self.spread_decode.rows > 0

    @property
    def prefill_ring(self) -> bool:
        """True if spread chunks go round a ring."""
        return EXCHANGES[self.exchange].settled and self.spread_prefill.rows > 0

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.local + self.spread)

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.local + self.spread)

    def __str__(self) -> str:
        return self._name

    @functools.cached_property
    def _name(self) -> str:
        name = lambda groups: "+".join(f"{rows}x{width}" for rows, width in groups)
        if not self.spread:
            return name(self.local)
        parts = [name(self.local), "spread", name(self.spread), "on", str(self.group_size)]
        if self.exchange != DEFAULT_EXCHANGE:
            parts.append(self.exchange)
        if self.decode_exchange != DEFAULT_EXCHANGE:
            parts += "decodes", self.decode_exchange
        if self.room < 1:
            parts.append(f"{self.room:g}")
        if self.moves:
            parts.append("moves")
        return "_".join(parts)


def shapes(
    config: SchedulerConfig,
    lanes: int,
    block: int,
    pool: int = 1,
    copies: bool = False,
    timed: bool = True,
    page_groups: int = 1,
) -> list[StepShape]:
    """Lists all shapes of an engine with pages of `block` tokens, cheapest first. Every batch that
    the scheduler may start fits the last of them. pool, copies: see `CacheConfig`; timed: see
    `EngineConfig`; page_groups: number of them."""
    every = [*_local_shapes(config)]
    if lanes > 1:
        made = _SpreadShapes(config, timed)
        every += made.pooled(pool, lanes) if pool > 1 else made.grouped(lanes)
        moves = moves_per_pair(config.chunk_tokens, block, lanes, page_groups)
        made = _SpreadShapes(config, timed, moves)
        moving: list[StepShape] = []
        if config.planner in PLANNERS:
            every_chunk = made.pooled(pool, lanes) if pool > 1 else made.grouped(lanes)
            moving += [shape for shape in every_chunk if shape.spread_prefill.rows]
            moving += made.without_chunks(group_sizes(lanes)[1:])
        if copies:
            moving += made.copying(sorted({pool, lanes} - {1}))
        every += [shape for shape in moving if shape.room == 1]
    sizes = sample_sizes(config)
    samples = lambda shape: next((size for size in sizes if size >= shape.rows), sizes[-1])
    every = [dataclasses.replace(each, samples=samples(each)) for each in dict.fromkeys(every)]
    return sorted(
        every,
        key=lambda shape: (
            bool(shape.spread),
            shape.tokens,
            shape.rows,
            shape.group_size,
            shape.moves,
            shape.decode_exchange != DEFAULT_EXCHANGE,
            shape.room,
        ),
    )


def _local_shapes(config: SchedulerConfig) -> Iterator[StepShape]:
    tile, tiles = config.tile, config.tiles
    decodes = RowGroup(config.decode_rows, 1)
    for rows in _powers(1, config.decode_rows, 2):
        yield StepShape(RowGroup(rows, 1))
    chunks = [RowGroup(1, width) for width in _powers(tile, tile * tiles, 2) if width > 1]
    if tiles > 1:
        chunks.append(RowGroup(tiles, tile))
    few = config.decode_rows // FEW_OF_MANY
    beside = [decodes] if few < LEAST_FEW else [RowGroup(few, 1), decodes]
    for prefill in chunks:
        yield StepShape(EMPTY, prefill)
        for some in beside:
            yield StepShape(some, prefill)
    for rows in _powers(2, tiles, 2):
        if rows < tiles:
            yield StepShape(decodes, RowGroup(rows, tile))


class _SpreadShapes:
    """Makes the shapes with spread rows of an engine with these settings. timed: as of `shapes`.
    moves: as of `StepShape`."""

    def __init__(self, config: SchedulerConfig, timed: bool, moves: int = 0):
        self._timed = timed
        self._moves = moves
        self._decode_exchange = config.decode_exchange
        self._decodes = RowGroup(config.decode_rows, 1)
        self._few_decodes = RowGroup(min(FEW_DECODES, config.decode_rows), 1)
        self._chunks = RowGroup(config.tiles, config.tile)
        self._few_chunks = RowGroup(-(-config.tiles // FEW_ROWS), config.tile)
        self._prefill_choices = prefill_choices(config)

    def grouped(self, lanes: int) -> Iterator[StepShape]:
        """Yields shapes on groups of every size, of few decodes and few rows or none of local
        chunks; on the largest groups also with as many as there may be."""
        for size in group_sizes(lanes)[1:]:
            yield from self._with_decodes(size, self._few_decodes)
            yield from self._with_chunks(size, self._few_decodes, (self._few_chunks, self._chunks))
        yield from self._largest(lanes)

    def pooled(self, pool: int, lanes: int) -> Iterator[StepShape]:
        """Yields shapes of sequences that are all spread over groups of `pool` lanes: of few
        decodes alone, of all, and of all beside chunks. Blocks leave their group only where it is
        full; for these steps there are the largest shapes."""
        yield from self._with_decodes(pool, self._few_decodes)
        yield from self._with_decodes(pool, self._decodes)
        yield from self._with_chunks(pool, self._decodes, (self._few_chunks, self._chunks))
        yield from self._largest(lanes)

    def without_chunks(self, sizes: Iterable[int]) -> Iterator[StepShape]:
        """Yields what steps that move blocks beside decodes are to hold, on groups of these sizes:
        no spread chunks, so that they pay for no padding of these, with and without local ones."""
        for size in sizes:
            yield from self._with_decodes(size, self._decodes)

    def copying(self, sizes: Iterable[int]) -> Iterator[StepShape]:
        """Yields what steps that copy blocks to other lanes are to hold, on groups of these sizes:
        those without spread chunks and those with them, each with and without local ones. Such
        steps are few, so none are compiled that hold less."""
        for size in sizes:
            yield from self.without_chunks((size,))
            yield from self._with_chunks(size, self._decodes, (self._chunks,))

    def _largest(self, lanes: int) -> Iterator[StepShape]:
        """Yields the shapes of all rows that there may be."""
        yield from self._with_decodes(lanes, self._decodes)
        for shape in self._with_chunks(lanes, self._decodes, (self._chunks,)):
            if shape.prefill.rows:
                yield shape

    def _with_decodes(self, size: int, decodes: RowGroup) -> Iterator[StepShape]:
        """Yields shapes without spread chunks, and with these rows of spread decodes, with and
        without local chunks."""
        for local, of_decodes in itertools.product((EMPTY, self._chunks), self._decode_choices()):
            shape = StepShape(
                self._decodes,
                local,
                decodes,
                group_size=size,
                decode_exchange=of_decodes,
                moves=self._moves,
            )
            yield from _with_rooms(shape)

    def _with_chunks(
        self, size: int, decodes: RowGroup, chunks: Iterable[RowGroup]
    ) -> Iterator[StepShape]:
        """Yields shapes with these rows of spread decodes and spread chunks, with and without local
        chunks."""
        for exchange, spread, local in itertools.product(
            self._prefill_choices, chunks, (EMPTY, self._chunks)
        ):
            for of_decodes in self._decode_choices(exchange):
                shape = StepShape(
                    self._decodes,
                    local,
                    decodes,
                    spread_rows(spread, exchange),
                    group_size=size,
                    exchange=exchange,
                    decode_exchange=of_decodes,
                    moves=self._moves,
                )
                yield from _with_rooms(shape)

    def _decode_choices(self, beside: str | None = None) -> tuple[str, ...]:
        """Lists the exchanges that spread decodes may have: those that steps may choose, and the
        default beside the default, which every step may have. beside: the exchange of the shape's
        spread chunks, if it has some."""
        names = decode_choices(self._decode_exchange, beside, self._moves > 0)
        if not self._timed:
            names = names[:1]
        if beside in (None, DEFAULT_EXCHANGE):
            names = DEFAULT_EXCHANGE, *names
        return tuple(dict.fromkeys(names))


def _with_rooms(shape: StepShape) -> Iterable[StepShape]:
    """Returns a shape with each room that its exchanges may have, if that differs in whole rows; of
    two lanes all rows visit the other one."""
    visiting = [pair for pair in shape.by_exchange if EXCHANGES[pair[0]].has_rooms]
    rooms = {
        tuple(rows_with_room(room, group.rows) for _, group in visiting): room
        for room in itertools.chain((1.0,), *(EXCHANGES[name].rooms for name, _ in visiting))
        if room == 1 or shape.group_size > 2
    }
    return [dataclasses.replace(shape, room=room) for room in rooms.values()]


def spread_rows(chunks: RowGroup, exchange: str) -> RowGroup:
    """Rows for spread chunks that take these by gathering; around a ring some rows are short, where
    lanes change."""
    return chunks._replace(rows=chunks.rows + EXCHANGES[exchange].settled)


def first_shapes(shapes: list[StepShape]) -> list[StepShape]:
    """Picks the few shapes that together hold every batch, to be compiled before the others: the
    largest of each exchange of chunks, the largest with decodes alone, also spread ones by each
    exchange, and the smallest and the largest with decodes and one row of a prompt."""
    # of each exchange of chunks one that gathers decodes, or has them go with chunks, if there is
    plain = lambda shape: shape.decode_exchange in (DEFAULT_EXCHANGE, shape.exchange)
    largest = {
        (bool(shape.spread), shape.exchange, shape.moves): shape
        for shape in sorted(shapes, key=plain)
    }
    local = [shape for shape in shapes if not shape.spread]
    decodes = [shape for shape in local if not shape.prefill.rows]
    most = max(shape.decode.rows for shape in local)
    mixed = [shape for shape in local if shape.decode.rows == most and shape.prefill.rows == 1]
    ends = {*decodes[:1], *decodes[-1:], *mixed[:1], *mixed[-1:]}
    spread = {
        shape.decode_exchange: shape
        for shape in shapes
        if shape.spread_decode.rows
        and not (shape.spread_prefill.rows or shape.prefill.rows or shape.moves)
    }
    chosen = {*largest.values(), *spread.values(), *ends}
    return [shape for shape in shapes if shape in chosen]


def prefill_choices(config: SchedulerConfig) -> list[str]:
    """The exchanges that steps with spread chunks may choose: the default, for those that another
    cannot have, and the one that is set, or all."""
    names = [row.name for row in EXCHANGES.values() if config.tile > 1 or not row.settled]
    if config.exchange in EXCHANGES:
        names = [name for name in names if name == config.exchange]
    return list(dict.fromkeys([DEFAULT_EXCHANGE, *names]))


def sample_sizes(config: SchedulerConfig) -> list[int]:
    """Sizes of head programs that are compiled, in tokens sampled per lane. A sequence samples one
    token of a step, and one behind each token that is proposed for it."""
    return list(_powers(1, config.decode_rows, 2))


def _powers(low: int, high: int, factor: int) -> Iterator[int]:
    while low < high:
        yield low
        low *= factor
    yield high


# --- fields of a step

# columns: of the field `rows`; the slots' of `deltas` and `samples`; the lane's of a page-table
# update, which is a delta behind that
SLOT, START, LENGTH, ADAPTER = ROW_COLUMNS = range(4)
DELTA_SLOT = 0
SAMPLE_SLOT = 1
SAMPLE_COLUMNS = 4
UPDATE_LANE = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """Places of a step's fields in a lane's row of int32. Field -> (offset, shape)."""

    fields: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    def views(self, ints):
        """Per field, its part of `ints` [..., size], numpy or jax."""
        return {
            name: ints[..., first : first + math.prod(shape)].reshape(*ints.shape[:-1], *shape)
            for name, (first, shape) in self.fields.items()
        }


def delta_columns(page_groups: int) -> int:
    """Returns the numbers of a page-table update on a lane."""
    return 3 + page_groups


@functools.cache
def layout(shape: StepShape, block: int, page_groups: int = 1) -> Layout:
    """Lays out the fields of a step.

    deltas [m, 4]: slot, index, page, block, and a page of each further page group; with room for
    what the step's tokens and moves change. tokens: ids or FEED. rows [R, 4]: slot, start, length,
    and 1 + the place of the adapter, or 0. held [spread rows, lanes of a group]: page-table
    entries. homes [spread rows]: home lane, of its group. samples [S, 4]: token (of the lane's
    tokens) to sample after, slot, position of the sampled token, and the token proposed for there
    (see `draft_checks`). moves: see `page_moves.move_pages`.
    """
    spread = sum(group.rows for group in shape.spread)
    new_blocks = lambda groups: sum(
        group.rows * (-(-group.width // block) + (group.width > 1)) for group in groups
    )
    spread_deltas = shape.group_size * (new_blocks(shape.spread) + shape.moves)
    sizes: dict[str, tuple[int, ...]] = {
        "deltas": (new_blocks(shape.local) + spread_deltas, delta_columns(page_groups)),
        "tokens": (shape.tokens,),
        "rows": (shape.rows, len(ROW_COLUMNS)),
        "held": (spread, shape.group_size),
        "homes": (spread,),
        "samples": (shape.samples, SAMPLE_COLUMNS),
        "moves": (2, shape.group_size, shape.moves),
    }
    ends = list(itertools.accumulate(math.prod(size) for size in sizes.values()))
    return Layout(
        {name: (end - math.prod(size), size) for (name, size), end in zip(sizes.items(), ends)},
        ends[-1],
    )
