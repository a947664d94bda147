"""Which rows of which lanes the chunks of a batch become.

A prefill chunk is cut into rows of a shape's width. A local chunk's rows follow each other on its
home lane; a spread chunk's rows are dealt over the lanes of its group, the last one to its home
lane, which samples for it, or, around a ring, to the lanes that hold its blocks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.engine.shapes import StepShape
from jaxserve.lanes.groups import group_around, group_sizes


class LongChunk(NamedTuple):
    """A chunk of more than one token: its row in the batch, and what the batch says of it."""

    row: int
    lane: int
    length: int
    group_size: int

    @property
    def spread(self) -> bool:
        return self.group_size > 1


@dataclasses.dataclass(frozen=True)
class StepDemand:
    """What of a batch bears on its shape."""

    local: int  # most local chunks of one token on a lane
    spread: int  # most spread ones
    long: tuple[LongChunk, ...]
    lanes: int
    group_size: int  # of the largest group in which spread chunks meet
    moves: bool  # whether pages change lanes

    @classmethod
    def of(cls, batch: Batch, lanes: int) -> StepDemand:
        at = np.flatnonzero(batch.length != 1)
        size = 1
        if lanes == 1:
            local = len(batch.slot) - len(at)
            spread = 0
        else:
            size = int(batch.group_size.max())
            single = batch.length == 1
            place = batch.lane[single] + lanes * batch.spread[single]
            local, spread = (
                np.bincount(place, minlength=2 * lanes).reshape(2, lanes).max(1).tolist()
            )
        fields = (batch.lane, batch.length, batch.group_size)
        long = zip(at.tolist(), *(field[at].tolist() for field in fields))
        return cls(
            local, spread, tuple(map(LongChunk._make, long)), lanes, size, len(batch.moves) > 0
        )

    def fits(self, shape: StepShape) -> bool:
        """Whether the shape holds it; rows of a ring are dealt by where blocks are (`settled`),
        which is looked at elsewhere."""
        if self.local > shape.decode[0] or self.spread > shape.spread_decode[0]:
            return False
        if self.group_size > shape.group_size or self.moves > bool(shape.moves):
            return False
        return not self.long or (
            self._fits(shape.prefill, False) and self._fits(shape.spread_prefill, True)
        )

    def _fits(self, group: tuple[int, int], spread: bool) -> bool:
        chunks = [chunk for chunk in self.long if chunk.spread == spread]
        if not chunks:
            return True
        rows, width = group
        if not rows:
            return False
        # groups of every size hold all rows that must lie in them: of chunks on larger groups the
        # last one, at home
        for size in group_sizes(self.lanes):
            need = Counter[int]()
            for _, lane, length, among in chunks:
                need[lane // size] += -(-length // width) if among <= size else 1
            if max(need.values()) > rows * size:
                return False
        return True


@dataclasses.dataclass(frozen=True)
class ChunkSlice:
    """Where part of a chunk went: `size` tokens from `offset` in the chunk are tokens `token`... of
    `lane`."""

    chunk: int
    offset: int
    size: int
    lane: int
    token: int


RingSlice = tuple[int, int, int, int]  # chunk, offset in it, size, lane


def settled(batch: Batch, work: StepDemand, width: int, block: int) -> list[RingSlice]:
    """The spread chunks of more than one token in rows of at most `width` tokens, each on the lane
    that holds its blocks. Rows end where lanes change and where whole rows from the start of the
    sequence do."""
    out = []
    at = 0
    for chunk, _, length, among in work.long:
        if among == 1:
            continue
        start = int(batch.start[chunk])
        offset = 0
        first = start // block
        lanes = batch.block_lane[at : at + (start + length - 1) // block - first + 1]
        at += len(lanes)
        changes = (np.flatnonzero(np.diff(lanes)) + 1 + first) * block - start
        ends = np.unique(
            np.concatenate([changes, np.arange(width - start % width, length, width), [length]])
        )
        for end in ends.tolist():
            out.append((chunk, offset, end - offset, int(lanes[(start + offset) // block - first])))
            offset = end
    return out


def ring_rows(batch: Batch, work: StepDemand, width: int, block: int) -> list[RingSlice]:
    """Rows dealt by where blocks are; none where a ring cannot be: nothing is spread but decodes,
    or a token is sampled elsewhere than at home."""
    rows = settled(batch, work, width, block)
    ends = {chunk: lane for chunk, _, _, lane in rows}
    return (
        []
        if any(batch.sample[chunk] and batch.lane[chunk] != lane for chunk, lane in ends.items())
        else rows
    )


def fullest(rows: list[RingSlice]) -> int:
    """Rows of the lane that has most."""
    return int(np.bincount([lane for *_, lane in rows]).max())


def extent(groups: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Rows and tokens of groups of rows."""
    return sum(rows for rows, _ in groups), sum(rows * width for rows, width in groups)


def deal(work: StepDemand, shape: StepShape, ring: Sequence[RingSlice]) -> list[ChunkSlice]:
    """Rows for the long chunks. A local chunk's rows follow each other on its lane; a spread one's
    go where most rows of its group are free, or around a ring where its blocks are."""
    out = []
    rows, width = shape.prefill
    first = shape.decode[0]
    used = [0] * work.lanes
    for chunk in work.long:
        if not chunk.spread:
            for offset, size in _cut(chunk.length, width):
                token = first + used[chunk.lane] * width
                out.append(ChunkSlice(chunk.row, offset, size, chunk.lane, token))
                used[chunk.lane] += 1
    rows, width = shape.spread_prefill
    first = extent(shape.local)[1] + shape.spread_decode[0]
    used = [0] * work.lanes
    for row, offset, size, lane in (
        ring if shape.exchange != "gather" else _dealt(work, rows, width)
    ):
        out.append(ChunkSlice(row, offset, size, lane, first + used[lane] * width))
        used[lane] += 1
    return out


def _cut(length: int, width: int) -> Iterator[tuple[int, int]]:
    """The offset and the size of each row of a chunk of so many tokens."""
    for offset in range(0, length, width):
        yield offset, min(width, length - offset)


def _dealt(work: StepDemand, rows: int, width: int) -> Iterator[RingSlice]:
    """Rows of spread chunks, each on the lane of its group that has most free, the last one at
    home; smaller groups first, which have less choice. rows: of a lane."""
    free = [rows] * work.lanes
    chunks = sorted((chunk for chunk in work.long if chunk.spread), key=lambda x: x.group_size)
    for chunk in chunks:  # kept for last rows
        free[chunk.lane] -= 1
    for chunk in chunks:
        lanes = group_around(chunk.lane, chunk.group_size)
        for offset, size in _cut(chunk.length, width):
            if offset + size == chunk.length:
                lane = chunk.lane
            else:
                lane = max(lanes, key=lambda x: (free[x], x == chunk.lane))
                free[lane] -= 1
            yield chunk.row, offset, size, lane
