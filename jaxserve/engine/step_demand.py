"""The demand of a batch on the shape of its step: how many rows its chunks need, on which lanes.

A prefill chunk is cut into rows of a shape's width. Around a ring the rows of spread chunks go to
the lanes that have their blocks, wherever that is; all other rows may go to any lane of a group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.step_shapes import RowGroup, StepShape
from jaxserve.lanes.exchange import EXCHANGES, rows_with_room
from jaxserve.lanes.groups import group_around, group_sizes, size_of_step
from jaxserve.lanes.work import most_visits


class LongChunk(NamedTuple):
    """A chunk of more than one token: its number in the batch, home lane, tokens, lanes that meet,
    those over which its rows are dealt, the last row aside, which is at home, and those that hold
    its sequence, where it visits them."""

    number: int
    lane: int
    length: int
    group_size: int
    lanes: range
    holders: tuple[int, ...] = ()

    @property
    def spread(self) -> bool:
        return self.group_size > 1


class LaneSlice(NamedTuple):
    """A row's part of a chunk: `size` tokens from `offset` in the chunk, computed by `lane`."""

    chunk: int
    offset: int
    size: int
    lane: int


@dataclasses.dataclass(frozen=True)
class StepDemand:
    """Everything of a batch that bears on its shape. ring: rows of its spread chunks on the lanes
    that have their blocks; none where the step cannot go round a ring. visits: spread chunks of one
    token on a lane that visit one other lane, at most."""

    local_singles: int  # most local chunks of one token on a lane
    spread_singles: int  # most spread ones
    long: tuple[LongChunk, ...]
    lanes: int
    group_size: int  # of the largest group in which spread chunks meet, or pages change lanes
    moves: bool  # whether pages change lanes
    ring: tuple[LaneSlice, ...] = ()
    visits: int = 0

    @classmethod
    def of(cls, batch: Batch, lanes: int, tile: int, block: int) -> StepDemand:
        """Counts what a batch needs on `lanes` lanes with pages of `block` tokens. tile: tokens of
        a row around a ring."""
        chunks = np.flatnonzero(batch.length != 1)
        fields = (batch.lane, batch.length, batch.group_size)
        long = tuple(
            LongChunk(
                number, lane, length, size, batch.dealt.get(number) or group_around(lane, size)
            )
            for number, lane, length, size in zip(
                chunks.tolist(), *(field[chunks].tolist() for field in fields)
            )
        )
        if lanes == 1:
            return cls(len(batch.slot) - len(chunks), 0, long, 1, 1, False)
        single = batch.length == 1
        place = batch.lane[single] + lanes * batch.spread[single]
        local, spread = np.bincount(place, minlength=2 * lanes).reshape(2, lanes).max(1).tolist()
        group_size = size_of_step(batch.group_size, batch.moves, lanes)
        ring: tuple[LaneSlice, ...] = ()
        if EXCHANGES[batch.exchange].settled and batch.block_lane.size:
            ring = _ring(batch, [chunk for chunk in long if chunk.spread], tile, block)
        visits = 0
        if EXCHANGES[batch.decode_exchange].has_rooms:
            alone = single & batch.spread
            visits = most_visits(batch.lane[alone], batch.blocks_per_lane[alone])
        if EXCHANGES[batch.exchange].has_rooms:
            holders = [np.flatnonzero(batch.blocks_per_lane[row]).tolist() for row in chunks]
            long = tuple(chunk._replace(holders=tuple(some)) for chunk, some in zip(long, holders))
        return cls(local, spread, long, lanes, group_size, len(batch.moves) > 0, ring, visits)

    @functools.cached_property
    def ring_rows(self) -> int:
        """Rows around the ring of the fullest lane; 0 where the step cannot go round one."""
        return max(Counter(part.lane for part in self.ring).values(), default=0)

    def fits(self, shape: StepShape) -> bool:
        """Returns whether a shape holds the batch."""
        if self.local_singles > shape.decode.rows or self.spread_singles > shape.spread_decode.rows:
            return False
        if self.group_size > shape.group_size or self.moves > bool(shape.moves):
            return False
        if shape.prefill_ring and not 0 < self.ring_rows <= shape.spread_prefill.rows:
            return False
        if self.long and not (
            self._fits(shape.prefill, False) and self._fits(shape.spread_prefill, True)
        ):
            return False
        return shape.room == 1 or self._finds_room(shape)

    def _fits(self, group: RowGroup, spread: bool) -> bool:
        chunks = [chunk for chunk in self.long if chunk.spread == spread]
        if not chunks:
            return True
        if not group.rows:
            return False
        # groups of every size hold all rows that must lie in them: of chunks on more lanes the last
        # one, at home
        for size in group_sizes(self.lanes):
            need = Counter[int]()
            for chunk in chunks:
                need[chunk.lane // size] += 1
                if len(chunk.lanes) <= size:
                    need[chunk.lanes.start // size] += -(-chunk.length // group.width) - 1
            if max(need.values()) > group.rows * size:
                return False
        return True

    def _finds_room(self, shape: StepShape) -> bool:
        """Returns whether all that visit one lane from another have room."""
        pairs = Counter(
            (part.lane, holder)
            for part in self.dealt(shape.spread_prefill)
            for holder in self._holders[part.chunk]
            if holder != part.lane
        )
        needs = self.visits, max(pairs.values(), default=0)
        groups = shape.spread_decode, shape.spread_prefill
        # of an exchange without rooms nothing was counted
        return all(
            need <= rows_with_room(shape.room, group.rows) for need, group in zip(needs, groups)
        )

    @functools.cached_property
    def _holders(self) -> dict[int, tuple[int, ...]]:
        return {chunk.number: chunk.holders for chunk in self.long}

    def dealt(self, group: RowGroup) -> Iterator[LaneSlice]:
        """Deals rows of spread chunks to those of their lanes that have most left, the last one to
        the home lane; chunks on fewer lanes first, which have less choice. A lane's rows of a chunk
        follow each other, those at home come last, so that states pass from lane to lane once
        (`sharding.states`)."""
        free = [group.rows] * self.lanes
        chunks = [chunk for chunk in self.long if chunk.spread]
        chunks.sort(key=lambda chunk: len(chunk.lanes))
        for chunk in chunks:  # kept for last rows
            free[chunk.lane] -= 1
        for chunk in chunks:
            parts = list(cut(chunk, group.width))
            lanes = []
            for _ in parts[1:]:
                lane = max(chunk.lanes, key=lambda lane: (free[lane], lane == chunk.lane))
                free[lane] -= 1
                lanes.append(lane)
            lanes.sort(key=lambda lane: (lane == chunk.lane, lane))
            for part, lane in zip(parts, [*lanes, chunk.lane]):
                yield part._replace(lane=lane)


def cut(chunk: LongChunk, width: int) -> Iterator[LaneSlice]:
    """Cuts a chunk into rows of `width` tokens on its home lane."""
    for offset in range(0, chunk.length, width):
        size = min(width, chunk.length - offset)
        yield LaneSlice(chunk.number, offset, size, chunk.lane)


def _ring(batch: Batch, chunks: list[LongChunk], width: int, block: int) -> tuple[LaneSlice, ...]:
    """Cuts spread chunks into rows of at most `width` tokens on the lanes that have their blocks;
    none where a token is sampled elsewhere than at home."""
    ring: list[LaneSlice] = []
    block_number = 0
    for chunk in chunks:
        start = int(batch.start[chunk.number])
        count = (start + chunk.length - 1) // block - start // block + 1
        block_lane = batch.block_lane[block_number : block_number + count]
        rows = _settled(chunk, start, block_lane, width, block)
        if batch.sample[chunk.number] and rows[-1].lane != chunk.lane:
            return ()
        ring += rows
        block_number += count
    return tuple(ring)


def _settled(
    chunk: LongChunk, start: int, block_lane: np.ndarray, width: int, block: int
) -> list[LaneSlice]:
    """Cuts a chunk where lanes change, and what a lane has in a row where rows of `width` tokens
    end. block_lane: lane of each block that its tokens fall in."""
    first = start // block
    changes = (np.flatnonzero(np.diff(block_lane)) + 1 + first) * block - start
    stretches = [0, *changes.tolist(), chunk.length]
    ends = [
        min(row + width, stop)
        for begin, stop in itertools.pairwise(stretches)
        for row in range(begin, stop, width)
    ]
    rows = []
    offset = 0
    for end in ends:
        lane = int(block_lane[(start + offset) // block - first])
        rows.append(LaneSlice(chunk.number, offset, end - offset, lane))
        offset = end
    return rows
